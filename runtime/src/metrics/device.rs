//! Statistics of a device's pool: torch's keys, and GLake's own.
//!
//! | torch | here |
//! |---|---|
//! | allocation, active, requested, reserved | the core's gauges |
//! | segment | extents at home: physical memory is created and released in these |
//! | num_device_alloc, num_device_free | extents created and released |
//! | num_sync_all_streams | waits for all freed memory: an emptied cache |

use glake_stitch::{Gauge, Inactive, PoolGauges, Stats};
use glake_tiers::{CompletionLag, GpuWaits, LeaseView};
use serde::Serialize;
use serde_json::{Map, Value};

use super::{metrics, micros};

/// Passes the metrics of a device to a macro that needs their names as fields.
#[macro_export]
macro_rules! device_metrics {
    ($then:ident) => {
        $then! {
            /// Pool statistics: of requests up to 1 MiB, of larger ones, or of both.
            #[derive(Copy, Default, Eq)]
            PoolStats {
                /// Allocated blocks.
                allocation: Stat, Count, Stable;
                /// Extents at home, the unit in which physical memory is created and released.
                segment: Stat, Count, Stable;
                /// Blocks that are allocated, or freed and still in use by other streams.
                active: Stat, Count, Stable;
                /// Free ranges that share an extent with memory in use; peak and totals repeat the current value.
                inactive_split: Stat, Count, Stable;
                /// Bytes of allocated blocks, rounded up.
                allocated_bytes: Stat, Bytes, Stable;
                /// Physical memory held by the pool.
                reserved_bytes: Stat, Bytes, Stable;
                /// Bytes of active blocks.
                active_bytes: Stat, Bytes, Stable;
                /// Bytes of free ranges that share an extent with memory in use.
                inactive_split_bytes: Stat, Bytes, Stable;
                /// Bytes of allocated blocks as requested.
                requested_bytes: Stat, Bytes, Stable;
            }

            /// Torch's counters of a whole device.
            #[derive(Copy, Default, Eq)]
            Counters {
                /// Requests that had to reclaim memory first.
                num_alloc_retries: i64, Count, Stable;
                /// Requests that failed for lack of memory.
                num_ooms: i64, Count, Stable;
                /// Waits for all freed memory.
                num_sync_all_streams: i64, Count, Stable;
                /// Extents created so far.
                num_device_alloc: i64, Count, Stable;
                /// Extents released so far.
                num_device_free: i64, Count, Stable;
            }

            /// Statistics without a torch name.
            #[derive(Copy, Default, Eq)]
            OwnStats {
                /// Aliases created so far.
                stitches: u64, Count, Stable;
                /// Allocations served by an existing alias.
                alias_reuses: u64, Count, Stable;
                /// Extents mapped so far, at home and in aliases.
                extent_maps: u64, Count, Stable;
                /// Waits of one stream for another that the program did not request.
                stream_waits: u64, Count, Stable;
                /// Completion edges added because bytes changed their address.
                edges: u64, Count, Experimental;
                /// Extents mapped at present.
                mappings: u64, Count, Stable;
                /// Address space of aliases at present.
                alias_bytes: u64, Bytes, Stable;
                /// Address space of idle aliases.
                idle_alias_bytes: u64, Bytes, Stable;
                /// Free reserved bytes in partly used extents.
                waste_hard: u64, Bytes, Stable;
                /// Bytes of whole free extents that are not joined.
                waste_soft: u64, Bytes, Stable;
                /// Free bytes that are pending on a stream.
                waste_stream: u64, Bytes, Stable;
                /// Misses at which the lag of the GPU behind the host was measured.
                completion_lags: u64, Count, Experimental;
                /// Median of those lags, in microseconds.
                completion_lag_us_p50: u64, Microseconds, Experimental;
                /// 95th percentile of those lags, in microseconds.
                completion_lag_us_p95: u64, Microseconds, Experimental;
                /// Maximum of those lags, in microseconds.
                completion_lag_us_max: u64, Microseconds, Experimental;
                /// GPU time in the waits of `borrow = wait` and of read holds, in microseconds.
                gpu_wait_us: u64, Microseconds, Experimental;
                /// Size of the lease; -1 without one.
                lease_bytes: i64, Bytes, Stable;
                /// Physical memory that counts towards a lease: created, or about to be.
                made_bytes: u64, Bytes, Stable;
                /// Waits for a grant, by allocations and refills.
                lease_waits: u64, Count, Stable;
                /// Total time of those waits, in microseconds.
                lease_wait_us: u64, Microseconds, Stable;
            }
        }
    };
}

device_metrics!(metrics);

metrics! {
    /// Torch's statistics of oversize blocks, which GLake does not have.
    #[derive(Copy, Default, Eq)]
    Oversize {
        /// Oversize allocations: always 0.
        oversize_allocations: Stat, Count, Stable;
        /// Oversize segments: always 0.
        oversize_segments: Stat, Count, Stable;
    }

    /// Torch's statistics with a constant value.
    #[derive(Copy, Default, Eq)]
    Constants {
        /// Split limit: -1, every block may be split.
        max_split_size: i64, Bytes, Stable;
    }
}

/// Statistic in torch's form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stat {
    /// Current value.
    pub current: i64,
    /// Maximum since the peaks were reset.
    pub peak: i64,
    /// Sum of all increases.
    pub allocated: i64,
    /// Sum of all decreases.
    pub freed: i64,
}

/// Keys of a [`Stat`].
pub(super) const STAT: &[&str] = &["current", "peak", "allocated", "freed"];
/// Torch's names of both pools together, of the pool for requests up to 1 MiB and of the pool for larger ones.
pub(super) const POOLS: &[&str] = &["all", "small_pool", "large_pool"];

/// All statistics of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Statistics of both pools.
    pub all: PoolStats,
    /// Statistics of requests up to 1 MiB.
    pub small_pool: PoolStats,
    /// Statistics of larger requests.
    pub large_pool: PoolStats,
    /// Torch's counters of the whole device.
    pub counters: Counters,
    /// Statistics without a torch name.
    pub own: OwnStats,
}

impl DeviceStats {
    pub(crate) fn of(
        stats: &Stats,
        settled: u64,
        lag: CompletionLag,
        waits: GpuWaits,
        lease: LeaseView,
    ) -> Self {
        let counters = &stats.counters;
        let (small, large) = (stats.inactive_small, stats.inactive_large);
        let both =
            Inactive { ranges: small.ranges + large.ranges, bytes: small.bytes.saturating_add(large.bytes) };
        let all = PoolStats::of(&stats.all, both);
        DeviceStats {
            all,
            small_pool: PoolStats::of(&stats.small_pool, small),
            large_pool: PoolStats::of(&stats.large_pool, large),
            counters: Counters {
                num_alloc_retries: signed(counters.retries),
                num_ooms: signed(counters.ooms),
                num_sync_all_streams: signed(settled),
                num_device_alloc: all.segment.allocated,
                num_device_free: all.segment.freed,
            },
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
                completion_lags: lag.misses,
                completion_lag_us_p50: micros(lag.p50),
                completion_lag_us_p95: micros(lag.p95),
                completion_lag_us_max: micros(lag.max),
                gpu_wait_us: micros(waits.time),
                lease_bytes: lease.leased.map_or(-1, |leased| signed(leased.get())),
                made_bytes: lease.made.get(),
                lease_waits: lease.waits,
                lease_wait_us: micros(lease.waited),
            },
        }
    }

    /// Returns torch's flat keys, and GLake's under `glake.`.
    pub fn json(&self) -> Value {
        let mut keys = Map::new();
        for (pool, stats) in POOLS.iter().zip([&self.all, &self.small_pool, &self.large_pool]) {
            for (name, stat) in fields(stats) {
                put(&mut keys, &format!("{name}.{pool}"), stat);
            }
        }
        let rest =
            [fields(Oversize::default()), fields(self.counters), fields(Constants { max_split_size: -1 })];
        rest.into_iter().flatten().for_each(|(name, value)| put(&mut keys, &name, value));
        fields(self.own)
            .into_iter()
            .for_each(|(name, value)| put(&mut keys, &format!("glake.{name}"), value));
        Value::Object(keys)
    }
}

/// Inserts a number under its key, or a [`Stat`] under its four keys.
fn put(keys: &mut Map<String, Value>, key: &str, value: Value) {
    match value {
        Value::Object(inner) => {
            keys.extend(inner.into_iter().map(|(name, value)| (format!("{key}.{name}"), value)));
        }
        value => drop(keys.insert(key.to_owned(), value)),
    }
}

/// Returns the metrics of a struct by name.
fn fields(metrics: impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(metrics) {
        Ok(Value::Object(fields)) => fields,
        _ => Map::new(),
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

/// Creates a statistic whose history is unknown: it is counted at the time of the query.
fn now(value: u64) -> Stat {
    let value = signed(value);
    Stat { current: value, peak: value, allocated: value, freed: 0 }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
