//! Memory that the driver does not know: bytes, the native contract, faults.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use glake_device::owned::{self, Buffer, DeviceSet, Span};
use glake_device::{Address, DeviceId, Fault, Injected, Touch, Verb, When};
use glake_sim::{Clock, pattern};
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, ends, length};
use crate::paths::Direction;
use crate::{CopyOptions, EngineOptions};

/// Memory of the program, with a pattern.
struct Loose(Vec<u8>);

impl Loose {
    fn new(size: Bytes, seed: u64) -> Loose {
        let mut bytes = vec![0; usize::try_from(size.get()).unwrap()];
        pattern::fill(&mut bytes, 0, seed);
        Loose(bytes)
    }

    /// As much of it, from an offset on.
    fn span(&self, fixture: &Fixture, offset: u64, size: u64) -> Span {
        let start = Address(self.0.as_ptr() as u64 + offset);
        fixture.sim.span(start, Bytes::new(size), DeviceSet::EMPTY).unwrap()
    }
}

fn buffer(fixture: &Fixture, size: Bytes) -> (Arc<Buffer>, Span) {
    let buffer = fixture.mapped(GPU, size);
    let span = buffer.span(Bytes::ZERO, size).unwrap();
    (buffer, span)
}

#[test]
fn bytes_are_there_when_the_call_returns() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let most = Bytes::mib(40);
    let (kept, mapped) = buffer(&fixture, most);
    let plain = fixture.plain(GPU, most);
    for gpu in [&mapped, &plain.span] {
        for (offset, size) in [(0, 2 << 20), (1, (2 << 20) + 1), (4097, (7 << 20) + 123), (64, 33 << 20)] {
            let (mut out, back) = (Loose::new(most, size), Loose::new(most, 99));
            let (start, end) = (length(offset), length(offset + size));
            let part = gpu.part(Bytes::new(offset), Bytes::new(size)).unwrap();
            let before = fixture.engine().statistics();
            let source = out.span(&fixture, offset, size);
            fixture.engine().copy(&part, &source, on, CopyOptions::default()).unwrap();
            let sent = out.0[start..end].to_vec();
            // The source has been read.
            out.0.fill(0);
            let target = back.span(&fixture, offset, size);
            fixture.engine().copy(&target, &part, on, CopyOptions::default()).unwrap();
            assert!(back.0[start..end] == sent, "{offset} {size}");
            let untouched = Loose::new(most, 99);
            assert!(back.0[..start] == untouched.0[..start]);
            assert!(back.0[end..] == untouched.0[end..]);
            let after = fixture.engine().statistics();
            assert_eq!(after.split_copies - before.split_copies, 2);
            assert_eq!(after.native_copies, before.native_copies);
        }
    }
    let relayed: Bytes = {
        let paths = fixture.engine().statistics().paths;
        paths.iter().filter(|path| path.relay != GPU).map(|path| path.bytes).sum()
    };
    assert!(relayed > Bytes::mib(4), "{relayed}");
    drop((stream, kept, mapped, plain));
    fixture.end();
}

#[test]
fn small_copies_and_engines_without_threads_leave_it_to_the_driver() {
    for (options, size) in [
        (EngineOptions::default(), Bytes::mib(1)),
        (EngineOptions { pageable_threads: 0, ..EngineOptions::default() }, Bytes::mib(8)),
        (EngineOptions { pageable_slots: Bytes::ZERO, ..EngineOptions::default() }, Bytes::mib(8)),
    ] {
        let fixture = Fixture::with("h200x4", options);
        let stream = fixture.stream(GPU);
        let (kept, gpu) = buffer(&fixture, size);
        let out = Loose::new(size, 5);
        let from = out.span(&fixture, 0, size.get());
        let on = fixture.user(GPU, stream.id());
        fixture.copy(&gpu, &from, on);
        fixture.wait(on);
        assert!(fixture.holds(&gpu, &out.0));
        assert_eq!(fixture.engine().statistics().native_copies, 1);
        drop((stream, kept, gpu));
        fixture.end();
    }
}

#[test]
fn kernels_before_and_after_see_what_they_should() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let size = Bytes::mib(8);
    let (kept, gpu) = buffer(&fixture, size);
    let paint = |byte: u8| {
        let (start, touch) = (gpu.start(), Touch { address: gpu.start(), size });
        let took = Duration::from_micros(300);
        let paint = move |memory: &mut dyn glake_device::KernelMemory| {
            memory.write(start, &vec![byte; 8 << 20]).unwrap();
        };
        fixture.sim.enqueue_kernel(GPU, on.raw, &[], &[touch], took, paint).unwrap();
    };
    let (first, second, out) = (Loose::new(size, 1), Loose::new(size, 2), Loose::new(size, 3));
    paint(1);
    fixture.copy(&first.span(&fixture, 0, size.get()), &gpu, on);
    assert!(first.0.iter().all(|byte| *byte == 1));
    paint(2);
    fixture.copy(&gpu, &out.span(&fixture, 0, size.get()), on);
    fixture.copy(&second.span(&fixture, 0, size.get()), &gpu, on);
    assert!(second.0 == out.0);
    paint(3);
    fixture.wait(on);
    assert!(fixture.read(&gpu).iter().all(|byte| *byte == 3));
    drop((stream, kept, gpu));
    fixture.end();
}

#[test]
fn the_source_is_read_when_the_stream_has_come_to_the_copy() {
    // In wall time: the host waits for what another thread does later.
    let fixture = Fixture::timed("h200x4", EngineOptions::default(), Clock::Wall);
    let (stream, other) = (fixture.stream(GPU), fixture.stream(GPU));
    let on = fixture.user(GPU, stream.id());
    let size = Bytes::mib(6);
    let (kept, gpu) = buffer(&fixture, size);
    let mut source = Loose::new(size, 1);
    let from = source.span(&fixture, 0, size.get());
    let word = fixture.pinned(Bytes::mib(2), 1);
    fixture.sim.enqueue_wait(GPU, on.raw, word.start(), 4242).unwrap();
    let (sim, at, raw) = (fixture.sim.clone(), word.start(), other.id());
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(60));
        pattern::fill(&mut source.0, 0, 2);
        sim.enqueue_signal(GPU, raw, at, 4242).unwrap();
        source
    });
    fixture.copy(&gpu, &from, on);
    let source = late.join().unwrap();
    fixture.wait(on);
    assert!(fixture.holds(&gpu, &source.0));
    assert_eq!(fixture.engine().statistics().split_copies, 1);
    other.synchronize().unwrap();
    drop((stream, other, kept, gpu, word));
    fixture.end();
}

#[test]
fn a_stream_that_is_held_back_holds_back_no_other() {
    let fixture = Fixture::timed("h200x4", EngineOptions::default(), Clock::Wall);
    let (held, other) = (fixture.stream(GPU), fixture.stream(GPU));
    let size = Bytes::mib(4);
    let word = fixture.pinned(Bytes::mib(2), 1);
    fixture.sim.enqueue_wait(GPU, held.id(), word.start(), 4242).unwrap();
    let memory: Vec<_> = (0..4).map(|_| buffer(&fixture, size)).collect();
    let sources: Vec<_> = (0..4).map(|seed| Loose::new(size, seed)).collect();
    let spans: Vec<_> = sources.iter().map(|source| source.span(&fixture, 0, size.get())).collect();
    let (done, waited) = mpsc::channel();
    std::thread::scope(|scope| {
        let (fixture, on) = (&fixture, fixture.user(GPU, held.id()));
        let (to, from) = (&memory[0].1, &spans[0]);
        scope.spawn(move || {
            fixture.copy(to, from, on);
            done.send(()).unwrap();
        });
        // On the same stream too another thread is not kept waiting by anything of ours.
        for at in 1..4 {
            fixture.copy(&memory[at].1, &spans[at], fixture.user(GPU, other.id()));
            assert!(fixture.holds(&memory[at].1, &sources[at].0));
        }
        assert!(waited.try_recv().is_err());
        fixture.sim.enqueue_signal(GPU, other.id(), word.start(), 4242).unwrap();
        waited.recv_timeout(Duration::from_secs(20)).unwrap();
    });
    fixture.wait(fixture.user(GPU, held.id()));
    assert!(fixture.holds(&memory[0].1, &sources[0].0));
    other.synchronize().unwrap();
    drop((held, other, word, memory, spans));
    fixture.end();
}

#[test]
fn threads_that_copy_at_once_get_their_bytes() {
    let fixture = Fixture::new("h200x4");
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let fixture = &fixture;
            scope.spawn(move || {
                let gpu = DeviceId(thread);
                let stream = fixture.stream(gpu);
                let on = fixture.user(gpu, stream.id());
                let size = Bytes::mib(5);
                let memory = fixture.mapped(gpu, size);
                let span = memory.span(Bytes::ZERO, size).unwrap();
                for round in 0..4 {
                    let seed = u64::from(thread) * 10 + round;
                    let (out, back) = (Loose::new(size, seed), Loose::new(size, 99));
                    fixture.copy(&span, &out.span(fixture, 0, size.get()), on);
                    fixture.copy(&back.span(fixture, 0, size.get()), &span, on);
                    assert!(back.0 == out.0);
                }
            });
        }
    });
    fixture.end();
}

/// A copy with a fault in one call; how often it was injected.
fn trial(direction: Direction, fault: Fault) -> u64 {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let size = Bytes::mib(6);
    let (kept, gpu) = buffer(&fixture, size);
    let (pinned, loose) = (fixture.pinned(size, 2), Loose::new(size, 1));
    let from = Span::pinned(&pinned, Bytes::ZERO, size).unwrap();
    owned::copy(&*fixture.driver, GPU, on.raw, &gpu, &from).unwrap();
    fixture.wait(on);
    let host = loose.span(&fixture, 0, size.get());
    let (to, from) = ends(direction, &host, &gpu);
    fixture.faults.set(&[fault]);
    let unwaited = CopyOptions { waited: false, ..CopyOptions::default() };
    let answer = fixture.engine().copy(to, from, on, unwaited);
    let injected = fixture.faults.injected();
    fixture.faults.set(&[]);
    // What no thread brought was read when the call returned, and arrives in the order of the stream.
    fixture.wait(on);
    match answer {
        Ok(_) => {
            assert!(fixture.holds(&gpu, &loose.0), "{fault:?}");
            assert!(direction == Direction::ToGpu || loose.0 == pinned.as_slice(), "{fault:?}");
        }
        // A fault that goes on and on leaves no way; nor does the loss of the user's own device.
        Err(error) => assert!(
            matches!(fault.when, When::From(_))
                || matches!(fault.error, Injected::Lost(_) | Injected::Sticky(_)),
            "{fault:?}: {error}"
        ),
    }
    drop((stream, kept, gpu, pinned, host));
    fixture.end();
    injected
}

const VERBS: [Verb; 6] = [
    Verb::Copy,
    Verb::EventRecord,
    Verb::EventQuery,
    Verb::EventSynchronize,
    Verb::StreamSynchronize,
    Verb::CaptureState,
];

#[test]
fn every_call_may_fail_once() {
    for direction in Direction::BOTH {
        for verb in VERBS {
            for n in 1.. {
                let fault = Fault { verb: Some(verb), when: When::Nth(n), error: Injected::Failed(1) };
                if trial(direction, fault) == 0 {
                    break;
                }
            }
        }
    }
}

#[test]
fn calls_that_go_on_failing_end() {
    for direction in Direction::BOTH {
        for verb in VERBS {
            for n in [1, 2, 5, 20] {
                trial(direction, Fault { verb: Some(verb), when: When::From(n), error: Injected::Failed(1) });
            }
        }
    }
}

#[test]
fn what_a_lost_gpu_did_not_bring_is_copied_again() {
    for direction in Direction::BOTH {
        for n in 1..=12 {
            for error in [Injected::Lost(700), Injected::Sticky(700)] {
                trial(direction, Fault { verb: Some(Verb::Copy), when: When::Nth(n), error });
            }
        }
    }
}
