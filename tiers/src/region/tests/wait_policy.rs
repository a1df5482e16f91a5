//! A refill that waits for memory which others give back.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;

/// Waits while another thread shrinks, and once more after that.
#[derive(Debug, Default)]
struct Until {
    over: AtomicBool,
    told: AtomicBool,
    asked: AtomicUsize,
}

impl WaitPolicy for Until {
    fn wait(&self, _: &PoolError) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(100));
        !self.over.load(Ordering::Acquire) || !self.told.swap(true, Ordering::AcqRel)
    }
}

impl Fixture {
    /// Another region of the same pool, with whole extents of bytes.
    fn other(&self, extents: u8) -> (Region, Vec<(Block, u8)>) {
        let region = Region::new(&self.pool, RegionOptions { extent: EXTENT, ..RegionOptions::of("cache") });
        let blocks = (0..extents).map(|index| {
            let block = region.malloc(EXTENT, self.here).unwrap();
            self.pool.write(block.address, &pattern(100 + index, block.size)).unwrap();
            (block, 100 + index)
        });
        let blocks = blocks.collect();
        (region, blocks)
    }

    /// Leaves room for so many extents.
    fn limit(&self, extents: u32) {
        self.pool.set_memory_fraction(f64::from(extents) * 2.0 / 64.0);
    }
}

#[test]
fn one_goes_while_another_comes() {
    for round in 0..4 {
        let mut fixture = fixture();
        for _ in 0..8 {
            fixture.add(EXTENT);
        }
        fixture.shrink().unwrap();
        let (other, blocks) = fixture.other(8);
        // All of the one, and one extent of the other.
        fixture.limit(9);
        let until = Until::default();
        let mover = Native::new(&fixture.mover.driver);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let out = other.shrink(
                    Bytes::MAX,
                    &Store::Host(fixture.host.clone()),
                    TransferContext { mover: &mover, checks: None, fill: false },
                );
                until.over.store(true, Ordering::Release);
                assert_eq!(out.unwrap().resident, Bytes::ZERO);
            });
            let back = fixture
                .region
                .refill(
                    Bytes::MAX,
                    TransferContext { mover: &fixture.mover, checks: None, fill: false },
                    &until,
                )
                .unwrap();
            assert_eq!((back.evicted, back.copied), (Bytes::ZERO, Bytes::mib(16)), "{round}");
        });
        fixture.assert_bytes();
        fixture.assert_sound();
        fixture.shrink().unwrap();
        other
            .refill(Bytes::MAX, TransferContext { mover: &fixture.mover, checks: None, fill: false }, &NoWait)
            .unwrap();
        for (block, seed) in blocks {
            let mut bytes = vec![0; 2 << 20];
            fixture.pool.read(block.address, &mut bytes).unwrap();
            assert!(bytes == pattern(seed, block.size));
            fixture.pool.free(block.address).unwrap();
        }
        drop((other, mover));
        fixture.limit(32);
        fixture.refill().unwrap();
        fixture.assert_bytes();
        fixture.end();
    }
}

#[test]
fn without_anybody_who_gives_it_ends() {
    let mut fixture = fixture();
    for _ in 0..4 {
        fixture.add(EXTENT);
    }
    fixture.shrink().unwrap();
    fixture.limit(2);
    let until = Until::default();
    until.over.store(true, Ordering::Release);
    let stopped = fixture
        .region
        .refill(Bytes::MAX, TransferContext { mover: &fixture.mover, checks: None, fill: false }, &until)
        .unwrap_err();
    let RegionError::Stopped { moved, source, .. } = stopped else { panic!("{stopped}") };
    assert!(matches!(*source, RegionError::Pool(ref error) if error.is_out_of_memory()), "{source}");
    assert_eq!((moved, until.asked.load(Ordering::Relaxed)), (Bytes::mib(4), 2));
    fixture.limit(32);
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.end();
}

/// What is free in other domains is given back first, what their streams still use too.
#[test]
fn what_is_free_elsewhere_goes_first() {
    let mut fixture = fixture();
    for _ in 0..4 {
        fixture.add(EXTENT);
    }
    fixture.shrink().unwrap();
    let block = fixture.pool.malloc(Bytes::mib(8), fixture.here).unwrap();
    fixture.limit(4);
    let writes = [Touch { address: block.address, size: block.size }];
    let time = Duration::from_millis(3);
    fixture.sim.enqueue_kernel(GPU, Stream::LEGACY, &[], &writes, time, |_| {}).unwrap();
    fixture.pool.free(block.address).unwrap();
    fixture.refill().unwrap();
    assert!(fixture.sim.now() >= time);
    fixture.assert_bytes();
    fixture.limit(32);
    fixture.end();
}
