//! The pool's gauges under torch's names.
//!
//! | torch | here |
//! |---|---|
//! | allocation, active, requested, reserved | the core's gauges |
//! | segment | extents at home: physical memory is made and released in these |
//! | inactive_split | free ranges that share an extent with something in use; peak and totals are what is now |
//! | num_device_alloc, num_device_free | extents made and released |
//! | num_sync_all_streams | times that everything freed was waited for: an emptied cache |
//! | oversize, max_split_size | nothing is oversize, everything may be split |

use std::time::Duration;

use glake_stitch::{Gauge, Inactive, PoolGauges, Stats};
use glake_tiers::{EpochLag, GpuWaits};
use serde_json::{Map, Value, json};

/// One of torch's statistics.
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

/// Those of one of torch's two pools, or of both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // torch's names, which the module's table explains
pub struct PoolStats {
    pub allocation: Stat,
    pub segment: Stat,
    pub active: Stat,
    pub inactive_split: Stat,
    pub allocated_bytes: Stat,
    pub reserved_bytes: Stat,
    pub active_bytes: Stat,
    pub inactive_split_bytes: Stat,
    pub requested_bytes: Stat,
}

/// Everything that is counted for a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Both pools.
    pub all: PoolStats,
    /// Requests up to 1 MiB.
    pub small_pool: PoolStats,
    /// Larger ones.
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
    /// What torch has no name for.
    pub own: OwnStats,
}

/// What torch has no name for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnStats {
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

impl DeviceStats {
    pub(super) fn of(stats: &Stats, settled: u64, lag: EpochLag, waits: GpuWaits) -> Self {
        let counters = &stats.counters;
        let (small, large) = (stats.inactive_small, stats.inactive_large);
        let both =
            Inactive { ranges: small.ranges + large.ranges, bytes: small.bytes.saturating_add(large.bytes) };
        let all = PoolStats::of(&stats.all, both);
        DeviceStats {
            all,
            small_pool: PoolStats::of(&stats.small_pool, small),
            large_pool: PoolStats::of(&stats.large_pool, large),
            num_alloc_retries: signed(counters.retries),
            num_ooms: signed(counters.ooms),
            num_sync_all_streams: signed(settled),
            num_device_alloc: all.segment.allocated,
            num_device_free: all.segment.freed,
            own: OwnStats {
                stitches: counters.stitches,
                alias_reuses: counters.alias_reuses,
                extent_maps: counters.extent_maps,
                stream_waits: counters.stream_waits,
                edges: counters.edges,
                mappings: stats.mappings,
                alias_bytes: stats.alias_bytes.get(),
                idle_alias_bytes: stats.idle_alias_bytes.get(),
                waste_hard: stats.waste.hard.get(),
                waste_soft: stats.waste.soft.get(),
                waste_stream: stats.waste.stream.get(),
                epoch_lags: lag.misses,
                epoch_lag_us_p50: micros(lag.p50),
                epoch_lag_us_p95: micros(lag.p95),
                epoch_lag_us_max: micros(lag.max),
                gpu_wait_us: micros(waits.time),
            },
        }
    }

    /// Torch's flat keys, and ours under `glake.`.
    pub fn json(&self) -> Value {
        let mut keys = Map::new();
        let mut put = |name: String, stat: &Stat| {
            for (metric, value) in stat.metrics() {
                keys.insert(format!("{name}.{metric}"), value.into());
            }
        };
        for (pool, stats) in
            [("all", &self.all), ("small_pool", &self.small_pool), ("large_pool", &self.large_pool)]
        {
            for (name, stat) in stats.named() {
                put(format!("{name}.{pool}"), stat);
            }
        }
        for name in ["oversize_allocations", "oversize_segments"] {
            put(name.to_owned(), &Stat::default());
        }
        for (name, value) in [
            ("num_alloc_retries", self.num_alloc_retries),
            ("num_ooms", self.num_ooms),
            ("num_sync_all_streams", self.num_sync_all_streams),
            ("num_device_alloc", self.num_device_alloc),
            ("num_device_free", self.num_device_free),
            ("max_split_size", -1),
        ] {
            keys.insert(name.to_owned(), json!(value));
        }
        keys.extend(
            self.own.named().into_iter().map(|(name, value)| (format!("glake.{name}"), json!(value))),
        );
        Value::Object(keys)
    }
}

impl PoolStats {
    fn of(gauges: &PoolGauges, inactive: Inactive) -> Self {
        PoolStats {
            allocation: gauges.allocation.into(),
            segment: gauges.extents.into(),
            active: gauges.active.into(),
            inactive_split: now(inactive.ranges),
            allocated_bytes: gauges.allocated_bytes.into(),
            reserved_bytes: gauges.reserved_bytes.into(),
            active_bytes: gauges.active_bytes.into(),
            inactive_split_bytes: now(inactive.bytes.get()),
            requested_bytes: gauges.requested_bytes.into(),
        }
    }

    fn named(&self) -> [(&'static str, &Stat); 9] {
        [
            ("allocation", &self.allocation),
            ("segment", &self.segment),
            ("active", &self.active),
            ("inactive_split", &self.inactive_split),
            ("allocated_bytes", &self.allocated_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("active_bytes", &self.active_bytes),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
        ]
    }
}

impl OwnStats {
    fn named(&self) -> [(&'static str, u64); 16] {
        [
            ("stitches", self.stitches),
            ("alias_reuses", self.alias_reuses),
            ("extent_maps", self.extent_maps),
            ("stream_waits", self.stream_waits),
            ("edges", self.edges),
            ("mappings", self.mappings),
            ("alias_bytes", self.alias_bytes),
            ("idle_alias_bytes", self.idle_alias_bytes),
            ("waste_hard", self.waste_hard),
            ("waste_soft", self.waste_soft),
            ("waste_stream", self.waste_stream),
            ("epoch_lags", self.epoch_lags),
            ("epoch_lag_us_p50", self.epoch_lag_us_p50),
            ("epoch_lag_us_p95", self.epoch_lag_us_p95),
            ("epoch_lag_us_max", self.epoch_lag_us_max),
            ("gpu_wait_us", self.gpu_wait_us),
        ]
    }
}

impl Stat {
    fn metrics(&self) -> [(&'static str, i64); 4] {
        [("current", self.current), ("peak", self.peak), ("allocated", self.allocated), ("freed", self.freed)]
    }
}

impl From<Gauge> for Stat {
    fn from(gauge: Gauge) -> Stat {
        Stat {
            current: signed(gauge.current),
            peak: signed(gauge.peak),
            allocated: signed(gauge.allocated),
            freed: signed(gauge.freed),
        }
    }
}

/// A statistic of which only the present is known: it is counted when it is asked for.
fn now(value: u64) -> Stat {
    let value = signed(value);
    Stat { current: value, peak: value, allocated: value, freed: 0 }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
