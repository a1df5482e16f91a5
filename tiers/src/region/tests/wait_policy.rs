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
    fn wait(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(100));
        !self.over.load(Ordering::Acquire) || !self.told.swap(true, Ordering::AcqRel)
    }
}

impl Bed {
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
        let mut bed = bed();
        for _ in 0..8 {
            bed.add(EXTENT);
        }
        bed.shrink().unwrap();
        let (other, blocks) = bed.other(8);
        // All of the one, and one extent of the other.
        bed.limit(9);
        let until = Until::default();
        let mover = Native::new(&bed.mover.driver);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let out = other.shrink(
                    Bytes::MAX,
                    &Store::Host(bed.host.clone()),
                    TransferContext { mover: &mover, checks: None },
                );
                until.over.store(true, Ordering::Release);
                assert_eq!(out.unwrap().left, Bytes::ZERO);
            });
            let back = bed
                .region
                .refill(Bytes::MAX, TransferContext { mover: &bed.mover, checks: None }, &until)
                .unwrap();
            assert_eq!((back.away, back.copied), (Bytes::ZERO, Bytes::mib(16)), "{round}");
        });
        bed.assert_bytes();
        bed.assert_sound();
        bed.shrink().unwrap();
        other.refill(Bytes::MAX, TransferContext { mover: &bed.mover, checks: None }, &NoWait).unwrap();
        for (block, seed) in blocks {
            let mut bytes = vec![0; 2 << 20];
            bed.pool.read(block.address, &mut bytes).unwrap();
            assert!(bytes == pattern(seed, block.size));
            bed.pool.free(block.address).unwrap();
        }
        drop((other, mover));
        bed.limit(32);
        bed.refill().unwrap();
        bed.assert_bytes();
        bed.end();
    }
}

#[test]
fn without_anybody_who_gives_it_ends() {
    let mut bed = bed();
    for _ in 0..4 {
        bed.add(EXTENT);
    }
    bed.shrink().unwrap();
    bed.limit(2);
    let until = Until::default();
    until.over.store(true, Ordering::Release);
    let stopped = bed
        .region
        .refill(Bytes::MAX, TransferContext { mover: &bed.mover, checks: None }, &until)
        .unwrap_err();
    let RegionError::Stopped { moved, source, .. } = stopped else { panic!("{stopped}") };
    assert!(matches!(*source, RegionError::Pool(ref error) if error.is_out_of_memory()), "{source}");
    assert_eq!((moved, until.asked.load(Ordering::Relaxed)), (Bytes::mib(4), 2));
    bed.limit(32);
    bed.refill().unwrap();
    bed.assert_bytes();
    bed.end();
}

/// What is free in other domains is given back first, what their streams still use too.
#[test]
fn what_is_free_elsewhere_goes_first() {
    let mut bed = bed();
    for _ in 0..4 {
        bed.add(EXTENT);
    }
    bed.shrink().unwrap();
    let block = bed.pool.malloc(Bytes::mib(8), bed.here).unwrap();
    bed.limit(4);
    let writes = [Touch { address: block.address, size: block.size }];
    let time = Duration::from_millis(3);
    bed.sim.enqueue_kernel(GPU, Stream::LEGACY, &[], &writes, time, |_| {}).unwrap();
    bed.pool.free(block.address).unwrap();
    bed.refill().unwrap();
    assert!(bed.sim.now() >= time);
    bed.assert_bytes();
    bed.limit(32);
    bed.end();
}
