//! Blocks that were recorded on other streams: when they are their own stream's again.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use glake_device::{DeviceId, Fault, Injected, Verb, When};
use glake_tests::pool::{Fixture, Lane, Shape, Stamp, Verdicts};
use glake_tiers::{Block, PoolStream};
use glake_units::Bytes;

const US: fn(u64) -> Duration = Duration::from_micros;
/// Longer than any test lets pass.
const LONG: Duration = Duration::from_secs(3600);
const GPU: DeviceId = DeviceId(0);

/// A pool, a stream that owns blocks, one that reads them, and one whose kernel ends later than anything else.
struct Scene {
    fixture: Fixture,
    own: Lane,
    side: Lane,
    third: Lane,
    verdicts: Verdicts,
}

impl Scene {
    fn new() -> Self {
        let fixture = Fixture::new(Shape { memory: Bytes::mib(256), ..Shape::default() });
        let (own, side, third) = (fixture.lane(), fixture.lane(), fixture.lane());
        third.busy(LONG);
        Scene { fixture, own, side, third, verdicts: Verdicts::default() }
    }

    fn malloc(&self, size: Bytes) -> Block {
        self.fixture.pool.malloc(size, self.own.pool).unwrap()
    }

    /// A block that its stream writes, and that another reads for some time and was recorded on.
    fn recorded(&self, size: Bytes, seed: u64, on: &Lane, time: Duration) -> Block {
        let stamp = Stamp { block: self.malloc(size), seed };
        stamp.write(&self.own, US(1)).unwrap();
        on.follows(&self.own);
        stamp.verify(on, time, &self.verdicts).unwrap();
        assert!(self.fixture.pool.record_stream(stamp.block.address, on.pool));
        stamp.block
    }

    fn free(&self, block: Block) {
        self.fixture.pool.free(block.address).unwrap();
    }

    fn calls(&self, verb: Verb) -> u64 {
        self.fixture.recorder.counters().of(verb).calls
    }

    /// Whether the next block of the own stream is this one, which is overwritten then.
    fn comes_back(&self, block: Block) -> bool {
        let again = self.malloc(block.size);
        Stamp { block: again, seed: u64::MAX }.write(&self.own, US(1)).unwrap();
        self.free(again);
        again == block
    }

    fn now(&self) -> Duration {
        self.fixture.sim.now()
    }

    fn end(self) {
        self.fixture.run_dry();
        self.verdicts.assert_clean();
        let Scene { fixture, own, side, third, .. } = self;
        drop((own, side, third));
        fixture.end();
    }
}

#[test]
fn a_loop_beside_a_long_kernel_reserves_one_block() {
    for size in [Bytes::kib(1000), Bytes::mib(4)] {
        let scene = Scene::new();
        for seed in 0..120 {
            let block = scene.recorded(size, seed, &scene.side, US(5));
            scene.free(block);
            scene.side.synchronize();
        }
        assert!(scene.now() < LONG, "no wait for the long kernel");
        let events = scene.calls(Verb::EventCreate) - scene.calls(Verb::EventRecordContext);
        assert!(events < 10, "{events} events for 120 uses");
        assert!(
            scene.fixture.pool.reserved() <= Bytes::mib(8),
            "{} of {size}",
            scene.fixture.pool.reserved()
        );
        scene.end();
    }
}

#[test]
fn its_own_stream_has_a_block_again_when_all_recorded_streams_are_done_and_no_other_has() {
    for size in [Bytes::kib(64), Bytes::mib(8)] {
        let scene = Scene::new();
        let slow = scene.fixture.lane();
        let block = scene.recorded(size, 1, &scene.side, US(100));
        slow.follows(&scene.own);
        slow.busy(US(500));
        Stamp { block, seed: 1 }.verify(&slow, US(1), &scene.verdicts).unwrap();
        assert!(scene.fixture.pool.record_stream(block.address, slow.pool));
        assert!(scene.fixture.pool.record_stream(block.address, scene.side.pool));
        scene.free(block);
        assert_eq!(scene.calls(Verb::EventRecord), 2, "one event a stream");
        assert!(!scene.comes_back(block));
        scene.side.synchronize();
        assert!(!scene.comes_back(block), "one of two is done");
        slow.synchronize();
        scene.fixture.pool.tick().unwrap();
        let other = scene.fixture.pool.malloc(size, scene.side.pool).unwrap();
        assert_ne!(other, block, "another stream's");
        scene.free(other);
        let trimmed = scene.fixture.pool.trim(Bytes::ZERO).unwrap();
        assert_eq!(trimmed, Bytes::ZERO, "nothing is unmapped before the completion point");
        let blocks = [(); 2].map(|()| scene.malloc(size));
        assert!(blocks.contains(&block));
        for block in blocks {
            Stamp { block, seed: 2 }.write(&scene.own, US(1)).unwrap();
            scene.free(block);
        }
        assert_eq!(scene.calls(Verb::StreamWaitEvent), 0, "no stream waits");
        drop(slow);
        scene.end();
    }
}

#[test]
fn a_recorded_stream_that_waits_for_later_work_of_the_own_stream_stops_nothing() {
    let scene = Scene::new();
    let flag = scene.fixture.sim.plain_alloc(GPU, Bytes::new(4)).unwrap();
    let block = scene.malloc(Bytes::mib(8));
    scene.fixture.sim.enqueue_wait(GPU, scene.side.pool.raw, flag, 1).unwrap();
    assert!(scene.fixture.pool.record_stream(block.address, scene.side.pool));
    scene.free(block);
    assert!(!scene.comes_back(block));
    scene.fixture.sim.enqueue_signal(GPU, scene.own.pool.raw, flag, 1).unwrap();
    scene.side.synchronize();
    scene.fixture.pool.tick().unwrap();
    assert!(scene.now() < LONG);
    let blocks = [(); 2].map(|()| scene.malloc(Bytes::mib(8)));
    assert!(blocks.contains(&block));
    blocks.into_iter().for_each(|block| scene.free(block));
    scene.fixture.sim.plain_free(flag).unwrap();
    scene.end();
}

/// Where there is no other memory the host waits, for the streams that used the block alone.
#[test]
fn at_the_limit_a_request_waits_for_the_recorded_stream_and_not_for_the_device() {
    let scene = Scene::new();
    let size = Bytes::mib(128);
    let (kept, block) = (scene.malloc(size), scene.recorded(size, 1, &scene.side, US(500)));
    scene.free(block);
    assert!(scene.comes_back(block));
    assert!(scene.now() >= US(500) && scene.now() < LONG, "{:?}", scene.now());
    scene.free(kept);
    scene.end();
}

#[test]
fn a_small_block_that_is_read_comes_back_when_it_was_read() {
    let scene = Scene::new();
    let stamp = Stamp { block: scene.malloc(Bytes::kib(64)), seed: 1 };
    stamp.write(&scene.own, US(1)).unwrap();
    scene.side.follows(&scene.own);
    stamp.verify(&scene.side, US(50), &scene.verdicts).unwrap();
    scene.side.holds(&scene.fixture.pool, stamp.block);
    scene.free(stamp.block);
    assert!(!scene.comes_back(stamp.block));
    scene.side.synchronize();
    scene.fixture.pool.tick().unwrap();
    assert!(scene.comes_back(stamp.block));
    scene.end();
}

/// No event is recorded on a stream that a capture has, and while one is announced on none: the capture stays whole.
#[test]
fn a_block_that_is_freed_in_a_capture_waits_for_its_completion_point() {
    for announced in [true, false] {
        let scene = Scene::new();
        let block = scene.recorded(Bytes::mib(8), 1, &scene.side, US(5));
        let hold = announced.then(|| scene.fixture.pool.clock().hold());
        scene.side.begin_capture();
        scene.free(block);
        assert_eq!(scene.calls(Verb::EventRecord), 0);
        if announced {
            scene.fixture.pool.tick().unwrap();
        }
        scene.side.end_capture();
        drop(hold);
        scene.side.synchronize();
        scene.fixture.pool.tick().unwrap();
        assert!(!scene.comes_back(block));
        scene.fixture.run_dry();
        scene.fixture.pool.tick().unwrap();
        let blocks = [(); 2].map(|()| scene.malloc(Bytes::mib(8)));
        assert!(blocks.contains(&block) && scene.now() >= LONG);
        blocks.into_iter().for_each(|block| scene.free(block));
        scene.end();
    }
}

#[test]
fn a_recorded_stream_that_is_gone_or_whose_handle_names_another_is_behind_the_completion_point() {
    for reused in [false, true] {
        let scene = Scene::new();
        let gone = scene.fixture.lane();
        let block = scene.recorded(Bytes::mib(8), 1, &gone, US(500));
        if reused {
            // The handle means a stream that has nothing to do.
            let named = PoolStream { raw: scene.side.pool.raw, ..gone.pool };
            assert!(scene.fixture.pool.record_stream(block.address, named));
        }
        drop(gone);
        scene.free(block);
        scene.fixture.pool.tick().unwrap();
        assert!(!scene.comes_back(block), "its work still runs");
        scene.end();
    }
}

/// Each call of the driver that a free makes fails in turn: the free is done, and the block comes back with its completion point at the
/// latest.
#[test]
fn a_free_whose_event_cannot_be_recorded_is_a_free() {
    let freed = |faults: &[Fault]| {
        let scene = Scene::new();
        let block = scene.recorded(Bytes::mib(8), 1, &scene.side, US(500));
        let before = scene.fixture.calls();
        scene.fixture.faults.set(faults);
        scene.free(block);
        scene.fixture.faults.set(&[]);
        (scene.fixture.calls() - before, scene, block)
    };
    let (calls, scene, _) = freed(&[]);
    assert_eq!(calls, 4, "make an event, ask for the stream and for captures, record");
    scene.end();
    let errors = [Injected::Failed(999), Injected::OutOfMemory, Injected::NotReady, Injected::Unsupported];
    for (n, error) in (1..=calls).flat_map(|n| errors.map(|error| (n, error))) {
        let (_, scene, block) = freed(&[Fault { verb: None, when: When::Nth(n), error }]);
        scene.fixture.pool.check().unwrap();
        assert!(!scene.comes_back(block), "{error:?} of call {n}: it is read");
        scene.side.synchronize();
        scene.fixture.pool.tick().unwrap();
        assert_eq!(scene.comes_back(block), error == Injected::NotReady, "{error:?} of call {n}");
        scene.fixture.run_dry();
        scene.fixture.pool.tick().unwrap();
        let blocks = [(); 2].map(|()| scene.malloc(Bytes::mib(8)));
        assert!(blocks.contains(&block), "{error:?} of call {n}");
        blocks.into_iter().for_each(|block| scene.free(block));
        scene.end();
    }
}
