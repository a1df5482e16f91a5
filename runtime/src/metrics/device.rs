//! The pool's gauges under torch's names, and what torch has no name for.
//!
//! | torch | here |
//! |---|---|
//! | allocation, active, requested, reserved | the core's gauges |
//! | segment | extents at home: physical memory is made and released in these |
//! | num_device_alloc, num_device_free | extents made and released |
//! | num_sync_all_streams | times that everything freed was waited for: an emptied cache |

use glake_stitch::{Gauge, Inactive, PoolGauges, Stats};
use glake_tiers::{CompletionLag, GpuWaits, LeaseView};
use serde::Serialize;
use serde_json::{Map, Value};

use super::{metrics, micros};

/// Gives a macro what is counted for a device, for whom the names are fields too.
#[macro_export]
macro_rules! device_metrics {
    ($then:ident) => {
        $then! {
            /// Those of requests up to 1 MiB, of larger ones, or of both.
            #[derive(Copy, Default, Eq)]
            PoolStats {
                /// Blocks handed out.
                allocation: Stat, Count, Stable;
                /// Extents at home: physical memory is made and released in these.
                segment: Stat, Count, Stable;
                /// Blocks handed out, or freed and still in use by other streams.
                active: Stat, Count, Stable;
                /// Free ranges that share an extent with something in use; peak and totals are what is now.
                inactive_split: Stat, Count, Stable;
                /// Bytes of `allocation`.
                allocated_bytes: Stat, Bytes, Stable;
                /// Physical memory held.
                reserved_bytes: Stat, Bytes, Stable;
                /// Bytes of `active`.
                active_bytes: Stat, Bytes, Stable;
                /// Bytes of `inactive_split`.
                inactive_split_bytes: Stat, Bytes, Stable;
                /// Bytes of `allocation` as they were asked for.
                requested_bytes: Stat, Bytes, Stable;
            }

            /// What torch counts of a device as a whole.
            #[derive(Copy, Default, Eq)]
            Counters {
                /// Requests that had to take memory back first.
                num_alloc_retries: i64, Count, Stable;
                /// Requests refused.
                num_ooms: i64, Count, Stable;
                /// Times that everything freed was waited for.
                num_sync_all_streams: i64, Count, Stable;
                /// Extents made.
                num_device_alloc: i64, Count, Stable;
                /// Extents released.
                num_device_free: i64, Count, Stable;
            }

            /// What torch has no name for.
            #[derive(Copy, Default, Eq)]
            OwnStats {
                /// Aliases made.
                stitches: u64, Count, Stable;
                /// Blocks handed out through an alias that was there.
                alias_reuses: u64, Count, Stable;
                /// Extents mapped so far, at home and in aliases.
                extent_maps: u64, Count, Stable;
                /// Waits of one stream for another that the program did not ask for.
                stream_waits: u64, Count, Stable;
                /// Completion edges, because bytes changed their address.
                edges: u64, Count, Experimental;
                /// Extents mapped now.
                mappings: u64, Count, Stable;
                /// Bytes of addresses of aliases now.
                alias_bytes: u64, Bytes, Stable;
                /// Those of them that are idle.
                idle_alias_bytes: u64, Bytes, Stable;
                /// Bytes reserved and free that are no whole extent.
                waste_hard: u64, Bytes, Stable;
                /// Bytes of whole free extents that are not joined.
                waste_soft: u64, Bytes, Stable;
                /// Bytes free that are pending on a stream.
                waste_stream: u64, Bytes, Stable;
                /// Misses at which it was measured how far the GPU was behind the host.
                completion_lags: u64, Count, Experimental;
                /// The median of those lags, in microseconds.
                completion_lag_us_p50: u64, Microseconds, Experimental;
                /// What 95 of 100 of those lags were below.
                completion_lag_us_p95: u64, Microseconds, Experimental;
                /// The longest of those lags.
                completion_lag_us_max: u64, Microseconds, Experimental;
                /// GPU time in the waits that `borrow = wait` and read holds made, in microseconds.
                gpu_wait_us: u64, Microseconds, Experimental;
                /// The lease; -1 where there is none.
                lease_bytes: i64, Bytes, Stable;
                /// Physical memory that a lease counts: what is made, or about to be.
                made_bytes: u64, Bytes, Stable;
                /// Waits for a grant, of allocations and of refills.
                lease_waits: u64, Count, Stable;
                /// How long they took in all, in microseconds.
                lease_wait_us: u64, Microseconds, Stable;
            }
        }
    };
}

device_metrics!(metrics);

metrics! {
    /// What torch has names for and never counts anything here.
    #[derive(Copy, Default, Eq)]
    Oversize {
        /// Nothing is oversize.
        oversize_allocations: Stat, Count, Stable;
        /// Nothing is oversize.
        oversize_segments: Stat, Count, Stable;
    }

    /// What torch has a name for and is always the same here.
    #[derive(Copy, Default, Eq)]
    Constants {
        /// -1: every block may be split.
        max_split_size: i64, Bytes, Stable;
    }
}

/// One of torch's statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
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

/// The keys of a [`Stat`].
pub(super) const STAT: &[&str] = &["current", "peak", "allocated", "freed"];
/// Torch's words for both pools, for requests up to 1 MiB and for larger ones.
pub(super) const POOLS: &[&str] = &["all", "small_pool", "large_pool"];

/// Everything that is counted for a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Both pools.
    pub all: PoolStats,
    /// Requests up to 1 MiB.
    pub small_pool: PoolStats,
    /// Larger ones.
    pub large_pool: PoolStats,
    /// What torch counts of the device as a whole.
    pub counters: Counters,
    /// What torch has no name for.
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

    /// Torch's flat keys, and ours under `glake.`.
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

/// A number under its key, a [`Stat`]'s under theirs.
fn put(keys: &mut Map<String, Value>, key: &str, value: Value) {
    match value {
        Value::Object(inner) => {
            keys.extend(inner.into_iter().map(|(name, value)| (format!("{key}.{name}"), value)));
        }
        value => drop(keys.insert(key.to_owned(), value)),
    }
}

/// The metrics of a struct by name.
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

/// A statistic of which only the present is known: it is counted when it is asked for.
fn now(value: u64) -> Stat {
    let value = signed(value);
    Stat { current: value, peak: value, allocated: value, freed: 0 }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
