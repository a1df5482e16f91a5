//! Allocation, free and lookup of blocks; decommit and commit of parts of live blocks.

use std::ffi::c_void;

use glake_abi::{Block, GLAKE_OK};
use glake_device::{Address, Stream};
use glake_runtime::process::ProcessError;
use glake_units::Bytes;

use crate::status::Failure;
use crate::{guard, library};

#[inline]
pub(crate) fn address(pointer: *const c_void) -> Address {
    Address(pointer as u64)
}

#[inline]
pub(crate) fn stream(handle: *mut c_void) -> Stream {
    Stream(handle as u64)
}

pub(crate) fn pointer(address: Address) -> *mut c_void {
    address.0 as *mut c_void
}

/// Allocates a block for work on a stream of the device; callable on any thread, whatever its current device. Size 0 gives null.
///
/// `GLAKE_OUT_OF_MEMORY`: not enough memory after everything reclaimable was reclaimed and every pending free was waited for.
///
/// # Safety
/// `stream` is null or a stream of the device; `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_alloc(
    device: i32,
    size: usize,
    stream: *mut c_void,
    out: *mut *mut c_void,
) -> i32 {
    guard::answer(|| {
        if size == 0 {
            // SAFETY: the caller's promise.
            return unsafe { guard::put(out, "out", std::ptr::null_mut()) };
        }
        if out.is_null() {
            return Err(Failure::invalid("out is null: it must point to where the answer goes"));
        }
        let raw = self::stream(stream);
        let address = library::process()?.malloc(device.into(), Bytes::new(size as u64), raw)?;
        // SAFETY: not null, and the caller's promise.
        unsafe { out.write(pointer(address)) };
        Ok(())
    })
}

/// Frees a block; its address identifies the device. Null is no error. The block's own stream may reuse the bytes at once, other streams
/// once all work enqueued before has completed. Does nothing in a forked child.
///
/// `GLAKE_INVALID`: no live block begins there; nothing was changed.
#[unsafe(no_mangle)]
pub extern "C" fn glake_free(pointer: *mut c_void) -> i32 {
    if pointer.is_null() || library::is_forked() {
        return GLAKE_OK;
    }
    guard::answer(|| {
        let address = address(pointer);
        match library::started_process()? {
            Some(process) => Ok(process.free(address)?),
            None => Err(ProcessError::UnknownAddress { address }.into()),
        }
    })
}

/// Finds the live block that contains an address.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_find(pointer: *const c_void, out: *mut Block) -> i32 {
    guard::answer(|| {
        let address = address(pointer);
        let found = library::started_process()?.and_then(|process| process.find(address));
        let found = found.ok_or(ProcessError::InNoBlock { address })?;
        let block = Block {
            base: self::pointer(found.address),
            size: found.size.get(),
            requested: found.requested.get(),
            device: i32::try_from(found.device.0).unwrap_or(i32::MAX),
        };
        // SAFETY: the caller's promise.
        unsafe { guard::put(out, "out", block) }
    })
}

/// Records that work of a stream, of any device, uses a block that was allocated for another stream: its memory is reused, by any stream,
/// only after that work. Null, 1 and 2 are the default streams of the block's device and of the thread's current one.
///
/// # Safety
/// `stream` is null or a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_record_stream(pointer: *mut c_void, stream: *mut c_void) -> i32 {
    guard::answer(|| Ok(library::process()?.record_stream(address(pointer), self::stream(stream))?))
}

/// Returns the size of the largest request that could be served now, with stitching and growing.
///
/// # Safety
/// `bytes` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_largest(device: i32, bytes: *mut u64) -> i32 {
    guard::answer(|| {
        let largest = library::process()?.largest(device.into())?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(bytes, "bytes", largest.get()) }
    })
}

/// Waits for pending frees (unless a capture is open), then releases free memory until at most `keep` bytes are reserved: on one device, or
/// with -1 on each. `released`, if not null, receives the number of bytes released. Does nothing in a forked child and at the end of the
/// process.
///
/// # Safety
/// `released` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_trim(device: i32, keep: u64, released: *mut u64) -> i32 {
    let mut went = Bytes::ZERO;
    let status = library::give_up(|process| {
        let device = (device != -1).then_some(i64::from(device));
        went = process.trim(device, Bytes::new(keep))?;
        Ok(())
    });
    if status == GLAKE_OK && !released.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { released.write(went.get()) };
    }
    status
}

/// Sets the fraction of a device's memory that may be reserved, 0 to 1; also before its first use. A configured limit still holds.
#[unsafe(no_mangle)]
pub extern "C" fn glake_set_fraction(device: i32, fraction: f64) -> i32 {
    guard::answer(|| Ok(library::process()?.set_fraction(device.into(), fraction)?))
}

/// Returns the fraction of a device's memory that may be reserved.
///
/// # Safety
/// `fraction` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_fraction(device: i32, fraction: *mut f64) -> i32 {
    guard::answer(|| {
        let part = library::process()?.fraction(device.into())?;
        // SAFETY: the caller's promise.
        unsafe { guard::put(fraction, "fraction", part) }
    })
}

/// Releases the physical memory of `bytes` bytes from `pointer` on, which must lie in one live block. Whole extents inside the range are
/// released (extents of up to four times `tiers.extent` in a region, `pool.extent` outside of regions). The block keeps its addresses; the
/// bytes are lost, and must not be accessed until `glake_commit`: a kernel that does faults, `glake_copy_*` refuses. No work on them may be
/// enqueued from this call on; the call waits for work enqueued before. Memory that is fixed, or shared with other processes, stays.
/// `decommitted`, if not null, receives the number of bytes released. The memory is available to others at once, and stays leased until a
/// shrink of everything returns the unused part of the lease.
///
/// `GLAKE_INVALID`: the bytes lie in no live block, or their region is sealed, or belongs to a captured graph. Refused while a capture is
/// open.
///
/// # Safety
/// `decommitted` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_decommit(pointer: *const c_void, bytes: u64, decommitted: *mut u64) -> i32 {
    guard::answer(|| {
        let freed = library::process()?.regions().decommit(address(pointer), Bytes::new(bytes))?;
        // SAFETY: the caller's promise.
        unsafe { tell(decommitted, freed) };
        Ok::<(), Failure>(())
    })
}

/// Creates memory for the decommitted parts of `bytes` bytes from `pointer` on, at their addresses; the bytes are undefined. Evicted memory
/// of their region is refilled first. `committed`, if not null, receives the number of bytes created.
///
/// `GLAKE_INVALID`: the bytes lie in no live block, or their region is sealed. `GLAKE_OUT_OF_MEMORY`: memory created by then stays, and a
/// repeated call continues.
///
/// # Safety
/// `committed` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_commit(pointer: *const c_void, bytes: u64, committed: *mut u64) -> i32 {
    guard::answer(|| {
        let made = library::process()?.regions().commit(address(pointer), Bytes::new(bytes))?;
        // SAFETY: the caller's promise.
        unsafe { tell(committed, made) };
        Ok::<(), Failure>(())
    })
}

/// Copies `bytes` bytes of evicted memory at `from`, which must lie in one live block, to host memory at `to`: from their copy in host
/// memory, without the GPU and without a refill. Bytes that were declared dead (`glake_live_ranges`) are 0.
///
/// `GLAKE_INVALID`: the bytes lie in no live block, or some of them are on a GPU or in a file; the bytes at `to` are 0 then.
///
/// # Safety
/// `to` may be written for `bytes` bytes, and no other thread accesses them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_read_evicted(to: *mut c_void, from: *const c_void, bytes: u64) -> i32 {
    guard::answer(|| {
        let size = usize::try_from(bytes).map_err(|_| Failure::invalid("bytes exceed the address space"))?;
        if size == 0 {
            return Ok(());
        }
        if to.is_null() {
            return Err(Failure::invalid("to is null"));
        }
        // SAFETY: the caller's promise; every byte is initialised by the fill.
        let into = unsafe {
            to.cast::<u8>().write_bytes(0, size);
            std::slice::from_raw_parts_mut(to.cast::<u8>(), size)
        };
        library::process()?.regions().read_evicted(address(from), into)?;
        Ok::<(), Failure>(())
    })
}

/// Writes `bytes` if the caller passed a place.
///
/// # Safety
/// `to` is null or may be written.
unsafe fn tell(to: *mut u64, bytes: Bytes) {
    if !to.is_null() {
        // SAFETY: the promise of who calls.
        unsafe { to.write(bytes.get()) };
    }
}
