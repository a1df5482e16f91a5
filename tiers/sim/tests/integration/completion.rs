//! Completion points on the simulated device, while contexts and captures come and go.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use glake_device::owned::{CompletionEvents, DeviceSet, OwnedStream, SeenCapture, this_thread};
use glake_device::{
    CaptureState, DeviceId, Driver, DriverError, Fault, Faults, Injected, Living, Recorder, Refusal, Verb,
    When,
};
use glake_sim::{Census, SimOptions, SimTopology, Simulator};
use glake_units::Bytes;

const BOTH: [DeviceId; 2] = [DeviceId(0), DeviceId(1)];

#[test]
fn a_device_without_a_context_is_covered_and_its_context_not_made() {
    let topology = SimTopology::uniform(2, Bytes::mib(64));
    let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
    let completion_events = CompletionEvents::new(sim.clone());
    let both: DeviceSet = BOTH.into_iter().collect();
    let driver: Arc<dyn Driver> = sim.clone();
    let stream = OwnedStream::new(&driver, DeviceId(0)).unwrap();
    let mark = completion_events.mark();
    assert!(completion_events.record(both).unwrap().wait().unwrap().covers(mark, both));
    assert!(completion_events.synchronize(both).unwrap().covers(mark, both));
    assert_eq!(BOTH.map(|device| sim.has_context(device).unwrap()), [true, false]);
    drop(stream);
    completion_events.release_context(DeviceId(0)).unwrap();
    assert!(!sim.has_context(DeviceId(0)).unwrap());
    assert_eq!(sim.census(), Census::default());
}

#[test]
fn a_point_is_complete_on_a_device_with_a_released_context() {
    let sim = Arc::new(Simulator::new(SimOptions::default()).unwrap());
    let driver: Arc<dyn Driver> = sim.clone();
    let completion_events = CompletionEvents::new(sim.clone());
    let here = DeviceSet::of(DeviceId(0));
    let stream = OwnedStream::new(&driver, DeviceId(0)).unwrap();
    let time = std::time::Duration::from_millis(1);
    sim.enqueue_kernel(DeviceId(0), stream.id(), &[], &[], time, |_| {}).unwrap();
    let mut point = completion_events.record(here).unwrap();
    assert!(point.poll().unwrap().is_none());
    let refused = completion_events.release_context(DeviceId(0)).unwrap_err();
    let living = Living { streams: 1, ..Living::default() };
    assert!(
        matches!(refused, DriverError::ContextInUse { living: found, .. } if found == living),
        "{refused}"
    );
    // It has waited.
    assert_eq!(sim.now(), time);
    assert!(point.poll().unwrap().is_some());
    let pending = completion_events.record(here).unwrap();
    drop(stream);
    let hold = completion_events.hold();
    let refused = completion_events.release_context(DeviceId(0));
    assert!(matches!(refused, Err(DriverError::Capturing { .. })));
    drop(hold);
    completion_events.release_context(DeviceId(0)).unwrap();
    assert_eq!(sim.census(), Census::default());
    drop(pending);
    // Everything begins anew.
    let stream = OwnedStream::new(&driver, DeviceId(0)).unwrap();
    drop(completion_events.record(here).unwrap());
    drop(completion_events.record(here).unwrap());
    assert_eq!(sim.census().events, 1);
    drop(stream);
    completion_events.release_context(DeviceId(0)).unwrap();
    drop(completion_events);
    assert_eq!(sim.census(), Census::default());
}

#[test]
fn points_work_while_the_context_is_released_and_recreated() {
    let topology = SimTopology::uniform(2, Bytes::mib(64));
    let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
    let driver: Arc<dyn Driver> = sim.clone();
    let completion_events = CompletionEvents::new(sim.clone());
    let both: DeviceSet = BOTH.into_iter().collect();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let mark = completion_events.mark();
                    let mut one = completion_events.record(both).unwrap();
                    while one.poll().unwrap().is_none() {}
                    assert!(completion_events.record(both).unwrap().wait().unwrap().covers(mark, both));
                }
            });
        }
        let mut gone = 0;
        while gone < 200 {
            drop(OwnedStream::new(&driver, DeviceId(1)).unwrap());
            match completion_events.release_context(DeviceId(1)) {
                Ok(()) => gone += 1,
                Err(DriverError::ContextInUse { .. } | DriverError::NotReady { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    });
    drop(completion_events);
    assert_eq!(sim.census(), Census::default());
}

#[test]
fn a_capture_that_was_seen_holds_points_back_until_it_is_over() {
    let sim = Arc::new(Simulator::new(SimOptions::default()).unwrap());
    let faults = Arc::new(Faults::new(sim.clone()));
    let completion_events = CompletionEvents::new(faults.clone());
    let driver: Arc<dyn Driver> = sim.clone();
    let (device, stream) = (DeviceId(0), OwnedStream::new(&driver, DeviceId(0)).unwrap());
    let record = || completion_events.record(DeviceSet::of(device));
    let seen = || match sim.capture_state(device, stream.id()).unwrap() {
        CaptureState::Active(id) => SeenCapture { device, stream: stream.id(), id },
        state => panic!("{state:?}"),
    };
    for _ in 0..2 {
        let hold = completion_events.hold();
        sim.begin_capture(device, stream.id()).unwrap();
        completion_events.follow(seen(), this_thread());
        completion_events.follow(seen(), this_thread());
        drop(hold);
        assert!(matches!(record(), Err(DriverError::Capturing { .. })));
        let refused = completion_events.release_context(device);
        assert!(matches!(refused, Err(DriverError::Capturing { .. })));
        sim.end_capture(device, stream.id()).unwrap();
        drop(record().unwrap());
    }
    for (error, holds) in [
        (Injected::Failed(1), true),
        (Injected::Refused(Refusal::UnknownHandle), false),
        (Injected::Sticky(700), false),
    ] {
        completion_events.follow(SeenCapture { device, stream: stream.id(), id: 7 }, this_thread());
        faults.set(&[Fault { verb: Some(Verb::CaptureState), when: When::From(1), error }]);
        assert_eq!(record().is_err(), holds, "{error:?}");
        faults.set(&[]);
        drop(record().unwrap());
    }
}

/// CUDA crashes where one thread asks of a stream whose capture another is ending.
#[test]
fn only_the_thread_that_captures_asks_whether_it_is_over() {
    let sim = Arc::new(Simulator::new(SimOptions::default()).unwrap());
    let recorder = Arc::new(Recorder::measured(sim.clone()).with_log());
    let completion_events = CompletionEvents::new(recorder.clone());
    let driver: Arc<dyn Driver> = sim.clone();
    let (device, stream) = (DeviceId(0), OwnedStream::new(&driver, DeviceId(0)).unwrap());
    let capture = SeenCapture { device, stream: stream.id(), id: 7 };
    let asked = || recorder.take_log().iter().filter(|logged| logged.call.verb == Verb::CaptureState).count();
    completion_events.follow(capture, this_thread());
    std::thread::scope(|scope| {
        let other = scope.spawn(|| completion_events.record(DeviceSet::of(device)).is_err());
        assert!(other.join().unwrap(), "it holds completion points back");
    });
    assert_eq!(asked(), 0);
    drop(completion_events.record(DeviceSet::of(device)).unwrap());
    assert_eq!(asked(), 1);
    // Once that thread has ended, nobody ends its capture.
    std::thread::scope(|scope| {
        scope.spawn(|| completion_events.follow(capture, this_thread())).join().unwrap();
    });
    drop(completion_events.record(DeviceSet::of(device)).unwrap());
}
