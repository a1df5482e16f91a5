//! Offload sites: the choice of bytes to offload in each pass of a program, and the start times of their reloads.

use std::ffi::c_char;

use glake_abi::Pack;
use glake_runtime::process::{ItemId, LeafPart, Preset, ScopeId, Verdict};
use glake_units::Bytes;

use crate::stats::string;
use crate::status::Failure;
use crate::{block, guard, library};

/// Creates an offload site. From each pass, a site learns the order in which packed items are read, and says when reloads begin. A pass
/// begins with the first packed item and ends when all packed items are dropped. `site` receives its number, which is above 0, and never
/// reused.
///
/// # Safety
/// `site` is null or may be written; null is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_site_create(site: *mut u64) -> i32 {
    guard::answer(|| {
        // Checked before anything is done that could not be undone.
        // SAFETY: the caller's promise.
        unsafe { guard::put(site, "site", 0) }?;
        let given = library::process()?.offload().sites().create();
        // SAFETY: the caller's promise.
        unsafe { guard::put(site, "site", given) }
    })
}

/// Forgets a site with everything that it learned. Does nothing in a forked child and at the end of the process.
///
/// `GLAKE_INVALID`: released before, or never created.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_site_release(site: u64) -> i32 {
    library::give_up(|process| Ok(process.offload().release_site(site)?))
}

/// Sets the goal of a site's plans, from its next pass on. `preset`: 0 the least time under the budget, 1 the least memory without
/// recomputation (the default), 3 like 0, but leaves of a recomputed layer may be stored one by one. `budget`: the most GPU memory of the
/// process, contexts included, in bytes; 0: no bound.
///
/// `GLAKE_INVALID`: no such site, device or preset.
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

/// Returns whether a forward that is about to begin has to report its saves. It need not if the plan for a pass of the same `shape` keeps
/// everything, the room in memory is unchanged, and the budget was not exceeded since. A shape is a number chosen by the caller, the same
/// for all forwards that save the same.
///
/// `GLAKE_INVALID`: no such site, or a pass with the same earlier forwards exceeded its budget; the text says how much it needs.
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

/// Returns a site's goal, its latest plan and its passes as a JSON object (docs/METRICS.md); with `course` also the planned pass step by
/// step. Null on failure; free it with `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_site_json(site: u64, course: bool) -> *mut c_char {
    guard::value(std::ptr::null_mut(), || {
        string(library::process()?.offload().told(site, course)?.to_string())
    })
}

/// Reports the next bytes that a pass saves, each range once. `item` receives their number in the pass, from 0 on. `verdict`: 0 they stay,
/// 1 they are to be offloaded, 2 they need not be stored because their layer recomputes them (only for leaves; such an item is never
/// dropped). `begin` has room for `room` items and receives those whose reloads should begin first, in this order; `count` their number.
/// Items that find no room come with the site's next call.
///
/// `GLAKE_INVALID`: no such site, or no such `leaf`.
///
/// # Safety
/// `pack` may be read, and `item`, `verdict` and `count` may be written, or are null, which is refused; `begin` may be written `room`
/// times.
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

/// Begins the computation of a leaf, which ends when its output is packed: the site measures the cost of its recomputation, on the stream
/// that the pass began on.
///
/// `GLAKE_INVALID`: no such site.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_leaf_begins(site: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().leaf_begins(site)?))
}

/// Excludes the current pass from time measurements: it computes more than later passes, to compare results with the stored ones.
///
/// `GLAKE_INVALID`: no such site.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_untimed(site: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().untimed(site)?))
}

/// Marks the beginning (`begins`) or the end of a layer's recomputation, on the stream that the pass began on. Reloads to begin come with
/// the next call that returns any.
///
/// `GLAKE_INVALID`: no such site.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_replays(site: u64, scope: u32, begins: bool) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().replays(site, ScopeId(scope), begins)?))
}

/// Reports a read of an item of the pass, the first or a repeated one. `begin`, `room` and `count` as for `glake_offload_packed`.
///
/// `GLAKE_INVALID`: no such site, or its pass has no such item.
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

/// Reports that the reloaded copy of an item was freed on its GPU, while the item may be read again.
///
/// `GLAKE_INVALID`: no such site.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_freed(site: u64, item: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().freed(site, number(item))?))
}

/// Reports that an item will not be read any more. Does nothing in a forked child and at the end of the process.
///
/// `GLAKE_INVALID`: no such site, or its pass has no such item.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_dropped(site: u64, item: u64) -> i32 {
    library::give_up(|process| Ok(process.offload().dropped(site, number(item))?))
}

/// Returns the caller's array of items to begin as a slice.
///
/// # Safety
/// `begin` is null, or may be written `room` times.
unsafe fn room_of<'a>(begin: *mut u64, room: usize) -> Result<&'a mut [u64], Failure> {
    match (begin.is_null(), room) {
        (_, 0) => Ok(&mut []),
        (true, _) => Err(Failure::invalid(format_args!("begin is null although room is {room}"))),
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
