//! Sites of a program that offload: what is to be offloaded of each pass, and when its reloads begin.

use std::ffi::c_char;

use glake_abi::Pack;
use glake_runtime::process::{ItemId, LeafPart, Preset, ScopeId, Verdict};
use glake_units::Bytes;

use crate::stats::string;
use crate::status::Failure;
use crate::{block, guard, library};

/// Makes a site of a program that offloads: it learns from each of its passes in which order what it packs is read, and says when
/// reloads begin. A pass begins with the first item that is packed and ends when all that were are dropped. `site` is its number,
/// above 0, and never given twice.
///
/// # Safety
/// `site` is null or may be written; null is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_site_create(site: *mut u64) -> i32 {
    guard::answer(|| {
        // Before anything is done that nobody could undo.
        // SAFETY: the caller's promise.
        unsafe { guard::put(site, "site", 0) }?;
        let given = library::process()?.offload().sites().create();
        // SAFETY: the caller's promise.
        unsafe { guard::put(site, "site", given) }
    })
}

/// Forgets a site and what it learned. In a forked child and at the end of the process nothing is done.
///
/// `GLAKE_INVALID`: it was released before, or never made.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_site_release(site: u64) -> i32 {
    library::give_up(|process| Ok(process.offload().release_site(site)?))
}

/// What plans of a site are for, from its next pass on: `preset` 0 the least time under the budget, 1 the least memory without computing
/// anything again (as where nothing was asked), 3 as 0, but of a layer that is computed
/// again leaves may be stored one by one. `budget` is what the GPU may show of the process, contexts included, in bytes; 0: anything.
///
/// `GLAKE_INVALID`: there is no such site, device or preset.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_ask(site: u64, device: i32, budget: u64, preset: i32) -> i32 {
    guard::answer(|| {
        let preset = match preset {
            0 => Preset::Fit,
            1 => Preset::Memory,
            2 => {
                return Err(Failure::invalid(
                    "preset is 2, which was removed: give 0, the least time under the budget",
                ));
            }
            3 => Preset::Hybrid,
            other => {
                return Err(Failure::invalid(format_args!("preset is {other}: give 0, 1 or 3")));
            }
        };
        let budget = (budget > 0).then(|| Bytes::new(budget));
        Ok(library::process()?.offload().ask(site, device.into(), budget, preset)?)
    })
}

/// Whether a forward that is about to begin has to tell what it saves: not where the plan of a pass of the same `shape` keeps everything,
/// memory has room as it had, and nothing went above the budget since. A shape is a number of the caller's, one for all forwards that save
/// the same.
///
/// `GLAKE_INVALID`: there is no such site, or a pass that had the same forwards before this one was above its budget, and needs what the
/// text says.
///
/// # Safety
/// `needs` is null or may be written; null is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_needs(site: u64, shape: u64, needs: *mut bool) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        unsafe { guard::put(needs, "needs", true) }?;
        let found = library::process()?.offload().needs(site, shape)?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(needs, "needs", found) }
    })
}

/// What a site was asked for, what its last plan says and what its passes were, as a JSON object (docs/METRICS.md); with `course` the
/// plan's pass step by step. Null on failure; to be given to `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_site_json(site: u64, course: bool) -> *mut c_char {
    guard::value(std::ptr::null_mut(), || {
        string(library::process()?.offload().told(site, course)?.to_string())
    })
}

/// The next bytes that a pass saves, each range once. `item` is their number in the pass, from 0 on; `verdict` whether they are to stay
/// (0), to be offloaded (1), or not to be stored, as their layer computes them again (2, of leaves alone: nobody drops such an item).
/// `begin` has room for `room` items and gets those whose reloads are to begin first, in this order; `count` how many these are. Those that
/// find no room come with the next call of the site.
///
/// `GLAKE_INVALID`: there is no such site, or no such `leaf`.
///
/// # Safety
/// `pack` may be read, and `item`, `verdict` and `count` may be written, or are null, which is refused; `begin` may be written `room` times.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_packed(
    site: u64,
    pack: *const Pack,
    item: *mut u64,
    verdict: *mut i32,
    begin: *mut u64,
    room: usize,
    count: *mut usize,
) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        unsafe {
            guard::put(item, "item", 0)?;
            guard::put(verdict, "verdict", 0)?;
            guard::put(count, "count", 0)?;
        }
        if pack.is_null() {
            return Err(Failure::invalid("pack is null: it must say what is saved"));
        }
        // SAFETY: not null, and the caller's promise.
        let pack = unsafe { &*pack };
        // SAFETY: the caller's promise.
        let begin = unsafe { room_of(begin, room) }?;
        let (packed, begun) =
            library::process()?.offload().packed(site, saved(pack)?, block::stream(pack.stream), begin)?;
        let given = match packed.verdict {
            Verdict::Keep => 0,
            Verdict::Offload => 1,
            Verdict::Recompute => 2,
        };
        // SAFETY: the caller's promise.
        unsafe {
            guard::put(item, "item", packed.item.index() as u64)?;
            guard::put(verdict, "verdict", given)?;
            guard::put(count, "count", begun)
        }
    })
}

/// A leaf is computed from here on, until its output is packed: so long it would take to compute it again, by the stream that the pass
/// began on.
///
/// `GLAKE_INVALID`: there is no such site.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_leaf_begins(site: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().leaf_begins(site)?))
}

/// Times of the pass that is under way do not count: it computes what later ones will not, to compare it with what is stored.
///
/// `GLAKE_INVALID`: there is no such site.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_untimed(site: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().untimed(site)?))
}

/// A layer is computed again: from here on (`begins`), or until here, by the stream that the pass began on. Reloads that are to begin come
/// with the next call that tells any.
///
/// `GLAKE_INVALID`: there is no such site.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_replays(site: u64, scope: u32, begins: bool) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().replays(site, ScopeId(scope), begins)?))
}

/// An item of the pass is read, or read once more. `begin`, `room` and `count` as of `glake_offload_packed`.
///
/// `GLAKE_INVALID`: there is no such site, or its pass has no such item.
///
/// # Safety
/// `count` may be written, or is null, which is refused; `begin` may be written `room` times.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_unpacked(
    site: u64,
    item: u64,
    begin: *mut u64,
    room: usize,
    count: *mut usize,
) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        unsafe { guard::put(count, "count", 0) }?;
        // SAFETY: the caller's promise.
        let begin = unsafe { room_of(begin, room) }?;
        let begun = library::process()?.offload().unpacked(site, number(item), begin)?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(count, "count", begun) }
    })
}

/// What was reloaded of an item is gone from its GPU again, and the item may be read once more.
///
/// `GLAKE_INVALID`: there is no such site.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_freed(site: u64, item: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().freed(site, number(item))?))
}

/// Nobody reads an item any more. In a forked child and at the end of the process nothing is done.
///
/// `GLAKE_INVALID`: there is no such site, or its pass has no such item.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_dropped(site: u64, item: u64) -> i32 {
    library::give_up(|process| Ok(process.offload().dropped(site, number(item))?))
}

/// Where items are written to.
///
/// # Safety
/// `begin` is null, or may be written `room` times.
unsafe fn room_of<'a>(begin: *mut u64, room: usize) -> Result<&'a mut [u64], Failure> {
    match (begin.is_null(), room) {
        (_, 0) => Ok(&mut []),
        (true, _) => {
            Err(Failure::invalid(format_args!("begin is null, and is said to have room for {room} items")))
        }
        // SAFETY: the caller's promise.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts_mut(begin, room) }),
    }
}

fn saved(pack: &Pack) -> Result<glake_runtime::process::Pack, Failure> {
    let size = Bytes::new(pack.size);
    let moved = if pack.link_size == 0 { size } else { Bytes::new(pack.link_size).min(size) };
    let scope = u32::try_from(pack.scope).ok().map(ScopeId);
    let leaf = match pack.leaf {
        0 => None,
        1 => Some(LeafPart::Output),
        2 => Some(LeafPart::Beside),
        other => {
            return Err(Failure::invalid(format_args!("leaf is {other}: give a number from 0 to 2")));
        }
    };
    Ok(glake_runtime::process::Pack { bytes: size, link_bytes: moved, scope, leaf })
}

fn number(item: u64) -> ItemId {
    ItemId::new(usize::try_from(item).unwrap_or(usize::MAX))
}
