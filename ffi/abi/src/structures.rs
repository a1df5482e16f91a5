//! What calls fill or read.

use std::ffi::c_void;

/// A live block.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Where it begins.
    pub base: *mut c_void,
    /// How long it is: the request rounded up to 512 bytes.
    pub size: u64,
    /// What was asked for.
    pub requested: u64,
    /// Whose memory it is.
    pub device: i32,
}

/// A mapped range of addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Where it begins.
    pub address: u64,
    /// How long it is.
    pub size: u64,
    /// The stream of its first block that belongs to one.
    pub stream: *mut c_void,
    /// The private pool that it belongs to; 0 and 0: none.
    pub pool_first: u64,
    /// The second number of that pool.
    pub pool_second: u64,
    /// Whose memory it is.
    pub device: i32,
    /// Whether it holds requests above 1 MiB.
    pub large: bool,
    /// A second view of memory that other segments count: it reserves nothing.
    pub stitched: bool,
}

/// A part of a segment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SegmentBlock {
    /// Where it begins.
    pub address: u64,
    /// How long it is.
    pub size: u64,
    /// What was asked for; 0 where it is free.
    pub requested: u64,
    /// Handed out.
    pub live: bool,
    /// Freed, and still in use by other streams.
    pub pending: bool,
}

/// One statistic.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: i64,
    /// The most since the peaks were reset.
    pub peak: i64,
    /// All that was ever added.
    pub allocated: i64,
    /// All that was ever taken away.
    pub freed: i64,
}

/// Those of requests up to 1 MiB, of larger ones, or of both.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Blocks handed out.
    pub allocation: Stat,
    /// Extents at home: physical memory is made and released in these.
    pub segment: Stat,
    /// Blocks handed out, or freed and still in use by other streams.
    pub active: Stat,
    /// Free ranges that share an extent with something in use; peak and totals are what is now.
    pub inactive_split: Stat,
    /// Bytes of `allocation`.
    pub allocated_bytes: Stat,
    /// Physical memory held.
    pub reserved_bytes: Stat,
    /// Bytes of `active`.
    pub active_bytes: Stat,
    /// Bytes of `inactive_split`.
    pub inactive_split_bytes: Stat,
    /// Bytes of `allocation` as they were asked for.
    pub requested_bytes: Stat,
}

/// Everything that is counted for a device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Both pools.
    pub all: PoolStats,
    /// Requests up to 1 MiB.
    pub small_pool: PoolStats,
    /// Larger requests.
    pub large_pool: PoolStats,
    /// Requests that had to take memory back first.
    pub num_alloc_retries: i64,
    /// Requests refused.
    pub num_ooms: i64,
    /// Times that everything freed was waited for.
    pub num_sync_all_streams: i64,
    /// Extents made.
    pub num_device_alloc: i64,
    /// Extents released.
    pub num_device_free: i64,
    /// Aliases made.
    pub stitches: u64,
    /// Blocks handed out through an alias that was there.
    pub alias_reuses: u64,
    /// Extents mapped so far, at home and in aliases.
    pub extent_maps: u64,
    /// Waits of one stream for another that the program did not ask for.
    pub stream_waits: u64,
    /// Completion edges, because bytes changed their address.
    pub edges: u64,
    /// Extents mapped now.
    pub mappings: u64,
    /// Bytes of addresses of aliases now.
    pub alias_bytes: u64,
    /// Of them, idle.
    pub idle_alias_bytes: u64,
    /// Reserved and free, but no whole extent.
    pub waste_hard: u64,
    /// Whole free extents, not joined.
    pub waste_soft: u64,
    /// Free, but pending on a stream.
    pub waste_stream: u64,
    /// Misses at which it was measured how far the GPU was behind the host.
    pub epoch_lags: u64,
    /// The median of that, in microseconds.
    pub epoch_lag_us_p50: u64,
    /// What 95 of 100 were below.
    pub epoch_lag_us_p95: u64,
    /// The most.
    pub epoch_lag_us_max: u64,
    /// GPU time in the waits that `borrow = wait` made, in microseconds.
    pub gpu_wait_us: u64,
}

/// One copy of a list.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopyBlock {
    /// Where the bytes go.
    pub to: *mut c_void,
    /// Where they come from.
    pub from: *const c_void,
    /// How many.
    pub size: usize,
}

/// Which blocks of a private pool were live at some time; the library's alone to look into.
#[derive(Debug)]
pub struct Checkpoint(());
