//! A copy whose lanes could not be joined says so; what it left on them comes to no later copy's bytes.

use std::time::Duration;

use glake_device::owned::{DeviceSet, Span};
use glake_device::{Address, Fault, Injected, Verb, When};
use glake_sim::SimOptions;
use glake_units::Bytes;

use super::fixture::{Fixture, GPU};
use crate::{CopyOptions, EngineOptions};

const SIZE: Bytes = Bytes::mib(12);

/// No lane's end can be marked, and no stream waited for.
fn faults() -> [Fault; 2] {
    let fault = |verb, n| Fault { verb: Some(verb), when: When::From(n), error: Injected::Failed(2) };
    // The first event is the fork's.
    [fault(Verb::EventRecord, 2), fault(Verb::StreamSynchronize, 1)]
}

#[test]
fn a_later_copy_keeps_its_bytes() {
    // The strict simulator refuses the later copy, the other one loses its bytes.
    for (is_open, strict_ordering) in [(true, false), (false, false), (true, true), (false, true)] {
        let device = SimOptions { strict_ordering, ..SimOptions::default() };
        let fixture = Fixture::on("h200x4", EngineOptions::default(), device);
        let [stream, next, other] = [(); 3].map(|()| fixture.stream(GPU));
        let on = [&stream, &next].map(|stream| fixture.user(GPU, stream.id()));
        let (mapped, plain) = (fixture.mapped(GPU, SIZE), fixture.plain(GPU, SIZE));
        let span = if is_open { mapped.span(Bytes::ZERO, SIZE).unwrap() } else { plain.span.clone() };
        let [first, second] = [1, 2].map(|seed| fixture.pinned(SIZE, seed));
        let from = |memory| Span::pinned(memory, Bytes::ZERO, SIZE).unwrap();
        // Lanes that have something else to do first.
        fixture.sim.enqueue_kernel(GPU, other.id(), &[], &[], Duration::from_millis(3), |_| {}).unwrap();
        let late = other.event().unwrap();
        late.record(other.id()).unwrap();
        for lane_set in fixture.engine().shared.links.lane_sets().snapshot() {
            for relay in fixture.gpus.iter() {
                lane_set.lane(relay).unwrap().stream.wait_for(late.id()).unwrap();
            }
        }
        fixture.faults.set(&faults());
        let failed = fixture.engine().copy(&span, &from(&first), on[0], CopyOptions::default());
        assert!(failed.is_err());
        fixture.faults.set(&[]);
        // A small one over each part of what failed, so that it is done before that is.
        let small = Bytes::kib(64);
        for (index, on) in on.into_iter().enumerate() {
            // Streams that the program orders, as it orders all that touches the same memory.
            let event = stream.event().unwrap();
            event.record(stream.id()).unwrap();
            next.wait_for(event.id()).unwrap();
            let parts: Vec<Bytes> = (0..12).map(|mib| Bytes::mib(mib).saturating_add(small)).collect();
            for at in &parts {
                let (to, from) = (span.part(*at, small).unwrap(), from(&second).part(*at, small).unwrap());
                fixture.engine().copy(&to, &from, on, CopyOptions::default()).unwrap().wait().unwrap();
            }
            fixture.completion_events.synchronize(fixture.gpus).unwrap();
            fixture.engine().shared.contexts.own().synchronize(fixture.gpus).unwrap();
            for at in &parts {
                let start = usize::try_from(at.get()).unwrap();
                let expected = &second.as_slice()[start..start + (64 << 10)];
                assert!(fixture.holds(&span.part(*at, small).unwrap(), expected), "{is_open} {index} {at}");
            }
        }
        assert!(!fixture.engine().shared.ledger.has_unjoined(), "later copies do not ask any more");
        drop((stream, next, other, mapped, plain, span, late));
        fixture.end();
    }
}

#[test]
fn a_copy_behind_what_cannot_be_joined_is_no_success() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let mapped = fixture.mapped(GPU, SIZE);
    let span = mapped.span(Bytes::ZERO, SIZE).unwrap();
    let memory = fixture.pinned(SIZE, 1);
    let from = Span::pinned(&memory, Bytes::ZERO, SIZE).unwrap();
    fixture.faults.set(&faults());
    for size in [SIZE, Bytes::kib(64)] {
        let (to, from) = (span.part(Bytes::ZERO, size).unwrap(), from.part(Bytes::ZERO, size).unwrap());
        let unwaited = CopyOptions { waited: false, ..CopyOptions::default() };
        assert!(fixture.engine().copy(&to, &from, on, unwaited).is_err(), "{size}");
    }
    fixture.faults.set(&[]);
    fixture.completion_events.synchronize(fixture.gpus).unwrap();
    fixture.engine().shared.contexts.own().synchronize(fixture.gpus).unwrap();
    fixture.engine().copy(&span, &from, on, CopyOptions::default()).unwrap().wait().unwrap();
    assert!(fixture.holds(&span, memory.as_slice()));
    drop((stream, mapped, span, from, memory));
    fixture.end();
}

#[test]
fn a_later_copy_keeps_its_bytes_of_a_pageable_one() {
    let fixture = Fixture::new("h200x4");
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let mapped = fixture.mapped(GPU, SIZE);
    let span = mapped.span(Bytes::ZERO, SIZE).unwrap();
    let (loose, memory) = (vec![7_u8; 12 << 20], fixture.pinned(SIZE, 1));
    let from = fixture.sim.span(Address(loose.as_ptr() as u64), SIZE, DeviceSet::EMPTY).unwrap();
    let fault = |verb| Fault { verb: Some(verb), when: When::From(1), error: Injected::Failed(2) };
    fixture.faults.set(&[fault(Verb::EventSynchronize), fault(Verb::StreamSynchronize)]);
    assert!(fixture.engine().copy(&span, &from, on, CopyOptions::default()).is_err());
    fixture.faults.set(&[]);
    // By the driver on the user's stream, and over lanes.
    for size in [Bytes::kib(64), SIZE] {
        let part = |span: &Span| span.part(Bytes::ZERO, size).unwrap();
        let from = part(&Span::pinned(&memory, Bytes::ZERO, SIZE).unwrap());
        fixture.engine().copy(&part(&span), &from, on, CopyOptions::default()).unwrap().wait().unwrap();
    }
    fixture.completion_events.synchronize(fixture.gpus).unwrap();
    fixture.engine().shared.contexts.own().synchronize(fixture.gpus).unwrap();
    assert!(fixture.holds(&span, memory.as_slice()));
    assert!(!fixture.engine().shared.ledger.has_unjoined(), "later copies do not ask any more");
    drop((stream, mapped, span, memory));
    fixture.end();
}

#[test]
fn a_graph_is_not_recorded_beside_what_was_not_joined() {
    let fixture = Fixture::new("h200x4");
    let [stream, other] = [(); 2].map(|()| fixture.stream(GPU));
    let on = fixture.user(GPU, stream.id());
    let mapped = fixture.mapped(GPU, SIZE);
    let span = mapped.span(Bytes::ZERO, SIZE).unwrap();
    let memory = fixture.pinned(SIZE, 1);
    let from = Span::pinned(&memory, Bytes::ZERO, SIZE).unwrap();
    fixture.sim.enqueue_kernel(GPU, other.id(), &[], &[], Duration::from_millis(3), |_| {}).unwrap();
    let late = other.event().unwrap();
    late.record(other.id()).unwrap();
    for lane_set in fixture.engine().shared.links.lane_sets().snapshot() {
        for relay in fixture.gpus.iter() {
            lane_set.lane(relay).unwrap().stream.wait_for(late.id()).unwrap();
        }
    }
    fixture.faults.set(&faults());
    assert!(fixture.engine().copy(&span, &from, on, CopyOptions::default()).is_err());
    fixture.faults.set(&[]);
    fixture.sim.begin_capture(GPU, stream.id()).unwrap();
    let unwaited = CopyOptions { waited: false, ..CopyOptions::default() };
    let refused = fixture.engine().copy(&span, &from, on, unwaited).unwrap_err();
    assert!(refused.to_string().contains("while a stream capture is open"), "{refused}");
    fixture.sim.end_capture(GPU, stream.id()).unwrap();
    // Once it is over a graph is recorded as ever.
    fixture.completion_events.synchronize(fixture.gpus).unwrap();
    fixture.engine().shared.contexts.own().synchronize(fixture.gpus).unwrap();
    fixture.sim.begin_capture(GPU, stream.id()).unwrap();
    fixture.engine().copy(&span, &from, on, unwaited).unwrap();
    fixture.sim.end_capture(GPU, stream.id()).unwrap();
    drop((stream, other, late, mapped, span, from, memory));
    fixture.end();
}
