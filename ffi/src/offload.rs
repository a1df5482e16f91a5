//! Bytes of live blocks in host memory, one tensor's at a time.

use std::ffi::{c_char, c_void};

use glake_runtime::process::{CheckState, SaveId};
use glake_units::Bytes;

use crate::block::{self, address};
use crate::stats::{self, string};
use crate::{guard, library};

/// Copies `bytes` bytes of a live block, from `pointer` on, to pinned host memory, after what is on `stream` by now (null, 1 and 2 are the
/// default streams of the block's device). `id` is the number by which they are known until `glake_offload_release`; above 0, and
/// never given twice. The block may be freed at once: its memory is its stream's again, behind a wait on the GPU for the copy, where
/// there is no other. Until it is freed nothing may write to these bytes before the copy is done. Nothing is waited for on the host,
/// but for memory to be pinned where none is free. No bytes are no error, wherever they lie.
///
/// `GLAKE_OUT_OF_MEMORY`: there is no host memory. `GLAKE_UNSUPPORTED`: it is no memory of this library's, or a private pool's
/// (`glake_is_private`), or the stream is captured, or of another context. In each case the bytes stay where they are.
/// `GLAKE_INVALID`: they lie in no live block, or were decommitted.
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
        // Before anything is done that nobody could undo.
        // SAFETY: the caller's promise.
        unsafe { guard::put(id, "id", 0) }?;
        let offload = library::process()?.offload();
        let given = offload.offload(block::stream(stream), address(pointer), Bytes::new(bytes))?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(id, "id", given) }
    })
}

/// As `glake_offload_begin`, of bytes that are to be checked: when the block is freed they are copied again, to the same host memory, so
/// that what comes back is what the block had then, whatever wrote to it meanwhile. Whether they had changed is known of `save` from then
/// on, a number that a site (`glake_offload_site_create`) gives to one of its saves in each pass. A copy that was to be made again and
/// could not, twice, is told when it is reloaded: `GLAKE_DRIVER`.
///
/// # Safety
/// As of `glake_offload_begin`.
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

/// What is known of a save of a site. `state` is 0 where it is to be checked, as the first two times that it is offloaded; 1 where its bytes did
/// not change when it was; 2 where they did, without anybody saying so: they should stay on their GPU.
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

/// Begins to copy what was offloaded under `id` to memory of a live block of the same device, after the copy out and after what is on
/// `stream` by now, for which the block may have been memory of earlier work. Nothing may be read or written there before a stream waits:
/// `glake_offload_wait`. It may be asked for as often as it is needed. A block that is freed before is nobody's until the copy is done.
///
/// `GLAKE_INVALID`: nothing is offloaded under `id`, or the bytes do not lie in one live block, or it is another device's.
/// `GLAKE_UNSUPPORTED`: as of `glake_offload_begin`. `GLAKE_DRIVER`: also where bytes were lost on their way out, with a GPU.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_reload(id: u64, pointer: *mut c_void, stream: *mut c_void) -> i32 {
    guard::answer(|| {
        Ok(library::process()?.offload().begin_reload(id, block::stream(stream), address(pointer))?)
    })
}

/// Has a stream wait, on its GPU, for the last copy that `glake_offload_reload` began under `id`; any stream, as often as needed.
///
/// `GLAKE_INVALID`: nothing is offloaded under `id`, or none was begun.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_wait(id: u64, stream: *mut c_void) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().wait_reload(id, block::stream(stream))?))
}

/// Forgets what was offloaded under `id`; copies that are under way go on. Its host memory is used again behind them, and nothing is
/// waited for. In a forked child and at the end of the process nothing is done.
///
/// `GLAKE_INVALID`: it was released before, or never given.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_release(id: u64) -> i32 {
    library::give_up(|process| Ok(process.offload().release(id)?))
}

/// Pins host memory for `bytes` bytes of a device that will be offloaded, beside what is in use: to be called ahead, on another thread.
///
/// `GLAKE_OUT_OF_MEMORY`: there is not so much, and nothing was pinned; or the driver refused some of it, and what was pinned by then stays.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_prepare(device: i32, bytes: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.offload().prepare(device.into(), Bytes::new(bytes))?))
}

/// Whether an owner counts on the memory at an address: it is a private pool's, or in no live block, as memory that a graph tree keeps
/// account of. Such memory is not offloaded, and nothing may free, move or replace it in the owner's place. Of memory that is not this
/// library's it is false.
///
/// # Safety
/// `is_private` is null or may be written; null is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_is_private(pointer: *const c_void, is_private: *mut bool) -> i32 {
    guard::answer(|| {
        let process = match library::started_process() {
            Ok(process) => process,
            // A child, or the end: nothing is offloaded.
            Err(failure) if failure.is_unavailable() => None,
            Err(failure) => return Err(failure),
        };
        let found = process.is_some_and(|process| process.offload().is_private(address(pointer)));
        // SAFETY: the caller's promise.
        unsafe { guard::put(is_private, "is_private", found) }
    })
}

/// A number for the life of the live block that an address lies in: the same until the block is freed, and no other block's of its device
/// ever.
///
/// `GLAKE_INVALID`: it lies in no live block. `GLAKE_UNSUPPORTED`: it is no memory of this library's.
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

/// What is offloaded, and what that took, as a JSON object. Null on failure; to be given to `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_offload_stats_json() -> *mut c_char {
    guard::value(std::ptr::null_mut(), || string(stats::process()?.offload().statistics().json().to_string()))
}
