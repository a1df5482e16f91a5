//! Plain memory: blocks at addresses of the driver's own, for IPC handles and registrations.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use glake_device::{Address, DeviceId, Driver, PointerKind, Verb};
use glake_stitch::{Allocator, DomainId, DomainOptions};
use glake_tests::pool::{Fixture, Lane, Shape, Stamp};
use glake_tiers::{Block, PoolError};
use glake_units::Bytes;

const GPU: DeviceId = DeviceId(0);

struct Scene {
    fixture: Fixture,
    lane: Lane,
}

impl Scene {
    fn new() -> Scene {
        let fixture = Fixture::new(Shape::default());
        Scene { lane: fixture.lane(), fixture }
    }

    fn plain(&self, domain: DomainId, size: Bytes) -> Result<Block, PoolError> {
        let block = self.fixture.pool.malloc_plain(domain, size, self.lane.pool)?;
        Stamp { block, seed: block.address.0 }.write_now(&self.fixture.pool)?;
        Ok(block)
    }

    fn assert_whole(&self, block: Block) {
        Stamp { block, seed: block.address.0 }.assert_on(&self.fixture.pool);
    }

    fn free(&self, block: Block) {
        self.assert_whole(block);
        self.fixture.pool.free(block.address).unwrap();
    }

    fn count(&self, verb: Verb) -> u64 {
        self.fixture.recorder.counters().of(verb).calls
    }

    fn end(self) {
        drop(self.lane);
        self.fixture.end();
    }
}

const DEFAULT: DomainId = Allocator::default_domain();

#[test]
fn only_plain_blocks_have_an_ipc_handle_and_a_range_of_their_own() {
    let scene = Scene::new();
    let sim = &scene.fixture.sim;
    let mapped = scene.fixture.pool.malloc(Bytes::mib(9), scene.lane.pool).unwrap();
    let plain = scene.plain(DEFAULT, Bytes::mib(9)).unwrap();
    let small = scene.plain(DEFAULT, Bytes::kib(3)).unwrap();
    assert!(sim.ipc_handle(mapped.address).is_err());
    let extent = sim.pointer_attributes(mapped.address).unwrap().range.unwrap().1;
    assert!(extent < mapped.size, "the range of a mapped block is one extent: {extent}");
    for block in [plain, small] {
        let (start, size) = sim.ipc_handle(block.address).unwrap();
        assert!(start <= block.address && block.address.0 + block.size.get() <= start.0 + size.get());
        let last = Address(block.address.0 + block.size.get() - 1);
        let told = sim.pointer_attributes(last).unwrap();
        assert_eq!(told.range, Some((start, size)), "one range covers the block");
        assert_eq!(told.kind, PointerKind::Device { device: GPU, mapped: false });
        assert_eq!(scene.fixture.pool.find(last).unwrap().address, block.address);
        assert_eq!(scene.fixture.pool.find(last).unwrap().domain, DEFAULT);
    }
    let shared = scene.fixture.pool.export(plain.address, 0..1).unwrap_err();
    assert!(matches!(shared, PoolError::Plain { address, .. } if address == plain.address), "{shared}");
    let held = scene.fixture.pool.reserved();
    assert_eq!(
        sim.memory_info(GPU).unwrap().total.get() - sim.memory_info(GPU).unwrap().free.get(),
        held.get()
    );
    assert!(
        scene.fixture.pool.report().plain_bytes() >= Bytes::mib(11)
            && scene.fixture.pool.report().plain_bytes() < held
    );
    scene.fixture.pool.free(mapped.address).unwrap();
    [plain, small].into_iter().for_each(|block| scene.free(block));
    scene.end();
}

#[test]
fn a_freed_plain_block_is_used_again_and_trimmed_after_its_last_use() {
    let scene = Scene::new();
    let block = scene.plain(DEFAULT, Bytes::mib(8)).unwrap();
    scene.lane.busy(Duration::from_millis(1));
    scene.free(block);
    let again = scene.plain(DEFAULT, Bytes::mib(8)).unwrap();
    assert_eq!(again.address, block.address);
    let other = scene.fixture.lane();
    scene.free(again);
    let elsewhere = scene.fixture.pool.malloc_plain(DEFAULT, Bytes::mib(8), other.pool).unwrap();
    assert_ne!(elsewhere.address, block.address, "the other stream's work may still run");
    assert_eq!(scene.count(Verb::AllocPlain), 2);
    scene.fixture.pool.trim(Bytes::ZERO).unwrap();
    assert_eq!(scene.count(Verb::FreePlain), 0, "its stream still uses the freed one");
    scene.fixture.run_dry();
    scene.fixture.pool.settle().unwrap();
    scene.fixture.pool.trim(Bytes::ZERO).unwrap();
    assert_eq!(scene.count(Verb::FreePlain), 1);
    assert!(matches!(scene.fixture.pool.free(block.address), Err(PoolError::UnknownAddress { .. })));
    scene.fixture.pool.free(elsewhere.address).unwrap();
    drop(other);
    scene.end();
}

#[test]
fn mapped_and_plain_memory_make_room_for_each_other() {
    let scene = Scene::new();
    let pool = &scene.fixture.pool;
    let mapped = pool.malloc(Bytes::mib(48), scene.lane.pool).unwrap();
    let refused = scene.plain(DEFAULT, Bytes::mib(30)).unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    pool.free(mapped.address).unwrap();
    let plain = scene.plain(DEFAULT, Bytes::mib(30)).unwrap();
    assert!(pool.malloc(Bytes::mib(48), scene.lane.pool).unwrap_err().is_out_of_memory());
    scene.free(plain);
    let mapped = pool.malloc(Bytes::mib(48), scene.lane.pool).unwrap();
    assert_eq!(pool.report().plain_bytes(), Bytes::ZERO);
    pool.free(mapped.address).unwrap();
    scene.end();
}

#[test]
fn plain_memory_of_a_captured_pool_stays_until_the_pool_is_released() {
    let scene = Scene::new();
    let pool = &scene.fixture.pool;
    let passed = scene.plain(DEFAULT, Bytes::mib(4)).unwrap();
    scene.free(passed);
    pool.settle().unwrap();
    let domain = pool.add_domain(DomainOptions::private_pool(), None);
    let hold = pool.clock().hold();
    scene.lane.begin_capture();
    let captured = pool.malloc_plain(domain, Bytes::mib(6), scene.lane.pool).unwrap();
    pool.free(captured.address).unwrap();
    let again = pool.malloc_plain(domain, Bytes::mib(6), scene.lane.pool).unwrap();
    assert_eq!(again.address, captured.address);
    pool.free(again.address).unwrap();
    // The driver frees nothing during a capture.
    pool.trim(Bytes::ZERO).unwrap();
    assert_eq!(scene.count(Verb::FreePlain), 0);
    scene.lane.end_capture();
    drop(hold);
    scene.fixture.run_dry();
    pool.settle().unwrap();
    pool.tick().unwrap();
    assert_eq!(scene.count(Verb::FreePlain), 1, "the memory that a capture kept from being freed");
    assert!(pool.report().plain_bytes() >= Bytes::mib(6), "a replay writes to it");
    pool.release_domain(domain).unwrap();
    pool.settle().unwrap();
    pool.trim(Bytes::ZERO).unwrap();
    assert_eq!(pool.report().plain_bytes(), Bytes::ZERO);
    assert!(!pool.has_domain(domain));
    scene.end();
}

#[test]
fn a_checkpoint_holds_plain_blocks_too() {
    let scene = Scene::new();
    let pool = &scene.fixture.pool;
    let domain = pool.add_domain(DomainOptions::private_pool(), None);
    let plain = scene.plain(domain, Bytes::mib(3)).unwrap();
    let mapped = pool.malloc_in(domain, Bytes::mib(5), scene.lane.pool).unwrap();
    let then = pool.checkpoint(domain).unwrap();
    scene.free(plain);
    pool.free(mapped.address).unwrap();
    let other = scene.plain(domain, Bytes::mib(2)).unwrap();
    let restored = pool.restore(domain, &then).unwrap();
    assert_eq!((restored.freed.len(), restored.claimed.len()), (1, 2));
    assert_eq!(pool.blocks_of(domain), then.blocks());
    assert!(pool.block(other.address).is_none() || other.address == plain.address);
    pool.free(plain.address).unwrap();
    pool.settle().unwrap();
    pool.trim_domain(domain).unwrap();
    let before = pool.blocks_of(domain);
    assert!(pool.restore(domain, &then).is_err(), "its plain memory is gone");
    assert_eq!(pool.blocks_of(domain), before);
    pool.free(mapped.address).unwrap();
    pool.release_domain(domain).unwrap();
    scene.end();
}

/// A checkpoint converts plain addresses, which knows the domains of plain memory; the first plain block of a domain adds one.
#[test]
fn checkpoints_and_first_plain_blocks_stop_each_other_never() {
    let scene = Scene::new();
    let pool = &scene.fixture.pool;
    let domain = pool.add_domain(DomainOptions::private_pool(), None);
    let block = scene.plain(domain, Bytes::mib(3)).unwrap();
    std::thread::scope(|threads| {
        threads
            .spawn(|| (0..2000).for_each(|_| assert_eq!(pool.checkpoint(domain).unwrap().blocks().len(), 1)));
        for _ in 0..300 {
            let other = pool.add_domain(DomainOptions::default(), None);
            let first = pool.malloc_plain(other, Bytes::mib(2), scene.lane.pool).unwrap();
            pool.free(first.address).unwrap();
            pool.release_domain(other).unwrap();
            pool.settle().unwrap();
            pool.trim(Bytes::ZERO).unwrap();
        }
    });
    scene.free(block);
    pool.release_domain(domain).unwrap();
    scene.end();
}
