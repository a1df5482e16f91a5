//! A pool that grows and is trimmed over and over stays where it is.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use glake_device::{DeviceId, Driver};
use glake_stitch::DomainOptions;
use glake_tests::pool::{Fixture, Ledger, Shape, Stamp, assert_empty};
use glake_units::Bytes;

const GPU: DeviceId = DeviceId(0);

#[test]
fn a_thousand_cycles_of_growth_and_trimming_stay_inside_the_reservation() {
    let fixture = Fixture::new(Shape::default());
    let lanes = [fixture.lane(), fixture.lane()];
    let (before, census) = (fixture.sim.memory_info(GPU).unwrap(), fixture.sim.census());
    let end = fixture.pool.base().0 + 11 * fixture.sim.memory_info(GPU).unwrap().total.get();
    for cycle in 0..1000_u64 {
        let domain = fixture.pool.add_domain(DomainOptions::private_pool(), None);
        let mut ledger = Ledger::default();
        let mut live = Vec::new();
        for index in 0..9 {
            let size = Bytes::kib(1 + (cycle * 977 + index * 3701) % 13_000);
            let lane = &lanes[(index % 2) as usize];
            let of = if index == 4 { domain } else { glake_stitch::Allocator::default_domain() };
            let Ok(block) = fixture.pool.malloc_in(of, size, lane.pool) else { continue };
            ledger.take(block, of);
            assert!(block.address.0 + block.size.get() <= end);
            let stamp = Stamp { block, seed: cycle * 10 + index };
            stamp.write_now(&fixture.pool).unwrap();
            live.push(stamp);
            // Holes, so that the next ones are stitched.
            if index % 3 == 2 {
                let stamp = live.remove(live.len() / 2);
                stamp.assert_on(&fixture.pool);
                ledger.give(stamp.block);
                fixture.pool.free(stamp.block.address).unwrap();
            }
        }
        if let Ok(block) = fixture.pool.malloc(Bytes::mib(12), lanes[0].pool) {
            ledger.take(block, glake_stitch::Allocator::default_domain());
            live.push(Stamp { block, seed: cycle });
            live[live.len() - 1].write_now(&fixture.pool).unwrap();
        }
        ledger.compare(&fixture.pool);
        for stamp in live {
            stamp.assert_on(&fixture.pool);
            fixture.pool.free(stamp.block.address).unwrap();
        }
        fixture.pool.release_domain(domain).unwrap();
        fixture.pool.settle().unwrap();
        fixture.pool.trim(Bytes::ZERO).unwrap();
        assert_empty(&fixture.pool);
        assert_eq!(fixture.sim.memory_info(GPU).unwrap(), before, "cycle {cycle}");
        let now = fixture.sim.census();
        assert_eq!((now.mappings, now.extents), (census.mappings, census.extents));
        assert!(now.events <= census.events + 2, "events are used again");
    }
    assert!(fixture.pool.counters().stitches > 100, "{:?}", fixture.pool.counters());
    drop(lanes);
    fixture.end();
}

/// What a trim leaves is what it was asked to leave, and what is in use.
#[test]
fn a_trim_keeps_what_it_is_told_to() {
    let fixture = Fixture::new(Shape::default());
    let lane = fixture.lane();
    let blocks: Vec<_> = (0..7).map(|_| fixture.pool.malloc(Bytes::mib(8), lane.pool).unwrap()).collect();
    let stamp = Stamp { block: blocks[3], seed: 1 };
    stamp.write_now(&fixture.pool).unwrap();
    for block in &blocks {
        if *block != stamp.block {
            fixture.pool.free(block.address).unwrap();
        }
    }
    assert_eq!(fixture.pool.reserved(), Bytes::mib(56));
    fixture.pool.settle().unwrap();
    for (keep, left) in [(60, 56), (40, 40), (21, 16), (0, 8), (0, 8)] {
        let before = fixture.pool.reserved();
        let went = fixture.pool.trim(Bytes::mib(keep)).unwrap();
        assert_eq!(fixture.pool.reserved(), Bytes::mib(left), "keep {keep}");
        assert_eq!(went, before.saturating_sub(Bytes::mib(left)));
        stamp.assert_on(&fixture.pool);
    }
    fixture.pool.free(stamp.block.address).unwrap();
    drop(lane);
    fixture.end();
}
