//! Costs of the library itself: driver calls and heap allocations. A hit makes neither.

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

use crate::guard;
use crate::stats::process;

/// Counter of the library's own heap allocations; only an allocation touches its atomics.
#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Returns the number of driver calls that the library has made, on all threads and devices, and the microseconds that they took on the
/// host. Either may be null.
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

/// Returns the number of heap allocations that the library has made.
#[unsafe(no_mangle)]
pub extern "C" fn glake_heap_allocations() -> u64 {
    let stats = HEAP.stats();
    (stats.allocations + stats.reallocations) as u64
}
