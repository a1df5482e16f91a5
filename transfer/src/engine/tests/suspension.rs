//! Relays that rest and wake: their contexts go and come back, whatever is copied meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use glake_device::owned::{DeviceSet, OwnedStream, Span};
use glake_device::{DeviceId, Driver, Fault, Injected, Verb, When};
use glake_sim::Clock;
use glake_units::Bytes;

use super::bed::{Bed, GPU, ends};
use crate::graph::{Direction, Way};
use crate::{CopyOptions, Engine, EngineOptions, UnsuspendedRelay, UserStream, WhyUnsuspended};

const SIZE: Bytes = Bytes::mib(8);
const LONG: Duration = Duration::from_secs(20);

impl Bed {
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
        let own = self.engine().relay_driver();
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
    fn new(bed: &Bed) -> Upload {
        let stream = bed.stream(GPU);
        Upload {
            on: bed.user(GPU, stream.id()),
            to: bed.mapped(GPU, SIZE).span(Bytes::ZERO, SIZE).unwrap(),
            from: Span::pinned(&bed.pinned(SIZE, 3), Bytes::ZERO, SIZE).unwrap(),
            stream,
        }
    }
}

/// Copies of every kind to a GPU and back, each time with other bytes.
fn copies(bed: &Bed, seed: u64) {
    let stream = bed.stream(GPU);
    let on = bed.user(GPU, stream.id());
    let (mapped, plain) = (bed.mapped(GPU, SIZE), bed.plain(GPU, SIZE));
    for (index, span) in [mapped.span(Bytes::ZERO, SIZE).unwrap(), plain.span.clone()].into_iter().enumerate()
    {
        let source = bed.pinned(SIZE, seed + index as u64);
        let back = bed.pinned(SIZE, 7);
        let from = Span::pinned(&source, Bytes::ZERO, SIZE).unwrap();
        let to = Span::pinned(&back, Bytes::ZERO, SIZE).unwrap();
        bed.copy(&span, &from, on);
        let part = |span: &Span, index| span.part(Bytes::new(index << 16), Bytes::kib(64)).unwrap();
        let list: Vec<(Span, Span)> =
            (0..SIZE.get() >> 16).map(|at| (part(&to, at), part(&span, at))).collect();
        bed.engine().copy_list(&list, on, CopyOptions::default()).unwrap().wait().unwrap();
        assert!(back.as_slice() == source.as_slice());
    }
}

#[test]
fn contexts_go_and_come_back() {
    for options in
        [EngineOptions::default(), EngineOptions { slots: Bytes::ZERO, ..EngineOptions::default() }]
    {
        let bed = Bed::with("h200x4", options);
        copies(&bed, 1);
        let costs = bed.engine().relay_cost().len();
        for round in 0..50 {
            assert_eq!(bed.suspend(), []);
            // It rests already.
            assert_eq!(bed.suspend(), []);
            assert_eq!((bed.contexts(), bed.engine().suspended()), (DeviceSet::of(GPU), bed.others()));
            assert_eq!(bed.engine().relays(), DeviceSet::of(GPU));
            assert_eq!(bed.engine().relay_cost().len(), 1);
            if round % 10 == 0 {
                copies(&bed, round + 10);
                assert_eq!(bed.contexts(), DeviceSet::of(GPU));
            }
            bed.resume();
            assert_eq!(bed.engine().relays(), bed.gpus);
            assert_eq!(
                (bed.engine().relay_cost().len(), bed.engine().suspended()),
                (costs, DeviceSet::EMPTY)
            );
            if round % 10 == 5 {
                let split = bed.carried(Way::ZeroStaging);
                copies(&bed, round + 20);
                assert!(bed.carried(Way::ZeroStaging) > split);
            }
        }
        assert_eq!(bed.suspend(), []);
        // All of their memory is free.
        for gpu in bed.others().iter() {
            assert_eq!(bed.free(gpu), bed.sim.devices().unwrap()[gpu.0 as usize].memory);
        }
        bed.end();
    }
}

#[test]
fn what_is_under_way_is_waited_for_and_its_handle_keeps_nothing() {
    let bed = Bed::new("h200x4");
    let Upload { stream, on, to, from } = Upload::new(&bed);
    let handle = bed.engine().copy(&to, &from, on, CopyOptions::default()).unwrap();
    bed.engine().suspend(bed.others());
    let stayed = bed.engine().unsuspended(Duration::from_millis(30));
    assert_eq!(stayed.len(), 3);
    assert!(stayed.iter().all(|stayed| stayed.why == WhyUnsuspended::UnderWay), "{stayed:?}");
    assert_eq!(bed.contexts(), bed.gpus);
    bed.wait(on);
    assert_eq!(bed.engine().unsuspended(LONG), []);
    assert_eq!(bed.contexts(), DeviceSet::of(GPU));
    assert!(handle.is_done().unwrap());
    handle.wait().unwrap();
    assert!(bed.read(&to) == bed.pinned(SIZE, 3).as_slice());
    // One that is waited for by the engine, with nothing of its lanes left.
    bed.resume();
    bed.engine()
        .copy_blocking(&to, &from, on, CopyOptions { verify: true, ..CopyOptions::default() })
        .unwrap();
    drop((stream, to));
    bed.end();
}

#[test]
fn waking_meanwhile_leaves_everything_as_it_was() {
    let bed = Bed::new("h200x4");
    let Upload { stream, on, to, from } = Upload::new(&bed);
    let free = bed.free(DeviceId(1));
    for _ in 0..20 {
        bed.copy(&to, &from, on);
        // The copy is under way: nothing can go.
        bed.engine().suspend(bed.others());
        std::thread::sleep(Duration::from_millis(2));
        bed.resume();
        assert_eq!((bed.engine().relays(), bed.contexts()), (bed.gpus, bed.gpus));
        bed.wait(on);
        copies(&bed, 5);
        assert_eq!(bed.free(DeviceId(1)), free);
    }
    drop((stream, to));
    bed.end();
}

#[test]
fn what_cannot_go_stays_and_says_why() {
    let bed = Bed::new("h200x4");
    let [used, free] = [2, 3].map(DeviceId);
    let stream = OwnedStream::new(bed.engine().relay_driver(), used).unwrap();
    let stayed = bed.suspend();
    let why: Vec<(DeviceId, WhyUnsuspended)> =
        stayed.iter().map(|stayed| (stayed.relay, stayed.why)).collect();
    let living = glake_device::Living { streams: 1, ..Default::default() };
    assert_eq!(why, [(used, WhyUnsuspended::InUse(living))]);
    assert!(!bed.contexts().contains(free));
    drop(stream);
    // Asked again, it goes.
    assert_eq!(bed.suspend(), []);
    bed.resume();
    copies(&bed, 9);
    bed.end();
}

#[test]
fn a_graph_keeps_its_relays() {
    let bed = Bed::with("h200x4", EngineOptions { graphs: true, ..EngineOptions::default() });
    let stream = bed.stream(GPU);
    let on = bed.user(GPU, stream.id());
    let mapped = bed.mapped(GPU, Bytes::mib(32));
    let span = mapped.span(Bytes::ZERO, Bytes::mib(32)).unwrap();
    let mut host = bed.pinned(Bytes::mib(32), 3);
    let from = Span::pinned(&host, Bytes::ZERO, Bytes::mib(32)).unwrap();
    bed.sim.begin_capture(GPU, on.raw).unwrap();
    bed.engine().copy(&span, &from, on, CopyOptions { waited: false, ..CopyOptions::default() }).unwrap();
    let graph = bed.sim.end_capture(GPU, on.raw).unwrap();
    let stayed = bed.suspend();
    let held = stayed.len();
    assert!(held > 0 && stayed.iter().all(|stayed| stayed.why == WhyUnsuspended::Graph), "{stayed:?}");
    for seed in [4, 5] {
        bed.sim.launch_graph(&graph, GPU, on.raw).unwrap();
        bed.wait(on);
        assert!(bed.read(&span) == host.as_slice(), "{seed}");
    }
    bed.resume();
    copies(&bed, 9);
    drop(from);
    assert!(Arc::get_mut(&mut host).is_some());
    drop((stream, mapped, span, graph));
    bed.end_with(held);
}

#[test]
fn a_fenced_relay_stays_fenced() {
    let bed = Bed::new("h200x4");
    let Upload { stream, on, to, from } = Upload::new(&bed);
    bed.faults.set(&[Fault { verb: Some(Verb::Copy), when: When::Nth(2), error: Injected::Lost(700) }]);
    bed.engine().copy(&to, &from, on, CopyOptions::default()).unwrap().wait().unwrap_err();
    let lost = bed.gpus.without(bed.engine().relays());
    assert_eq!(lost.len(), 1);
    let stayed = bed.suspend();
    assert!(
        stayed.iter().all(|stayed| stayed.why == WhyUnsuspended::Lost) && stayed.len() == 1,
        "{stayed:?}"
    );
    bed.resume();
    assert_eq!(bed.engine().relays(), bed.gpus.without(lost));
    bed.faults.set(&[]);
    drop((stream, to));
    bed.end();
}

/// Every call of the driver fails once, at rest and when it wakes.
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
            let bed = Bed::with("h200x4", EngineOptions { pageable_threads: 2, ..EngineOptions::default() });
            let fault = Fault { verb: Some(verb), when: When::Nth(n), error: Injected::Failed(999) };
            bed.faults.set(&[fault]);
            bed.suspend();
            bed.faults.set(&[fault]);
            bed.resume();
            bed.faults.set(&[]);
            copies(&bed, n);
            // Without faults all is as it should be.
            assert_eq!(bed.suspend(), [], "{fault:?}");
            assert_eq!(bed.contexts(), DeviceSet::of(GPU), "{fault:?}");
            bed.resume();
            assert_eq!(bed.engine().relays(), bed.gpus, "{fault:?}");
            bed.end();
        }
    }
}

/// What a thread copies over and over, in both directions, on a stream of its own.
fn copy_on_and_on(bed: &Bed, engine: &Engine, seed: u64, stop: &AtomicBool) -> u64 {
    let stream = bed.stream(GPU);
    let on = bed.user(GPU, stream.id());
    let (mapped, plain) = (bed.mapped(GPU, SIZE), bed.plain(GPU, SIZE));
    let spans = [mapped.span(Bytes::ZERO, SIZE).unwrap(), plain.span.clone()];
    let mut round = 0;
    while !stop.load(Ordering::Relaxed) || round < 4 {
        let span = &spans[usize::try_from(round % 2).unwrap()];
        let source = bed.pinned(SIZE, seed + round);
        let host = bed.pinned(SIZE, 0);
        for (direction, pinned) in [(Direction::ToGpu, &source), (Direction::FromGpu, &host)] {
            let pinned = Span::pinned(pinned, Bytes::ZERO, SIZE).unwrap();
            let (to, from) = ends(direction, &pinned, span);
            let handle = engine.copy(to, from, on, CopyOptions::default()).unwrap();
            if round % 3 == 0 {
                handle.wait().unwrap();
            }
        }
        bed.wait(on);
        assert!(host.as_slice() == source.as_slice(), "thread {seed}, round {round}");
        round += 1;
    }
    round
}

#[test]
fn threads_copy_while_relays_rest_and_wake() {
    let bed = Bed::timed("h200x4", EngineOptions::default(), Clock::Wall);
    let stop = AtomicBool::new(false);
    let rested = std::thread::scope(|scope| {
        for thread in 0..3 {
            let (bed, stop) = (&bed, &stop);
            scope.spawn(move || copy_on_and_on(bed, bed.engine(), 1000 * (thread + 1), stop));
        }
        let (begin, mut rested) = (Instant::now(), 0);
        for round in 0.. {
            if begin.elapsed() > Duration::from_secs(3) && rested > 10 {
                break;
            }
            bed.engine().suspend(bed.others());
            if round % 3 != 0 {
                let stayed = bed.engine().unsuspended(Duration::from_millis(200));
                rested += u32::from(stayed.is_empty());
            }
            bed.engine().resume(|_| {}).unwrap();
            if round % 2 == 0 {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        stop.store(true, Ordering::Relaxed);
        rested
    });
    assert!(rested > 10);
    bed.wake_all();
    copies(&bed, 77);
    bed.end();
}

impl Bed {
    fn wake_all(&self) {
        let (done, ready) = mpsc::channel();
        self.engine().start_relays(move |_| done.send(()).unwrap()).unwrap();
        ready.recv_timeout(LONG).unwrap();
        assert_eq!(self.engine().relays(), self.gpus);
    }
}
