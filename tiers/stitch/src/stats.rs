//! Counters in the manner of torch's allocator, and the breakdown of what is reserved but not in use.

use glake_units::Bytes;
use serde::Serialize;

/// A gauge with its peak and its totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Gauge {
    /// Now.
    pub current: u64,
    /// The most since the last reset of peaks.
    pub peak: u64,
    /// All that was ever added.
    pub allocated: u64,
    /// All that was ever taken away.
    pub freed: u64,
}

/// One pool's gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolGauges {
    /// Blocks handed out and not freed (torch: `allocation`).
    pub allocation: Gauge,
    /// Their bytes, rounded up to 512 (torch: `allocated_bytes`).
    pub allocated_bytes: Gauge,
    /// Their bytes as asked for (torch: `requested_bytes`).
    pub requested_bytes: Gauge,
    /// Blocks that are in use, freed ones that wait for other streams too (torch: `active`).
    pub active: Gauge,
    /// Their bytes (torch: `active_bytes`).
    pub active_bytes: Gauge,
    /// Extents held (torch's segments are runs of these).
    pub extents: Gauge,
    /// Physical bytes held (torch: `reserved_bytes`).
    pub reserved_bytes: Gauge,
}

/// What an allocator has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Aliases made.
    pub stitches: u64,
    /// Blocks handed out through an alias that was there.
    pub alias_reuses: u64,
    /// Extents mapped, at home and in aliases.
    pub extent_maps: u64,
    /// Waits of one stream for another that the program did not ask for.
    pub stream_waits: u64,
    /// Waits of a stream for what holds memory that it freed.
    pub hold_waits: u64,
    /// Completion edges, because bytes changed their address.
    pub edges: u64,
    /// Idle aliases unmapped.
    pub aliases_collected: u64,
    /// Requests that had to take memory back first (torch: `num_alloc_retries`).
    pub retries: u64,
    /// Requests refused (torch: `num_ooms`).
    pub ooms: u64,
    /// Times that a request had to wait on the host for a completion point, as the last rung (torch: `num_sync_all_streams`).
    pub host_waits: u64,
    /// Extents made (torch: `num_device_alloc`).
    pub extents_created: u64,
    /// Extents given back (torch: `num_device_free`).
    pub extents_released: u64,
}

/// Free ranges that share an extent with something in use (torch: `inactive_split`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Inactive {
    /// How many.
    pub ranges: u64,
    /// Their bytes outside of whole free extents.
    pub bytes: Bytes,
}

/// Reserved memory that is not in use, by the reason why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waste {
    /// Free, but no whole extent.
    pub hard: Bytes,
    /// Whole free extents, not joined.
    pub soft: Bytes,
    /// Free, but pending on a stream.
    pub stream: Bytes,
}

/// Everything that is counted for one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Both pools.
    pub all: PoolGauges,
    /// Requests up to 1 MiB, in slabs.
    pub small_pool: PoolGauges,
    /// Larger requests.
    pub large_pool: PoolGauges,
    /// What was done.
    pub counters: Counters,
    /// Extents mapped now, at home and in aliases.
    pub mappings: u64,
    /// Address ranges of aliases now.
    pub alias_bytes: Bytes,
    /// Of them, idle.
    pub idle_alias_bytes: Bytes,
    /// Reserved and not in use.
    pub waste: Waste,
    /// Of the small pool: what is free in slabs that are in use, and beside them.
    pub inactive_small: Inactive,
    /// Of the large pool.
    pub inactive_large: Inactive,
}
