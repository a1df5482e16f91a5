//! Statistics in torch's scheme, and the breakdown of reserved memory that is not in use.

use glake_units::Bytes;
use serde::Serialize;

/// A gauge with its peak and its totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Gauge {
    /// Value at this time.
    pub current: u64,
    /// Maximum since the last reset of peaks.
    pub peak: u64,
    /// Sum of all increases.
    pub allocated: u64,
    /// Sum of all decreases.
    pub freed: u64,
}

/// Gauges of one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolGauges {
    /// Live blocks, not yet freed (torch: `allocation`).
    pub allocation: Gauge,
    /// Bytes of live blocks, rounded up to 512 (torch: `allocated_bytes`).
    pub allocated_bytes: Gauge,
    /// Bytes of live blocks as requested (torch: `requested_bytes`).
    pub requested_bytes: Gauge,
    /// Blocks in use, including freed blocks that wait for other streams (torch: `active`).
    pub active: Gauge,
    /// Bytes of blocks in use (torch: `active_bytes`).
    pub active_bytes: Gauge,
    /// Extents with memory; torch's segments are runs of these.
    pub extents: Gauge,
    /// Physical bytes reserved (torch: `reserved_bytes`).
    pub reserved_bytes: Gauge,
}

/// Event counters of an allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Number of aliases made.
    pub stitches: u64,
    /// Number of blocks handed out through an existing alias.
    pub alias_reuses: u64,
    /// Number of extents mapped, at home and in aliases.
    pub extent_maps: u64,
    /// Number of waits of one stream for another that the program did not ask for.
    pub stream_waits: u64,
    /// Number of waits of a stream for holds on memory that it freed.
    pub hold_waits: u64,
    /// Number of completion edges, because bytes changed their address.
    pub edges: u64,
    /// Number of idle aliases unmapped.
    pub aliases_collected: u64,
    /// Number of requests that had to take memory back first (torch: `num_alloc_retries`).
    pub retries: u64,
    /// Number of requests refused (torch: `num_ooms`).
    pub ooms: u64,
    /// Number of waits of a request on the host for a completion point, the last way before a refusal (torch: `num_sync_all_streams`).
    pub host_waits: u64,
    /// Number of extents created (torch: `num_device_alloc`).
    pub extents_created: u64,
    /// Number of extents released (torch: `num_device_free`).
    pub extents_released: u64,
}

/// Free ranges that share an extent with memory in use (torch: `inactive_split`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Inactive {
    /// Number of such ranges.
    pub ranges: u64,
    /// Bytes of the ranges outside of whole free extents.
    pub bytes: Bytes,
}

/// Reserved memory that is not in use, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waste {
    /// Free bytes outside of whole free extents.
    pub hard: Bytes,
    /// Bytes of whole free extents that are not joined.
    pub soft: Bytes,
    /// Free bytes pending on a stream.
    pub stream: Bytes,
}

/// Statistics of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Sum of both pools.
    pub all: PoolGauges,
    /// Requests up to 1 MiB, served from slabs.
    pub small_pool: PoolGauges,
    /// Requests above 1 MiB.
    pub large_pool: PoolGauges,
    /// Event counters of the allocator.
    pub counters: Counters,
    /// Extents mapped now, at home and in aliases.
    pub mappings: u64,
    /// Bytes of alias addresses now.
    pub alias_bytes: Bytes,
    /// Bytes of idle aliases now.
    pub idle_alias_bytes: Bytes,
    /// Reserved memory not in use.
    pub waste: Waste,
    /// Free ranges of the small pool, in slabs in use and beside them.
    pub inactive_small: Inactive,
    /// Free ranges of the large pool.
    pub inactive_large: Inactive,
}
