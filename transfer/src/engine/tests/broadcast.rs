//! One span to several GPUs: bytes, order, faults, speed.

use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::{self, Buffer, DeviceSet, Span};
use glake_device::{DeviceId, Fault, Injected, Touch, Verb, When};
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, length};
use crate::paths::Way;
use crate::{CopyHandle, CopyOptions, TransferError};

fn buffers(fixture: &Fixture, devices: &[u32], size: Bytes) -> (Vec<Arc<Buffer>>, Vec<Span>) {
    let buffers: Vec<_> = devices.iter().map(|device| fixture.mapped(DeviceId(*device), size)).collect();
    let spans = buffers.iter().map(|buffer| buffer.span(Bytes::ZERO, size).unwrap()).collect();
    (buffers, spans)
}

#[test]
fn every_gpu_gets_every_byte() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(DeviceId(2));
    for (devices, bytes) in [
        (&[0, 1, 2, 3][..], 64 << 20),
        (&[0, 1, 2, 3], (9 << 20) + 4097),
        (&[3, 1], (5 << 20) + 1),
        // Two on one GPU.
        (&[1, 1, 2], 8 << 20),
        // Too little for several links, or for several GPUs.
        (&[0, 1, 2, 3], 2 << 20),
        (&[2], 8 << 20),
        (&[0, 1], 100),
    ] {
        for on in [fixture.user(DeviceId(2), stream.id()), fixture.user(GPU, glake_device::Stream(0))] {
            let size = Bytes::new(bytes);
            let (kept, spans) = buffers(&fixture, devices, size);
            let host = fixture.pinned(size, bytes);
            let from = Span::pinned(&host, Bytes::ZERO, size).unwrap();
            fixture.engine().copy_to_all(&spans, &from, on, CopyOptions::default()).unwrap().wait().unwrap();
            for span in &spans {
                assert!(fixture.holds(span, &host.as_slice()[..length(bytes)]), "{devices:?} {bytes}");
            }
            drop((kept, spans, from, host));
        }
    }
    // Each byte went over a link once.
    let paths = fixture.engine().statistics().paths;
    assert!(paths.iter().any(|path| path.way == Way::Staged && path.relay != path.target));
    drop(stream);
    fixture.end();
}

#[test]
fn memory_that_peers_do_not_reach_gets_copies_of_its_own() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let size = Bytes::mib(8);
    let plain = [0, 1].map(|device| fixture.plain(DeviceId(device), size));
    let host = fixture.pinned(size, 4);
    let from = Span::pinned(&host, Bytes::ZERO, size).unwrap();
    let spans = plain.each_ref().map(|plain| plain.span.clone());
    fixture.engine().copy_to_all(&spans, &from, on, CopyOptions::default()).unwrap().wait().unwrap();
    for span in &spans {
        assert!(fixture.holds(span, host.as_slice()));
    }
    drop((stream, plain, spans, from, host));
    fixture.end();
}

#[test]
fn a_broadcast_keeps_the_order_of_its_stream() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let size = Bytes::mib(16);
    let (kept, spans) = buffers(&fixture, &[0, 1, 2, 3], size);
    let hosts: Vec<_> = (0..5).map(|seed| fixture.pinned(size, seed)).collect();
    let whole = |at: usize| Span::pinned(&hosts[at], Bytes::ZERO, size).unwrap();
    let touch = Touch { address: spans[0].start(), size };
    let start = spans[0].start();
    let took = Duration::from_micros(100);
    // The simulator refuses work that no event orders; the bytes tell the rest.
    fixture
        .sim
        .enqueue_kernel(GPU, on.raw, &[], &[touch], took, move |memory| {
            memory.write(start, &vec![1; 16 << 20]).unwrap();
        })
        .unwrap();
    let engine = fixture.engine();
    engine.copy_to_all(&spans, &whole(0), on, CopyOptions::default()).unwrap();
    for (at, span) in spans.iter().enumerate() {
        engine.copy(&whole(at + 1), span, on, CopyOptions::default()).unwrap();
    }
    engine.copy_to_all(&spans, &whole(4), on, CopyOptions::default()).unwrap().wait().unwrap();
    assert!(hosts[1..4].iter().all(|host| host.as_slice() == hosts[0].as_slice()));
    assert!(spans.iter().all(|span| fixture.holds(span, hosts[4].as_slice())));
    drop((stream, kept, spans, hosts));
    fixture.end();
}

/// A broadcast with a fault in one call; how often it was injected, and what became of it.
fn trial(fault: Fault) -> (u64, crate::Result<()>) {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let size = Bytes::mib(10);
    let (kept, spans) = buffers(&fixture, &[0, 1, 2, 3], size);
    let host = fixture.pinned(size, 7);
    let from = Span::pinned(&host, Bytes::ZERO, size).unwrap();
    fixture.faults.set(&[fault]);
    let answer = fixture.engine().copy_to_all(&spans, &from, on, CopyOptions::default());
    let waited = answer.and_then(CopyHandle::wait);
    let injected = fixture.faults.injected();
    fixture.faults.set(&[]);
    fixture.wait(on);
    if waited.is_ok() {
        assert!(spans.iter().all(|span| fixture.holds(span, host.as_slice())), "{fault:?}");
    }
    drop((stream, kept, spans, from, host));
    fixture.end();
    (injected, waited)
}

#[test]
fn every_call_may_fail_once() {
    let mut last = None;
    for verb in [Verb::Copy, Verb::EventRecord, Verb::StreamWaitEvent, Verb::CaptureState] {
        for n in 1.. {
            let fault = Fault { verb: Some(verb), when: When::Nth(n), error: Injected::Failed(1) };
            let (injected, answer) = trial(fault);
            if injected == 0 {
                break;
            }
            // The last event is the handle's: all is enqueued then.
            if let Err(error) = answer {
                assert!(verb == Verb::EventRecord, "{fault:?}: {error}");
                assert_eq!(last.replace(n), None, "{fault:?}: {error}");
            }
        }
    }
}

#[test]
fn a_gpu_that_is_lost_is_told_of() {
    for n in [1, 2, 5, 9, 20] {
        let error = Injected::Lost(700);
        let (_, answer) = trial(Fault { verb: Some(Verb::Copy), when: When::Nth(n), error });
        assert!(
            matches!(&answer, Err(TransferError::Lost { .. } | TransferError::Driver(_))),
            "{n}: {answer:?}"
        );
    }
}

#[test]
fn a_broadcast_is_three_times_as_fast_as_a_copy_for_each_gpu() {
    let fixture = Fixture::of_times("h200x4");
    for size in [Bytes::mib(128), Bytes::mib(256)] {
        let (kept, spans) = buffers(&fixture, &[0, 1, 2, 3], size);
        let host = fixture.pinned(size, 7);
        let from = Span::pinned(&host, Bytes::ZERO, size).unwrap();
        let streams: Vec<_> = (0..4).map(|device| fixture.stream(DeviceId(device))).collect();
        let start = fixture.sim.now();
        for (stream, span) in streams.iter().zip(&spans) {
            owned::copy(&*fixture.driver, stream.device(), stream.id(), span, &from).unwrap();
        }
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
        let native = fixture.sim.now() - start;
        let start = fixture.sim.now();
        let on = fixture.user(GPU, streams[0].id());
        fixture.engine().copy_to_all(&spans, &from, on, CopyOptions::default()).unwrap().wait().unwrap();
        let took = fixture.sim.now() - start;
        let gain = native.as_secs_f64() / took.as_secs_f64();
        println!("{size}: {gain:.2}");
        assert!(gain > 3.0, "{size}: {gain}");
        drop((kept, spans, from, host));
    }
    assert_eq!(fixture.engine().relays(), (0..4).map(DeviceId).collect::<DeviceSet>());
    fixture.end();
}
