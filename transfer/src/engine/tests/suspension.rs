//! Relays that are suspended and resumed: their contexts go and come back, whatever is copied meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use glake_device::owned::{DeviceSet, OwnedStream, Span};
use glake_device::{DeviceId, Driver, Fault, Injected, Verb, When};
use glake_sim::Clock;
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, ends};
use crate::paths::{Direction, Way};
use crate::{CopyOptions, Engine, EngineOptions, UnsuspendedRelay, UserStream, WhyUnsuspended};

const SIZE: Bytes = Bytes::mib(8);
const LONG: Duration = Duration::from_secs(20);

impl Fixture {
    /// All GPUs but the first.
    fn others(&self) -> DeviceSet {
        self.gpus.without(DeviceSet::of(GPU))
    }

    fn suspend(&self) -> Vec<UnsuspendedRelay> {
        self.engine().suspend(self.others());
        self.engine().unsuspended(LONG)
    }

    fn resume(&self) {
        let (done, ready) = mpsc::channel();
        self.engine().resume(move |_| done.send(()).unwrap()).unwrap();
        ready.recv_timeout(LONG).unwrap();
    }

    /// Where the engine has contexts of its own.
    fn contexts(&self) -> DeviceSet {
        let own = self.engine().shared.contexts.own_driver();
        self.gpus.iter().filter(|gpu| own.has_context(*gpu).unwrap()).collect()
    }

    fn free(&self, device: DeviceId) -> Bytes {
        self.sim.memory_info(device).unwrap().free
    }
}

/// What a copy to the GPU needs.
struct Upload {
    stream: OwnedStream,
    on: UserStream,
    to: Span,
    from: Span,
}

impl Upload {
    fn new(fixture: &Fixture) -> Upload {
        let stream = fixture.stream(GPU);
        Upload {
            on: fixture.user(GPU, stream.id()),
            to: fixture.mapped(GPU, SIZE).span(Bytes::ZERO, SIZE).unwrap(),
            from: Span::pinned(&fixture.pinned(SIZE, 3), Bytes::ZERO, SIZE).unwrap(),
            stream,
        }
    }
}

/// Copies of every kind to a GPU and back, each time with other bytes.
fn copies(fixture: &Fixture, seed: u64) {
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let (mapped, plain) = (fixture.mapped(GPU, SIZE), fixture.plain(GPU, SIZE));
    for (index, span) in [mapped.span(Bytes::ZERO, SIZE).unwrap(), plain.span.clone()].into_iter().enumerate()
    {
        let source = fixture.pinned(SIZE, seed + index as u64);
        let back = fixture.pinned(SIZE, 7);
        let from = Span::pinned(&source, Bytes::ZERO, SIZE).unwrap();
        let to = Span::pinned(&back, Bytes::ZERO, SIZE).unwrap();
        fixture.copy(&span, &from, on);
        let part = |span: &Span, index| span.part(Bytes::new(index << 16), Bytes::kib(64)).unwrap();
        let list: Vec<(Span, Span)> =
            (0..SIZE.get() >> 16).map(|at| (part(&to, at), part(&span, at))).collect();
        fixture.engine().copy_list(&list, on, CopyOptions::default()).unwrap().wait().unwrap();
        assert!(back.as_slice() == source.as_slice());
    }
}

#[test]
fn contexts_go_and_come_back() {
    for options in
        [EngineOptions::default(), EngineOptions { slots: Bytes::ZERO, ..EngineOptions::default() }]
    {
        let fixture = Fixture::with("h200x4", options);
        copies(&fixture, 1);
        let costs = fixture.engine().relay_cost().len();
        for round in 0..50 {
            assert_eq!(fixture.suspend(), []);
            // It is suspended already.
            assert_eq!(fixture.suspend(), []);
            assert_eq!(
                (fixture.contexts(), fixture.engine().suspended()),
                (DeviceSet::of(GPU), fixture.others())
            );
            assert_eq!(fixture.engine().relays(), DeviceSet::of(GPU));
            assert_eq!(fixture.engine().relay_cost().len(), 1);
            if round % 10 == 0 {
                copies(&fixture, round + 10);
                assert_eq!(fixture.contexts(), DeviceSet::of(GPU));
            }
            fixture.resume();
            assert_eq!(fixture.engine().relays(), fixture.gpus);
            assert_eq!(
                (fixture.engine().relay_cost().len(), fixture.engine().suspended()),
                (costs, DeviceSet::EMPTY)
            );
            if round % 10 == 5 {
                let split = fixture.carried(Way::ZeroStaging);
                copies(&fixture, round + 20);
                assert!(fixture.carried(Way::ZeroStaging) > split);
            }
        }
        assert_eq!(fixture.suspend(), []);
        // All of their memory is free.
        for gpu in fixture.others().iter() {
            assert_eq!(fixture.free(gpu), fixture.sim.devices().unwrap()[gpu.0 as usize].memory);
        }
        fixture.end();
    }
}

#[test]
fn what_is_under_way_is_waited_for_and_its_handle_keeps_nothing() {
    let fixture = Fixture::new("h200x4");
    let Upload { stream, on, to, from } = Upload::new(&fixture);
    let handle = fixture.engine().copy(&to, &from, on, CopyOptions::default()).unwrap();
    fixture.engine().suspend(fixture.others());
    let stayed = fixture.engine().unsuspended(Duration::from_millis(30));
    assert_eq!(stayed.len(), 3);
    assert!(stayed.iter().all(|stayed| stayed.why == WhyUnsuspended::UnderWay), "{stayed:?}");
    assert_eq!(fixture.contexts(), fixture.gpus);
    fixture.wait(on);
    assert_eq!(fixture.engine().unsuspended(LONG), []);
    assert_eq!(fixture.contexts(), DeviceSet::of(GPU));
    assert!(handle.is_done().unwrap());
    handle.wait().unwrap();
    assert!(fixture.holds(&to, fixture.pinned(SIZE, 3).as_slice()));
    // One that is waited for by the engine, with nothing of its lanes left.
    fixture.resume();
    fixture
        .engine()
        .copy_blocking(&to, &from, on, CopyOptions { verify: true, ..CopyOptions::default() })
        .unwrap();
    drop((stream, to));
    fixture.end();
}

#[test]
fn waking_meanwhile_leaves_everything_as_it_was() {
    let fixture = Fixture::new("h200x4");
    let Upload { stream, on, to, from } = Upload::new(&fixture);
    let free = fixture.free(DeviceId(1));
    for _ in 0..20 {
        fixture.copy(&to, &from, on);
        // The copy is under way: nothing can go.
        fixture.engine().suspend(fixture.others());
        std::thread::sleep(Duration::from_millis(2));
        fixture.resume();
        assert_eq!((fixture.engine().relays(), fixture.contexts()), (fixture.gpus, fixture.gpus));
        fixture.wait(on);
        copies(&fixture, 5);
        assert_eq!(fixture.free(DeviceId(1)), free);
    }
    drop((stream, to));
    fixture.end();
}

#[test]
fn what_cannot_go_stays_and_says_why() {
    let fixture = Fixture::new("h200x4");
    let [used, free] = [2, 3].map(DeviceId);
    let stream = OwnedStream::new(fixture.engine().shared.contexts.own_driver(), used).unwrap();
    let stayed = fixture.suspend();
    let why: Vec<(DeviceId, WhyUnsuspended)> =
        stayed.iter().map(|stayed| (stayed.relay, stayed.why)).collect();
    let living = glake_device::Living { streams: 1, ..Default::default() };
    assert_eq!(why, [(used, WhyUnsuspended::InUse(living))]);
    assert!(!fixture.contexts().contains(free));
    drop(stream);
    // Asked again, it goes.
    assert_eq!(fixture.suspend(), []);
    fixture.resume();
    copies(&fixture, 9);
    fixture.end();
}

#[test]
fn a_graph_keeps_its_relays() {
    let fixture = Fixture::with("h200x4", EngineOptions { graphs: true, ..EngineOptions::default() });
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let mapped = fixture.mapped(GPU, Bytes::mib(32));
    let span = mapped.span(Bytes::ZERO, Bytes::mib(32)).unwrap();
    let mut host = fixture.pinned(Bytes::mib(32), 3);
    let from = Span::pinned(&host, Bytes::ZERO, Bytes::mib(32)).unwrap();
    fixture.sim.begin_capture(GPU, on.raw).unwrap();
    fixture.engine().copy(&span, &from, on, CopyOptions { waited: false, ..CopyOptions::default() }).unwrap();
    let graph = fixture.sim.end_capture(GPU, on.raw).unwrap();
    let stayed = fixture.suspend();
    let held = stayed.len();
    assert!(held > 0 && stayed.iter().all(|stayed| stayed.why == WhyUnsuspended::Graph), "{stayed:?}");
    for seed in [4, 5] {
        fixture.sim.launch_graph(&graph, GPU, on.raw).unwrap();
        fixture.wait(on);
        assert!(fixture.holds(&span, host.as_slice()), "{seed}");
    }
    fixture.resume();
    copies(&fixture, 9);
    drop(from);
    assert!(Arc::get_mut(&mut host).is_some());
    drop((stream, mapped, span, graph));
    fixture.end_with(held);
}

#[test]
fn a_fenced_relay_stays_fenced() {
    let fixture = Fixture::new("h200x4");
    let Upload { stream, on, to, from } = Upload::new(&fixture);
    fixture.faults.set(&[Fault { verb: Some(Verb::Copy), when: When::Nth(2), error: Injected::Lost(700) }]);
    fixture.engine().copy(&to, &from, on, CopyOptions::default()).unwrap().wait().unwrap_err();
    let lost = fixture.gpus.without(fixture.engine().relays());
    assert_eq!(lost.len(), 1);
    let stayed = fixture.suspend();
    assert!(
        stayed.iter().all(|stayed| stayed.why == WhyUnsuspended::Lost) && stayed.len() == 1,
        "{stayed:?}"
    );
    fixture.resume();
    assert_eq!(fixture.engine().relays(), fixture.gpus.without(lost));
    fixture.faults.set(&[]);
    drop((stream, to));
    fixture.end();
}

/// Every call of the driver fails once, when a relay is suspended and when it is resumed.
#[test]
fn every_call_may_fail_once() {
    use Verb::{
        CaptureState, ContextSynchronize, Create, EnablePeerAccess, EventCreate, EventQuery,
        EventRecordContext, HasContext, HostRegister, KernelFind, Launch, Map, MemoryInfo, ModuleLoad,
        ModuleUnload, ReleaseContext, Reserve, SetAccess, StreamCreate,
    };
    let verbs = [
        CaptureState,
        ContextSynchronize,
        Create,
        EnablePeerAccess,
        EventCreate,
        EventQuery,
        EventRecordContext,
        HasContext,
        HostRegister,
        KernelFind,
        Launch,
        Map,
        MemoryInfo,
        ModuleLoad,
        ModuleUnload,
        ReleaseContext,
        Reserve,
        SetAccess,
        StreamCreate,
    ];
    for verb in verbs {
        for n in [1, 2, 7] {
            let fixture =
                Fixture::with("h200x4", EngineOptions { pageable_threads: 2, ..EngineOptions::default() });
            let fault = Fault { verb: Some(verb), when: When::Nth(n), error: Injected::Failed(999) };
            fixture.faults.set(&[fault]);
            fixture.suspend();
            fixture.faults.set(&[fault]);
            fixture.resume();
            fixture.faults.set(&[]);
            copies(&fixture, n);
            // Without faults all is as it should be.
            assert_eq!(fixture.suspend(), [], "{fault:?}");
            assert_eq!(fixture.contexts(), DeviceSet::of(GPU), "{fault:?}");
            fixture.resume();
            assert_eq!(fixture.engine().relays(), fixture.gpus, "{fault:?}");
            fixture.end();
        }
    }
}

/// What a thread copies over and over, in both directions, on a stream of its own.
fn copy_on_and_on(fixture: &Fixture, engine: &Engine, seed: u64, stop: &AtomicBool) -> u64 {
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let (mapped, plain) = (fixture.mapped(GPU, SIZE), fixture.plain(GPU, SIZE));
    let spans = [mapped.span(Bytes::ZERO, SIZE).unwrap(), plain.span.clone()];
    let mut round = 0;
    while !stop.load(Ordering::Relaxed) || round < 4 {
        let span = &spans[usize::try_from(round % 2).unwrap()];
        let source = fixture.pinned(SIZE, seed + round);
        let host = fixture.pinned(SIZE, 0);
        for (direction, pinned) in [(Direction::ToGpu, &source), (Direction::FromGpu, &host)] {
            let pinned = Span::pinned(pinned, Bytes::ZERO, SIZE).unwrap();
            let (to, from) = ends(direction, &pinned, span);
            let handle = engine.copy(to, from, on, CopyOptions::default()).unwrap();
            if round % 3 == 0 {
                handle.wait().unwrap();
            }
        }
        fixture.wait(on);
        assert!(host.as_slice() == source.as_slice(), "thread {seed}, round {round}");
        round += 1;
    }
    round
}

#[test]
fn threads_copy_while_relays_are_suspended_and_resumed() {
    let fixture = Fixture::timed("h200x4", EngineOptions::default(), Clock::Wall);
    let stop = AtomicBool::new(false);
    let rested = std::thread::scope(|scope| {
        for thread in 0..3 {
            let (fixture, stop) = (&fixture, &stop);
            scope.spawn(move || copy_on_and_on(fixture, fixture.engine(), 1000 * (thread + 1), stop));
        }
        let (begin, mut rested) = (Instant::now(), 0);
        for round in 0.. {
            if begin.elapsed() > Duration::from_secs(3) && rested > 10 {
                break;
            }
            fixture.engine().suspend(fixture.others());
            if round % 3 != 0 {
                let stayed = fixture.engine().unsuspended(Duration::from_millis(200));
                rested += u32::from(stayed.is_empty());
            }
            fixture.engine().resume(|_| {}).unwrap();
            if round % 2 == 0 {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        stop.store(true, Ordering::Relaxed);
        rested
    });
    assert!(rested > 10);
    fixture.wake_all();
    copies(&fixture, 77);
    fixture.end();
}

impl Fixture {
    fn wake_all(&self) {
        let (done, ready) = mpsc::channel();
        self.engine().start_relays(move |_| done.send(()).unwrap()).unwrap();
        ready.recv_timeout(LONG).unwrap();
        assert_eq!(self.engine().relays(), self.gpus);
    }
}
