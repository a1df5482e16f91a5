//! What copies have under way and what they have done: counted with each relay, on each link, and by path.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use glake_device::DeviceId;
use glake_units::Bytes;

use super::Statistics;
use super::counters::{Counters, Path};
use crate::links::crossings::Crossings;
use crate::links::relays::Relays;
use crate::paths::{Direction, Load};

/// Written by whoever enqueues and by whoever sees that something has arrived. Takes no lock but for a moment, and asks no driver.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// Who serves, and what of it is not seen to arrive.
    pub(crate) relays: Arc<Relays>,
    /// What copies that begin reckon with.
    pub(crate) load: Load,
    /// What relays copy with no staging, for background copies too.
    pub(crate) crossings: Crossings,
    /// What was done.
    pub(crate) counters: Counters,
    /// How many streams of ours have work that no stream of the program could be made to wait for, and that was not seen done.
    unjoined: AtomicUsize,
    devices: usize,
}

/// Bytes that others reckon with, until `end`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Carried {
    target: DeviceId,
    relay: DeviceId,
    direction: Direction,
    size: Bytes,
}

impl Ledger {
    /// With nothing under way, for so many GPUs.
    pub(crate) fn new(relays: &Arc<Relays>, devices: usize) -> Arc<Ledger> {
        let (load, crossings, counters) = (Load::new(), Crossings::default(), Counters::new(devices));
        let unjoined = AtomicUsize::new(0);
        Arc::new(Ledger { relays: relays.clone(), load, crossings, counters, unjoined, devices })
    }

    /// One more stream has work that could not be joined.
    pub(crate) fn leave_unjoined(&self) {
        self.unjoined.fetch_add(1, Ordering::AcqRel);
    }

    /// The work of one is done.
    pub(crate) fn end_unjoined(&self) {
        self.unjoined.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whether any has: what every copy asks.
    pub(crate) fn has_unjoined(&self) -> bool {
        self.unjoined.load(Ordering::Acquire) > 0
    }

    /// From now on others reckon with so many bytes on a path.
    pub(crate) fn begin(&self, path: Path, size: Bytes) -> Carried {
        let Path { target, relay, direction, .. } = path;
        self.load.begin(target, relay, direction, size);
        Carried { target, relay, direction, size }
    }

    /// No longer.
    pub(crate) fn end(&self, carried: Carried) {
        self.load.end(carried.target, carried.relay, carried.direction, carried.size);
    }

    /// Whether any link has bytes of copies in flight.
    pub(crate) fn is_loaded(&self, direction: Direction) -> bool {
        (0_u32..).map(DeviceId).take(self.devices).any(|link| !self.load.link(link, direction).is_zero())
    }

    /// What was done so far.
    pub(crate) fn statistics(&self) -> Statistics {
        self.counters.report(&self.relays)
    }
}

impl Carried {
    /// And with so many more.
    pub(crate) fn and(self, more: Carried) -> Carried {
        Carried { size: self.size.saturating_add(more.size), ..self }
    }
}

#[cfg(test)]
mod tests {
    use glake_device::owned::DeviceSet;

    use super::*;
    use crate::paths::Way;

    #[test]
    fn what_is_carried_loads_its_link_until_it_ends() {
        let relays = Arc::new(Relays::new(2, DeviceSet::ALL, false));
        let ledger = Ledger::new(&relays, 2);
        let [target, relay] = [0, 1].map(DeviceId);
        let path = Path { target, relay, direction: Direction::ToGpu, way: Way::ZeroStaging };
        let carried = ledger.begin(path, Bytes::mib(3)).and(ledger.begin(path, Bytes::mib(1)));
        assert_eq!(ledger.load.link(relay, Direction::ToGpu), Bytes::mib(4));
        assert!(ledger.is_loaded(Direction::ToGpu) && !ledger.is_loaded(Direction::FromGpu));
        ledger.end(carried);
        assert!(!ledger.is_loaded(Direction::ToGpu));
        ledger.counters.sent(path, Bytes::mib(4), 2);
        let statistics = ledger.statistics();
        assert_eq!((statistics.paths[0].bytes, statistics.paths[0].slices), (Bytes::mib(4), 2));
    }
}
