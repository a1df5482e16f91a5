//! Regions that leave for the host and come back over every link of a simulated server.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use glake_device::{Address, DeviceId, Fault, Injected, Stream, Verb, When};
use glake_tests::transfer::{Server, ServerShape};
use glake_tiers::{
    Block, CopyPolicy, GpuPool, HostOptions, HostPool, Impatient, PoolStream, Refilled, Region, RegionError,
    RegionOptions, Shrunk, Store, Transit,
};
use glake_transfer::{LinkMover, Priority};
use glake_units::Bytes;

const GPU: DeviceId = DeviceId(0);
const SIZE: Bytes = Bytes::mib(24);

struct Bed {
    server: Server,
    pool: Arc<GpuPool>,
    host: Arc<HostPool>,
    region: Region,
    mover: LinkMover,
    blocks: Vec<Block>,
}

/// A region of a GPU, with blocks whose bytes tell their places.
fn bed() -> Bed {
    let server = Server::new(ServerShape::four(Bytes::mib(192)));
    let pool = server.pools[0].clone();
    let host = HostOptions { arena: Bytes::mib(32), threads: 1, ..HostOptions::default() };
    let host = HostPool::new(&server.epochs, host).unwrap();
    let options = RegionOptions { host_copy: CopyPolicy::Drop, ..RegionOptions::of("weights") };
    let region = Region::new(&pool, options);
    let stream = PoolStream::of(&*server.driver, GPU, Stream::LEGACY).unwrap();
    let blocks: Vec<Block> = (0..3).map(|_| region.malloc(SIZE, stream).unwrap()).collect();
    for (block, seed) in blocks.iter().zip(0..) {
        pool.write(block.address, &bytes(seed)).unwrap();
    }
    let mover = LinkMover::new(&server.engine, GPU, Priority::Normal).unwrap();
    Bed { server, pool, host, region, mover, blocks }
}

fn bytes(seed: u64) -> Vec<u8> {
    let word = |place: u64| (place ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..SIZE.get() / 8).flat_map(word).collect()
}

impl Bed {
    fn shrink(&self) -> Result<Shrunk, RegionError> {
        self.region.shrink(
            Bytes::MAX,
            &Store::Host(self.host.clone()),
            Transit { mover: &self.mover, checks: None },
        )
    }

    fn refill(&self) -> Result<Refilled, RegionError> {
        self.region.refill(Bytes::MAX, Transit { mover: &self.mover, checks: None }, &Impatient)
    }

    fn assert_bytes(&self) {
        for (block, seed) in self.blocks.iter().zip(0..) {
            let mut found = vec![0; usize::try_from(SIZE.get()).unwrap()];
            self.pool.read(block.address, &mut found).unwrap();
            assert!(found == bytes(seed), "block {seed}");
        }
    }

    fn addresses(&self) -> Vec<Address> {
        self.blocks.iter().map(|block| block.address).collect()
    }

    fn end(self) {
        let Bed { server, pool, host, region, mover, blocks } = self;
        for block in blocks {
            pool.free(block.address).unwrap();
        }
        drop((region, mover, pool, host));
        server.end();
    }
}

#[test]
fn bytes_leave_and_come_back_over_other_gpus_links() {
    let bed = bed();
    let before = bed.addresses();
    let gone = bed.shrink().unwrap();
    assert_eq!((gone.left, gone.copied), (Bytes::ZERO, Bytes::mib(72)));
    assert_eq!(bed.region.sizes().unwrap().0, Bytes::ZERO);
    let back = bed.refill().unwrap();
    assert_eq!((back.away, back.copied), (Bytes::ZERO, Bytes::mib(72)));
    assert_eq!(bed.addresses(), before);
    bed.assert_bytes();
    let done = bed.server.engine.statistics();
    for relay in 1..4 {
        let carried = |path: &&glake_transfer::PathStatistics| path.relay == DeviceId(relay);
        let ways = done.paths.iter().filter(carried).filter(|path| !path.bytes.is_zero()).count();
        assert_eq!(ways, 2, "{done:?}");
    }
    bed.end();
}

#[test]
fn a_copy_that_is_refused_anywhere_loses_nothing() {
    for error in [Injected::Failed(1), Injected::NotReady] {
        for nth in 1..12 {
            let bed = bed();
            bed.server.faults.set(&[Fault { verb: Some(Verb::Copy), when: When::Nth(nth), error }]);
            let gone = bed.shrink();
            bed.server.faults.set(&[]);
            if gone.is_err() {
                bed.shrink().unwrap();
            }
            assert_eq!(bed.region.sizes().unwrap().0, Bytes::ZERO);
            bed.server.faults.set(&[Fault { verb: Some(Verb::Copy), when: When::Nth(nth), error }]);
            let back = bed.refill();
            bed.server.faults.set(&[]);
            assert!(nth > 4 || bed.server.faults.injected() == 2, "fewer copies than that");
            if back.is_err() {
                bed.refill().unwrap();
            }
            bed.assert_bytes();
            bed.end();
        }
    }
}
