//! Small things stay small: what a pool takes from the device grows with what is in it.

#![allow(clippy::unwrap_used)]

use glake_sim::Clock;
use glake_stitch::{Borrow, DomainOptions};
use glake_tests::pool::{Fixture, Shape};
use glake_units::Bytes;

/// A device with extents of the default size.
fn fixture() -> Fixture {
    let (memory, extent) = (Bytes::gib(16), Bytes::mib(16));
    Fixture::new(Shape { memory, extent, borrow: Borrow::Completed, clock: Clock::Virtual })
}

/// Returns what each of so many domains reserves for blocks of these sizes.
fn reserved_each(domains: u64, options: DomainOptions, sizes: &[Bytes]) -> Bytes {
    let fixture = fixture();
    let lane = fixture.lane();
    let mut held = Vec::new();
    for _ in 0..domains {
        let domain = fixture.pool.add_domain(options, None);
        let blocks: Vec<_> =
            sizes.iter().map(|&size| fixture.pool.malloc_in(domain, size, lane.pool).unwrap()).collect();
        held.push((domain, blocks));
    }
    let each = Bytes::new(fixture.pool.reserved().get() / domains);
    for (domain, blocks) in held {
        for block in blocks {
            fixture.pool.free(block.address).unwrap();
        }
        fixture.pool.release_domain(domain).unwrap();
    }
    drop(lane);
    fixture.end();
    each
}

/// Torch's private pool for the same: a small segment of 2 MiB, and one of 20 MiB for a request between 1 and 10 MiB.
#[test]
fn two_hundred_small_graphs_take_no_more_than_under_torch() {
    let graph = DomainOptions::private_pool();
    let small = reserved_each(200, graph, &[Bytes::kib(4)]);
    assert!(small <= Bytes::mib(2), "{small} for 4 KiB");
    let both = reserved_each(200, graph, &[Bytes::kib(4), Bytes::mib(4)]);
    assert!(both <= Bytes::mib(6), "{both} for 4 KiB and 4 MiB");
}

#[test]
fn a_tag_of_few_bytes_takes_few() {
    let tag = DomainOptions::region(Bytes::mib(128));
    let small = reserved_each(100, tag, &[Bytes::kib(4)]);
    assert!(small <= Bytes::mib(2), "{small} for 4 KiB");
    let weights = reserved_each(10, tag, &[Bytes::mib(112), Bytes::mib(112), Bytes::mib(33)]);
    assert!(weights <= Bytes::mib(257 * 33 / 32), "{weights} for 257 MiB");
}

#[test]
fn a_large_region_takes_few_extents() {
    let fixture = fixture();
    let lane = fixture.lane();
    let domain = fixture.pool.add_domain(DomainOptions::region(Bytes::mib(128)), None);
    let blocks: Vec<_> =
        (0..2000).map(|_| fixture.pool.malloc_in(domain, Bytes::mib(4), lane.pool).unwrap()).collect();
    let extents = fixture.sim.census().extents;
    assert!(extents <= 400, "{extents} extents for 8,000 MiB");
    for block in blocks {
        fixture.pool.free(block.address).unwrap();
    }
    fixture.pool.release_domain(domain).unwrap();
    drop(lane);
    fixture.end();
}
