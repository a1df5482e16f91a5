//! Devices that are lost, by the fault decorator over the simulated device.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use glake_device::owned::{
    self, Buffer, CompletionEvents, DeviceSet, OwnedEvent, OwnedStream, Pages, Registration, Span,
};
use glake_device::{
    Address, CopyRequest, DeviceId, Driver, DriverError, EventKind, Fault, Faults, Injected, Priority,
    Result, Verb, When,
};
use glake_sim::{Census, SimOptions, SimTopology, Simulator};
use glake_units::Bytes;

const USER: DeviceId = DeviceId(0);
const PEER: DeviceId = DeviceId(1);
const SIZE: Bytes = Bytes::kib(64);

/// A copy of two halves into memory of the first device: each enqueued on a stream of another device, and joined.
struct Fixture {
    sim: Arc<Simulator>,
    faults: Arc<Faults>,
    target: Arc<Buffer>,
    halves: [(Span, Span); 2],
    user: OwnedStream,
    path: OwnedStream,
    done: OwnedEvent,
}

impl Fixture {
    fn new() -> Fixture {
        let topology = SimTopology::uniform(2, Bytes::mib(64));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let faults = Arc::new(Faults::new(sim.clone()));
        let driver: Arc<dyn Driver> = faults.clone();
        let completion_events = CompletionEvents::new(driver.clone());
        let target = Arc::new(Buffer::new(&completion_events, USER, SIZE, DeviceSet::of(PEER)).unwrap());
        let mut pinned = Registration::new(&completion_events, Pages::new(SIZE, 1).unwrap()).unwrap();
        pinned.as_mut_slice().fill(7);
        let source = Span::pinned(&Arc::new(pinned), Bytes::ZERO, SIZE).unwrap();
        let whole = target.span(Bytes::ZERO, SIZE).unwrap();
        let half = |at| {
            let (offset, size) = (Bytes::new(at * SIZE.get() / 2), Bytes::new(SIZE.get() / 2));
            (whole.part(offset, size).unwrap(), source.part(offset, size).unwrap())
        };
        let [user, path] = [USER, PEER].map(|device| OwnedStream::new(&driver, device).unwrap());
        let done = OwnedEvent::new(&driver, PEER, EventKind::Plain).unwrap();
        Fixture { halves: [half(0), half(1)], sim, faults, target, user, path, done }
    }

    fn fail(&self, verb: Verb, n: u64, error: Injected) {
        self.faults.set(&[Fault { verb: Some(verb), when: When::Nth(n), error }]);
    }

    /// One half over the user's own stream, one over the peer's, which the user's waits for.
    fn copy(&self) -> Result<()> {
        let [own, relayed] = &self.halves;
        owned::copy(&*self.faults, PEER, self.path.id(), &relayed.0, &relayed.1)?;
        owned::copy(&*self.faults, USER, self.user.id(), &own.0, &own.1)?;
        self.done.record(self.path.id())?;
        self.user.wait_for(self.done.id())
    }

    /// How many bytes of the first and of the second half have arrived, from the start on.
    fn arrived(&self) -> [usize; 2] {
        let mut bytes = vec![0; SIZE.get() as usize];
        self.target.read(Bytes::ZERO, &mut bytes).unwrap();
        [0, 1].map(|half| {
            bytes[half * bytes.len() / 2..][..bytes.len() / 2].iter().take_while(|byte| **byte == 7).count()
        })
    }

    /// Nothing is left once everything has been given back.
    fn end(self) {
        let Fixture { sim, faults, .. } = self;
        faults.set(&[]);
        drop((self.target, self.halves, self.user, self.path, self.done, faults));
        assert_eq!(sim.census(), Census::default());
    }
}

fn sticky<T: std::fmt::Debug>(result: Result<T>) -> (Verb, u32) {
    match result {
        Err(DriverError::Sticky { verb, code }) => (verb, code),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_lost_copy_is_accepted_and_other_devices_go_on() {
    for (error, relayed) in [(Injected::Lost(700), 0), (Injected::Damaged(700), SIZE.get() as usize / 4)] {
        let fixture = Fixture::new();
        fixture.fail(Verb::Copy, 1, error);
        fixture.copy().unwrap();
        assert_eq!(fixture.faults.injected(), 1);
        fixture.user.synchronize().unwrap();
        assert_eq!(fixture.arrived(), [SIZE.get() as usize / 2, relayed]);
        let faults = &fixture.faults;
        assert_eq!(sticky(fixture.done.is_passed()), (Verb::EventQuery, 700));
        assert_eq!(sticky(fixture.path.synchronize()), (Verb::StreamSynchronize, 700));
        assert_eq!(sticky(fixture.done.record(fixture.path.id())), (Verb::EventRecord, 700));
        assert_eq!(sticky(fixture.copy()), (Verb::Copy, 700));
        assert_eq!(sticky(faults.stream_create(PEER, Priority::Normal)), (Verb::StreamCreate, 700));
        assert_eq!(sticky(faults.memory_info(PEER)), (Verb::MemoryInfo, 700));
        assert_eq!(sticky(faults.context_synchronize(PEER)), (Verb::ContextSynchronize, 700));
        faults.context_synchronize(USER).unwrap();
        fixture.user.wait_for(fixture.done.id()).unwrap();
        fixture.user.synchronize().unwrap();
        fixture.end();
    }
}

#[test]
fn the_error_is_reported_once_the_stream_reaches_it() {
    let fixture = Fixture::new();
    let busy = std::time::Duration::from_millis(1);
    fixture.sim.enqueue_kernel(PEER, fixture.path.id(), &[], &[], busy, |_| {}).unwrap();
    fixture.done.record(fixture.path.id()).unwrap();
    fixture.fail(Verb::Copy, 1, Injected::Lost(719));
    fixture.copy().unwrap();
    assert!(!fixture.done.is_passed().unwrap());
    fixture.copy().unwrap();
    fixture.user.synchronize().unwrap();
    assert!(fixture.sim.now() >= busy, "the user's stream waits for the peer's all the same");
    assert_eq!(fixture.arrived()[1], 0, "nothing that the device did after it arrives");
    assert_eq!(sticky(fixture.done.synchronize()), (Verb::EventSynchronize, 719));
    fixture.end();
}

#[test]
fn a_synchronous_copy_reports_at_once() {
    let fixture = Fixture::new();
    fixture.fail(Verb::Copy, 1, Injected::Lost(700));
    let mut bytes = vec![0_u8; SIZE.get() as usize];
    let to = Address(bytes.as_mut_ptr().expose_provenance() as u64);
    let request = CopyRequest { to, from: fixture.target.start(), size: SIZE };
    // SAFETY: the call returns when the copy has run.
    let answer = unsafe { fixture.faults.copy(USER, request, fixture.user.id()) };
    assert_eq!(sticky(answer), (Verb::Copy, 700));
    assert_eq!(sticky(fixture.target.read(Bytes::ZERO, &mut bytes)), (Verb::ReadNow, 700));
    fixture.end();
}

#[test]
fn every_work_of_a_lost_device_is_dropped() {
    let fixture = Fixture::new();
    let (to, stream) = (fixture.target.start(), fixture.path.id());
    fixture.fail(Verb::Fill, 2, Injected::Damaged(700));
    // SAFETY: the buffer lives, and nothing else uses it.
    unsafe {
        fixture.faults.fill(PEER, to, SIZE, 7, stream).unwrap();
        fixture.faults.fill(PEER, to, SIZE, 8, stream).unwrap();
        fixture.faults.stream_write_value(PEER, stream, to, 9).unwrap();
        let request = CopyRequest { to, from: fixture.halves[0].1.start(), size: SIZE };
        fixture.faults.copy_batch(PEER, &[request, request], stream).unwrap();
    }
    assert_eq!(sticky(fixture.path.synchronize()), (Verb::StreamSynchronize, 700));
    fixture.sim.stream_synchronize(PEER, stream).unwrap();
    assert_eq!(fixture.arrived(), [0, SIZE.get() as usize / 2]);
    let mut first = [0];
    fixture.target.read(Bytes::ZERO, &mut first).unwrap();
    assert_eq!(first, [8]);
    fixture.end();
}
