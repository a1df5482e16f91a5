//! What the library calls: functions of the program, each with a context of its own; null where there is none.

use std::ffi::{c_char, c_void};

use crate::{Segment, SegmentBlock};

/// Says whether allocations on a stream go to a pool; called on the thread that allocates.
pub type StreamFilter = Option<unsafe extern "C" fn(context: *mut c_void, stream: *mut c_void) -> bool>;

/// Called once when a context is no longer needed.
pub type ContextDrop = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// Called for each block.
pub type BlockVisit = Option<unsafe extern "C" fn(context: *mut c_void, pointer: *mut c_void, size: u64)>;

/// Called for each block that is freed.
pub type BlockFreed = Option<unsafe extern "C" fn(context: *mut c_void, pointer: *mut c_void)>;

/// Called before memory leaves or comes back, and after, with the event as JSON; answers 0 where all is well.
pub type RegionHook = Option<unsafe extern "C" fn(context: *mut c_void, event_json: *const c_char) -> i32>;

/// Told of a request that is about to be refused: the device's memory, and what nobody holds of it.
pub type ShortageObserver =
    Option<unsafe extern "C" fn(context: *mut c_void, device: i32, requested: u64, total: u64, free: u64)>;

/// Told of memory that was mapped for blocks, or is about to be unmapped.
pub type MappingObserver =
    Option<unsafe extern "C" fn(context: *mut c_void, device: i32, mapped: bool, address: u64, size: u64)>;

/// Told of leases: an event of `GLAKE_LEASE_WANT` and its kin, the device, and how many bytes.
pub type LeaseWatcher =
    Option<unsafe extern "C" fn(context: *mut c_void, event: i32, device: i32, bytes: u64)>;

/// Given to who says which bytes of a block count, who calls it for each range of bytes that counts, from the first to the one behind the last.
pub type LiveRangeAdd = Option<unsafe extern "C" fn(into: *mut c_void, start: u64, end: u64)>;

/// Says which bytes of a block count: calls `add` for each range, with `into`, and answers 0.
pub type LiveCallback =
    Option<unsafe extern "C" fn(context: *mut c_void, add: LiveRangeAdd, into: *mut c_void) -> i32>;

/// Called for each segment.
pub type SegmentVisit = Option<unsafe extern "C" fn(context: *mut c_void, segment: *const Segment)>;

/// Called for each part of the segment before it, in order.
pub type SegmentBlockVisit = Option<unsafe extern "C" fn(context: *mut c_void, block: *const SegmentBlock)>;
