//! Completion points on a stub; `tiers/sim/tests/integration/completion.rs` has them on the simulated device.

use std::sync::atomic::Ordering::Relaxed;

use super::*;
use crate::stub::Stub;
use crate::{Fault, Faults, Injected, Recorder, Refusal, When};

const BOTH: [DeviceId; 2] = [DeviceId(0), DeviceId(1)];

#[test]
fn a_point_covers_earlier_marks_only() {
    let stub = Stub::new();
    let completion_events = CompletionEvents::new(stub.clone());
    let both: DeviceSet = BOTH.into_iter().collect();
    let before = completion_events.mark();
    let mut point = completion_events.record(both).unwrap();
    let after = completion_events.mark();
    stub.pending.store(true, Relaxed);
    assert!(point.poll().unwrap().is_none());
    stub.pending.store(false, Relaxed);
    let passed = point.poll().unwrap().unwrap();
    assert!(passed.covers(before, both) && !passed.covers(after, both));
    assert!(!passed.covers(before, DeviceSet::of(DeviceId(2))));
    assert!(completion_events.synchronize(both).unwrap().covers(after, both));
}

#[test]
fn events_are_reused() {
    let stub = Stub::new();
    let completion_events = CompletionEvents::new(stub.clone());
    for _ in 0..100 {
        let mut kept = completion_events.record(DeviceSet::of(DeviceId(0))).unwrap();
        drop(completion_events.record(DeviceSet::of(DeviceId(0))).unwrap());
        kept.wait().unwrap();
    }
    assert_eq!(stub.events.load(Relaxed), 2);
    drop(completion_events);
    assert_eq!(stub.events.load(Relaxed), 0);
}

const MEMORY: DeviceSet = DeviceSet::of(DeviceId(1));
const STREAM: (DeviceId, Stream) = (DeviceId(0), Stream(7));

#[test]
fn marks_of_finished_outside_work_are_dropped() {
    let stub = Stub::new();
    let completion_events = CompletionEvents::new(stub.clone());
    for _ in 0..1000 {
        completion_events.enqueued_on(MEMORY, STREAM).unwrap();
    }
    assert!(stub.events.load(Relaxed) < 100, "{} events", stub.events.load(Relaxed));
    // What is not done is kept, all of it.
    completion_events.outside.sweep();
    stub.pending.store(true, Relaxed);
    for _ in 0..1000 {
        completion_events.enqueued_on(MEMORY, STREAM).unwrap();
    }
    assert_eq!(stub.events.load(Relaxed), 1000);
    assert!(completion_events.record(MEMORY).unwrap().poll().unwrap().is_none());
}

#[test]
fn waiting_for_outside_work_blocks_no_other_thread() {
    let stub = Stub::new();
    // No completion point of its own has an event.
    stub.without_context.store(MEMORY.bits(), Relaxed);
    let completion_events = CompletionEvents::new(stub.clone());
    stub.pending.store(true, Relaxed);
    completion_events.enqueued_on(MEMORY, STREAM).unwrap();
    let held = stub.waits.lock();
    let waiting = {
        let mut point = completion_events.record(MEMORY).unwrap();
        std::thread::spawn(move || point.wait().map(drop))
    };
    // Most likely it waits by then; where it does not the test passes for nothing, and never fails for it.
    std::thread::sleep(std::time::Duration::from_millis(50));
    let (done, recorded) = std::sync::mpsc::channel();
    let other = completion_events.clone();
    let recording = std::thread::spawn(move || {
        let mut point = other.record(MEMORY).unwrap();
        let _ = done.send(point.poll().unwrap().is_none());
    });
    let told = recorded.recv_timeout(std::time::Duration::from_secs(10));
    drop(held);
    waiting.join().unwrap().unwrap();
    recording.join().unwrap();
    assert_eq!(told, Ok(true), "what is waited for is enqueued after the next completion point is recorded");
}

#[test]
fn losing_a_gpu_ends_its_work_on_other_gpus_memory() {
    for (error, ends) in [
        (Injected::Sticky(700), true),
        (Injected::Refused(Refusal::UnknownHandle), true),
        (Injected::Failed(1), false),
    ] {
        let stub = Stub::new();
        // No completion point of its own has an event.
        stub.without_context.store(MEMORY.bits(), Relaxed);
        stub.pending.store(true, Relaxed);
        let faults = Arc::new(Faults::new(stub.clone()));
        let completion_events = CompletionEvents::new(faults.clone());
        completion_events.enqueued_on(MEMORY, STREAM).unwrap();
        let [mut polled, mut waited] = [0, 1].map(|_| completion_events.record(MEMORY).unwrap());
        let of = |verb| Fault { verb: Some(verb), when: When::From(1), error };
        faults.set(&[of(Verb::EventQuery), of(Verb::EventSynchronize)]);
        assert_eq!(polled.poll().is_ok_and(|passed| passed.is_some()), ends, "{error:?}");
        assert_eq!(waited.wait().is_ok(), ends, "{error:?}");
        assert_eq!(completion_events.synchronize(MEMORY).is_ok(), ends, "{error:?}");
    }
}

#[test]
fn a_capture_holds_points_back() {
    let recorder = Arc::new(Recorder::measured(Stub::new()));
    let completion_events = CompletionEvents::new(recorder.clone());
    let told = Arc::new(Mutex::new(Vec::new()));
    let into = told.clone();
    completion_events.watch_holds(move |holds| into.lock().push(holds));
    let (hold, second) = (completion_events.hold(), completion_events.hold());
    let refused = completion_events.record(DeviceSet::of(DeviceId(0)));
    assert!(matches!(refused, Err(DriverError::Capturing { .. })));
    assert_eq!(recorder.counters().calls(), 0);
    drop(hold);
    assert_eq!(*told.lock(), [true]);
    drop(second);
    assert_eq!(*told.lock(), [true, false]);
    completion_events.record(DeviceSet::of(DeviceId(0))).unwrap();
}

#[test]
fn without_context_events_every_known_stream_gets_one() {
    let faults = Arc::new(Faults::new(Stub::new()));
    faults.set(&[Fault {
        verb: Some(Verb::EventRecordContext),
        when: When::From(1),
        error: Injected::Unsupported,
    }]);
    let recorder = Arc::new(Recorder::measured(faults));
    let completion_events = CompletionEvents::new(recorder.clone());
    completion_events.know(DeviceId(0), Stream(7));
    completion_events.know(DeviceId(0), Stream(7));
    for _ in 0..2 {
        completion_events.record(DeviceSet::of(DeviceId(0))).unwrap().wait().unwrap();
    }
    let counters = recorder.counters();
    assert_eq!(counters.of(Verb::EventRecordContext).calls, 1);
    assert_eq!(counters.of(Verb::EventRecord).calls, 4);
    assert_eq!(counters.of(Verb::EventCreate).calls, 2);
}
