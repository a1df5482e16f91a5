//! Full stream order: with kernels before and after, beside streams that are held back, through changes of hands.

use std::time::Duration;

use glake_device::owned::{OwnedStream, Span};
use glake_device::{Driver, Fault, Injected, Stream, Touch, Verb, When};
use glake_units::Bytes;

use super::bed::{Bed, GPU};
use crate::graph::Way;
use crate::{CopyOptions, EngineOptions};

const SIZE: Bytes = Bytes::mib(16);

/// A kernel that fills a range of the GPU with a byte.
fn paint(bed: &Bed, on: &OwnedStream, span: &Span, byte: u8) {
    let touch = Touch { address: span.start(), size: span.size() };
    let (start, length) = (span.start(), usize::try_from(span.size().get()).unwrap());
    let took = Duration::from_micros(300);
    bed.sim
        .enqueue_kernel(on.device(), on.id(), &[], &[touch], took, move |memory| {
            memory.write(start, &vec![byte; length]).unwrap();
        })
        .unwrap();
}

/// Holds a stream back until the returned release.
fn hold(bed: &Bed, on: &OwnedStream) -> impl FnOnce() {
    let word = bed.pinned(Bytes::mib(2), 1);
    let other = bed.stream(on.device());
    bed.sim.enqueue_wait(on.device(), on.id(), word.start(), 4242).unwrap();
    let sim = bed.sim.clone();
    move || {
        sim.enqueue_signal(other.device(), other.id(), word.start(), 4242).unwrap();
        sim.stream_synchronize(other.device(), other.id()).unwrap();
        drop(word);
    }
}

#[test]
fn kernels_before_and_after_see_what_they_should() {
    for memory in [Way::ZeroStaging, Way::Staged] {
        let bed = Bed::new("h200x4");
        let stream = bed.stream(GPU);
        let on = bed.user(GPU, stream.id());
        let (mapped, plain) = (bed.mapped(GPU, SIZE), bed.plain(GPU, SIZE));
        let span = match memory {
            Way::ZeroStaging => mapped.span(Bytes::ZERO, SIZE).unwrap(),
            _ => plain.span.clone(),
        };
        let host: Vec<_> = (0..3).map(|seed| bed.pinned(SIZE, seed)).collect();
        let spans: Vec<Span> =
            host.iter().map(|memory| Span::pinned(memory, Bytes::ZERO, SIZE).unwrap()).collect();
        // The simulator refuses work that no event orders; the bytes tell the rest.
        paint(&bed, &stream, &span, 1);
        bed.copy(&spans[0], &span, on);
        paint(&bed, &stream, &span, 2);
        bed.copy(&spans[1], &span, on);
        bed.copy(&span, &spans[2], on);
        bed.copy(&spans[2], &span, on);
        paint(&bed, &stream, &span, 3);
        bed.wait(on);
        assert!(host[0].as_slice().iter().all(|byte| *byte == 1));
        assert!(host[1].as_slice().iter().all(|byte| *byte == 2));
        assert!(bed.read(&span).iter().all(|byte| *byte == 3));
        assert!(bed.carried(memory) > SIZE, "{memory:?}");
        assert_eq!(bed.engine().statistics().split_copies, 4);
        drop((stream, mapped, plain, span, spans, host));
        bed.end();
    }
}

#[test]
fn a_stream_that_is_held_back_holds_back_no_other() {
    for streams in [1, 2, 8] {
        for memory in [Way::ZeroStaging, Way::Staged] {
            let options = EngineOptions { streams, ..EngineOptions::default() };
            let bed = Bed::with("h200x4", options);
            let held = bed.stream(GPU);
            let (mapped, plain) = (bed.mapped(GPU, SIZE), bed.plain(GPU, SIZE));
            let span = match memory {
                Way::ZeroStaging => mapped.span(Bytes::ZERO, SIZE).unwrap(),
                _ => plain.span.clone(),
            };
            let release = hold(&bed, &held);
            let host = bed.pinned(SIZE, 3);
            let from = Span::pinned(&host, Bytes::ZERO, SIZE).unwrap();
            bed.copy(&span, &from, bed.user(GPU, held.id()));
            // What ends a memory's life waits for its devices, and so for the stream that is held back.
            let mut kept = Vec::new();
            for round in 0..6 {
                let other = bed.stream(GPU);
                let on = bed.user(GPU, other.id());
                let gpu = bed.plain(GPU, SIZE);
                let memory = bed.pinned(SIZE, round);
                let source = Span::pinned(&memory, Bytes::ZERO, SIZE).unwrap();
                bed.copy(&gpu.span, &source, on);
                // The simulator would say that nothing can complete this.
                bed.wait(on);
                assert!(bed.read(&gpu.span) == memory.as_slice());
                bed.engine().forget_stream(on.id);
                kept.push((gpu, memory, source));
            }
            release();
            held.synchronize().unwrap();
            assert!(bed.read(&span) == host.as_slice());
            drop((held, mapped, plain, span, host, from, kept));
            bed.end();
        }
    }
}

#[test]
fn lane_sets_change_hands_when_they_are_idle() {
    let bed = Bed::with("h200x4", EngineOptions { streams: 1, ..EngineOptions::default() });
    let gpu = bed.mapped(GPU, SIZE);
    let span = gpu.span(Bytes::ZERO, SIZE).unwrap();
    let host = bed.pinned(SIZE, 3);
    let from = Span::pinned(&host, Bytes::ZERO, SIZE).unwrap();
    for _ in 0..5 {
        let stream = bed.stream(GPU);
        let on = bed.user(GPU, stream.id());
        bed.copy(&span, &from, on);
        bed.wait(on);
    }
    let statistics = bed.engine().statistics();
    assert_eq!((statistics.split_copies, statistics.native_copies), (5, 0));
    drop((gpu, span, host, from));
    bed.end();
}

#[test]
fn more_streams_get_leases_up_to_the_limit() {
    let bed = Bed::with("h200x4", EngineOptions { streams: 4, ..EngineOptions::default() });
    let held: Vec<OwnedStream> = (0..6).map(|_| bed.stream(GPU)).collect();
    let buffers: Vec<_> = (0..6).map(|_| bed.mapped(GPU, SIZE)).collect();
    let host = bed.pinned(SIZE, 3);
    let from = Span::pinned(&host, Bytes::ZERO, SIZE).unwrap();
    let mut releases = Vec::new();
    for (stream, buffer) in held.iter().zip(&buffers) {
        releases.push(hold(&bed, stream));
        let span = buffer.span(Bytes::ZERO, SIZE).unwrap();
        let before = bed.engine().statistics();
        bed.copy(&span, &from, bed.user(GPU, stream.id()));
        let after = bed.engine().statistics();
        if after.native_copies > before.native_copies {
            // The thread makes another.
            std::thread::sleep(Duration::from_millis(200));
        }
    }
    let statistics = bed.engine().statistics();
    assert_eq!(statistics.split_copies + statistics.native_copies, 6);
    assert!(statistics.split_copies >= 2, "{statistics:?}");
    releases.into_iter().for_each(|release| release());
    for (stream, buffer) in held.iter().zip(&buffers) {
        stream.synchronize().unwrap();
        assert!(bed.read(&buffer.span(Bytes::ZERO, SIZE).unwrap()) == host.as_slice());
    }
    drop((held, buffers, host, from));
    bed.end();
}

#[test]
fn streams_of_several_threads_copy_at_once() {
    let bed = Bed::new("h200x4");
    std::thread::scope(|scope| {
        for (thread, target) in (0_u64..).zip(bed.gpus.iter()) {
            let bed = &bed;
            scope.spawn(move || {
                let stream = bed.stream(target);
                let on = bed.user(target, stream.id());
                let gpu = bed.mapped(target, SIZE);
                let span = gpu.span(Bytes::ZERO, SIZE).unwrap();
                for round in 0..5 {
                    let [out, back] = [thread * 10 + round, 99].map(|seed| bed.pinned(SIZE, seed));
                    let whole = |memory| Span::pinned(memory, Bytes::ZERO, SIZE).unwrap();
                    bed.copy(&span, &whole(&out), on);
                    let options = CopyOptions::default();
                    bed.engine().copy(&whole(&back), &span, on, options).unwrap().wait().unwrap();
                    assert!(back.as_slice() == out.as_slice());
                }
            });
        }
    });
    assert_eq!(bed.engine().statistics().lost_copies, 0);
    bed.end();
}

/// Where the end of a copy cannot be marked its handle waits for more than the copy: never for less, whichever thread waits.
#[test]
fn a_handle_without_a_mark_waits_for_the_copying_threads_own_stream() {
    let bed = Bed::new("h200x4");
    let size = Bytes::kib(64);
    let (gpu, host) = (bed.mapped(GPU, size), bed.pinned(size, 3));
    let (to, from) = (gpu.span(Bytes::ZERO, size).unwrap(), Span::pinned(&host, Bytes::ZERO, size).unwrap());
    for raw in [Stream::PER_THREAD, Stream(0)] {
        let on = bed.user(GPU, raw);
        let (took, touched) = (Duration::from_millis(1), [Touch { address: to.start(), size }]);
        bed.sim.enqueue_kernel(GPU, raw, &[], &touched, took, |_| {}).unwrap();
        let faults =
            [Fault { verb: Some(Verb::EventRecord), when: When::From(1), error: Injected::NotReady }];
        bed.faults.set(&faults);
        let handle = bed.engine().copy(&to, &from, on, CopyOptions::default()).unwrap();
        bed.faults.set(&[]);
        std::thread::scope(|scope| scope.spawn(|| handle.wait().unwrap()).join().unwrap());
        assert!(bed.read(&to) == host.as_slice()[..64 << 10], "{raw:?}");
    }
    drop((gpu, host, to, from));
    bed.end();
}
