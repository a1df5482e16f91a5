//! Ledger of copies in flight and completed, per relay, per link and per path. All counters are atomics, updated without a lock.
//!
//! Zero-staging copies are counted separately: a GPU has one engine for the copies between the host and other GPUs' memory, in both
//! directions, and this engine completes one stream's queued work before it switches to another stream's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use glake_device::DeviceId;
use glake_units::Bytes;

use crate::links::relays::Relays;
use crate::paths::{Direction, Load, MOST_GPUS, Way};
use crate::{PathStatistics, Statistics};

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

/// Path of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Path {
    pub(crate) target: DeviceId,
    pub(crate) relay: DeviceId,
    pub(crate) direction: Direction,
    pub(crate) way: Way,
}

#[derive(Debug, Default)]
struct PathCounters {
    bytes: AtomicU64,
    slices: AtomicU64,
    retries: AtomicU64,
    /// Bytes of the timed parts.
    timed_bytes: AtomicU64,
    timed_nanos: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Counters {
    devices: usize,
    paths: Box<[PathCounters]>,
    native_copies: AtomicU64,
    native_bytes: AtomicU64,
    split_copies: AtomicU64,
}

const WAYS: [Way; 3] = [Way::Direct, Way::ZeroStaging, Way::Staged];

impl Counters {
    pub(crate) fn new(devices: usize) -> Counters {
        let count = devices * devices * Direction::BOTH.len() * WAYS.len();
        Counters {
            devices,
            paths: (0..count).map(|_| PathCounters::default()).collect(),
            native_copies: AtomicU64::new(0),
            native_bytes: AtomicU64::new(0),
            split_copies: AtomicU64::new(0),
        }
    }

    pub(crate) fn native(&self, size: Bytes) {
        self.native_copies.fetch_add(1, Ordering::Relaxed);
        self.native_bytes.fetch_add(size.get(), Ordering::Relaxed);
    }

    pub(crate) fn split(&self) {
        self.split_copies.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a part sent over a path in `slices` driver copies.
    pub(crate) fn sent(&self, path: Path, size: Bytes, slices: u64) {
        if let Some(of) = self.of(path) {
            of.bytes.fetch_add(size.get(), Ordering::Relaxed);
            of.slices.fetch_add(slices, Ordering::Relaxed);
        }
    }

    /// Counts a part that was moved to another path.
    pub(crate) fn retried(&self, path: Path) {
        if let Some(of) = self.of(path) {
            of.retries.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a part that took `micros`.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub(crate) fn timed(&self, path: Path, size: Bytes, micros: f64) {
        if let Some(of) = self.of(path) {
            of.timed_bytes.fetch_add(size.get(), Ordering::Relaxed);
            // Saturates where a number is none.
            of.timed_nanos.fetch_add((micros * 1000.0) as u64, Ordering::Relaxed);
        }
    }

    pub(crate) fn report(&self, relays: &Relays) -> Statistics {
        let paths = (0_usize..).zip(&self.paths).filter_map(|(index, of)| {
            let bytes = of.bytes.load(Ordering::Relaxed);
            let retries = of.retries.load(Ordering::Relaxed);
            (bytes > 0 || retries > 0).then(|| {
                let path = self.path(index);
                PathStatistics {
                    relay: path.relay,
                    target: path.target,
                    direction: path.direction,
                    way: path.way,
                    bytes: Bytes::new(bytes),
                    slices: of.slices.load(Ordering::Relaxed),
                    busy: of.busy(bytes),
                    retries,
                    fenced: relays.is_fenced(path.relay),
                }
            })
        });
        Statistics {
            paths: paths.collect(),
            native_copies: self.native_copies.load(Ordering::Relaxed),
            native_bytes: Bytes::new(self.native_bytes.load(Ordering::Relaxed)),
            split_copies: self.split_copies.load(Ordering::Relaxed),
            lost_copies: relays.lost_copies(),
        }
    }

    fn of(&self, path: Path) -> Option<&PathCounters> {
        let (target, relay) = (index(path.target)?, index(path.relay)?);
        if target >= self.devices || relay >= self.devices {
            return None;
        }
        let way = WAYS.iter().position(|way| *way == path.way)?;
        let pair = target * self.devices + relay;
        self.paths.get((pair * Direction::BOTH.len() + path.direction.index()) * WAYS.len() + way)
    }

    /// Returns the path of a counter index.
    fn path(&self, index: usize) -> Path {
        let device = |index: usize| DeviceId(u32::try_from(index).unwrap_or(u32::MAX));
        let (rest, way) = (index / WAYS.len(), WAYS[index % WAYS.len()]);
        let (pair, direction) = (rest / 2, Direction::BOTH[rest % 2]);
        let (target, relay) = (pair / self.devices, pair % self.devices);
        Path { target: device(target), relay: device(relay), direction, way }
    }
}

impl PathCounters {
    /// Extrapolates the time of all bytes from the timed ones.
    #[allow(clippy::cast_precision_loss)]
    fn busy(&self, bytes: u64) -> Duration {
        let timed = self.timed_bytes.load(Ordering::Relaxed);
        let nanos = self.timed_nanos.load(Ordering::Relaxed);
        match timed {
            0 => Duration::ZERO,
            _ => Duration::from_nanos(nanos).mul_f64(bytes as f64 / timed as f64),
        }
    }
}

fn index(device: DeviceId) -> Option<usize> {
    usize::try_from(device.0).ok()
}

/// Bytes enqueued and not known to be complete, by relay and direction.
#[derive(Debug, Default)]
pub(crate) struct Crossings {
    bytes: [[AtomicU64; 2]; MOST_GPUS],
}

impl Crossings {
    /// Adds bytes in flight.
    pub(crate) fn begin(&self, relay: DeviceId, direction: Direction, size: Bytes) {
        if let Some(bytes) = self.at(relay, direction) {
            bytes.fetch_add(size.get(), Ordering::Relaxed);
        }
    }

    /// Removes completed bytes; the counter saturates at zero.
    pub(crate) fn end(&self, relay: DeviceId, direction: Direction, size: Bytes) {
        if let Some(bytes) = self.at(relay, direction) {
            let less = |bytes: u64| Some(bytes.saturating_sub(size.get()));
            // The closure always answers, so the update cannot fail.
            let _ = bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        }
    }

    /// Returns a relay's bytes in flight in a direction.
    pub(crate) fn of(&self, relay: DeviceId, direction: Direction) -> Bytes {
        Bytes::new(self.at(relay, direction).map_or(0, |bytes| bytes.load(Ordering::Relaxed)))
    }

    fn at(&self, relay: DeviceId, direction: Direction) -> Option<&AtomicU64> {
        let relay = usize::try_from(relay.0).ok().and_then(|relay| self.bytes.get(relay));
        relay.map(|relay| &relay[direction.index()])
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

#[cfg(test)]
mod crossings_tests {
    use super::*;

    #[test]
    fn bytes_are_counted_by_relay_and_direction() {
        let crossings = Crossings::default();
        let [relay, far] = [3, 400].map(DeviceId);
        for relay in [relay, far] {
            crossings.begin(relay, Direction::ToGpu, Bytes::mib(3));
            crossings.begin(relay, Direction::ToGpu, Bytes::mib(1));
        }
        assert_eq!(crossings.of(relay, Direction::ToGpu), Bytes::mib(4));
        assert_eq!(
            [crossings.of(relay, Direction::FromGpu), crossings.of(far, Direction::ToGpu)],
            [Bytes::ZERO; 2]
        );
        crossings.end(relay, Direction::ToGpu, Bytes::mib(3));
        assert_eq!(crossings.of(relay, Direction::ToGpu), Bytes::mib(1));
        crossings.end(relay, Direction::ToGpu, Bytes::mib(9));
        assert_eq!(crossings.of(relay, Direction::ToGpu), Bytes::ZERO);
    }
}
