//! What a pool and its device look like, to be compared.

use glake_sim::Census;
use glake_stitch::{BlockInfo, Gauge, PoolGauges, Segment, Stats};
use glake_tiers::GpuPool;
use glake_units::Bytes;

use super::Fixture;

/// What a call that fails must leave as it was.
#[derive(Debug, PartialEq)]
pub struct Picture {
    segments: Vec<Segment>,
    gauges: Vec<u64>,
    mappings: (u64, Bytes),
    reserved: Bytes,
    census: Census,
}

impl Picture {
    /// Takes one. How free bytes are divided among streams, and how many events are kept for the next time, is not part
    /// of it: time passes also where a call fails.
    pub fn of(fixture: &Fixture) -> Self {
        let mut segments = fixture.pool.report().segments();
        segments.sort_by_key(|segment| segment.offset);
        for segment in &mut segments {
            segment.blocks.dedup_by(join);
            segment.blocks.iter_mut().filter(|block| !block.live).for_each(|block| block.stream = None);
        }
        let stats = fixture.pool.stats();
        Picture {
            segments,
            gauges: currents(&stats).map(|gauge| gauge.current).collect(),
            mappings: (stats.mappings, stats.alias_bytes),
            reserved: fixture.pool.reserved(),
            census: Census { events: 0, ..fixture.sim.census() },
        }
    }
}

fn join(next: &mut BlockInfo, block: &mut BlockInfo) -> bool {
    let joined = !next.live && !block.live;
    if joined {
        block.size = block.size.saturating_add(next.size);
    }
    joined
}

fn gauges(pool: &PoolGauges) -> [Gauge; 7] {
    [
        pool.allocation,
        pool.allocated_bytes,
        pool.requested_bytes,
        pool.extents,
        pool.reserved_bytes,
        pool.active,
        pool.active_bytes,
    ]
}

fn currents(stats: &Stats) -> impl Iterator<Item = Gauge> {
    [stats.all, stats.small_pool, stats.large_pool].into_iter().flat_map(|pool| gauges(&pool))
}

/// Nothing is held.
///
/// # Panics
/// Something is.
pub fn assert_empty(pool: &GpuPool) {
    let stats = pool.stats();
    for gauge in currents(&stats) {
        assert_eq!(gauge.current, 0, "a gauge is left: {stats:?}");
        assert_eq!(gauge.allocated, gauge.freed, "{stats:?}");
    }
    assert_eq!((stats.mappings, stats.alias_bytes, stats.idle_alias_bytes), (0, Bytes::ZERO, Bytes::ZERO));
    assert_eq!(stats.waste, Default::default());
    assert!(pool.report().segments().is_empty());
    assert_eq!((pool.reserved(), pool.report().free_ranges()), (Bytes::ZERO, 0));
}
