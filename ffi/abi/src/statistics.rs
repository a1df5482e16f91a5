//! What is counted for a device. Written from `glake_runtime::metrics`: `make generated` writes it anew.

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
    /// Allocated blocks.
    pub allocation: Stat,
    /// Extents at home, the unit in which physical memory is created and released.
    pub segment: Stat,
    /// Blocks that are allocated, or freed and still in use by other streams.
    pub active: Stat,
    /// Free ranges that share an extent with memory in use; peak and totals repeat the current value.
    pub inactive_split: Stat,
    /// Bytes of allocated blocks, rounded up.
    pub allocated_bytes: Stat,
    /// Physical memory held by the pool.
    pub reserved_bytes: Stat,
    /// Bytes of active blocks.
    pub active_bytes: Stat,
    /// Bytes of free ranges that share an extent with memory in use.
    pub inactive_split_bytes: Stat,
    /// Bytes of allocated blocks as requested.
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
    /// Requests that had to reclaim memory first.
    pub num_alloc_retries: i64,
    /// Requests that failed for lack of memory.
    pub num_ooms: i64,
    /// Waits for all freed memory.
    pub num_sync_all_streams: i64,
    /// Extents created so far.
    pub num_device_alloc: i64,
    /// Extents released so far.
    pub num_device_free: i64,
    /// Aliases created so far.
    pub stitches: u64,
    /// Allocations served by an existing alias.
    pub alias_reuses: u64,
    /// Extents mapped so far, at home and in aliases.
    pub extent_maps: u64,
    /// Waits of one stream for another that the program did not request.
    pub stream_waits: u64,
    /// Completion edges added because bytes changed their address.
    pub edges: u64,
    /// Extents mapped at present.
    pub mappings: u64,
    /// Address space of aliases at present.
    pub alias_bytes: u64,
    /// Address space of idle aliases.
    pub idle_alias_bytes: u64,
    /// Free reserved bytes in partly used extents.
    pub waste_hard: u64,
    /// Bytes of whole free extents that are not joined.
    pub waste_soft: u64,
    /// Free bytes that are pending on a stream.
    pub waste_stream: u64,
    /// Misses at which the lag of the GPU behind the host was measured.
    pub completion_lags: u64,
    /// Median of those lags, in microseconds.
    pub completion_lag_us_p50: u64,
    /// 95th percentile of those lags, in microseconds.
    pub completion_lag_us_p95: u64,
    /// Maximum of those lags, in microseconds.
    pub completion_lag_us_max: u64,
    /// GPU time in the waits of `borrow = wait` and of read holds, in microseconds.
    pub gpu_wait_us: u64,
    /// Size of the lease; -1 without one.
    pub lease_bytes: i64,
    /// Physical memory that counts towards a lease: created, or about to be.
    pub made_bytes: u64,
    /// Waits for a grant, by allocations and refills.
    pub lease_waits: u64,
    /// Total time of those waits, in microseconds.
    pub lease_wait_us: u64,
}
