//! Copies between the host and GPUs, over every link of the server.
//!
//! ```text
//! glake_copy_* ─► flags, pointers ─► Lent, CopyAsk ─► Copies: decides between the engine and the driver, and copies
//! ```
//!
//! Every copy runs in the order of its stream, as the driver's own does: after all work enqueued there before it, and before all work
//! enqueued later.

#[cfg(test)]
mod between;
mod flags;
#[cfg(test)]
mod tests;

use std::ffi::{c_char, c_void};

use glake_abi::{CopyBlock, GLAKE_DRIVER, GLAKE_OK, GLAKE_OUT_OF_MEMORY};
use glake_device::owned::Lent;
use glake_device::{Address, CopyRequest};
use glake_runtime::process::Form;
use glake_units::Bytes;

use crate::block::address;
use crate::stats::{self, string};
use crate::status::Failure;
use crate::{guard, library};

/// Enqueues a copy on a stream of any device (null and 1: the legacy default stream of the calling thread's current device, 2: the thread's
/// own). `handle`, if not null, receives the argument of `glake_copy_wait`, or 0 if there is nothing left to wait for.
///
/// A copy between host memory and a GPU of at least the break-even size goes over several links if relays are on and ready; any other is
/// the driver's own copy. As for `cuMemcpyAsync`, the source must not change, and both ranges stay allocated, until the copy has run.
///
/// `GLAKE_DRIVER`: the driver refused, or a GPU was lost that carried parts of earlier copies, whose bytes may not have arrived; this copy
/// was not made then.
///
/// # Safety
/// Both ranges are memory; the destination is not accessed by unordered work until the copy has run; `stream` is a stream; `handle` is null
/// or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_copy_async(
    to: *mut c_void,
    from: *const c_void,
    size: usize,
    stream: *mut c_void,
    flags: u32,
    handle: *mut u64,
) -> i32 {
    guard::answer(|| {
        let asked = flags::asked(stream, flags, !handle.is_null())?;
        let request = [request(to, from, size)?];
        // SAFETY: the caller's promise.
        let lent = unsafe { Lent::new(&request) };
        let given = library::process()?.copies().copy(lent, Form::One, &asked)?;
        // SAFETY: the caller's promise.
        unsafe { hand_over(handle, given) };
        Ok(())
    })
}

/// Builds the request of a copy.
fn request(to: *mut c_void, from: *const c_void, size: usize) -> Result<CopyRequest, Failure> {
    let null = |pointer: Address| pointer.0 == 0 && size > 0;
    let request = CopyRequest { to: address(to), from: address(from), size: Bytes::new(size as u64) };
    match (null(request.to), null(request.from)) {
        (true, _) => {
            Err(Failure::invalid(format_args!("to is null: it must point to the {size} bytes to write")))
        }
        (_, true) => {
            Err(Failure::invalid(format_args!("from is null: it must point to the {size} bytes to read")))
        }
        _ => Ok(request),
    }
}

/// Writes a handle if the caller wants one.
///
/// # Safety
/// `to` is null or may be written.
unsafe fn hand_over(to: *mut u64, handle: u64) {
    if !to.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { to.write(handle) };
    }
}

/// Waits on the host until a copy is complete, and ends its handle. 0 is no error.
///
/// `GLAKE_DRIVER`: the bytes did not arrive, or may not have. `GLAKE_INVALID`: the handle was waited for before, or never given.
#[unsafe(no_mangle)]
pub extern "C" fn glake_copy_wait(handle: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.copies().wait(handle)?))
}

/// Ends the handle of a copy without waiting for it: the copy continues, and its outcome is not reported. 0 is no error. Every handle must
/// be ended by this call or by `glake_copy_wait`; until then it keeps an event of the driver. Does nothing in a forked child and at the end
/// of the process.
///
/// `GLAKE_INVALID`: the handle was ended before, or never given.
#[unsafe(no_mangle)]
pub extern "C" fn glake_copy_drop(handle: u64) -> i32 {
    library::give_up(|process| Ok(process.copies().drop(handle)?))
}

/// Returns whether a copy is complete; the handle stays. Errors are those of `glake_copy_wait`, which must then still end the handle.
///
/// # Safety
/// `done` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_copy_done(handle: u64, done: *mut bool) -> i32 {
    guard::answer(|| {
        let passed = library::process()?.copies().is_done(handle)?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(done, "done", passed) }
    })
}

/// Enqueues a list of copies, unordered among themselves: like one `glake_copy_async`, for many small blocks.
///
/// # Safety
/// `blocks` may be read for `count` blocks; for each, and for the rest, as for `glake_copy_async`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_copy_list(
    blocks: *const CopyBlock,
    count: usize,
    stream: *mut c_void,
    flags: u32,
    handle: *mut u64,
) -> i32 {
    guard::answer(|| {
        let asked = flags::asked(stream, flags, !handle.is_null())?;
        if blocks.is_null() && count > 0 {
            return Err(Failure::invalid("blocks is null: it must point to count blocks"));
        }
        // SAFETY: not null where there is any, and the caller's promise.
        let blocks = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(blocks, count) } };
        let mut requests = Vec::with_capacity(blocks.len());
        for block in blocks {
            requests.push(request(block.to, block.from, block.size)?);
        }
        // SAFETY: the caller's promise.
        let lent = unsafe { Lent::new(&requests) };
        let given = library::process()?.copies().copy(lent, Form::List, &asked)?;
        // SAFETY: the caller's promise.
        unsafe { hand_over(handle, given) };
        Ok(())
    })
}

/// Enqueues copies of one range of host memory to several GPUs: it is read once, and passed on between them.
///
/// # Safety
/// `to` may be read for `count` pointers; for each, and for the rest, as for `glake_copy_async`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_copy_to_all(
    to: *const *mut c_void,
    count: usize,
    from: *const c_void,
    size: usize,
    stream: *mut c_void,
    flags: u32,
    handle: *mut u64,
) -> i32 {
    guard::answer(|| {
        let asked = flags::asked(stream, flags, !handle.is_null())?;
        if to.is_null() && count > 0 {
            return Err(Failure::invalid("to is null: it must point to count pointers"));
        }
        // SAFETY: not null where there is any, and the caller's promise.
        let to = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(to, count) } };
        let requests = to.iter().map(|to| request(*to, from, size));
        let requests: Vec<CopyRequest> = requests.collect::<Result<_, _>>()?;
        // SAFETY: the caller's promise.
        let lent = unsafe { Lent::new(&requests) };
        let given = library::process()?.copies().copy(lent, Form::ToAll, &asked)?;
        // SAFETY: the caller's promise.
        unsafe { hand_over(handle, given) };
        Ok(())
    })
}

/// Tries a copy for callers with a copy function of their own, such as the preload library. Returns 0 if it was enqueued (with
/// `GLAKE_COPY_BLOCKING`: completed). Returns 1 if nothing was done: the copy is too small, is not between host and GPU, has not the
/// direction that `GLAKE_COPY_TO_GPU` or `GLAKE_COPY_FROM_GPU` asks for, the driver refused before anything was enqueued, or no relays are
/// on and ready. Below 0: the driver's own error, negated. Any other value is an error of `glake_copy_async`; after `GLAKE_INVALID`,
/// `GLAKE_UNAVAILABLE` and `GLAKE_UNSUPPORTED` nothing was done either.
///
/// # Safety
/// As for `glake_copy_async`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_copy_try(
    to: *mut c_void,
    from: *const c_void,
    size: usize,
    stream: *mut c_void,
    flags: u32,
) -> i32 {
    const TAKEN: i32 = 0;
    const NOT_TAKEN: i32 = 1;
    let mut outcome = TAKEN;
    let status = guard::answer(|| {
        // SAFETY: the caller's promise.
        let taken = unsafe { tried(to, from, size, stream, flags) };
        let taken = taken.inspect_err(|failure| outcome = failure.driver_error().unwrap_or(outcome))?;
        outcome = if taken { TAKEN } else { NOT_TAKEN };
        Ok(())
    });
    // A driver error takes precedence: the status for out of memory has the same number as a copy that is not taken.
    match status {
        _ if outcome < 0 || status == GLAKE_OK => outcome,
        GLAKE_OUT_OF_MEMORY => GLAKE_DRIVER,
        status => status,
    }
}

/// Returns whether the engine took the copy.
///
/// # Safety
/// As for [`glake_copy_async`].
unsafe fn tried(
    to: *mut c_void,
    from: *const c_void,
    size: usize,
    stream: *mut c_void,
    flags: u32,
) -> Result<bool, Failure> {
    if library::is_over() {
        return Ok(false);
    }
    let copies = library::process()?.copies();
    let wanted = CopyRequest { to: address(to), from: address(from), size: Bytes::new(size as u64) };
    if !copies.is_worth_trying(&wanted)? {
        return Ok(false);
    }
    let (asked, way) = flags::tried(stream, flags)?;
    let request = [request(to, from, size)?];
    // SAFETY: the caller's promise.
    let lent = unsafe { Lent::new(&request) };
    Ok(copies.attempt(lent, &asked, way)?)
}

/// Returns the GPU whose memory is at an address; -1 for host memory, and for managed memory, which migrates on access.
///
/// # Safety
/// `device` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_device_of(at: *const c_void, device: *mut i32) -> i32 {
    guard::answer(|| {
        let found = library::process()?.copies().device_of(address(at))?;
        let of = found.map_or(-1, |device| i32::try_from(device.0).unwrap_or(-1));
        // SAFETY: the caller's promise.
        unsafe { guard::put(device, "device", of) }
    })
}

/// Allows copies to use the links of the other visible GPUs (1), or ends that (0). The links are prepared in the background, at the cost of
/// a context on each GPU; copies use one link until then, and none waits for it. Repeated calls are no error.
///
/// `GLAKE_INVALID`: the configuration has `transfer.multi_path = "never"`, or several processes of the program run on this machine and
/// it does not say `"always"`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_multi_path(on: i32) -> i32 {
    guard::answer(|| Ok(library::process()?.copies().multi_path(on != 0)?))
}

/// Returns the statistics of copies as a JSON object: relays that are ready and their cost, and for each path its bytes, slices, busy time
/// and retries. Null on failure; free it with `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_copy_stats_json() -> *mut c_char {
    guard::value(std::ptr::null_mut(), || string(stats::process()?.copies().statistics().json().to_string()))
}
