//! A stream of a random program, and what its next work is ordered after.

use std::sync::Arc;

use glake_device::owned::{Flag, OwnedEvent, OwnedStream, StreamRef};
use glake_device::{Compare, DeviceId, Driver, EventKind, Stream};
use glake_tiers::PoolStream;
use glake_transfer::UserStream;

/// One step of one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) lane: usize,
    pub(super) step: u64,
}

#[derive(Debug)]
pub(super) struct Lane {
    driver: Arc<dyn Driver>,
    pub(super) user: UserStream,
    pub(super) pool: PoolStream,
    /// For each lane, up to which of its steps the next one here is ordered after.
    known: Vec<u64>,
    event: OwnedEvent,
    /// Holds it back while it is below `shut`.
    gate: Flag,
    shut: u32,
    /// The lanes, a bit each, that are held back and that it waits for.
    pub(super) waits: u64,
    _stream: Option<OwnedStream>,
}

#[allow(clippy::unwrap_used)]
impl Lane {
    /// A lane on a stream of its own, or on a default stream of the device.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        default: Option<Stream>,
        count: usize,
        gate: Flag,
    ) -> Lane {
        let own = default.is_none().then(|| OwnedStream::new(driver, device).unwrap());
        let raw = default.or(own.as_ref().map(OwnedStream::id)).unwrap();
        Lane {
            driver: driver.clone(),
            user: UserStream::of(&**driver, device, raw).unwrap(),
            pool: PoolStream::of(&**driver, device, raw).unwrap(),
            known: vec![0; count],
            event: OwnedEvent::new(driver, device, EventKind::Plain).unwrap(),
            gate,
            shut: 0,
            waits: 0,
            _stream: own,
        }
    }

    /// Begins a step of the lane that has this index.
    pub(super) fn step(&mut self, index: usize) -> Use {
        self.known[index] += 1;
        Use { lane: index, step: self.known[index] }
    }

    /// Whether what comes next here comes after that step.
    pub(super) fn is_after(&self, other: Use) -> bool {
        self.known[other.lane] >= other.step
    }

    /// Makes what comes next here come after all that was enqueued there.
    pub(super) fn follow(&mut self, driver: &dyn Driver, other: &Lane) {
        other.event.record(other.user.raw).unwrap();
        driver.stream_wait_event(self.user.device, self.user.raw, other.event.id()).unwrap();
        self.waits |= other.waits;
        for (mine, theirs) in self.known.iter_mut().zip(&other.known) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// What comes next here waits until the lane is let go.
    pub(super) fn hold(&mut self) {
        self.shut += 1;
        let on = StreamRef::new(&*self.driver, self.user.device, self.user.raw);
        self.gate.await_on(on, self.shut, Compare::AtLeast).unwrap();
    }

    pub(super) fn let_go(&mut self) {
        self.gate.set(self.shut);
    }
}
