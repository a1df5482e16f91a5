//! Copies between the host and GPUs, over every link of the server.
//!
//! ```text
//! glake_copy_* ─► flags, pointers ─► Lent, CopyAsk ─► Copies: decides who makes it, and makes it
//! ```
//!
//! Every copy runs in the order of its stream, as the driver's own does: after all work that was enqueued there before it,
//! and before all that is enqueued later.

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

/// Enqueues a copy on a stream of any device (null and 1: the legacy default stream of the calling thread's current device, 2:
/// the thread's own). `handle`, where not null, gets what `glake_copy_wait` takes, or 0 where nothing is left to wait for.
///
/// Where it is as large as the break-even, one end is host memory and the other a GPU's, and relays are on and ready, it goes
/// over several links; else it is the driver's own copy. Memory that is copied from stays as it is, and both stay allocated,
/// until the copy has run: as for `cuMemcpyAsync`.
///
/// `GLAKE_DRIVER`: the driver refused, or a GPU was lost that carried parts of earlier copies, whose bytes may not have
/// arrived; this copy was not made then.
///
/// # Safety
/// Both ranges are memory, the first of which nothing else touches unordered until the copy has run; `stream` is a stream;
/// `handle` is null or may be written.
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

/// A copy of a caller's.
fn request(to: *mut c_void, from: *const c_void, size: usize) -> Result<CopyRequest, Failure> {
    let null = |pointer: Address| pointer.0 == 0 && size > 0;
    let request = CopyRequest { to: address(to), from: address(from), size: Bytes::new(size as u64) };
    match (null(request.to), null(request.from)) {
        (true, _) => Err(Failure::invalid(format_args!("to is null, and {size} bytes shall go there"))),
        (_, true) => {
            Err(Failure::invalid(format_args!("from is null, and {size} bytes shall come from there")))
        }
        _ => Ok(request),
    }
}

/// Writes a handle where one is wanted.
///
/// # Safety
/// `to` is null or may be written.
unsafe fn hand_over(to: *mut u64, handle: u64) {
    if !to.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { to.write(handle) };
    }
}

/// Waits on the host until the bytes of a copy are there, and ends its handle. 0 is no error.
///
/// `GLAKE_DRIVER`: they are not, or may not be. `GLAKE_INVALID`: the handle was waited for before, or never given.
#[unsafe(no_mangle)]
pub extern "C" fn glake_copy_wait(handle: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.copies().wait(handle)?))
}

/// Ends the handle of a copy without waiting for it: the copy goes on, and nobody is told how it ended. 0 is no error. Every handle is
/// ended by this or by `glake_copy_wait`; until then it keeps an event of the driver. In a forked child and at the end of the process
/// nothing is done.
///
/// `GLAKE_INVALID`: the handle was ended before, or never given.
#[unsafe(no_mangle)]
pub extern "C" fn glake_copy_drop(handle: u64) -> i32 {
    library::give_up(|process| Ok(process.copies().drop(handle)?))
}

/// Whether the bytes of a copy are there; the handle stays. Errors are those of `glake_copy_wait`, which still ends the
/// handle then.
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

/// Enqueues copies, in no order among themselves: as one `glake_copy_async`, for many small blocks.
///
/// # Safety
/// `blocks` may be read for `count` blocks; for each, and for the rest, as `glake_copy_async`.
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
/// `to` may be read for `count` pointers; for each, and for the rest, as `glake_copy_async`.
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

/// For those who have a copy of their own to make where this one is none for the engine, as the preload library: 0 where it
/// was enqueued (with `GLAKE_COPY_BLOCKING`: made), 1 where nothing was done, because it is too small, is not between host and
/// GPU, does not go the way that `GLAKE_COPY_TO_GPU` or `GLAKE_COPY_FROM_GPU` asks for, the driver refused before anything was
/// enqueued, or no relays are on and ready. Below 0 it is the driver's own error, negated. Any other answer is an error as of
/// `glake_copy_async`; after `GLAKE_INVALID`, `GLAKE_UNAVAILABLE` and `GLAKE_UNSUPPORTED` too nothing was done.
///
/// # Safety
/// As `glake_copy_async`.
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
    // A number of the driver's goes first; out of memory has the number of what is not taken.
    match status {
        _ if outcome < 0 || status == GLAKE_OK => outcome,
        GLAKE_OUT_OF_MEMORY => GLAKE_DRIVER,
        status => status,
    }
}

/// Whether the engine took the copy.
///
/// # Safety
/// As [`glake_copy_async`].
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

/// Which GPU's memory is at an address; -1 for the host's, and for memory that moves between them as it is touched.
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

/// Lets copies use the links of the other visible GPUs (1), or no longer (0). They are made ready in the background, at the
/// cost of a context on each; copies take one link until then, and none waits for it. Twice is no error.
///
/// `GLAKE_INVALID`: the configuration has `transfer.multi_path = "never"`, or several processes of the program run on this machine
/// and it does not say `true`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_multi_path(on: i32) -> i32 {
    guard::answer(|| Ok(library::process()?.copies().multi_path(on != 0)?))
}

/// What copies did as a JSON object: relays that are ready and what they cost, and for each path its bytes, slices, busy time
/// and retries. Null on failure; to be given to `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_copy_stats_json() -> *mut c_char {
    guard::value(std::ptr::null_mut(), || string(stats::process()?.copies().statistics().json().to_string()))
}
