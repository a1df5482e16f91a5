//! Buffers and flags on the simulated device.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use glake_device::owned::{
    self, Buffer, CompletionEvents, DeviceSet, Flag, OwnedEvent, OwnedStream, Pages, Registration, Span,
};
use glake_device::{Compare, DeviceId, Driver, DriverError, EventKind, Refusal};
use glake_sim::{Census, SimOptions, SimTopology, Simulator};
use glake_units::Bytes;

#[test]
fn every_device_of_the_reach_copies_bytes() {
    let topology = SimTopology::uniform(3, Bytes::mib(64));
    let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
    let driver: Arc<dyn Driver> = sim.clone();
    let completion_events = CompletionEvents::new(driver.clone());
    let size = Bytes::mib(4);
    let buffer =
        Arc::new(Buffer::new(&completion_events, DeviceId(0), size, DeviceSet::of(DeviceId(1))).unwrap());
    let mut pinned = Registration::new(&completion_events, Pages::new(size, 1).unwrap()).unwrap();
    pinned.as_mut_slice().fill(9);
    let pinned = Arc::new(pinned);
    let from = Span::pinned(&pinned, Bytes::ZERO, size).unwrap();
    let to = buffer.span(Bytes::ZERO, size).unwrap();
    assert!(buffer.span(size, Bytes::new(1)).is_none());
    let stream = OwnedStream::new(&driver, DeviceId(1)).unwrap();
    owned::copy(&*driver, DeviceId(1), stream.id(), &to, &from).unwrap();
    stream.synchronize().unwrap();
    let mut bytes = vec![0; 4 << 20];
    buffer.read(Bytes::ZERO, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 9));
    let third = OwnedStream::new(&driver, DeviceId(2)).unwrap();
    let refused = owned::copy(&*driver, DeviceId(2), third.id(), &to, &from).unwrap_err();
    assert!(matches!(refused, DriverError::Refused { reason: Refusal::NoPeerAccess, .. }), "{refused}");
    drop((to, from, buffer, pinned, stream, third));
    assert_eq!(sim.census(), Census::default());
}

#[test]
fn the_host_and_every_stream_can_set_a_flag() {
    let topology = SimTopology::uniform(2, Bytes::mib(64));
    let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
    let driver: Arc<dyn Driver> = sim.clone();
    let completion_events = CompletionEvents::new(driver.clone());
    let flags = Flag::several(&completion_events, 3).unwrap();
    let streams = [DeviceId(0), DeviceId(1)].map(|device| OwnedStream::new(&driver, device).unwrap());
    let passed = OwnedEvent::new(&driver, DeviceId(0), EventKind::Plain).unwrap();
    let await_flag = |flag: &Flag, value| {
        flag.await_on(streams[0].of(), value, Compare::AtLeast).unwrap();
        passed.record(streams[0].id()).unwrap();
    };
    await_flag(&flags[0], 7);
    assert!(!passed.is_passed().unwrap());
    flags[1].set(7);
    flags[0].set(6);
    assert!(!passed.is_passed().unwrap());
    flags[0].set(8);
    assert!(passed.is_passed().unwrap());
    await_flag(&flags[2], 1);
    flags[2].set_on(streams[1].of(), 5).unwrap();
    passed.synchronize().unwrap();
    assert_eq!([0, 1, 2].map(|at: usize| flags[at].get()), [8, 7, 5]);
    drop((flags, streams, passed, completion_events));
    assert_eq!(sim.census(), Census::default());
}
