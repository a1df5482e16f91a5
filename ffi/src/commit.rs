//! Parts of live blocks without memory.

use std::ffi::c_void;

use glake_units::Bytes;

use crate::block::address;
use crate::status::Failure;
use crate::{guard, library};

/// Gives the physical memory of `bytes` bytes from `pointer` on back to the driver, which lie in one live block: of the extents that lie
/// wholly in them (of up to four times `tiers.extent` in a region, `pool.extent` outside of regions). The block keeps its addresses; the bytes are lost, and
/// until `glake_commit` nothing may touch them: a kernel that does faults, `glake_copy_*` refuses. No work on them may be enqueued from this
/// call on; what was enqueued before is waited for. What is fixed, or shared with other processes, stays. `decommitted`, which may be null,
/// is how much memory went; it is free for others at once, and stays leased until a shrink of everything gives back what is not made.
///
/// `GLAKE_INVALID`: the bytes lie in no live block, or their region is sealed, or a captured graph's. Refused while a capture is open.
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

/// Makes memory, at its addresses, for what was decommitted of `bytes` bytes from `pointer` on; the bytes have any value. What else is
/// evicted of their region comes back first. `committed`, which may be null, is how much memory was made.
///
/// `GLAKE_INVALID`: the bytes lie in no live block, or their region is sealed. `GLAKE_OUT_OF_MEMORY`: what was made by then stays, and the same call goes on.
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

/// # Safety
/// It is null or may be written.
unsafe fn tell(to: *mut u64, bytes: Bytes) {
    if !to.is_null() {
        // SAFETY: the promise of who calls.
        unsafe { to.write(bytes.get()) };
    }
}
