//! Offload of bytes of live blocks to host memory, one tensor at a time, and offload sites, which choose the bytes to offload in each pass of a
//! program and the start times of their reloads.

use std::ffi::{c_char, c_void};

use glake_abi::Pack;
use glake_runtime::process::{
    CheckState, ItemId, LeafPart, Preset, SaveId, ScopeId, StreamedPlace, UseOrders, UsePhase, Verdict,
};
use glake_units::Bytes;

use crate::block::{self, address};
use crate::stats::{self, string};
use crate::status::Failure;
use crate::{guard, library};

/// Begins to copy `bytes` bytes of a live block, from `pointer` on, to pinned host memory, after the work enqueued on `stream` so far
/// (null, 1 and 2 are the default streams of the block's device). `id` receives their number until `glake_offload_release`; it is above 0,
/// and never reused. The block may be freed at once: its stream may reuse the memory, behind a wait on the GPU for the copy if there is no
/// other memory. Until it is freed, the bytes must not be written before the copy is complete. The call does not wait on the host, except
/// to pin memory if none is free. 0 bytes are no error, wherever they lie.
///
/// `GLAKE_OUT_OF_MEMORY`: no host memory. `GLAKE_UNSUPPORTED`: the memory does not belong to this library, or belongs to a private pool
/// (`glake_is_private`), or the stream is captured, or of another context. In each case the bytes stay on the GPU. `GLAKE_INVALID`: the
/// bytes lie in no live block, or were decommitted.
///
/// # Safety
/// `id` is null or may be written; null is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_begin(
    pointer: *const c_void,
    bytes: u64,
    stream: *mut c_void,
    id: *mut u64,
) -> i32 {
    guard::answer(|| {
        // Checked before anything is done that could not be undone.
        // SAFETY: the caller's promise.
        unsafe { guard::put(id, "id", 0) }?;
        let offload = library::process()?.offload();
        let given = offload.offload(block::stream(stream), address(pointer), Bytes::new(bytes))?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(id, "id", given) }
    })
}

/// Begins an offload like `glake_offload_begin`, with a check for later writes. When the block is freed, the bytes are copied again to the
/// same host memory, so that a reload returns the bytes as of the free, whatever wrote to them meanwhile. From then on
/// `glake_offload_check` reports for `save` whether they had changed. `save` is a number that a site (`glake_offload_site_create`) gives to
/// one of its saves in each pass. If a required second copy failed twice, the reload reports it: `GLAKE_DRIVER`.
///
/// # Safety
/// The conditions of `glake_offload_begin` hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_begin_checked(
    pointer: *const c_void,
    bytes: u64,
    stream: *mut c_void,
    site: u64,
    save: u64,
    id: *mut u64,
) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        unsafe { guard::put(id, "id", 0) }?;
        let offload = library::process()?.offload();
        let (stream, pointer, save) = (block::stream(stream), address(pointer), SaveId { site, save });
        let given = offload.offload_checked(stream, pointer, Bytes::new(bytes), save)?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(id, "id", given) }
    })
}

/// Returns the state of a save of a site. `state`: 0 if the save is to be checked, as in its first two offloads; 1 if its bytes did not
/// change during the check; 2 if they changed without notice: they should stay on their GPU.
///
/// # Safety
/// `state` is null or may be written; null is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_check(site: u64, save: u64, state: *mut i32) -> i32 {
    guard::answer(|| {
        let found = match library::process()?.offload().check_state(SaveId { site, save }) {
            CheckState::Due => 0,
            CheckState::Fine => 1,
            CheckState::Changed => 2,
        };
        // SAFETY: the caller's promise.
        unsafe { guard::put(state, "state", found) }
    })
}

/// Begins to copy offloaded bytes `id` back into a live block of the same device, after the copy out and after the work enqueued on
/// `stream` so far, which may have used the block's memory. The bytes must not be read or written before a stream waits:
/// `glake_offload_wait`. May be called any number of times. If the block is freed before, its memory is not reused until the copy is
/// complete.
///
/// `GLAKE_INVALID`: no bytes are offloaded under `id`, or the destination does not lie in one live block, or on another device.
/// `GLAKE_UNSUPPORTED`: as for `glake_offload_begin`. `GLAKE_DRIVER`: also if bytes were lost on their way out, with a GPU.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_reload(id: u64, pointer: *mut c_void, stream: *mut c_void) -> i32 {
    guard::answer(|| {
        Ok(library::process()?.offload().begin_reload(id, block::stream(stream), address(pointer))?)
    })
}

/// Makes a stream wait, on its GPU, for the latest copy begun by `glake_offload_reload` under `id`; any stream, any number of times.
///
/// `GLAKE_INVALID`: no bytes are offloaded under `id`, or no reload was begun.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_wait(id: u64, stream: *mut c_void) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().wait_reload(id, block::stream(stream))?))
}

/// Forgets the bytes offloaded under `id`; copies in progress continue. Their host memory is reused after them, without a wait. Does
/// nothing in a forked child and at the end of the process.
///
/// `GLAKE_INVALID`: released before, or never given.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_release(id: u64) -> i32 {
    library::give_up(|process| Ok(process.offload().release(id)?))
}

/// Pins host memory for `bytes` bytes to be offloaded from a device, beside the memory in use: call it ahead, on another thread.
///
/// `GLAKE_OUT_OF_MEMORY`: not enough host memory, and none was pinned; or the driver refused a part, and the memory pinned by then stays.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_prepare(device: i32, bytes: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().prepare(device.into(), Bytes::new(bytes))?))
}

/// Checks whether pinned host memory for copies to a device can be had for `bytes` bytes, while `freed` bytes of other memory of the process
/// are freed. Pins nothing.
///
/// `GLAKE_OUT_OF_MEMORY`: it cannot; the text says how much there is. `GLAKE_INVALID`: no such device.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_room(device: i32, bytes: u64, freed: u64) -> i32 {
    guard::answer(|| {
        Ok(library::process()?.offload().has_room(device.into(), Bytes::new(bytes), Bytes::new(freed))?)
    })
}

/// Reserves contiguous pinned host memory of `bytes` bytes for copies to a device, until `glake_offload_release`. `id` receives its number,
/// for `glake_offload_host`, `glake_offload_reload`, `glake_offload_wait` and `glake_offload_store`. The contents are undefined. Waits only
/// to pin memory if none is free.
///
/// `GLAKE_OUT_OF_MEMORY`: no host memory. `GLAKE_INVALID`: no such device.
///
/// # Safety
/// `id` is null or may be written; null is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_reserve(device: i32, bytes: u64, id: *mut u64) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        unsafe { guard::put(id, "id", 0) }?;
        let given = library::process()?.offload().reserve(device.into(), Bytes::new(bytes))?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(id, "id", given) }
    })
}

/// Begins to copy bytes of a live block, from `pointer` on, into the host memory reserved under `id`, after the work enqueued on `stream` so
/// far and after the last reload. The block may be freed at once. Until it is freed, the bytes must not be written before the copy is
/// complete.
///
/// `GLAKE_INVALID`: `id` is unknown or of offloaded bytes, or the bytes do not lie in one live block of the same device.
/// `GLAKE_UNSUPPORTED`: as for `glake_offload_begin`. After another error the block still has the bytes, and the reserved memory may not.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_store(id: u64, pointer: *const c_void, stream: *mut c_void) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().store(id, block::stream(stream), address(pointer))?))
}

/// Waits on the host until the copies of the host memory reserved under `id` are complete. `host` receives its address, which is the same
/// until the release: the host may read and write the bytes until the next copy begins.
///
/// `GLAKE_INVALID`: `id` is unknown or of offloaded bytes. `GLAKE_DRIVER`: also if the last store failed.
///
/// # Safety
/// `host` is null or may be written; null is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_host(id: u64, host: *mut *mut c_void) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        unsafe { guard::put(host, "host", std::ptr::null_mut()) }?;
        let found = library::process()?.offload().host_address(id)?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(host, "host", block::pointer(found)) }
    })
}

/// Sets the weights of a site's program that stream, each a range that comes to the GPU as a whole: `bytes` has the size of each, and
/// `blocks` the number of the block that uses it, in the order of a forward. They are all away, and earlier ones are forgotten.
///
/// `GLAKE_INVALID`: no such site, or a null list.
///
/// # Safety
/// `bytes` and `blocks` may be read `count` times.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_stream(
    site: u64,
    bytes: *const u64,
    blocks: *const u32,
    count: usize,
) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        let (bytes, blocks) = unsafe { (list(bytes, count, "bytes")?, list(blocks, count, "blocks")?) };
        let places = bytes.iter().zip(blocks);
        let places = places.map(|(bytes, block)| StreamedPlace { bytes: Bytes::new(*bytes), block: *block });
        Ok(library::process()?.offload().set_streamed(site, places.collect())?)
    })
}

/// Reports the use of a streamed weight, by its number in `glake_offload_stream`. `phase`: 0 a forward without gradients, 1 a forward with
/// gradients, 2 a backward. `first`: a new forward begins with it; the caller has freed all copies on the GPU before. `places` receives
/// first `left` numbers of weights whose copies on the GPU are to be freed, then `begun` numbers of weights to reload, in this order.
///
/// `GLAKE_INVALID`: no such site, weight or phase, or more numbers than `room`, which is enough with twice the number of weights.
///
/// # Safety
/// `places` may be written `room` times; `left` and `begun` may be written, or are null, which is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_offload_used(
    site: u64,
    place: usize,
    phase: i32,
    first: bool,
    places: *mut u32,
    room: usize,
    left: *mut usize,
    begun: *mut usize,
) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise.
        unsafe {
            guard::put(left, "left", 0)?;
            guard::put(begun, "begun", 0)?;
        }
        let phase = match phase {
            0 => UsePhase::Evaluation,
            1 => UsePhase::Forward,
            2 => UsePhase::Backward,
            other => {
                return Err(Failure::invalid(format_args!("phase is {other}: give a number from 0 to 2")));
            }
        };
        let UseOrders { leave, begin } = library::process()?.offload().used(site, place, phase, first)?;
        let count = leave.len() + begin.len();
        if count > room {
            return Err(Failure::invalid(format_args!(
                "room is {room}, and {count} weights are to be moved: give room for twice the weights"
            )));
        }
        for (at, number) in leave.iter().chain(&begin).enumerate() {
            // SAFETY: below `room`, and the caller's promise.
            unsafe {
                guard::put(places.wrapping_add(at), "places", u32::try_from(*number).unwrap_or(u32::MAX))
            }?;
        }
        // SAFETY: the caller's promise.
        unsafe {
            guard::put(left, "left", leave.len())?;
            guard::put(begun, "begun", begin.len())
        }
    })
}

/// Returns whether an owner accounts for the memory at an address: it belongs to a private pool, or to no live block, such as memory that a
/// graph tree manages. Such memory is not offloaded, and must not be freed, moved or replaced on the owner's behalf. False for memory that
/// does not belong to this library.
///
/// # Safety
/// `is_private` is null or may be written; null is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_is_private(pointer: *const c_void, is_private: *mut bool) -> i32 {
    guard::answer(|| {
        let process = match library::started_process() {
            Ok(process) => process,
            // In a forked child, or at the end of the process: nothing is offloaded.
            Err(failure) if failure.is_unavailable() => None,
            Err(failure) => return Err(failure),
        };
        let found = process.is_some_and(|process| process.offload().is_private(address(pointer)));
        // SAFETY: the caller's promise.
        unsafe { guard::put(is_private, "is_private", found) }
    })
}

/// Returns a number for the lifetime of the live block that contains an address: constant until the block is freed, and unique on its
/// device.
///
/// `GLAKE_INVALID`: the address lies in no live block. `GLAKE_UNSUPPORTED`: the memory does not belong to this library.
///
/// # Safety
/// `generation` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_generation(pointer: *const c_void, generation: *mut u64) -> i32 {
    guard::answer(|| {
        let found = library::process()?.offload().generation(address(pointer))?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(generation, "generation", found) }
    })
}

/// Returns the statistics of offloading as a JSON object. Null on failure; free it with `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_stats_json() -> *mut c_char {
    guard::value(std::ptr::null_mut(), || string(stats::process()?.offload().statistics().json().to_string()))
}

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
            3 => Preset::Hybrid,
            other => {
                return Err(Failure::invalid(format_args!("preset is {other}: give a number from 0 to 3")));
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
unsafe fn list<'a, T>(list: *const T, count: usize, name: &str) -> Result<&'a [T], Failure> {
    match (list.is_null(), count) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Failure::invalid(format_args!("{name} is null although count is {count}"))),
        // SAFETY: the caller's promise.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(list, count) }),
    }
}

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
