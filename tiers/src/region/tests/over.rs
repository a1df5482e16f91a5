//! Regions over domains that exist, beside one of its own: random programs, with failures, beside what the bytes must be.

use std::collections::{BTreeMap, BTreeSet};

use glake_stitch::Allocator;
use proptest::prelude::*;

use super::random::set;
use super::*;
use crate::Residency;

/// What a graph's bytes are told apart by.
const CELL: u64 = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Default,
    Graph,
    Own,
}

#[derive(Clone, Debug)]
enum Op {
    Malloc { of: Of, kib: u64, elsewhere: bool },
    Record { which: usize },
    Free { which: usize },
    Shrink { of: Of, mib: u64, fault: Option<u64> },
    Refill { of: Of, mib: u64, fault: Option<u64> },
    Settle,
    Trim,
}

fn of() -> impl Strategy<Value = Of> {
    prop_oneof![3 => Just(Of::Default), 2 => Just(Of::Graph), 1 => Just(Of::Own)]
}

fn op() -> impl Strategy<Value = Op> {
    let fault = || prop::option::weighted(0.3, 1..40u64);
    let amount = || prop_oneof![1..12u64, Just(1 << 20)];
    let kib = prop_oneof![3 => 1..700u64, 1 => 1000..1030u64, 2 => 1500..7000u64];
    prop_oneof![
        8 => (of(), kib, prop::bool::weighted(0.2))
            .prop_map(|(of, kib, elsewhere)| Op::Malloc { of, kib, elsewhere }),
        1 => any::<usize>().prop_map(|which| Op::Record { which }),
        5 => any::<usize>().prop_map(|which| Op::Free { which }),
        3 => (of(), amount(), fault()).prop_map(|(of, mib, fault)| Op::Shrink { of, mib, fault }),
        3 => (of(), amount(), fault()).prop_map(|(of, mib, fault)| Op::Refill { of, mib, fault }),
        1 => Just(Op::Settle),
        1 => Just(Op::Trim),
    ]
}

/// A pool of which every byte is in one of three regions.
struct World {
    fixture: Fixture,
    default: Region,
    graph: Region,
    there: PoolStream,
    stream: OwnedStream,
    live: Vec<(Of, Block, u8)>,
    /// What a replay of the graph expects: of free memory too.
    cells: BTreeMap<u64, u8>,
    /// Where the graph's extents were ever seen.
    homes: BTreeSet<u64>,
}

impl World {
    fn new() -> World {
        let fixture = fixture();
        fixture.pool.set_memory_fraction(28.0 / 64.0);
        let options = |tag| RegionOptions { extent: EXTENT, ..RegionOptions::of(tag) };
        let default = Region::over(&fixture.pool, Allocator::default_domain(), options("default"));
        let domain = fixture.pool.add_domain(DomainOptions::private_pool(), None);
        let graph = Region::over(&fixture.pool, domain, options("graph"));
        let stream = OwnedStream::new(&fixture.mover.driver, GPU).unwrap();
        let there = PoolStream::of(&*fixture.mover.driver, GPU, stream.id()).unwrap();
        let (live, cells, homes) = Default::default();
        World { fixture, default, graph, there, stream, live, cells, homes }
    }

    fn region(&self, of: Of) -> &Region {
        match of {
            Of::Default => &self.default,
            Of::Graph => &self.graph,
            Of::Own => &self.fixture.region,
        }
    }

    fn shrink(&self, of: Of, amount: Bytes) -> Result<Shrunk> {
        let context = TransferContext { mover: &self.fixture.mover, checks: None, fill: false };
        self.region(of).shrink(amount, &Store::Host(self.fixture.host.clone()), context)
    }

    fn refill(&self, of: Of, amount: Bytes) -> Result<Refilled> {
        self.region(of).refill(
            amount,
            TransferContext { mover: &self.fixture.mover, checks: None, fill: false },
            &NoWait,
        )
    }

    fn domains(&self) -> [DomainId; 3] {
        [Of::Default, Of::Graph, Of::Own].map(|of| self.region(of).domain)
    }

    fn malloc(&mut self, of: Of, size: Bytes, stream: PoolStream, seed: u8) {
        let block = match self.region(of).malloc(size, stream) {
            Ok(block) => block,
            Err(RegionError::Pool(error)) if error.is_out_of_memory() => return,
            Err(error) => panic!("{error}"),
        };
        let bytes = pattern(seed, block.size);
        self.fixture.pool.write(block.address, &bytes).unwrap();
        if of == Of::Graph {
            let at = |cell: usize| block.address.0 + cell as u64 * CELL;
            let cells = bytes.chunks(512).enumerate();
            self.cells.extend(cells.map(|(cell, bytes)| (at(cell), bytes[0])));
        }
        self.live.push((of, block, seed));
    }

    fn is_here(&self, of: Of) -> bool {
        let standing = self.fixture.pool.records().standing(self.region(of).domain);
        standing.iter().all(|(_, residency)| matches!(residency, Residency::Resident { .. }))
    }

    /// The bytes of what is here, and everything that the books say.
    fn check(&mut self) {
        self.fixture.pool.check().unwrap();
        assert_eq!(self.fixture.pool.reserved(), self.fixture.used(), "reserved counts every physical byte");
        for of in [Of::Default, Of::Graph, Of::Own] {
            if !self.is_here(of) {
                continue;
            }
            for (_, block, seed) in self.live.iter().filter(|(whose, ..)| *whose == of) {
                let mut bytes = vec![0; usize::try_from(block.size.get()).unwrap()];
                self.fixture.pool.read(block.address, &mut bytes).unwrap();
                assert!(bytes == pattern(*seed, block.size), "{block:?} of {of:?}");
            }
        }
        let views = self.fixture.pool.records().standing(self.graph.domain);
        let homes: BTreeSet<u64> = views.iter().map(|(view, _)| view.offset.get()).collect();
        assert!(homes.is_superset(&self.homes), "a graph's addresses stay");
        self.homes = homes;
        for (view, residency) in views {
            if !matches!(residency, Residency::Resident { .. }) {
                continue;
            }
            let start = self.fixture.pool.core().address(view.offset);
            let mut bytes = vec![0; usize::try_from(view.size.get()).unwrap()];
            self.fixture.pool.read(start, &mut bytes).unwrap();
            for (at, byte) in self.cells.range(start.0..start.0 + view.size.get()) {
                let found = bytes[usize::try_from(at - start.0).unwrap()];
                assert_eq!(found, *byte, "what a graph left at {at:#x}");
            }
        }
    }

    fn all(&self, out: bool) {
        for of in [Of::Own, Of::Graph, Of::Default] {
            if out {
                let report = self.shrink(of, Bytes::MAX).unwrap();
                assert_eq!((report.resident, report.skipped.len()), (Bytes::ZERO, 0), "{of:?}");
            } else {
                assert_eq!(self.refill(of, Bytes::MAX).unwrap().evicted, Bytes::ZERO, "{of:?}");
            }
        }
    }

    fn end(mut self) {
        self.fixture.pool.set_memory_fraction(1.0);
        self.all(true);
        assert_eq!((self.fixture.pool.reserved(), self.fixture.used()), (Bytes::ZERO, Bytes::ZERO));
        self.check();
        self.all(false);
        self.check();
        for (_, block, _) in std::mem::take(&mut self.live) {
            self.fixture.pool.free(block.address).unwrap();
        }
        let World { fixture, default, graph, stream, .. } = self;
        let domain = graph.domain();
        drop((default, graph, stream));
        fixture.pool.release_domain(domain).unwrap();
        fixture.end();
    }
}

fn run(program: Vec<Op>) {
    let mut world = World::new();
    for (step, op) in program.into_iter().enumerate() {
        let seed = u8::try_from(step % 250).unwrap();
        match op {
            Op::Malloc { of, kib, elsewhere }
                if world.fixture.has_room(&world.domains(), Bytes::kib(kib)) =>
            {
                let stream = if elsewhere { world.there } else { world.fixture.here };
                world.malloc(of, Bytes::kib(kib), stream, seed);
            }
            Op::Record { which } if !world.live.is_empty() => {
                let (_, block, _) = world.live[which % world.live.len()];
                assert!(world.fixture.pool.record_stream(block.address, world.there));
            }
            Op::Free { which } if !world.live.is_empty() => {
                let (_, block, _) = world.live.swap_remove(which % world.live.len());
                world.fixture.pool.free(block.address).unwrap();
            }
            Op::Shrink { of, mib, fault } => {
                set(&world.fixture, fault);
                let shrunk = world.shrink(of, Bytes::mib(mib));
                world.fixture.faults.set(&[]);
                assert!(shrunk.is_ok() || fault.is_some(), "{shrunk:?}");
                if let Ok(report) = shrunk {
                    assert_eq!(report.skipped, [], "nothing has to stay");
                    assert!(mib < 1 << 20 || report.resident.is_zero());
                }
            }
            Op::Refill { of, mib, fault } => {
                set(&world.fixture, fault);
                let refilled = world.refill(of, Bytes::mib(mib));
                world.fixture.faults.set(&[]);
                if let Err(RegionError::Stopped { source, .. }) = &refilled {
                    let full = matches!(**source, RegionError::Pool(ref error) if error.is_out_of_memory());
                    assert!(full || fault.is_some(), "{source}");
                }
            }
            Op::Settle => world.fixture.pool.settle().unwrap(),
            Op::Trim => _ = world.fixture.pool.trim(Bytes::ZERO).unwrap(),
            Op::Malloc { .. } | Op::Record { .. } | Op::Free { .. } => {}
        }
        world.check();
    }
    world.end();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 500, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_over_every_domain(program in prop::collection::vec(op(), 1..48)) {
        run(program);
    }
}

#[test]
fn a_program_that_asks_for_more_than_the_gpu_has() {
    let all = 1 << 20;
    let one = [
        Op::Malloc { of: Of::Graph, kib: 6000, elsewhere: false },
        Op::Shrink { of: Of::Graph, mib: all, fault: None },
    ];
    run(std::iter::repeat_n(one, 16).flatten().collect());
}

/// Blocks of every kind in the default domain, a graph's memory of which nothing is live: everything goes, and comes back.
#[test]
fn everything_goes_and_comes_back() {
    let mut world = World::new();
    world.fixture.pool.set_memory_fraction(1.0);
    let sizes = [3, 700, 40, 1024, 1500, 5000, 2048, 6000];
    for (seed, kib) in (0..).zip(sizes) {
        world.malloc(Of::Default, Bytes::kib(kib), world.fixture.here, seed);
        world.malloc(Of::Default, Bytes::kib(kib), world.there, seed + 50);
        world.malloc(Of::Graph, Bytes::kib(kib / 2), world.fixture.here, seed + 100);
    }
    for _ in 0..2 {
        let gone: Vec<_> = world.live.extract_if(.., |(of, ..)| *of == Of::Graph).collect();
        for (_, block, _) in gone {
            world.fixture.pool.free(block.address).unwrap();
        }
        world.check();
        let reserved = world.fixture.pool.reserved();
        world.all(true);
        assert_eq!((world.fixture.pool.reserved(), world.fixture.used()), (Bytes::ZERO, Bytes::ZERO));
        assert_eq!(world.fixture.sim.census().mappings, 0);
        // A block of the default domain is freed while it is evicted, another is new.
        let (_, block, _) = world.live.remove(0);
        world.fixture.pool.free(block.address).unwrap();
        world.malloc(Of::Default, Bytes::kib(300), world.fixture.here, 77);
        world.all(false);
        assert!(world.fixture.pool.reserved() <= reserved.saturating_add(EXTENT));
        world.check();
    }
    world.end();
}

/// A graph is gone, and a block of its pool lives on.
#[test]
fn what_is_left_of_a_released_pool_goes_too() {
    let mut world = World::new();
    world.malloc(Of::Graph, Bytes::kib(300), world.fixture.here, 1);
    world.malloc(Of::Graph, Bytes::mib(3), world.fixture.here, 2);
    let domain = world.graph.domain();
    world.fixture.pool.release_domain(domain).unwrap();
    let (_, gone, _) = world.live.remove(0);
    world.fixture.pool.free(gone.address).unwrap();
    world.all(true);
    assert_eq!((world.fixture.pool.reserved(), world.fixture.used()), (Bytes::ZERO, Bytes::ZERO));
    world.all(false);
    let (_, block, seed) = world.live[0];
    let mut bytes = vec![0; usize::try_from(block.size.get()).unwrap()];
    world.fixture.pool.read(block.address, &mut bytes).unwrap();
    assert!(bytes == pattern(seed, block.size));
    world.all(true);
    let World { fixture, default, graph, stream, .. } = world;
    // The last block is freed while it is evicted: with it goes its copy.
    fixture.pool.free(block.address).unwrap();
    assert_eq!(fixture.host.statistics().in_use, Bytes::ZERO);
    drop((default, graph, stream));
    fixture.end();
}

#[test]
fn all_bytes_that_are_kept_are_prepared() {
    let mut world = World::new();
    let of = |tag| RegionOptions { host_copy: CopyPolicy::Prepare, ..RegionOptions::of(tag) };
    let domain = world.graph.domain();
    world.graph = Region::over(&world.fixture.pool, domain, of("graph"));
    world.malloc(Of::Graph, Bytes::kib(1100), world.fixture.here, 1);
    world.graph.prepare(&world.fixture.host).unwrap();
    assert!(world.fixture.host.statistics().pinned >= EXTENT);
    world.end();
}
