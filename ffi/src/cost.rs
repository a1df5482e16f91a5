//! What the library itself costs: calls of the driver, and allocations on the heap. A hit makes neither.

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

use crate::guard;
use crate::stats::process;

/// Counts the library's own allocations, in atomics that only an allocation touches.
#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// How many calls of the driver the library has made, on all threads and devices, and the microseconds that they took on
/// the host. Either may be null.
///
/// # Safety
/// Both are null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_driver_calls(calls: *mut u64, microseconds: *mut u64) -> i32 {
    guard::answer(|| {
        let (made, time) = process()?.reports().driver_calls();
        if !calls.is_null() {
            // SAFETY: not null, and the caller's promise.
            unsafe { calls.write(made) };
        }
        if !microseconds.is_null() {
            // SAFETY: as above.
            unsafe { microseconds.write(u64::try_from(time.as_micros()).unwrap_or(u64::MAX)) };
        }
        Ok(())
    })
}

/// How many allocations on the heap the library has made.
#[unsafe(no_mangle)]
pub extern "C" fn glake_heap_allocations() -> u64 {
    let stats = HEAP.stats();
    (stats.allocations + stats.reallocations) as u64
}
