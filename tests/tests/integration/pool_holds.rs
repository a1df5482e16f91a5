//! Read holds: blocks that are freed while something beside their stream reads them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::OwnedEvent;
use glake_device::{Address, DeviceId, EventKind, StreamId};
use glake_tests::pool::{Fixture, Lane, Shape, Stamp, Verdicts};
use glake_tiers::{Block, PoolError};
use glake_units::Bytes;

const US: fn(u64) -> Duration = Duration::from_micros;
const GPU: DeviceId = DeviceId(0);

struct Scene {
    fixture: Fixture,
    /// The program's stream, and the queue that copies out.
    own: Lane,
    queue: Lane,
    verdicts: Verdicts,
}

impl Scene {
    fn new() -> Self {
        let fixture = Fixture::tuned(Shape::default(), |settings| settings.near_limit = 1.0);
        let (own, queue) = (fixture.lane(), fixture.lane());
        Scene { fixture, own, queue, verdicts: Verdicts::default() }
    }

    fn malloc(&self, mib: u64) -> Block {
        self.fixture.pool.malloc(Bytes::mib(mib), self.own.pool).unwrap()
    }

    /// A block that was written, is read by the queue for so long, held until then, and freed.
    fn freed(&self, mib: u64, seed: u64, time: Duration) -> Block {
        let stamp = Stamp { block: self.malloc(mib), seed };
        stamp.write(&self.own, US(1)).unwrap();
        self.queue.follows(&self.own);
        stamp.verify(&self.queue, time, &self.verdicts).unwrap();
        self.queue.holds(&self.fixture.pool, stamp.block);
        self.fixture.pool.free(stamp.block.address).unwrap();
        stamp.block
    }

    /// Overwrites a block with something else: the device refuses it where that is not ordered behind who reads.
    fn poison(&self, block: Block) {
        Stamp { block, seed: u64::MAX }.write(&self.own, US(1)).unwrap();
    }

    fn now(&self) -> Duration {
        self.fixture.sim.now()
    }

    fn end(self) {
        self.fixture.run_dry();
        self.verdicts.assert_clean();
        let Scene { fixture, own, queue, .. } = self;
        drop((own, queue));
        fixture.end();
    }
}

#[test]
fn the_stream_has_its_block_again_at_once_and_waits_on_the_gpu() {
    let scene = Scene::new();
    let gone = scene.freed(40, 1, US(500));
    let small = scene.malloc(20);
    assert_eq!(scene.fixture.pool.counters().hold_waits, 0, "there was other memory");
    let again = scene.malloc(40);
    assert_eq!((again, scene.now()), (gone, Duration::ZERO), "without a wait on the host");
    assert_eq!(scene.fixture.pool.counters().hold_waits, 1);
    scene.poison(again);
    scene.own.synchronize();
    assert!(scene.now() >= US(502), "{:?}: it ran before the copy was done", scene.now());
    assert_eq!(scene.fixture.pool.report().gpu_waits().count, 1);
    for block in [small, again] {
        scene.fixture.pool.free(block.address).unwrap();
    }
    scene.end();
}

#[test]
fn once_the_copy_is_done_it_is_memory_as_any_other() {
    let scene = Scene::new();
    let gone = scene.freed(8, 1, US(50));
    scene.fixture.run_dry();
    assert_eq!(scene.fixture.pool.read_holds().count(), 1);
    scene.fixture.pool.tick().unwrap();
    assert_eq!(scene.fixture.pool.read_holds().count(), 0);
    let again = scene.malloc(8);
    assert_eq!((again, scene.fixture.pool.counters().hold_waits), (gone, 0));
    scene.poison(again);
    scene.fixture.pool.free(again.address).unwrap();
    scene.end();
}

#[test]
fn nobody_else_has_it_and_nothing_is_unmapped_before_the_copy_is_done() {
    let scene = Scene::new();
    let other = scene.fixture.lane();
    scene.freed(40, 1, US(500));
    scene.fixture.pool.tick().unwrap();
    assert_eq!(scene.fixture.pool.trim(Bytes::ZERO).unwrap(), Bytes::ZERO, "nothing goes");
    assert_eq!(scene.now(), Duration::ZERO);
    let block = scene.fixture.pool.malloc(Bytes::mib(40), other.pool).unwrap();
    assert!(scene.now() >= US(500), "another stream waits for its completion point");
    Stamp { block, seed: 2 }.write(&other, US(1)).unwrap();
    scene.fixture.pool.free(block.address).unwrap();
    drop(other);
    scene.end();
}

#[test]
fn held_blocks_are_stitched_where_the_limit_asks() {
    let scene = Scene::new();
    let keep: Vec<Block> = (0..4)
        .map(|seed| {
            scene.freed(8, seed, US(100));
            scene.malloc(8)
        })
        .collect();
    let before = scene.fixture.pool.read_holds().freed_bytes();
    assert_eq!(before, Bytes::mib(32));
    let block = scene.malloc(28);
    assert_eq!((scene.now(), scene.fixture.pool.counters().stitches), (Duration::ZERO, 1));
    scene.poison(block);
    scene.own.synchronize();
    for block in keep.into_iter().chain([block]) {
        scene.fixture.pool.free(block.address).unwrap();
    }
    scene.end();
}

#[test]
fn a_stitched_block_is_held_at_all_its_addresses() {
    let scene = Scene::new();
    let blocks: Vec<Block> = (0..8).map(|_| scene.malloc(8)).collect();
    for index in [0, 2, 4] {
        scene.fixture.pool.free(blocks[index].address).unwrap();
    }
    scene.fixture.pool.settle().unwrap();
    let stitched = scene.freed(20, 7, US(300));
    assert_eq!(scene.fixture.pool.counters().stitches, 1);
    assert!(stitched.address.0 > blocks[7].address.0);
    assert_eq!(scene.fixture.pool.trim(Bytes::ZERO).unwrap(), Bytes::ZERO, "its alias is in use");
    let home = scene.malloc(8);
    scene.poison(home);
    scene.own.synchronize();
    scene.fixture.pool.free(home.address).unwrap();
    for index in [1, 3, 5, 6, 7] {
        scene.fixture.pool.free(blocks[index].address).unwrap();
    }
    scene.end();
}

#[test]
fn a_hold_is_of_the_block_that_was_meant() {
    let scene = Scene::new();
    let holds = scene.fixture.pool.read_holds();
    let block = scene.malloc(8);
    let id = holds.identify(block.address, block.size).unwrap();
    let inner = Address(block.address.0 + 4096);
    assert_eq!(holds.identify(inner, Bytes::kib(1)).unwrap(), id);
    let outside = holds.identify(inner, block.size).unwrap_err();
    assert!(matches!(outside, PoolError::OutsideBlock { .. }), "{outside}");
    scene.fixture.pool.free(block.address).unwrap();
    let again = scene.malloc(8);
    assert_eq!(again, block);
    assert_ne!(holds.identify(again.address, again.size).unwrap(), id);
    let event = Arc::new(OwnedEvent::new(&scene.fixture.driver, GPU, EventKind::Plain).unwrap());
    let over = holds.hold(id, &event, StreamId(scene.queue.pool.key.0)).unwrap_err();
    assert!(matches!(over, PoolError::UnknownAddress { address, .. } if address == block.address), "{over}");
    assert_eq!(holds.count(), 0);
    scene.fixture.pool.free(again.address).unwrap();
    assert!(holds.identify(block.address, Bytes::new(1)).is_err());
    drop(event);
    scene.end();
}

#[test]
fn a_capturing_stream_is_given_nothing_that_is_held() {
    let scene = Scene::new();
    let gone = scene.freed(40, 1, US(500));
    let hold = scene.fixture.pool.clock().hold();
    scene.own.begin_capture();
    let refused = scene.fixture.pool.malloc(Bytes::mib(40), scene.own.pool).unwrap_err();
    assert!(matches!(refused, PoolError::CaptureOpen { .. }), "{refused}");
    assert_eq!(scene.fixture.pool.read_holds().freed_bytes(), Bytes::mib(40), "it is held as before");
    scene.own.end_capture();
    drop(hold);
    let again = scene.malloc(40);
    assert_eq!(again, gone);
    scene.poison(again);
    scene.fixture.pool.free(again.address).unwrap();
    scene.end();
}

/// Of two queues' holds, after each thing that a GPU does: those that have passed are known, and no other.
#[test]
fn what_has_passed_is_known_however_many_are_held() {
    let scene = Scene::new();
    let other = scene.fixture.lane();
    let holds = scene.fixture.pool.read_holds();
    let block = scene.malloc(2);
    let mut events = Vec::new();
    for number in 0..60 {
        let lane = if number % 3 == 0 { &other } else { &scene.queue };
        lane.busy(US(1 + number % 7));
        let event = Arc::new(OwnedEvent::new(&scene.fixture.driver, GPU, EventKind::Plain).unwrap());
        event.record(lane.pool.raw).unwrap();
        let of = holds.identify(block.address, block.size).unwrap();
        holds.hold(of, &event, StreamId(lane.pool.key.0)).unwrap();
        events.push(event);
    }
    loop {
        let done = !scene.fixture.sim.step();
        // Seldom, so that often many have passed, and often few.
        if done || scene.now().as_micros().is_multiple_of(5) {
            let left = events.iter().filter(|event| !event.is_passed().unwrap()).count();
            scene.fixture.pool.tick().unwrap();
            assert_eq!(holds.count(), left, "{:?}", scene.now());
        }
        if done {
            break;
        }
    }
    scene.fixture.pool.free(block.address).unwrap();
    drop((events, other));
    scene.end();
}
