//! Full stream order: with kernels before and after, beside streams that are held back, through changes of hands.

use std::time::Duration;

use glake_device::owned::{OwnedStream, Span};
use glake_device::{Driver, Fault, Injected, Stream, Touch, Verb, When};
use glake_units::Bytes;

use super::fixture::{Fixture, GPU};
use crate::paths::Way;
use crate::{CopyOptions, EngineOptions};

const SIZE: Bytes = Bytes::mib(16);

/// A kernel that fills a range of the GPU with a byte.
fn paint(fixture: &Fixture, on: &OwnedStream, span: &Span, byte: u8) {
    let touch = Touch { address: span.start(), size: span.size() };
    let (start, length) = (span.start(), usize::try_from(span.size().get()).unwrap());
    let took = Duration::from_micros(300);
    fixture
        .sim
        .enqueue_kernel(on.device(), on.id(), &[], &[touch], took, move |memory| {
            memory.write(start, &vec![byte; length]).unwrap();
        })
        .unwrap();
}

/// Holds a stream back until the returned release.
fn hold(fixture: &Fixture, on: &OwnedStream) -> impl FnOnce() {
    let word = fixture.pinned(Bytes::mib(2), 1);
    let other = fixture.stream(on.device());
    fixture.sim.enqueue_wait(on.device(), on.id(), word.start(), 4242).unwrap();
    let sim = fixture.sim.clone();
    move || {
        sim.enqueue_signal(other.device(), other.id(), word.start(), 4242).unwrap();
        sim.stream_synchronize(other.device(), other.id()).unwrap();
        drop(word);
    }
}

#[test]
fn kernels_before_and_after_see_what_they_should() {
    for memory in [Way::ZeroStaging, Way::Staged] {
        let fixture = Fixture::new("h200x4");
        let stream = fixture.stream(GPU);
        let on = fixture.user(GPU, stream.id());
        let (mapped, plain) = (fixture.mapped(GPU, SIZE), fixture.plain(GPU, SIZE));
        let span = match memory {
            Way::ZeroStaging => mapped.span(Bytes::ZERO, SIZE).unwrap(),
            _ => plain.span.clone(),
        };
        let host: Vec<_> = (0..3).map(|seed| fixture.pinned(SIZE, seed)).collect();
        let spans: Vec<Span> =
            host.iter().map(|memory| Span::pinned(memory, Bytes::ZERO, SIZE).unwrap()).collect();
        // The simulator refuses work that no event orders; the bytes tell the rest.
        paint(&fixture, &stream, &span, 1);
        fixture.copy(&spans[0], &span, on);
        paint(&fixture, &stream, &span, 2);
        fixture.copy(&spans[1], &span, on);
        fixture.copy(&span, &spans[2], on);
        fixture.copy(&spans[2], &span, on);
        paint(&fixture, &stream, &span, 3);
        fixture.wait(on);
        assert!(host[0].as_slice().iter().all(|byte| *byte == 1));
        assert!(host[1].as_slice().iter().all(|byte| *byte == 2));
        assert!(fixture.read(&span).iter().all(|byte| *byte == 3));
        assert!(fixture.carried(memory) > SIZE, "{memory:?}");
        assert_eq!(fixture.engine().statistics().split_copies, 4);
        drop((stream, mapped, plain, span, spans, host));
        fixture.end();
    }
}

#[test]
fn a_stream_that_is_held_back_holds_back_no_other() {
    for streams in [1, 2, 8] {
        for memory in [Way::ZeroStaging, Way::Staged] {
            let options = EngineOptions { streams, ..EngineOptions::default() };
            let fixture = Fixture::with("h200x4", options);
            let held = fixture.stream(GPU);
            let (mapped, plain) = (fixture.mapped(GPU, SIZE), fixture.plain(GPU, SIZE));
            let span = match memory {
                Way::ZeroStaging => mapped.span(Bytes::ZERO, SIZE).unwrap(),
                _ => plain.span.clone(),
            };
            let release = hold(&fixture, &held);
            let host = fixture.pinned(SIZE, 3);
            let from = Span::pinned(&host, Bytes::ZERO, SIZE).unwrap();
            fixture.copy(&span, &from, fixture.user(GPU, held.id()));
            // What ends a memory's life waits for its devices, and so for the stream that is held back.
            let mut kept = Vec::new();
            for round in 0..6 {
                let other = fixture.stream(GPU);
                let on = fixture.user(GPU, other.id());
                let gpu = fixture.plain(GPU, SIZE);
                let memory = fixture.pinned(SIZE, round);
                let source = Span::pinned(&memory, Bytes::ZERO, SIZE).unwrap();
                fixture.copy(&gpu.span, &source, on);
                // The simulator would say that nothing can complete this.
                fixture.wait(on);
                assert!(fixture.holds(&gpu.span, memory.as_slice()));
                fixture.engine().forget_stream(on.id);
                kept.push((gpu, memory, source));
            }
            release();
            held.synchronize().unwrap();
            assert!(fixture.holds(&span, host.as_slice()));
            drop((held, mapped, plain, span, host, from, kept));
            fixture.end();
        }
    }
}

#[test]
fn lane_sets_change_hands_when_they_are_idle() {
    let fixture = Fixture::with("h200x4", EngineOptions { streams: 1, ..EngineOptions::default() });
    let gpu = fixture.mapped(GPU, SIZE);
    let span = gpu.span(Bytes::ZERO, SIZE).unwrap();
    let host = fixture.pinned(SIZE, 3);
    let from = Span::pinned(&host, Bytes::ZERO, SIZE).unwrap();
    for _ in 0..5 {
        let stream = fixture.stream(GPU);
        let on = fixture.user(GPU, stream.id());
        fixture.copy(&span, &from, on);
        fixture.wait(on);
    }
    let statistics = fixture.engine().statistics();
    assert_eq!((statistics.split_copies, statistics.native_copies), (5, 0));
    drop((gpu, span, host, from));
    fixture.end();
}

#[test]
fn more_streams_get_leases_up_to_the_limit() {
    let fixture = Fixture::with("h200x4", EngineOptions { streams: 4, ..EngineOptions::default() });
    let held: Vec<OwnedStream> = (0..6).map(|_| fixture.stream(GPU)).collect();
    let buffers: Vec<_> = (0..6).map(|_| fixture.mapped(GPU, SIZE)).collect();
    let host = fixture.pinned(SIZE, 3);
    let from = Span::pinned(&host, Bytes::ZERO, SIZE).unwrap();
    let mut releases = Vec::new();
    for (stream, buffer) in held.iter().zip(&buffers) {
        releases.push(hold(&fixture, stream));
        let span = buffer.span(Bytes::ZERO, SIZE).unwrap();
        let before = fixture.engine().statistics();
        fixture.copy(&span, &from, fixture.user(GPU, stream.id()));
        let after = fixture.engine().statistics();
        if after.native_copies > before.native_copies {
            // The thread makes another.
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    let statistics = fixture.engine().statistics();
    assert_eq!(statistics.split_copies + statistics.native_copies, 6);
    assert!(statistics.split_copies >= 2, "{statistics:?}");
    releases.into_iter().for_each(|release| release());
    for (stream, buffer) in held.iter().zip(&buffers) {
        stream.synchronize().unwrap();
        assert!(fixture.holds(&buffer.span(Bytes::ZERO, SIZE).unwrap(), host.as_slice()));
    }
    drop((held, buffers, host, from));
    fixture.end();
}

#[test]
fn streams_of_several_threads_copy_at_once() {
    let fixture = Fixture::new("h200x4");
    std::thread::scope(|scope| {
        for (thread, target) in (0_u64..).zip(fixture.gpus.iter()) {
            let fixture = &fixture;
            scope.spawn(move || {
                let stream = fixture.stream(target);
                let on = fixture.user(target, stream.id());
                let gpu = fixture.mapped(target, SIZE);
                let span = gpu.span(Bytes::ZERO, SIZE).unwrap();
                for round in 0..5 {
                    let [out, back] = [thread * 10 + round, 99].map(|seed| fixture.pinned(SIZE, seed));
                    let whole = |memory| Span::pinned(memory, Bytes::ZERO, SIZE).unwrap();
                    fixture.copy(&span, &whole(&out), on);
                    let options = CopyOptions::default();
                    fixture.engine().copy(&whole(&back), &span, on, options).unwrap().wait().unwrap();
                    assert!(back.as_slice() == out.as_slice());
                }
            });
        }
    });
    assert_eq!(fixture.engine().statistics().lost_copies, 0);
    fixture.end();
}

/// Where the end of a copy cannot be marked its handle waits for more than the copy: never for less, whichever thread waits.
#[test]
fn a_handle_without_a_mark_waits_for_the_copying_threads_own_stream() {
    let fixture = Fixture::new("h200x4");
    let size = Bytes::kib(64);
    let (gpu, host) = (fixture.mapped(GPU, size), fixture.pinned(size, 3));
    let (to, from) = (gpu.span(Bytes::ZERO, size).unwrap(), Span::pinned(&host, Bytes::ZERO, size).unwrap());
    for raw in [Stream::PER_THREAD, Stream(0)] {
        let on = fixture.user(GPU, raw);
        let (took, touched) = (Duration::from_millis(1), [Touch { address: to.start(), size }]);
        fixture.sim.enqueue_kernel(GPU, raw, &[], &touched, took, |_| {}).unwrap();
        let faults =
            [Fault { verb: Some(Verb::EventRecord), when: When::From(1), error: Injected::NotReady }];
        fixture.faults.set(&faults);
        let handle = fixture.engine().copy(&to, &from, on, CopyOptions::default()).unwrap();
        fixture.faults.set(&[]);
        std::thread::scope(|scope| scope.spawn(|| handle.wait().unwrap()).join().unwrap());
        assert!(fixture.holds(&to, &host.as_slice()[..64 << 10]), "{raw:?}");
    }
    drop((gpu, host, to, from));
    fixture.end();
}
