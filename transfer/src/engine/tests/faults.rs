//! Calls of the driver that fail while a copy is enqueued: the bytes are right all the same, or the call says so.

use glake_device::owned::Span;
use glake_device::{Fault, Injected, Refusal, Verb, When};
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, ends};
use crate::CopyOptions;
use crate::paths::{Direction, Way};

const SIZE: Bytes = Bytes::mib(6);

/// The verbs that a copy may call.
const VERBS: [Verb; 7] = [
    Verb::Copy,
    Verb::EventRecord,
    Verb::EventQuery,
    Verb::StreamWaitEvent,
    Verb::StreamSynchronize,
    Verb::CaptureState,
    Verb::EventCreate,
];

const ERRORS: [Injected; 4] = [
    Injected::Failed(1),
    Injected::OutOfMemory,
    Injected::Refused(Refusal::InvalidValue),
    Injected::NotReady,
];

/// Three copies with the fault in the second, on memory of a kind, of a stream that is idle or is not.
fn trial(direction: Direction, memory: Way, busy: bool, fault: Fault) -> u64 {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let (mapped, plain) = (fixture.mapped(GPU, SIZE), fixture.plain(GPU, SIZE));
    let span = match memory {
        Way::ZeroStaging => mapped.span(Bytes::ZERO, SIZE).unwrap(),
        _ => plain.span.clone(),
    };
    let unwaited = CopyOptions { waited: false, ..CopyOptions::default() };
    let mut injected = 0;
    for round in 0..3 {
        let source = fixture.pinned(SIZE, round + 1);
        let host = fixture.pinned(SIZE, round + if direction == Direction::ToGpu { 1 } else { 50 });
        let host_span = Span::pinned(&host, Bytes::ZERO, SIZE).unwrap();
        if direction == Direction::FromGpu {
            let source = Span::pinned(&source, Bytes::ZERO, SIZE).unwrap();
            glake_device::owned::copy(&*fixture.driver, GPU, on.raw, &span, &source).unwrap();
            fixture.wait(on);
        }
        if busy {
            fixture.keep_busy(&stream);
        }
        if round == 1 {
            fixture.faults.set(&[fault]);
        }
        let before = fixture.faults.injected();
        let (to, from) = ends(direction, &host_span, &span);
        let answer = fixture.engine().copy(to, from, on, unwaited);
        injected += fixture.faults.injected() - before;
        fixture.faults.set(&[]);
        fixture.wait(on);
        let arrived = match direction {
            Direction::ToGpu => fixture.holds(&span, source.as_slice()),
            Direction::FromGpu => host.as_slice() == source.as_slice(),
        };
        match answer {
            Ok(_) => assert!(arrived, "{fault:?}"),
            // Only a fault that goes on and on leaves no way.
            Err(error) => assert!(matches!(fault.when, When::From(_)), "{fault:?}: {error}"),
        }
    }
    drop((stream, mapped, plain, span));
    fixture.end();
    injected
}

#[test]
fn every_call_may_fail_once() {
    let mut error = ERRORS.iter().cycle();
    for (memory, busy) in
        [Way::ZeroStaging, Way::Staged].into_iter().flat_map(|memory| [(memory, false), (memory, true)])
    {
        for direction in Direction::BOTH {
            for verb in VERBS {
                for n in 1.. {
                    let fault = Fault { verb: Some(verb), when: When::Nth(n), error: *error.next().unwrap() };
                    if trial(direction, memory, busy, fault) == 0 {
                        break;
                    }
                }
            }
        }
    }
}

#[test]
fn lanes_wait_for_a_stream_that_is_not_idle() {
    for busy in [false, true] {
        let fixture = Fixture::new("h200x4");
        let stream = fixture.stream(GPU);
        let (mapped, host) = (fixture.mapped(GPU, SIZE), fixture.pinned(SIZE, 1));
        let (to, from) =
            (mapped.span(Bytes::ZERO, SIZE).unwrap(), Span::pinned(&host, Bytes::ZERO, SIZE).unwrap());
        if busy {
            fixture.keep_busy(&stream);
        }
        // The first wait is a lane's for the stream, by whose failure its part goes another way, or the stream's for a lane.
        let (verb, when) = (Some(Verb::StreamWaitEvent), When::Nth(1));
        fixture.faults.set(&[Fault { verb, when, error: Injected::NotReady }]);
        fixture.copy(&to, &from, fixture.user(GPU, stream.id()));
        assert_eq!(fixture.faults.injected(), 1);
        stream.synchronize().unwrap();
        assert!(fixture.holds(&to, host.as_slice()));
        let retries: u64 = fixture.engine().statistics().paths.iter().map(|path| path.retries).sum();
        assert_eq!(retries, u64::from(busy));
        drop((stream, mapped, host, to, from));
        fixture.end();
    }
}

#[test]
fn a_relay_may_answer_that_it_is_lost() {
    for memory in [Way::ZeroStaging, Way::Staged] {
        for verb in [Verb::Copy, Verb::EventRecord, Verb::StreamWaitEvent] {
            for (n, busy) in (1..=24).flat_map(|n| [(n, false), (n, true)]) {
                let fixture = Fixture::new("h200x4");
                let stream = fixture.stream(GPU);
                let on = fixture.user(GPU, stream.id());
                let (mapped, plain) = (fixture.mapped(GPU, SIZE), fixture.plain(GPU, SIZE));
                let span = match memory {
                    Way::ZeroStaging => mapped.span(Bytes::ZERO, SIZE).unwrap(),
                    _ => plain.span.clone(),
                };
                let host = fixture.pinned(SIZE, n);
                let from = Span::pinned(&host, Bytes::ZERO, SIZE).unwrap();
                if busy {
                    fixture.keep_busy(&stream);
                }
                fixture.faults.set(&[Fault {
                    verb: Some(verb),
                    when: When::Nth(n),
                    error: Injected::Sticky(700),
                }]);
                let answer = fixture.engine().copy(&span, &from, on, CopyOptions::default());
                let answered = answer.and_then(crate::CopyHandle::wait);
                fixture.faults.set(&[]);
                fixture.wait(on);
                // What the user's own device answers is the user's to know.
                assert!(answered.is_err() || fixture.holds(&span, host.as_slice()), "{verb} {n}");
                if let Err(error) = &answered {
                    assert!(
                        matches!(error, crate::TransferError::Driver(error) if error.is_sticky()),
                        "{error}"
                    );
                }
                drop((stream, mapped, plain, span, from, host));
                fixture.end();
            }
        }
    }
}

#[test]
fn calls_that_go_on_failing_leave_nothing_running() {
    for verb in VERBS {
        for n in [1, 2, 3, 5, 8] {
            trial(
                Direction::ToGpu,
                Way::ZeroStaging,
                n > 3,
                Fault { verb: Some(verb), when: When::From(n), error: Injected::Failed(1) },
            );
        }
    }
}

#[test]
fn copies_under_faults_at_random_are_right_or_say_so() {
    for seed in 0..40 {
        let fixture = Fixture::new("h200x4");
        let stream = fixture.stream(GPU);
        let on = fixture.user(GPU, stream.id());
        let mapped = fixture.mapped(GPU, SIZE);
        let span = mapped.span(Bytes::ZERO, SIZE).unwrap();
        let memory = fixture.pinned(SIZE, 0);
        let host = Span::pinned(&memory, Bytes::ZERO, SIZE).unwrap();
        for round in 0..8 {
            let source = fixture.pinned(SIZE, 100 * seed + round);
            let from = Span::pinned(&source, Bytes::ZERO, SIZE).unwrap();
            let chance = When::Chance { probability: 0.15, seed: 1000 * seed + round };
            fixture.faults.set(&[Fault { verb: None, when: chance, error: Injected::Failed(2) }]);
            let there = fixture.engine().copy_blocking(&span, &from, on, CopyOptions::default());
            fixture.faults.set(&[]);
            // What an error says of may run still.
            fixture.completion_events.synchronize(fixture.gpus).unwrap();
            fixture.engine().shared.contexts.own().synchronize(fixture.gpus).unwrap();
            assert!(there.is_err() || fixture.holds(&span, source.as_slice()), "{seed} {round}");
            fixture.engine().copy_blocking(&host, &span, on, CopyOptions::default()).unwrap();
            assert!(fixture.holds(&span, memory.as_slice()), "{seed} {round}");
        }
        drop((stream, mapped, span, host));
        fixture.end();
    }
}
