//! Private pools: those of CUDA graphs, and `torch.cuda.MemPool`.

use std::ffi::c_void;
use std::sync::Arc;

use glake_abi::{BlockFreed, BlockVisit, Checkpoint, ContextDrop, StreamFilter};
use glake_device::Stream;
use glake_runtime::process::{Filter, PoolCheckpoint, PoolId};

use crate::block::pointer;
use crate::status::Failure;
use crate::{guard, library};

/// Stream filter of the program, with its context.
struct Program {
    filter: unsafe extern "C" fn(context: *mut c_void, stream: *mut c_void) -> bool,
    context: *mut c_void,
    drop: ContextDrop,
}

// SAFETY: `glake_pool_begin` asks for a filter and a drop that may be called on any thread.
unsafe impl Send for Program {}
// SAFETY: as above, and on several at once.
unsafe impl Sync for Program {}

impl Program {
    fn takes(&self, stream: Stream) -> bool {
        // SAFETY: the filter and its context are the program's promise, alive until `drop` was called.
        unsafe { (self.filter)(self.context, stream.0 as *mut c_void) }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(drop) = self.drop {
            // SAFETY: called once, and nothing asks the filter after it.
            unsafe { drop(self.context) };
        }
    }
}

/// Creates a private pool on a device, or adds an owner to it. Pools are named by two numbers, as torch's MempoolId_t.
#[unsafe(no_mangle)]
pub extern "C" fn glake_pool_create(device: i32, first: u64, second: u64) -> i32 {
    guard::answer(|| Ok(library::process()?.pools().create(device.into(), PoolId(first, second))?))
}

/// Routes allocations on streams that the filter accepts (null: every stream), of any thread, to a private pool from now on; the pool is
/// created if it does not exist. It adds an owner, which `glake_pool_release` removes. If several pools accept a stream, the one begun last
/// serves it. `drop`, if not null, is called once when the filter is no longer needed, also if this call fails.
///
/// Call it before a stream capture begins: from then on no completion point is recorded on any device, which would break the capture, until
/// `glake_pool_end`, or until an allocation for the pool arrives on a stream that is not capturing. If an allocation was seen in a capture,
/// the end of the capture ends this state, even if the capture fails. A capture that failed without allocations ends it with the end of the
/// calling thread, or with that thread's next allocation on the device outside of a capture. A pool can then be begun again without
/// `glake_pool_end`.
///
/// # Safety
/// `filter` and `drop` may be called on any thread with this context, and do not call back into the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_pool_begin(
    device: i32,
    first: u64,
    second: u64,
    filter: StreamFilter,
    context: *mut c_void,
    drop: ContextDrop,
) -> i32 {
    guard::answer(|| {
        // Created first, so that the context is dropped on every path.
        let program = match filter {
            Some(filter) => Some(Arc::new(Program { filter, context, drop })),
            None => {
                if let Some(drop) = drop {
                    // SAFETY: there is no filter that would need it.
                    unsafe { drop(context) };
                }
                None
            }
        };
        let filter = program.map(|program| -> Filter { Arc::new(move |stream| program.takes(stream)) });
        Ok(library::process()?.pools().begin(device.into(), PoolId(first, second), filter)?)
    })
}

/// Names the stream on which the capture announced by `glake_pool_begin` will begin. Allocations of the same thread on streams outside of
/// the capture then no longer indicate that there is no capture.
#[unsafe(no_mangle)]
pub extern "C" fn glake_pool_expect_capture(
    device: i32,
    first: u64,
    second: u64,
    stream: *mut c_void,
) -> i32 {
    let stream = crate::block::stream(stream);
    guard::answer(|| {
        Ok(library::process()?.pools().expect_capture(device.into(), PoolId(first, second), stream)?)
    })
}

/// Ends the routing begun by `glake_pool_begin`; the pool and its owners stay. Does nothing in a forked child and at the end of the
/// process.
#[unsafe(no_mangle)]
pub extern "C" fn glake_pool_end(device: i32, first: u64, second: u64) -> i32 {
    library::give_up(|process| Ok(process.pools().end(device.into(), PoolId(first, second))?))
}

/// Removes an owner of a pool. With the last owner the pool is given up: its memory is released once its blocks are freed and all work
/// enqueued before is complete. Does nothing in a forked child and at the end of the process.
#[unsafe(no_mangle)]
pub extern "C" fn glake_pool_release(device: i32, first: u64, second: u64) -> i32 {
    library::give_up(|process| Ok(process.pools().release(device.into(), PoolId(first, second))?))
}

/// Returns the number of owners of a pool; 0 if it does not exist, in a forked child, and at the end of the process.
///
/// # Safety
/// `count` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_pool_use_count(device: i32, first: u64, second: u64, count: *mut i32) -> i32 {
    guard::answer(|| {
        let mut owners = 0;
        if !library::is_over() {
            owners = library::process()?.pools().owners(device.into(), PoolId(first, second))?;
        }
        // SAFETY: the caller's promise.
        unsafe { guard::put(count, "count", i32::try_from(owners).unwrap_or(i32::MAX)) }
    })
}

/// Releases the free memory of a private pool, for `torch.cuda.MemPool`; not for the pool of a graph that may be replayed. Does nothing in
/// a forked child and at the end of the process.
#[unsafe(no_mangle)]
pub extern "C" fn glake_pool_trim(device: i32, first: u64, second: u64) -> i32 {
    library::give_up(|process| {
        process.pools().trim(device.into(), PoolId(first, second))?;
        Ok(())
    })
}

/// Keeps all memory of the private pools with this number on their GPUs, on every device, memory that is made later and free memory too, or
/// reverts one earlier call; that does nothing in a forked child and at the end of the process. The pools need not exist yet: fix the pool
/// of a graph before its capture, because NCCL registers buffers of captured collectives by their physical memory.
///
/// `GLAKE_INVALID`: part of a pool is evicted, or it was not fixed.
#[unsafe(no_mangle)]
pub extern "C" fn glake_pool_fix(first: u64, second: u64, fixed: bool) -> i32 {
    library::give_up_if(!fixed, |process| Ok(process.pools().fix(PoolId(first, second), fixed)?))
}

/// Calls `visit` for each live block of a private pool.
///
/// # Safety
/// `visit` may be called with this context, and does not call back into the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_pool_blocks(
    device: i32,
    first: u64,
    second: u64,
    visit: BlockVisit,
    context: *mut c_void,
) -> i32 {
    guard::answer(|| {
        let visit = visit.ok_or_else(|| Failure::invalid("visit is null"))?;
        let id = PoolId(first, second);
        library::process()?.pools().blocks(device.into(), id, |address, size| {
            // SAFETY: the caller's promise.
            unsafe { visit(context, pointer(address), size.get()) };
        })?;
        Ok(())
    })
}

/// Records which blocks of a private pool are live, as torch's getCheckpointState does; release the record with `glake_checkpoint_drop`.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_pool_checkpoint(
    device: i32,
    first: u64,
    second: u64,
    out: *mut *mut Checkpoint,
) -> i32 {
    guard::answer(|| {
        if out.is_null() {
            return Err(Failure::invalid("out is null: it must point to where the answer goes"));
        }
        let checkpoint = library::process()?.pools().checkpoint(device.into(), PoolId(first, second))?;
        // SAFETY: not null, and the caller's promise.
        unsafe { out.write(Box::into_raw(Box::new(checkpoint)).cast()) };
        Ok(())
    })
}

/// Restores a private pool to a checkpoint, as torch's setCheckpointPoolState does: blocks live now are freed, and blocks live then are
/// live again at the same addresses. `freed` is called for each block that was live before, `allocated` for each that is live now; both for
/// a block that stays. No byte is written and no stream waits. Either may be null.
///
/// `GLAKE_INVALID`: the pool was released, or memory of those blocks was released since; nothing was changed.
///
/// # Safety
/// The checkpoint is null or alive; the functions may be called with this context, and do not call back into the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_pool_restore(
    checkpoint: *const Checkpoint,
    freed: BlockFreed,
    allocated: BlockVisit,
    context: *mut c_void,
) -> i32 {
    guard::answer(|| {
        // SAFETY: the caller's promise: it came from `glake_pool_checkpoint`.
        let checkpoint = unsafe { checkpoint.cast::<PoolCheckpoint>().as_ref() };
        let checkpoint = checkpoint.ok_or_else(|| Failure::invalid("checkpoint is null"))?;
        let restored = library::process()?.restore(checkpoint)?;
        if let Some(freed) = freed {
            for block in &restored.freed {
                // SAFETY: the caller's promise.
                unsafe { freed(context, pointer(block.address)) };
            }
        }
        if let Some(allocated) = allocated {
            for block in &restored.claimed {
                // SAFETY: as above.
                unsafe { allocated(context, pointer(block.address), block.size.get()) };
            }
        }
        Ok(())
    })
}

/// Releases a checkpoint; null is no error.
///
/// # Safety
/// The checkpoint is null or alive, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_checkpoint_drop(checkpoint: *mut Checkpoint) {
    if !checkpoint.is_null() {
        // SAFETY: the caller's promise: it came from `glake_pool_checkpoint`.
        drop(unsafe { Box::from_raw(checkpoint.cast::<PoolCheckpoint>()) });
    }
}
