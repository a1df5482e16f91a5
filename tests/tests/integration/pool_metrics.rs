//! What a pool measures and whom it tells: mappings, lags, waits.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::{Address, DeviceId, Fault, Injected, Verb, When};
use glake_stitch::Borrow;
use glake_tests::pool::{Fixture, Shape};
use glake_tiers::{Block, MappingObserver, PoolOptions};
use glake_units::Bytes;
use parking_lot::Mutex;

const GRANULE: usize = 2 << 20;

/// Knows by granules what is mapped.
#[derive(Debug, Default)]
struct Map(Mutex<BTreeSet<u64>>);

impl MappingObserver for Map {
    fn mapped(&self, _: DeviceId, address: Address, size: Bytes) {
        for granule in (address.0..address.0 + size.get()).step_by(GRANULE) {
            assert!(self.0.lock().insert(granule), "mapped twice");
        }
    }

    fn unmapping(&self, _: DeviceId, address: Address, size: Bytes) {
        for granule in (address.0..address.0 + size.get()).step_by(GRANULE) {
            assert!(self.0.lock().remove(&granule), "unmapped and never mapped");
        }
    }
}

fn check(map: &Map, fixture: &Fixture) {
    let mut mapped: Vec<u64> = Vec::new();
    for segment in fixture.pool.report().segments() {
        let start = fixture.pool.base().0 + segment.offset.get();
        mapped.extend((start..start + segment.size.get()).step_by(GRANULE));
    }
    mapped.sort_unstable();
    assert_eq!(map.0.lock().iter().copied().collect::<Vec<u64>>(), mapped);
}

/// Grows, stitches, trims and frees; what fails is left out.
fn program(fixture: &Fixture, check: impl Fn()) {
    let lane = fixture.lane();
    let malloc = |mib| fixture.pool.malloc(Bytes::mib(mib), lane.pool);
    let all: Vec<Block> = (0..8).filter_map(|_| malloc(6).ok()).collect();
    check();
    for block in all.iter().step_by(2) {
        fixture.pool.free(block.address).unwrap();
    }
    let mut blocks: Vec<Block> = all.into_iter().skip(1).step_by(2).collect();
    blocks.extend(malloc(20));
    check();
    for block in blocks {
        fixture.pool.free(block.address).unwrap();
    }
    fixture.pool.settle().unwrap();
    for keep in [Bytes::mib(16), Bytes::ZERO] {
        // Where an unmap fails everything stays as it was.
        let _ = fixture.pool.trim(keep);
        check();
    }
}

#[test]
fn an_observer_knows_what_is_mapped_whatever_fails() {
    for verb in [None, Some(Verb::Create), Some(Verb::Map), Some(Verb::SetAccess), Some(Verb::Unmap)] {
        for nth in 1..12 {
            let map = Arc::new(Map::default());
            let options = PoolOptions { observer: Some(map.clone()), ..PoolOptions::default() };
            let fixture = Fixture::with(Shape::default(), |_| (), options);
            if let Some(verb) = verb {
                let error = Injected::OutOfMemory;
                fixture.faults.set(&[Fault { verb: Some(verb), when: When::Nth(nth), error }]);
            }
            program(&fixture, || check(&map, &fixture));
            fixture.faults.set(&[]);
            fixture.end();
            assert!(map.0.lock().is_empty());
        }
    }
}

#[test]
fn the_lag_is_the_age_of_the_oldest_event_not_passed() {
    let fixture = Fixture::new(Shape::default());
    let lane = fixture.lane();
    let block = fixture.pool.malloc(Bytes::mib(4), lane.pool).unwrap();
    assert_eq!((fixture.pool.clock().lag().misses, fixture.pool.clock().lag().max), (1, Duration::ZERO));
    lane.busy(Duration::from_millis(50));
    fixture.pool.free(block.address).unwrap();
    fixture.pool.tick().unwrap();
    let recorded = Instant::now();
    let wait = Duration::from_millis(3);
    while recorded.elapsed() < wait {}
    let large = fixture.pool.malloc(Bytes::mib(20), lane.pool).unwrap();
    let lag = fixture.pool.clock().lag();
    assert!(lag.misses == 2 && lag.max >= wait && lag.p95 >= wait && lag.p50 == Duration::ZERO, "{lag:?}");
    fixture.run_dry();
    fixture
        .pool
        .malloc(Bytes::mib(30), lane.pool)
        .map(|block| fixture.pool.free(block.address))
        .unwrap()
        .unwrap();
    assert_eq!(
        (fixture.pool.clock().lag().misses, fixture.pool.clock().lag().max),
        (3, lag.max),
        "it has passed"
    );
    fixture.pool.free(large.address).unwrap();
    fixture.pool.report().reset_totals();
    assert_eq!(fixture.pool.clock().lag(), glake_tiers::CompletionLag::default());
}

#[test]
fn waits_for_lenders_are_timed_on_the_gpu() {
    let fixture = Fixture::new(Shape { borrow: Borrow::Wait, ..Shape::default() });
    let (lender, taker) = (fixture.lane(), fixture.lane());
    assert_eq!(fixture.pool.report().gpu_waits(), glake_tiers::GpuWaits::default());
    let block = fixture.pool.malloc(Bytes::mib(8), lender.pool).unwrap();
    lender.busy(Duration::from_micros(700));
    fixture.pool.free(block.address).unwrap();
    let taken = fixture.pool.malloc(Bytes::mib(8), taker.pool).unwrap();
    assert_eq!(taken, block);
    let waits = fixture.pool.report().gpu_waits();
    assert_eq!((waits.count, waits.timed), (1, 0), "it is under way");
    fixture.run_dry();
    fixture.pool.tick().unwrap();
    let waits = fixture.pool.report().gpu_waits();
    assert_eq!((waits.count, waits.timed), (1, 1));
    assert!((650..=750).contains(&waits.time.as_micros()), "{waits:?}");
    fixture.pool.free(taken.address).unwrap();
    drop((lender, taker));
    fixture.end();
}

#[test]
fn extents_and_waits_of_the_host_are_counted() {
    let fixture = Fixture::new(Shape::default());
    let (one, two) = (fixture.lane(), fixture.lane());
    let block = fixture.pool.malloc(Bytes::mib(60), one.pool).unwrap();
    let made = fixture.pool.counters().extents_created;
    assert!(made > 0 && fixture.pool.counters().extents_released == 0);
    one.busy(Duration::from_micros(10));
    fixture.pool.free(block.address).unwrap();
    let other = fixture.pool.malloc(Bytes::mib(60), two.pool).unwrap();
    assert_eq!(fixture.pool.counters().host_waits, 1);
    fixture.pool.free(other.address).unwrap();
    fixture.pool.settle().unwrap();
    fixture.pool.trim(Bytes::ZERO).unwrap();
    let counters = fixture.pool.counters();
    assert_eq!(counters.extents_created, counters.extents_released);
    drop((one, two));
    fixture.end();
}
