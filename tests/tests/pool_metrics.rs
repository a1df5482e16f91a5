//! What a pool measures and whom it tells: mappings, lags, waits.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::{Address, DeviceId, Fault, Injected, Verb, When};
use glake_stitch::{Borrow, WaitRules};
use glake_tests::pool::{Bed, Shape};
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

fn check(map: &Map, bed: &Bed) {
    let mut mapped: Vec<u64> = Vec::new();
    for segment in bed.pool.segments() {
        let start = bed.pool.base().0 + segment.offset.get();
        mapped.extend((start..start + segment.size.get()).step_by(GRANULE));
    }
    mapped.sort_unstable();
    assert_eq!(map.0.lock().iter().copied().collect::<Vec<u64>>(), mapped);
}

/// Grows, stitches, trims and frees; what fails is left out.
fn program(bed: &Bed, check: impl Fn()) {
    let lane = bed.lane();
    let malloc = |mib| bed.pool.malloc(Bytes::mib(mib), lane.pool);
    let all: Vec<Block> = (0..8).filter_map(|_| malloc(6).ok()).collect();
    check();
    for block in all.iter().step_by(2) {
        bed.pool.free(block.address).unwrap();
    }
    let mut blocks: Vec<Block> = all.into_iter().skip(1).step_by(2).collect();
    blocks.extend(malloc(20));
    check();
    for block in blocks {
        bed.pool.free(block.address).unwrap();
    }
    bed.pool.settle().unwrap();
    for keep in [Bytes::mib(16), Bytes::ZERO] {
        // Where an unmap fails everything stays as it was.
        let _ = bed.pool.trim(keep);
        check();
    }
}

#[test]
fn an_observer_knows_what_is_mapped_whatever_fails() {
    for verb in [None, Some(Verb::Create), Some(Verb::Map), Some(Verb::SetAccess), Some(Verb::Unmap)] {
        for nth in 1..12 {
            let map = Arc::new(Map::default());
            let options = PoolOptions { observer: Some(map.clone()), ..PoolOptions::default() };
            let bed = Bed::with(Shape::default(), |_| (), options);
            if let Some(verb) = verb {
                let error = Injected::OutOfMemory;
                bed.faults.set(&[Fault { verb: Some(verb), when: When::Nth(nth), error }]);
            }
            program(&bed, || check(&map, &bed));
            bed.faults.set(&[]);
            bed.end();
            assert!(map.0.lock().is_empty());
        }
    }
}

#[test]
fn the_lag_is_the_age_of_the_oldest_event_not_passed() {
    let bed = Bed::new(Shape::default());
    let lane = bed.lane();
    let block = bed.pool.malloc(Bytes::mib(4), lane.pool).unwrap();
    assert_eq!((bed.pool.epoch_lag().misses, bed.pool.epoch_lag().max), (1, Duration::ZERO));
    lane.busy(Duration::from_millis(50));
    bed.pool.free(block.address).unwrap();
    bed.pool.tick().unwrap();
    let recorded = Instant::now();
    let wait = Duration::from_millis(3);
    while recorded.elapsed() < wait {}
    let large = bed.pool.malloc(Bytes::mib(20), lane.pool).unwrap();
    let lag = bed.pool.epoch_lag();
    assert!(lag.misses == 2 && lag.max >= wait && lag.p95 >= wait && lag.p50 == Duration::ZERO, "{lag:?}");
    bed.run_dry();
    bed.pool.malloc(Bytes::mib(30), lane.pool).map(|block| bed.pool.free(block.address)).unwrap().unwrap();
    assert_eq!((bed.pool.epoch_lag().misses, bed.pool.epoch_lag().max), (3, lag.max), "it has passed");
    bed.pool.free(large.address).unwrap();
    bed.pool.reset_totals();
    assert_eq!(bed.pool.epoch_lag(), glake_tiers::EpochLag::default());
}

#[test]
fn waits_for_lenders_are_timed_on_the_gpu() {
    let bed = Bed::new(Shape { borrow: Borrow::Wait(WaitRules::default()), ..Shape::default() });
    let (lender, taker) = (bed.lane(), bed.lane());
    assert_eq!(bed.pool.gpu_waits(), glake_tiers::GpuWaits::default());
    let block = bed.pool.malloc(Bytes::mib(8), lender.pool).unwrap();
    lender.busy(Duration::from_micros(700));
    bed.pool.free(block.address).unwrap();
    let taken = bed.pool.malloc(Bytes::mib(8), taker.pool).unwrap();
    assert_eq!(taken, block);
    let waits = bed.pool.gpu_waits();
    assert_eq!((waits.count, waits.timed), (1, 0), "it is under way");
    bed.run_dry();
    bed.pool.tick().unwrap();
    let waits = bed.pool.gpu_waits();
    assert_eq!((waits.count, waits.timed), (1, 1));
    assert!((650..=750).contains(&waits.time.as_micros()), "{waits:?}");
    bed.pool.free(taken.address).unwrap();
    drop((lender, taker));
    bed.end();
}

#[test]
fn extents_and_waits_of_the_host_are_counted() {
    let bed = Bed::new(Shape::default());
    let (one, two) = (bed.lane(), bed.lane());
    let block = bed.pool.malloc(Bytes::mib(60), one.pool).unwrap();
    let made = bed.pool.counters().extents_created;
    assert!(made > 0 && bed.pool.counters().extents_released == 0);
    one.busy(Duration::from_micros(10));
    bed.pool.free(block.address).unwrap();
    let other = bed.pool.malloc(Bytes::mib(60), two.pool).unwrap();
    assert_eq!(bed.pool.counters().host_waits, 1);
    bed.pool.free(other.address).unwrap();
    bed.pool.settle().unwrap();
    bed.pool.trim(Bytes::ZERO).unwrap();
    let counters = bed.pool.counters();
    assert_eq!(counters.extents_created, counters.extents_released);
    drop((one, two));
    bed.end();
}
