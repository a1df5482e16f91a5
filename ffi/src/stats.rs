//! Statistics of devices in torch's key scheme, snapshots with their event history, observers, and the costs of the library itself.

use std::alloc::System;
use std::ffi::{CString, c_char, c_void};
use std::sync::Arc;

use glake_abi::{
    DeviceStats, MappingObserver, PoolStats, Segment, SegmentBlock, SegmentBlockVisit, SegmentVisit,
    ShortageObserver, Stat,
};
use glake_runtime::process::{BlockView, OnMapping, OnShortage, SegmentView, Shortage};
use glake_runtime::{metrics, process};
use glake_stitch::SegmentKind;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

use crate::block::pointer;
use crate::guard::Context;
use crate::status::Failure;
use crate::{guard, library};

/// Returns the statistics of a device; zeros if its pool has not started.
///
/// # Safety
/// `out` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_stats(device: i32, out: *mut DeviceStats) -> i32 {
    guard::answer(|| {
        let stats = device_stats(&stats_of(device)?);
        // SAFETY: the caller's promise.
        unsafe { guard::put(out, "out", stats) }
    })
}

/// Resets the peaks of a device to the current values.
#[unsafe(no_mangle)]
pub extern "C" fn glake_reset_peaks(device: i32) -> i32 {
    guard::answer(|| Ok(process()?.reports().reset_peaks(device.into())?))
}

/// Resets the totals and event counters of a device to zero.
#[unsafe(no_mangle)]
pub extern "C" fn glake_reset_totals(device: i32) -> i32 {
    guard::answer(|| Ok(process()?.reports().reset_totals(device.into())?))
}

/// Returns the statistics as a JSON object: torch's flat keys ("active_bytes.all.peak"), and GLake's under "glake.". Null on failure; free
/// it with `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_stats_json(device: i32) -> *mut c_char {
    guard::value(std::ptr::null_mut(), || string(stats_of(device)?.json().to_string()))
}

/// Frees a text returned by this library; null is no error.
///
/// # Safety
/// The pointer is null, or such a text, and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_string_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the caller's promise: `string` made it.
        drop(unsafe { CString::from_raw(text) });
    }
}

/// Converts a text for the caller.
pub(crate) fn string(text: String) -> Result<*mut c_char, Failure> {
    CString::new(text).map(CString::into_raw).map_err(Failure::invalid)
}

/// Returns the process, for calls that need no driver; works at the end of the process too.
pub(crate) fn process() -> Result<&'static process::Process, Failure> {
    match library::started_process()? {
        Some(process) => Ok(process),
        None => library::process(),
    }
}

fn stats_of(device: i32) -> Result<metrics::DeviceStats, Failure> {
    Ok(process()?.reports().stats(device.into())?)
}

/// Converts the runtime's figures to the C structure: every metric, by its name.
macro_rules! as_in_c {
    (
        $(#[$of_pools:meta])* PoolStats { $( $(#[$a:meta])* $pool:ident: $p:ty, $pu:ident, $ps:ident; )* }
        $(#[$of_torch:meta])* Counters { $( $(#[$b:meta])* $torch:ident: $t:ty, $tu:ident, $ts:ident; )* }
        $(#[$of_own:meta])* OwnStats { $( $(#[$c:meta])* $own:ident: $o:ty, $ou:ident, $os:ident; )* }
    ) => {
        fn pool_stats(stats: &metrics::PoolStats) -> PoolStats {
            PoolStats { $($pool: stat(stats.$pool),)* }
        }

        fn device_stats(stats: &metrics::DeviceStats) -> DeviceStats {
            DeviceStats {
                all: pool_stats(&stats.all),
                small_pool: pool_stats(&stats.small_pool),
                large_pool: pool_stats(&stats.large_pool),
                $($torch: stats.counters.$torch,)*
                $($own: stats.own.$own,)*
            }
        }
    };
}
glake_runtime::device_metrics!(as_in_c);

fn stat(stat: metrics::Stat) -> Stat {
    let metrics::Stat { current, peak, allocated, freed } = stat;
    Stat { current, peak, allocated, freed }
}

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

/// Returns the state of all pools in the form of torch's `_cuda_memorySnapshot`, as JSON. Null on failure; free it with
/// `glake_string_free`.
#[unsafe(no_mangle)]
pub extern "C" fn glake_snapshot_json() -> *mut c_char {
    guard::value(std::ptr::null_mut(), || string(process()?.reports().snapshot().to_string()))
}

/// Calls `segment` for every mapped range of a device, each followed by `block` for its parts. Either may be null.
///
/// # Safety
/// The functions may be called with this context, and do not call back into the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_segments(
    device: i32,
    segment: SegmentVisit,
    block: SegmentBlockVisit,
    context: *mut c_void,
) -> i32 {
    guard::answer(|| {
        for view in process()?.reports().segments(device.into())? {
            if let Some(segment) = segment {
                // SAFETY: the caller's promise; the segment lives until the call returns.
                unsafe { segment(context, &segment_of(&view)) };
            }
            for part in &view.blocks {
                if let Some(block) = block {
                    // SAFETY: as above.
                    unsafe { block(context, &block_of(part)) };
                }
            }
        }
        Ok(())
    })
}

/// Starts or stops the event history for snapshots: the last `max_entries` events are kept. `clear` forgets earlier ones.
#[unsafe(no_mangle)]
pub extern "C" fn glake_record_history(enabled: bool, max_entries: u64, clear: bool) -> i32 {
    guard::answer(|| {
        library::process()?.observers().keep_history(enabled, max_entries, clear);
        Ok(())
    })
}

/// Returns whether events are recorded.
#[unsafe(no_mangle)]
pub extern "C" fn glake_history_enabled() -> bool {
    guard::value(false, || {
        Ok(library::started_process()?.is_some_and(|process| process.observers().keeps_history()))
    })
}

fn segment_of(view: &SegmentView) -> Segment {
    Segment {
        address: view.address.0,
        size: view.size,
        stream: pointer(glake_device::Address(view.stream.0)),
        pool_first: view.pool.0,
        pool_second: view.pool.1,
        device: i32::try_from(view.device.0).unwrap_or(i32::MAX),
        large: view.kind != SegmentKind::Slabs,
        stitched: view.kind == SegmentKind::Stitched,
    }
}

fn block_of(view: &BlockView) -> SegmentBlock {
    let BlockView { address, size, requested, live, pending, .. } = *view;
    SegmentBlock { address: address.0, size, requested, live, pending }
}

/// Calls `observer`, on the requesting thread, before a request is refused for lack of memory; null ends that, also in a forked child and
/// at the end of the process. There is at most one observer.
///
/// # Safety
/// The observer may be called on any thread with this context for the life of the process, and calls no function of the library except
/// `glake_stats`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_on_out_of_memory(observer: ShortageObserver, context: *mut c_void) -> i32 {
    library::give_up_if(observer.is_none(), |process| {
        let context = Context(context);
        let observer = observer.map(|observer| -> OnShortage {
            Arc::new(move |shortage: &Shortage| {
                let device = i32::try_from(shortage.device.0).unwrap_or(i32::MAX);
                let (wanted, total, free) =
                    (shortage.wanted.get(), shortage.total.get(), shortage.free.get());
                // SAFETY: the promise of who gave it.
                unsafe { observer(context.get(), device, wanted, total, free) };
            })
        });
        process.observers().on_shortage(observer);
        Ok(())
    })
}

/// Calls `observer`, on the thread at hand, for memory that was mapped or is about to be unmapped; null ends that. There is at most one
/// observer.
///
/// # Safety
/// The conditions of `glake_on_out_of_memory` hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn glake_on_mapping(observer: MappingObserver, context: *mut c_void) -> i32 {
    library::give_up_if(observer.is_none(), |process| {
        let context = Context(context);
        let observer = observer.map(|observer| -> OnMapping {
            Arc::new(move |device, mapped, address, size| {
                let device = i32::try_from(device.0).unwrap_or(i32::MAX);
                // SAFETY: the promise of who gave it.
                unsafe { observer(context.get(), device, mapped, address.0, size.get()) };
            })
        });
        process.observers().on_mapping(observer);
        Ok(())
    })
}
