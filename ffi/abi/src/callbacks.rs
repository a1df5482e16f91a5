//! Callback types: functions of the program that the library calls, each with its own context pointer; null: no callback.

use std::ffi::{c_char, c_void};

use crate::{Segment, SegmentBlock};

/// Returns whether allocations on a stream go to a pool; called on the allocating thread.
pub type StreamFilter = Option<unsafe extern "C" fn(context: *mut c_void, stream: *mut c_void) -> bool>;

/// Called once when the library no longer needs a context.
pub type ContextDrop = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// Called once for each block.
pub type BlockVisit = Option<unsafe extern "C" fn(context: *mut c_void, pointer: *mut c_void, size: u64)>;

/// Called for each freed block.
pub type BlockFreed = Option<unsafe extern "C" fn(context: *mut c_void, pointer: *mut c_void)>;

/// Called before and after memory is evicted or refilled, with the event as JSON; returns 0 on success.
pub type RegionHook = Option<unsafe extern "C" fn(context: *mut c_void, event_json: *const c_char) -> i32>;

/// Called for a request that is about to be refused; `total` is the device's memory, `free` its free memory, in bytes.
pub type ShortageObserver =
    Option<unsafe extern "C" fn(context: *mut c_void, device: i32, requested: u64, total: u64, free: u64)>;

/// Called for memory that was mapped for blocks (`mapped`) or is about to be unmapped.
pub type MappingObserver =
    Option<unsafe extern "C" fn(context: *mut c_void, device: i32, mapped: bool, address: u64, size: u64)>;

/// Called for a lease event (`GLAKE_LEASE_WANT` and the others) of a device, with its number of bytes.
pub type LeaseWatcher =
    Option<unsafe extern "C" fn(context: *mut c_void, event: i32, device: i32, bytes: u64)>;

/// Passed to a live callback, which calls it for each half-open range of live bytes.
pub type LiveRangeAdd = Option<unsafe extern "C" fn(into: *mut c_void, start: u64, end: u64)>;

/// Reports the live bytes of a block: calls `add` with `into` for each range, and returns 0.
pub type LiveCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, add: LiveRangeAdd, into: *mut c_void) -> i32>;

/// Called once for each segment.
pub type SegmentVisit = Option<unsafe extern "C" fn(context: *mut c_void, segment: *const Segment)>;

/// Called for each part of the preceding segment, in order.
pub type SegmentBlockVisit = Option<unsafe extern "C" fn(context: *mut c_void, block: *const SegmentBlock)>;
