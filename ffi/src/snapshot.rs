//! Snapshots of the pools, and their event history.

use std::ffi::{c_char, c_void};

use glake_abi::{Segment, SegmentBlock, SegmentBlockVisit, SegmentVisit};
use glake_runtime::process::{BlockView, SegmentView};
use glake_stitch::SegmentKind;

use crate::block::pointer;
use crate::stats::{process, string};
use crate::{guard, library};

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
