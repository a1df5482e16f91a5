//! Copies in graphs: replayed bytes, order, faults, speed.

use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::{OwnedStream, Registration, Span};
use glake_device::{CaptureState, DriverError, Fault, Injected, Touch, Verb, When};
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, ends};
use crate::paths::Direction;
use crate::{CopyOptions, EngineOptions, UserStream};

/// A server whose engine splits captured copies.
fn split_fixture() -> Fixture {
    Fixture::with("h200x4", EngineOptions { graphs: true, ..EngineOptions::default() })
}

const UNWAITED: CopyOptions =
    CopyOptions { priority: crate::Priority::Normal, verify: false, waited: false, unordered: false };

/// Puts other bytes into pinned memory.
fn refill(fixture: &Fixture, host: &Arc<Registration>, seed: u64) -> Vec<u8> {
    let size = host.size();
    let other = fixture.pinned(size, seed);
    let span = |memory| Span::pinned(memory, Bytes::ZERO, size).unwrap();
    span(&other).copy_on_host(&span(host)).unwrap();
    other.as_slice().to_vec()
}

fn paint(fixture: &Fixture, on: &OwnedStream, span: &Span, byte: u8) {
    let (start, length) = (span.start(), usize::try_from(span.size().get()).unwrap());
    let touch = Touch { address: start, size: span.size() };
    let body = move |memory: &mut dyn glake_device::KernelMemory| {
        memory.write(start, &vec![byte; length]).unwrap();
    };
    fixture.sim.enqueue_kernel(GPU, on.id(), &[], &[touch], Duration::from_micros(50), body).unwrap();
}

#[test]
fn a_replay_copies_what_is_there_then() {
    for mapped in [true, false] {
        let fixture = split_fixture();
        let stream = fixture.stream(GPU);
        let on = fixture.user(GPU, stream.id());
        let size = Bytes::new((16 << 20) + 12_345);
        let (kept, plain) = (fixture.mapped(GPU, size), fixture.plain(GPU, size));
        let whole = if mapped { kept.span(Bytes::ZERO, size).unwrap() } else { plain.span.clone() };
        let (out, back) = (fixture.pinned(size, 1), fixture.pinned(size, 2));
        let [out_span, back_span] = [&out, &back].map(|host| Span::pinned(host, Bytes::ZERO, size).unwrap());
        fixture.sim.begin_capture(GPU, on.raw).unwrap();
        paint(&fixture, &stream, &whole, 1);
        fixture.engine().copy(&whole, &out_span, on, UNWAITED).unwrap();
        fixture.engine().copy(&back_span, &whole, on, UNWAITED).unwrap();
        paint(&fixture, &stream, &whole, 2);
        let graph = fixture.sim.end_capture(GPU, on.raw).unwrap();
        // Memory that is not ours is the target's own link's.
        let (links, native) = if mapped { (4, 0) } else { (1, 2) };
        assert_eq!(graph.operations(), 2 + 2 * links, "each link has a node");
        assert_eq!(fixture.engine().statistics().native_copies, native);
        for seed in 5..8 {
            let sent = refill(&fixture, &out, seed);
            fixture.sim.launch_graph(&graph, GPU, on.raw).unwrap();
            fixture.wait(on);
            let length = usize::try_from(size.get()).unwrap();
            assert!(back.as_slice()[..length] == sent[..length]);
            assert!(fixture.read(&whole).iter().all(|byte| *byte == 2));
        }
        // The engine copies as before beside it.
        fixture.copy(&whole, &out_span, on);
        fixture.wait(on);
        drop((stream, kept, plain, whole, out_span, back_span, out, back));
        fixture.end_with(if mapped { 3 } else { 0 });
    }
}

/// A graph that has nodes of several GPUs cannot be launched from a GPU: that is asked for, never assumed.
#[test]
fn a_captured_copy_is_the_drivers_one_node_unless_asked() {
    for graphs in [false, true] {
        let fixture = Fixture::with("h200x4", EngineOptions { graphs, ..EngineOptions::default() });
        let stream = fixture.stream(GPU);
        let on = fixture.user(GPU, stream.id());
        for size in [Bytes::mib(4), Bytes::mib(64)] {
            let (kept, host) = (fixture.mapped(GPU, size), fixture.pinned(size, 1));
            let host_span = Span::pinned(&host, Bytes::ZERO, size).unwrap();
            let gpu = kept.span(Bytes::ZERO, size).unwrap();
            for direction in Direction::BOTH {
                let (to, from) = ends(direction, &host_span, &gpu);
                let graph = capture(&fixture, to, from, on).unwrap();
                assert_eq!(graph.operations() == 1, !graphs, "{size} {direction:?}");
                fixture.sim.launch_graph(&graph, GPU, on.raw).unwrap();
                fixture.wait(on);
                assert!(fixture.holds(&gpu, host.as_slice()));
            }
        }
        drop(stream);
        fixture.end_with(if graphs { 3 } else { 0 });
    }
}

/// A copy in a capture of its own.
fn capture(
    fixture: &Fixture,
    to: &Span,
    from: &Span,
    on: UserStream,
) -> glake_device::Result<glake_sim::Graph> {
    fixture.sim.begin_capture(on.device, on.raw)?;
    fixture.engine().copy(to, from, on, UNWAITED).unwrap();
    fixture.sim.end_capture(on.device, on.raw)
}

#[test]
fn captures_come_one_after_another_and_beside_each_other() {
    let fixture = split_fixture();
    let size = Bytes::mib(4);
    let kept = fixture.mapped(GPU, size);
    let gpu = kept.span(Bytes::ZERO, size).unwrap();
    let host = fixture.pinned(size, 1);
    let from = Span::pinned(&host, Bytes::ZERO, size).unwrap();
    let streams: Vec<OwnedStream> = (0..3).map(|_| fixture.stream(GPU)).collect();
    for stream in streams.iter().cycle().take(7) {
        let graph = capture(&fixture, &gpu, &from, fixture.user(GPU, stream.id())).unwrap();
        assert!(graph.operations() > 1);
    }
    // The third finds no branches.
    for stream in &streams {
        fixture.sim.begin_capture(GPU, stream.id()).unwrap();
        for _ in 0..2 {
            fixture.engine().copy(&gpu, &from, fixture.user(GPU, stream.id()), UNWAITED).unwrap();
        }
    }
    let graphs: Vec<usize> = streams
        .iter()
        .map(|stream| fixture.sim.end_capture(GPU, stream.id()).unwrap().operations())
        .collect();
    assert!(graphs[0] > 2 && graphs[0] == graphs[1] && graphs[2] == 2, "{graphs:?}");
    // A capture that was broken leaves nothing behind.
    let on = fixture.user(GPU, streams[0].id());
    fixture.sim.begin_capture(GPU, on.raw).unwrap();
    fixture.engine().copy(&gpu, &from, on, UNWAITED).unwrap();
    assert!(fixture.completion_events.record(fixture.gpus).is_err());
    assert!(fixture.engine().copy(&gpu, &from, on, UNWAITED).is_err());
    assert!(matches!(fixture.sim.end_capture(GPU, on.raw), Err(DriverError::Failed { code: 901, .. })));
    assert!(capture(&fixture, &gpu, &from, on).unwrap().operations() > 1);
    assert_eq!(fixture.driver.capture_state(GPU, on.raw).unwrap(), CaptureState::None);
    drop((kept, gpu, from, host, streams));
    fixture.end_with(3);
}

#[test]
fn a_stream_of_another_gpu_records_copies_too() {
    let fixture = split_fixture();
    let other = glake_device::DeviceId(2);
    let stream = fixture.stream(other);
    let on = fixture.user(other, stream.id());
    let size = Bytes::mib(16);
    let kept = fixture.mapped(GPU, size);
    let gpu = kept.span(Bytes::ZERO, size).unwrap();
    let host = fixture.pinned(size, 1);
    let from = Span::pinned(&host, Bytes::ZERO, size).unwrap();
    let graph = capture(&fixture, &gpu, &from, on).unwrap();
    assert_eq!(graph.operations(), 4);
    fixture.sim.launch_graph(&graph, other, on.raw).unwrap();
    fixture.wait(on);
    assert!(fixture.holds(&gpu, host.as_slice()));
    drop((stream, kept, gpu, from, host));
    fixture.end_with(3);
}

#[test]
fn a_replay_uses_every_link() {
    let fixture = split_fixture();
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    for (size, least) in [(Bytes::mib(16), 2.0), (Bytes::mib(64), 2.5)] {
        let kept = fixture.mapped(GPU, size);
        let gpu = kept.span(Bytes::ZERO, size).unwrap();
        let host = fixture.pinned(size, 1);
        let host_span = Span::pinned(&host, Bytes::ZERO, size).unwrap();
        for direction in Direction::BOTH {
            let (to, from) = ends(direction, &host_span, &gpu);
            let graph = capture(&fixture, to, from, on).unwrap();
            let time = |work: &dyn Fn()| {
                let start = fixture.sim.now();
                work();
                fixture.wait(on);
                (fixture.sim.now() - start).as_secs_f64()
            };
            let split = time(&|| fixture.sim.launch_graph(&graph, GPU, on.raw).unwrap());
            let native =
                time(&|| glake_device::owned::copy(&*fixture.driver, GPU, on.raw, to, from).unwrap());
            println!("{size} {direction:?}: {:.2}", native / split);
            assert!(native / split > least, "{size} {direction:?}: {}", native / split);
        }
    }
    drop(stream);
    fixture.end_with(3);
}

#[test]
fn every_call_may_fail_once() {
    for verb in [Verb::Launch, Verb::EventRecord, Verb::StreamWaitEvent, Verb::CaptureState, Verb::Copy] {
        for n in 1.. {
            let fixture = split_fixture();
            let stream = fixture.stream(GPU);
            let on = fixture.user(GPU, stream.id());
            let size = Bytes::mib(6);
            let kept = fixture.mapped(GPU, size);
            let gpu = kept.span(Bytes::ZERO, size).unwrap();
            let host = fixture.pinned(size, 1);
            let from = Span::pinned(&host, Bytes::ZERO, size).unwrap();
            fixture.sim.begin_capture(GPU, on.raw).unwrap();
            let error = Injected::Failed(1);
            fixture.faults.set(&[Fault { verb: Some(verb), when: When::Nth(n), error }]);
            fixture.engine().copy(&gpu, &from, on, UNWAITED).unwrap();
            let injected = fixture.faults.injected();
            fixture.faults.set(&[]);
            let graph = fixture.sim.end_capture(GPU, on.raw).unwrap();
            fixture.sim.launch_graph(&graph, GPU, on.raw).unwrap();
            fixture.wait(on);
            assert!(fixture.holds(&gpu, host.as_slice()), "{verb} {n}");
            drop((stream, kept, gpu, from, host));
            let paths = fixture.engine().statistics().paths;
            let modules = paths.iter().filter(|path| path.relay != GPU && !path.bytes.is_zero()).count();
            fixture.end_with(modules);
            if injected == 0 {
                break;
            }
        }
    }
}
