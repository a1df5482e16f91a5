//! Counters of the engine: atomics, updated without a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use glake_device::DeviceId;
use glake_units::Bytes;

use crate::links::relays::Relays;
use crate::paths::{Direction, Way};
use crate::{PathStatistics, Statistics};

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
