//! Copies beside a program that knows nothing of them: it sees no error, no wait and no state that it would not see without them.

use std::time::Duration;

use glake_device::owned::{DeviceSet, OwnedStream, Span};
use glake_device::{Address, DeviceId, Driver as _, Fault, Injected, PointerKind, Stream, Verb, When};
use glake_sim::SimOptions;
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, ends};
use crate::paths::{Direction, Way};
use crate::{CopyOptions, EngineOptions, Priority, UserStream};

const OTHER: DeviceId = DeviceId(1);
const SIZE: Bytes = Bytes::mib(24);
const UNWAITED: CopyOptions =
    CopyOptions { priority: Priority::Normal, verify: false, waited: false, unordered: false };

/// A device on which a kernel that touches what it may not kills its context, as on CUDA.
fn killing() -> SimOptions {
    SimOptions { faults_kill: true, ..SimOptions::default() }
}

/// Memory of a GPU that the program made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain,
    OfAPool,
    Managed,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Plain, Kind::OfAPool, Kind::Managed];

    fn make(self, fixture: &Fixture, size: Bytes) -> (Address, Span) {
        let made = match self {
            Kind::Plain => fixture.sim.plain_alloc(GPU, size),
            Kind::OfAPool => fixture.sim.async_alloc(GPU, size),
            Kind::Managed => fixture.sim.managed_alloc(GPU, size),
        };
        let start = made.unwrap();
        let reach = if self == Kind::Managed { DeviceSet::EMPTY } else { DeviceSet::of(GPU) };
        (start, fixture.sim.span(start, size, reach).unwrap())
    }
}

/// Copies to such memory and back, in one and as a list, with other bytes each time.
fn round_trips(fixture: &Fixture, kind: Kind) {
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let (start, span) = kind.make(fixture, SIZE);
    for seed in [1, 2] {
        let (source, back) = (fixture.pinned(SIZE, seed), fixture.pinned(SIZE, 77));
        let [source_span, back_span] =
            [&source, &back].map(|memory| Span::pinned(memory, Bytes::ZERO, SIZE).unwrap());
        fixture.copy(&span, &source_span, on);
        match seed {
            1 => fixture.copy(&back_span, &span, on),
            _ => {
                let part = |span: &Span, at: u64| span.part(Bytes::kib(64 * at), Bytes::kib(64)).unwrap();
                let blocks: Vec<(Span, Span)> =
                    (0..SIZE.get() >> 16).map(|at| (part(&back_span, at), part(&span, at))).collect();
                drop(fixture.engine().copy_list(&blocks, on, UNWAITED).unwrap());
            }
        }
        fixture.wait(on);
        assert!(back.as_slice() == source.as_slice(), "{kind:?} {seed}");
    }
    drop((stream, span));
    fixture.sim.plain_free(start).unwrap();
}

#[test]
fn memory_of_every_kind_is_copied_and_no_context_dies() {
    for kind in Kind::ALL {
        let fixture = Fixture::on("h200x4", EngineOptions::default(), killing());
        round_trips(&fixture, kind);
        let staged = fixture.carried(Way::Staged);
        assert_eq!(staged.is_zero(), kind == Kind::Managed, "{kind:?}: {staged} through slots");
        fixture.gpus.iter().for_each(|gpu| fixture.driver.context_synchronize(gpu).unwrap());
        fixture.end();
    }
}

#[test]
fn the_program_s_peer_access_is_its_own() {
    let fixture = Fixture::on("h200x4", EngineOptions::default(), killing());
    round_trips(&fixture, Kind::Plain);
    assert_eq!(fixture.sim.program_enable_peer(OTHER, GPU), 0, "nobody had enabled it");
    round_trips(&fixture, Kind::Plain);
    assert_eq!(fixture.sim.program_disable_peer(OTHER, GPU), 0);
    round_trips(&fixture, Kind::Plain);
    round_trips(&fixture, Kind::OfAPool);
    assert_eq!(fixture.sim.program_disable_peer(OTHER, GPU), 705, "nobody has enabled it since");
    fixture.end();
}

/// A stream that does not go on before it is told, and what tells it.
fn held(fixture: &Fixture, device: DeviceId) -> (OwnedStream, UserStream, impl FnOnce()) {
    let word = fixture.pinned(Bytes::mib(2), 0);
    let stream = fixture.stream(device);
    fixture.sim.enqueue_wait(device, stream.id(), word.start(), 4242).unwrap();
    let on = fixture.user(device, stream.id());
    // Streams of one GPU may share a queue.
    let (sim, other) = (fixture.sim.clone(), fixture.stream(OTHER));
    let release = move || {
        sim.enqueue_signal(OTHER, other.id(), word.start(), 4242).unwrap();
        sim.stream_synchronize(OTHER, other.id()).unwrap();
        drop((other, word));
    };
    (stream, on, release)
}

#[test]
fn no_gpu_waits_for_the_work_of_another() {
    for way in [Way::ZeroStaging, Way::Staged] {
        for hardware_queues in [None, Some(1)] {
            let device = SimOptions { hardware_queues, ..killing() };
            let fixture = Fixture::on("h200x4", EngineOptions::default(), device);
            let (mapped, (start, plain)) = (fixture.mapped(GPU, SIZE), Kind::Plain.make(&fixture, SIZE));
            let span =
                if way == Way::Staged { plain.clone() } else { mapped.span(Bytes::ZERO, SIZE).unwrap() };
            let memory = fixture.pinned(SIZE, 5);
            let host = Span::pinned(&memory, Bytes::ZERO, SIZE).unwrap();
            let (stream, on, release) = held(&fixture, GPU);
            // Twice, so that there is a lane set.
            for _ in 0..2 {
                drop(fixture.engine().copy(&span, &host, on, UNWAITED).unwrap());
            }
            assert!(fixture.engine().statistics().split_copies > 0);
            // On the held stream too: memory of another GPU, whose own work goes on.
            let there = fixture.sim.plain_alloc(OTHER, SIZE).unwrap();
            let theirs = fixture.sim.span(there, SIZE, DeviceSet::of(OTHER)).unwrap();
            drop(fixture.engine().copy(&theirs, &host, on, UNWAITED).unwrap());
            // The simulator would say that nothing can complete these: work of other GPUs, also enqueued behind the copy.
            for other in fixture.gpus.without(DeviceSet::of(GPU)).iter() {
                let theirs = fixture.stream(other);
                fixture
                    .sim
                    .enqueue_kernel(other, theirs.id(), &[], &[], Duration::from_micros(5), |_| {})
                    .unwrap();
                theirs.synchronize().unwrap();
                fixture.driver.context_synchronize(other).unwrap();
            }
            release();
            stream.synchronize().unwrap();
            assert!(fixture.holds(&span, memory.as_slice()));
            assert!(fixture.holds(&theirs, memory.as_slice()));
            fixture.sim.plain_free(there).unwrap();
            drop((stream, mapped, plain, span, host));
            fixture.sim.plain_free(start).unwrap();
            fixture.end();
        }
    }
}

#[test]
fn a_gpu_does_not_wait_for_another_s_stream_that_copies_its_memory() {
    // The engine has a stream of its own on the GPU that the program has to itself.
    let fixture = Fixture::made("h200x4", EngineOptions::default(), killing());
    let (stream, on, release) = held(&fixture, OTHER);
    let (mapped, memory) = (fixture.mapped(GPU, SIZE), fixture.pinned(SIZE, 5));
    let (gpu, host) =
        (mapped.span(Bytes::ZERO, SIZE).unwrap(), Span::pinned(&memory, Bytes::ZERO, SIZE).unwrap());
    for direction in Direction::BOTH {
        let (to, from) = ends(direction, &host, &gpu);
        drop(fixture.engine().copy(to, from, on, UNWAITED).unwrap());
        let part = |span: &Span, at: u64| span.part(Bytes::kib(64 * at), Bytes::kib(64)).unwrap();
        let blocks: Vec<_> = (0..SIZE.get() >> 16).map(|at| (part(to, at), part(from, at))).collect();
        drop(fixture.engine().copy_list(&blocks, on, UNWAITED).unwrap());
        // The simulator would say that nothing can complete it.
        fixture.sim.enqueue_kernel(GPU, Stream::LEGACY, &[], &[], Duration::from_micros(5), |_| {}).unwrap();
        fixture.driver.context_synchronize(GPU).unwrap();
    }
    release();
    stream.synchronize().unwrap();
    assert!(fixture.holds(&gpu, memory.as_slice()));
    drop((stream, mapped, gpu, host));
    fixture.end();
}

#[test]
fn points_cover_what_another_gpu_s_stream_copies_also_where_the_call_fails() {
    for failing in [false, true] {
        let fixture = Fixture::made("h200x4", EngineOptions::default(), killing());
        let (mapped, memory) = (fixture.mapped(GPU, SIZE), fixture.pinned(SIZE, 5));
        let (gpu, host) =
            (mapped.span(Bytes::ZERO, SIZE).unwrap(), Span::pinned(&memory, Bytes::ZERO, SIZE).unwrap());
        let part = |span: &Span, at: u64| span.part(Bytes::kib(64 * at), Bytes::kib(64)).unwrap();
        let to = [part(&gpu, 0), part(&gpu, 1)];
        let (stream, on, release) = held(&fixture, OTHER);
        let second = Fault { verb: Some(Verb::Copy), when: When::From(2), error: Injected::Failed(1) };
        fixture.faults.set(&[second][..usize::from(failing)]);
        let copied = fixture.engine().copy_to_all(&to, &part(&host, 0), on, UNWAITED);
        fixture.faults.set(&[]);
        assert_eq!(copied.is_err(), failing);
        let mut point = fixture.completion_events.record(DeviceSet::of(GPU)).unwrap();
        assert!(point.poll().unwrap().is_none(), "a copy of its memory waits in the stream");
        release();
        stream.synchronize().unwrap();
        assert!(point.poll().unwrap().is_some());
        drop((stream, mapped, memory, gpu, host, to, point, copied));
        fixture.end();
    }
}

/// How deep the queues are behind a stream that is held back, after so many lists of so many ranges of a size.
fn deepest_of_lists(way: Way, (lists, ranges): (u64, u64), size: Bytes, priority: Priority) -> u64 {
    let large = Bytes::new(ranges * size.get());
    let device = SimOptions { queue: Some(1000), times_only: true, ..killing() };
    let fixture = Fixture::on("h200x4", EngineOptions::default(), device);
    let (mapped, (start, plain)) = (fixture.mapped(GPU, large), Kind::Plain.make(&fixture, large));
    let gpu = if way == Way::Staged { plain.clone() } else { mapped.span(Bytes::ZERO, large).unwrap() };
    let memory = fixture.pinned(large, 5);
    let host = Span::pinned(&memory, Bytes::ZERO, large).unwrap();
    let mut deepest = 0;
    for direction in Direction::BOTH {
        let (stream, on, release) = held(&fixture, GPU);
        fixture.sim.reset_deepest_queue();
        let (to, from) = ends(direction, &host, &gpu);
        let part = |span: &Span, at: u64| span.part(Bytes::new(at * size.get()), size).unwrap();
        let list: Vec<_> = (0..ranges).map(|at| (part(to, at), part(from, at))).collect();
        for _ in 0..lists {
            let options = CopyOptions { priority, ..UNWAITED };
            drop(fixture.engine().copy_list(&list, on, options).unwrap());
        }
        deepest = deepest.max(fixture.sim.deepest_queue());
        release();
        stream.synchronize().unwrap();
    }
    drop((mapped, plain, gpu, host));
    fixture.sim.plain_free(start).unwrap();
    deepest
}

#[test]
fn no_queue_is_filled_by_lists_of_large_ranges() {
    for way in [Way::ZeroStaging, Way::Staged] {
        for priority in [Priority::Normal, Priority::Background] {
            for ranges in [30, 600] {
                let deepest = deepest_of_lists(way, (1, ranges), Bytes::mib(1), priority);
                assert!(deepest < 500, "{way:?} {priority:?}: {deepest} of {ranges} ranges");
            }
        }
        // So many extents of a region may be on their way in.
        let deepest = deepest_of_lists(way, (24, 1), Bytes::mib(128), Priority::Normal);
        assert!(deepest < 700, "{way:?}: {deepest}");
    }
}

/// One range of a list that is small takes no link from the others.
#[test]
fn a_small_range_goes_with_the_large_ones() {
    let fixture = Fixture::on("h200x4", EngineOptions::default(), killing());
    let (start, gpu) = Kind::Plain.make(&fixture, Bytes::mib(66));
    let memory = fixture.pinned(Bytes::mib(66), 5);
    let host = Span::pinned(&memory, Bytes::ZERO, Bytes::mib(66)).unwrap();
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let part = |at, size| (gpu.part(at, size).unwrap(), host.part(at, size).unwrap());
    let list = [part(Bytes::ZERO, Bytes::mib(64)), part(Bytes::mib(64), Bytes::kib(512))];
    for _ in 0..5 {
        drop(fixture.engine().copy_list(&list, on, UNWAITED).unwrap());
        stream.synchronize().unwrap();
    }
    assert!(fixture.carried(Way::Staged) > Bytes::mib(64));
    drop((list, stream, gpu, host));
    fixture.sim.plain_free(start).unwrap();
    fixture.end();
}

#[test]
fn no_queue_is_filled_behind_a_stream_that_is_held_back() {
    let large = Bytes::mib(512);
    for (way, direction) in
        [Way::ZeroStaging, Way::Staged].into_iter().flat_map(|way| Direction::BOTH.map(|to| (way, to)))
    {
        for priority in [Priority::Normal, Priority::Background] {
            let device = SimOptions { queue: Some(1000), ..killing() };
            let fixture = Fixture::on("h200x4", EngineOptions::default(), device);
            let (mapped, (start, plain)) = (fixture.mapped(GPU, large), Kind::Plain.make(&fixture, large));
            let gpu =
                if way == Way::Staged { plain.clone() } else { mapped.span(Bytes::ZERO, large).unwrap() };
            let memory = fixture.pinned(large, 5);
            let host = Span::pinned(&memory, Bytes::ZERO, large).unwrap();
            let (stream, on, release) = held(&fixture, GPU);
            fixture.sim.reset_deepest_queue();
            let (to, from) = ends(direction, &host, &gpu);
            // A call that finds a queue full would be told that nothing can complete it.
            drop(fixture.engine().copy(to, from, on, CopyOptions { priority, ..UNWAITED }).unwrap());
            let deepest = fixture.sim.deepest_queue();
            // What joins the lanes comes on top of what one of them holds.
            assert!(deepest <= 256 + 16, "{way:?} {direction:?} {priority:?}: {deepest}");
            release();
            stream.synchronize().unwrap();
            if direction == Direction::ToGpu {
                assert!(fixture.holds(&gpu, memory.as_slice()), "{way:?} {priority:?}");
            }
            drop((stream, mapped, plain, gpu, host));
            fixture.sim.plain_free(start).unwrap();
            fixture.end();
        }
    }
}

#[test]
fn links_of_gpus_that_the_program_uses_are_its_own() {
    let fixture = Fixture::made("h200x4", EngineOptions::default(), killing());
    let (mapped, memory) = (fixture.mapped(GPU, SIZE), fixture.pinned(SIZE, 5));
    let (to, from) =
        (mapped.span(Bytes::ZERO, SIZE).unwrap(), Span::pinned(&memory, Bytes::ZERO, SIZE).unwrap());
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let relays = || {
        let before = fixture.engine().statistics().paths;
        fixture.copy(&to, &from, on);
        fixture.wait(on);
        let bytes = |path: &crate::PathStatistics| {
            let earlier = before.iter().find(|other| (other.relay, other.way) == (path.relay, path.way));
            path.bytes.saturating_sub(earlier.map_or(Bytes::ZERO, |earlier| earlier.bytes))
        };
        let after = fixture.engine().statistics().paths;
        let used = after.iter().filter(|path| !bytes(path).is_zero()).map(|path| path.relay);
        used.collect::<DeviceSet>().without(DeviceSet::of(GPU))
    };
    let all = fixture.gpus.without(DeviceSet::of(GPU));
    // Never another link; and all of these as soon as the thread that makes lanes has run.
    let takes = |expected: DeviceSet| {
        let is_all = |used: DeviceSet| {
            assert_eq!(used.without(expected), DeviceSet::EMPTY);
            used == expected
        };
        assert!((0..1000).any(|_| is_all(relays())), "not all of {expected:?}");
    };
    takes(all);
    // The first sign that the program uses one: an answer that is older than a millisecond is asked for again.
    fixture.sim.hold_context(OTHER).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    takes(all.without(DeviceSet::of(OTHER)));
    // What the engine had there goes back.
    assert_eq!(fixture.engine().unsuspended(Duration::from_secs(60)), []);
    let own = fixture.engine().shared.contexts.own_driver();
    assert_eq!(own.has_context(OTHER).ok(), Some(false));
    // It does not come back with those that rested.
    fixture.engine().suspend(all);
    assert_eq!(fixture.engine().unsuspended(Duration::from_secs(60)), []);
    let (done, ready) = std::sync::mpsc::channel();
    fixture.engine().resume(move |_| done.send(()).unwrap()).unwrap();
    ready.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(fixture.engine().relays(), all.without(DeviceSet::of(OTHER)));
    takes(all.without(DeviceSet::of(OTHER)));
    drop((stream, mapped, to, from));
    fixture.end();
}

#[test]
fn a_gpu_that_the_program_used_before_is_no_relay() {
    let fixture = Fixture::made("h200x4", EngineOptions::default(), killing());
    assert_eq!(fixture.engine().relays(), fixture.gpus.without(DeviceSet::of(GPU)));
    let own = fixture.engine().shared.contexts.own_driver();
    assert_eq!(own.has_context(GPU).ok(), Some(false), "no context of ours is on the program's GPU");
    fixture.end();
}

#[test]
fn a_synchronous_copy_does_not_wait_for_a_lease_that_has_become_another_stream_s() {
    let fixture = Fixture::new("h200x4");
    let (mapped, memory) = (fixture.mapped(GPU, SIZE), fixture.pinned(SIZE, 5));
    let (to, from) =
        (mapped.span(Bytes::ZERO, SIZE).unwrap(), Span::pinned(&memory, Bytes::ZERO, SIZE).unwrap());
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let parts = fixture.engine().spans.enqueue(&to, &from, on, Priority::Normal).unwrap().unwrap();
    fixture.wait(on);
    // Another stream's copy has the lane set now, and waits with it.
    let lane_set = parts.lane_set.upgrade().unwrap();
    let mut state = lane_set.state.lock();
    lane_set.set_owner(&mut state, Some(glake_device::StreamId(4_242)));
    fixture.engine().blocking.repair(&parts, &to, &from, on).unwrap();
    lane_set.set_owner(&mut state, None);
    drop(state);
    assert!(fixture.holds(&to, memory.as_slice()));
    drop((lane_set, parts, stream, mapped, to, from));
    fixture.end();
}

#[test]
fn what_is_mapped_is_told_apart_from_what_moves() {
    let fixture = Fixture::new("h200x4");
    for kind in Kind::ALL {
        let (start, span) = kind.make(&fixture, Bytes::mib(2));
        let is_managed = fixture.driver.pointer_attributes(start).unwrap().kind == PointerKind::Managed;
        assert_eq!(is_managed, kind == Kind::Managed);
        drop(span);
        fixture.sim.plain_free(start).unwrap();
    }
    fixture.end();
}
