//! Decommit and commit: parts of live blocks without physical memory.

use std::ffi::c_void;

use glake_units::Bytes;

use crate::block::address;
use crate::status::Failure;
use crate::{guard, library};

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
