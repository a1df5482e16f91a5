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
    /// Those of them that are idle.
    pub idle_alias_bytes: u64,
    /// Bytes reserved and free that are no whole extent.
    pub waste_hard: u64,
    /// Bytes of whole free extents that are not joined.
    pub waste_soft: u64,
    /// Bytes free that are pending on a stream.
    pub waste_stream: u64,
    /// Misses at which it was measured how far the GPU was behind the host.
    pub completion_lags: u64,
    /// The median of those lags, in microseconds.
    pub completion_lag_us_p50: u64,
    /// What 95 of 100 of those lags were below.
    pub completion_lag_us_p95: u64,
    /// The longest of those lags.
    pub completion_lag_us_max: u64,
    /// GPU time in the waits that `borrow = wait` and read holds made, in microseconds.
    pub gpu_wait_us: u64,
    /// The lease; -1 where there is none.
    pub lease_bytes: i64,
    /// Physical memory that a lease counts: what is made, or about to be.
    pub made_bytes: u64,
    /// Waits for a grant, of allocations and of refills.
    pub lease_waits: u64,
    /// How long they took in all, in microseconds.
    pub lease_wait_us: u64,
}
