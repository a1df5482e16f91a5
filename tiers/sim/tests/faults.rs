//! Devices that are lost, by the fault decorator over the simulated device.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use glake_device::owned::{
    self, Buffer, DeviceSet, Epochs, OwnedEvent, OwnedStream, Pages, Registration, Span,
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
struct Bed {
    sim: Arc<Simulator>,
    faults: Arc<Faults>,
    target: Arc<Buffer>,
    halves: [(Span, Span); 2],
    user: OwnedStream,
    path: OwnedStream,
    done: OwnedEvent,
}

impl Bed {
    fn new() -> Bed {
        let topology = SimTopology::uniform(2, Bytes::mib(64));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let faults = Arc::new(Faults::new(sim.clone()));
        let driver: Arc<dyn Driver> = faults.clone();
        let epochs = Epochs::new(driver.clone());
        let target = Arc::new(Buffer::new(&epochs, USER, SIZE, DeviceSet::of(PEER)).unwrap());
        let mut pinned = Registration::new(&epochs, Pages::new(SIZE, 1).unwrap()).unwrap();
        pinned.as_mut_slice().fill(7);
        let source = Span::pinned(&Arc::new(pinned), Bytes::ZERO, SIZE).unwrap();
        let whole = target.span(Bytes::ZERO, SIZE).unwrap();
        let half = |at| {
            let (offset, size) = (Bytes::new(at * SIZE.get() / 2), Bytes::new(SIZE.get() / 2));
            (whole.part(offset, size).unwrap(), source.part(offset, size).unwrap())
        };
        let [user, path] = [USER, PEER].map(|device| OwnedStream::new(&driver, device).unwrap());
        let done = OwnedEvent::new(&driver, PEER, EventKind::Plain).unwrap();
        Bed { halves: [half(0), half(1)], sim, faults, target, user, path, done }
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
        let Bed { sim, faults, .. } = self;
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
        let bed = Bed::new();
        bed.fail(Verb::Copy, 1, error);
        bed.copy().unwrap();
        assert_eq!(bed.faults.injected(), 1);
        bed.user.synchronize().unwrap();
        assert_eq!(bed.arrived(), [SIZE.get() as usize / 2, relayed]);
        let faults = &bed.faults;
        assert_eq!(sticky(bed.done.is_passed()), (Verb::EventQuery, 700));
        assert_eq!(sticky(bed.path.synchronize()), (Verb::StreamSynchronize, 700));
        assert_eq!(sticky(bed.done.record(bed.path.id())), (Verb::EventRecord, 700));
        assert_eq!(sticky(bed.copy()), (Verb::Copy, 700));
        assert_eq!(sticky(faults.stream_create(PEER, Priority::Normal)), (Verb::StreamCreate, 700));
        assert_eq!(sticky(faults.memory_info(PEER)), (Verb::MemoryInfo, 700));
        assert_eq!(sticky(faults.context_synchronize(PEER)), (Verb::ContextSynchronize, 700));
        faults.context_synchronize(USER).unwrap();
        bed.user.wait_for(bed.done.id()).unwrap();
        bed.user.synchronize().unwrap();
        bed.end();
    }
}

#[test]
fn the_error_is_told_when_the_stream_has_come_to_it() {
    let bed = Bed::new();
    let busy = std::time::Duration::from_millis(1);
    bed.sim.enqueue_kernel(PEER, bed.path.id(), &[], &[], busy, |_| {}).unwrap();
    bed.done.record(bed.path.id()).unwrap();
    bed.fail(Verb::Copy, 1, Injected::Lost(719));
    bed.copy().unwrap();
    assert!(!bed.done.is_passed().unwrap());
    bed.copy().unwrap();
    bed.user.synchronize().unwrap();
    assert!(bed.sim.now() >= busy, "the user's stream waits for the peer's all the same");
    assert_eq!(bed.arrived()[1], 0, "nothing that the device did after it arrives");
    assert_eq!(sticky(bed.done.synchronize()), (Verb::EventSynchronize, 719));
    bed.end();
}

#[test]
fn a_copy_that_waits_tells_at_once() {
    let bed = Bed::new();
    bed.fail(Verb::Copy, 1, Injected::Lost(700));
    let mut bytes = vec![0_u8; SIZE.get() as usize];
    let to = Address(bytes.as_mut_ptr().expose_provenance() as u64);
    let request = CopyRequest { to, from: bed.target.start(), size: SIZE };
    // SAFETY: the call returns when the copy has run.
    let answer = unsafe { bed.faults.copy(USER, request, bed.user.id()) };
    assert_eq!(sticky(answer), (Verb::Copy, 700));
    assert_eq!(sticky(bed.target.read(Bytes::ZERO, &mut bytes)), (Verb::ReadNow, 700));
    bed.end();
}

#[test]
fn every_work_of_a_lost_device_is_dropped() {
    let bed = Bed::new();
    let (to, stream) = (bed.target.start(), bed.path.id());
    bed.fail(Verb::Fill, 2, Injected::Damaged(700));
    // SAFETY: the buffer lives, and nothing else uses it.
    unsafe {
        bed.faults.fill(PEER, to, SIZE, 7, stream).unwrap();
        bed.faults.fill(PEER, to, SIZE, 8, stream).unwrap();
        bed.faults.stream_write_value(PEER, stream, to, 9).unwrap();
        let request = CopyRequest { to, from: bed.halves[0].1.start(), size: SIZE };
        bed.faults.copy_batch(PEER, &[request, request], stream).unwrap();
    }
    assert_eq!(sticky(bed.path.synchronize()), (Verb::StreamSynchronize, 700));
    bed.sim.stream_synchronize(PEER, stream).unwrap();
    assert_eq!(bed.arrived(), [0, SIZE.get() as usize / 2]);
    let mut first = [0];
    bed.target.read(Bytes::ZERO, &mut first).unwrap();
    assert_eq!(first, [8]);
    bed.end();
}
