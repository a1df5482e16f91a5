//! Ledger of copies in flight and completed, per relay, per link and per path.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use glake_device::DeviceId;
use glake_units::Bytes;

use crate::Statistics;
use crate::links::counters::{Counters, Path};
use crate::links::crossings::Crossings;
use crate::links::relays::Relays;
use crate::paths::{Direction, Load};

/// Shared counters, written when copies are enqueued and when they are found complete. Holds no lock for long and makes no driver call.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// Relays and their pending completions.
    pub(crate) relays: Arc<Relays>,
    /// Bytes in flight per link, an input for splitting new copies.
    pub(crate) load: Load,
    /// Zero-staging copies of relays, background copies included.
    pub(crate) crossings: Crossings,
    /// Totals since the engine was created.
    pub(crate) counters: Counters,
    /// Number of GLake's streams with work that could not be joined to a program's stream and is not known to be complete.
    unjoined: AtomicUsize,
    devices: usize,
}

/// Bytes in flight on a path, counted until [`Ledger::end`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Carried {
    target: DeviceId,
    relay: DeviceId,
    direction: Direction,
    size: Bytes,
}

impl Ledger {
    /// Creates an empty ledger for `devices` GPUs.
    pub(crate) fn new(relays: &Arc<Relays>, devices: usize) -> Arc<Ledger> {
        let (load, crossings, counters) = (Load::new(), Crossings::default(), Counters::new(devices));
        let unjoined = AtomicUsize::new(0);
        Arc::new(Ledger { relays: relays.clone(), load, crossings, counters, unjoined, devices })
    }

    /// Counts a stream whose work could not be joined.
    pub(crate) fn leave_unjoined(&self) {
        self.unjoined.fetch_add(1, Ordering::AcqRel);
    }

    /// Records that the unjoined work of one stream has completed.
    pub(crate) fn end_unjoined(&self) {
        self.unjoined.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns whether any stream has unjoined work. Called for every copy.
    pub(crate) fn has_unjoined(&self) -> bool {
        self.unjoined.load(Ordering::Acquire) > 0
    }

    /// Counts `size` bytes as in flight on a path.
    pub(crate) fn begin(&self, path: Path, size: Bytes) -> Carried {
        let Path { target, relay, direction, .. } = path;
        self.load.begin(target, relay, direction, size);
        Carried { target, relay, direction, size }
    }

    /// Removes bytes in flight.
    pub(crate) fn end(&self, carried: Carried) {
        self.load.end(carried.target, carried.relay, carried.direction, carried.size);
    }

    /// Returns whether any link has bytes in flight in a direction.
    pub(crate) fn is_loaded(&self, direction: Direction) -> bool {
        (0_u32..).map(DeviceId).take(self.devices).any(|link| !self.load.link(link, direction).is_zero())
    }

    /// Returns the totals so far.
    pub(crate) fn statistics(&self) -> Statistics {
        self.counters.report(&self.relays)
    }
}

impl Carried {
    /// Adds `more` on the same path.
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
