//! Offload of bytes of live blocks to host memory, one tensor at a time.

use std::ffi::{c_char, c_void};

use glake_runtime::process::{CheckState, SaveId};
use glake_units::Bytes;

use crate::block::{self, address};
use crate::stats::{self, string};
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
/// As for `glake_offload_begin`.
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
