//! What a pool answers about blocks, domains and the memory that is left.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use glake_device::Address;
use glake_stitch::{DomainOptions, SegmentKind};
use glake_tests::pool::{Fixture, Shape};
use glake_tiers::Block;
use glake_units::Bytes;

fn at(block: Block, offset: u64) -> Address {
    Address(block.address.0 + offset)
}

fn free<'a>(fixture: &Fixture, blocks: impl Iterator<Item = &'a Block>) {
    for block in blocks {
        fixture.pool.free(block.address).unwrap();
    }
}

#[test]
fn a_block_is_found_by_any_of_its_bytes() {
    let fixture = Fixture::new(Shape::default());
    let lane = fixture.lane();
    let sizes = [Bytes::new(100), Bytes::kib(700), Bytes::mib(3), Bytes::mib(9)];
    let mut blocks: Vec<Block> =
        sizes.iter().map(|&size| fixture.pool.malloc(size, lane.pool).unwrap()).collect();
    // Every second one of these is freed, so that the last block is stitched.
    let spread: Vec<Block> =
        (0..10).map(|_| fixture.pool.malloc(Bytes::mib(4), lane.pool).unwrap()).collect();
    free(&fixture, spread.iter().step_by(2));
    blocks.push(fixture.pool.malloc(Bytes::mib(18), lane.pool).unwrap());
    assert_eq!(fixture.pool.counters().stitches, 1);
    let requested = [100, 700 << 10, 3 << 20, 9 << 20, 18 << 20];
    for (&block, requested) in blocks.iter().zip(requested) {
        for offset in [0, 1, block.size.get() / 2, block.size.get() - 1] {
            let found = fixture.pool.find(at(block, offset)).unwrap();
            assert_eq!((found.address, found.size), (block.address, block.size));
            assert_eq!((found.requested.get(), found.stream), (requested, lane.pool.key));
        }
        let behind = fixture.pool.find(at(block, block.size.get()));
        assert!(behind.is_none_or(|other| other.address != block.address));
    }
    assert_eq!(fixture.pool.find(spread[0].address).map(|found| found.address), None, "freed");
    assert_eq!(fixture.pool.find(Address(0)), None);
    let told = fixture.pool.blocks_of(glake_stitch::Allocator::default_domain());
    assert_eq!(told.len(), 10);
    let lent = |segment: &glake_stitch::Segment| segment.blocks.iter().any(|block| block.lent);
    let segments = fixture.pool.report().segments();
    assert!(segments.iter().any(|segment| segment.kind == SegmentKind::Home && lent(segment)));
    for block in told {
        fixture.pool.free(block.address).unwrap();
    }
    drop(lane);
    fixture.end();
}

#[test]
fn a_private_pool_keeps_its_memory_until_it_is_given_up_or_trimmed_by_name() {
    let fixture = Fixture::new(Shape::default());
    let lane = fixture.lane();
    let pool = &fixture.pool;
    let domain = pool.add_domain(DomainOptions::private_pool(), None);
    let private = pool.malloc_in(domain, Bytes::mib(8), lane.pool).unwrap();
    let small = pool.malloc_in(domain, Bytes::kib(8), lane.pool).unwrap();
    assert_eq!(pool.blocks_of(domain).len(), 2);
    pool.free(private.address).unwrap();
    pool.free(small.address).unwrap();
    pool.settle().unwrap();
    let kept = pool.reserved();
    assert!(kept >= Bytes::mib(8));
    assert_eq!(pool.trim(Bytes::ZERO).unwrap(), Bytes::ZERO);
    assert!(pool.malloc(Bytes::mib(60), lane.pool).is_err(), "nothing is taken from it");
    assert!(pool.blocks_of(domain).is_empty() && pool.reserved() == kept);
    assert_eq!(pool.malloc_in(domain, Bytes::mib(8), lane.pool).unwrap(), private, "at the same address");
    pool.free(private.address).unwrap();
    pool.settle().unwrap();
    assert_eq!(pool.trim_domain(domain).unwrap(), kept);
    assert_eq!(pool.reserved(), Bytes::ZERO);
    pool.release_domain(domain).unwrap();
    assert!(!pool.has_domain(domain));
    assert_eq!(pool.trim_domain(domain).unwrap(), Bytes::ZERO);
    let counters = pool.counters();
    assert!(counters.extents_created > 0 && counters.extents_created == counters.extents_released);
    drop(lane);
    fixture.end();
}

#[test]
fn the_largest_request_is_served_and_a_larger_one_is_not() {
    let fixture = Fixture::new(Shape::default());
    let lane = fixture.lane();
    let pool = &fixture.pool;
    assert_eq!(pool.report().largest().unwrap(), Bytes::mib(64));
    pool.set_memory_fraction(0.75);
    assert!((pool.memory_fraction() - 0.75).abs() < 1e-9);
    assert_eq!(pool.report().largest().unwrap(), Bytes::mib(48));
    let blocks: Vec<Block> = (0..6).map(|_| pool.malloc(Bytes::mib(4), lane.pool).unwrap()).collect();
    free(&fixture, blocks.iter().step_by(2));
    let largest = pool.report().largest().unwrap();
    assert_eq!(largest, Bytes::mib(36), "three holes of 4 MiB, and 24 MiB to grow");
    assert!(pool.malloc(largest.saturating_add(Bytes::mib(1)), lane.pool).is_err());
    let block = pool.malloc(largest, lane.pool).unwrap();
    assert_eq!(pool.report().largest().unwrap(), Bytes::ZERO);
    free(&fixture, blocks.iter().skip(1).step_by(2).chain([&block]));
    assert_eq!(pool.counters().ooms, 1);
    drop(lane);
    fixture.end();
}

#[test]
fn a_domain_that_a_graph_was_captured_in_is_stitched_no_more() {
    let fixture = Fixture::new(Shape::default());
    let lane = fixture.lane();
    let domain = fixture.pool.add_domain(DomainOptions::own_pool(), None);
    let stitched = || {
        let take = |size| fixture.pool.malloc_in(domain, size, lane.pool).unwrap();
        let blocks: Vec<Block> = (0..6).map(|_| take(Bytes::mib(4))).collect();
        free(&fixture, blocks.iter().step_by(2));
        let whole = take(Bytes::mib(10));
        free(&fixture, blocks.iter().skip(1).step_by(2).chain([&whole]));
        let counters = fixture.pool.counters();
        counters.stitches + counters.alias_reuses
    };
    let before = stitched();
    assert_eq!(before, 1);
    fixture.pool.keep_addresses(domain);
    assert_eq!(stitched(), before);
    fixture.pool.release_domain(domain).unwrap();
    drop(lane);
    fixture.end();
}
