//! Contention of GPUs whose memory is copied concurrently: for half a second, the links of these GPUs serve their own copies only.
//!
//! ```text
//!   at first     GPU 0  ══links 0, 1══        GPU 1  ══links 0, 1══      both at once: links that serve two copies give less
//!   after that   GPU 0  ══link 0══            GPU 1  ══link 1══          and the links of idle GPUs serve either
//! ```
//!
//! A program that copies to all its GPUs usually does so repeatedly, and the first copy of each round cannot see the others. A wrong
//! prediction only costs time. The driver makes the copies over the own link only, and their end is not observed: it is predicted.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::Micros;

use crate::paths::{Direction, Load, MOST_GPUS};

/// Time for which copies of two GPUs that met are expected to meet again.
const EXPECTED: Duration = Duration::from_millis(500);

/// Time of each GPU by direction, in microseconds since creation.
type Moments = [[AtomicU64; MOST_GPUS]; 2];

#[derive(Debug)]
pub(crate) struct Contention {
    begin: Instant,
    /// End of the period in which each GPU's copies are expected to run next to others'.
    until: Moments,
    /// Latest of these, by direction.
    last: [AtomicU64; 2],
    /// Predicted end of the copies that use each GPU's own link only.
    busy: Moments,
}

/// Other GPUs that contend with a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Contenders {
    /// GPUs that keep their own links.
    pub(crate) rivals: DeviceSet,
    /// Number of these without a copy in flight, whose next copies will use the other links too.
    pub(crate) expected: u32,
}

impl Contention {
    pub(crate) fn new() -> Contention {
        let none = || [const { AtomicU64::new(0) }; MOST_GPUS];
        let (begin, last) = (Instant::now(), [const { AtomicU64::new(0) }; 2]);
        Contention { begin, until: [none(), none()], last, busy: [none(), none()] }
    }

    /// Returns the GPUs whose copies recently ran next to copies of `target`, and records those that run now.
    pub(crate) fn of(
        &self,
        target: DeviceId,
        direction: Direction,
        load: &Load,
        devices: usize,
    ) -> Contenders {
        self.at(|| micros(self.begin.elapsed()), target, direction, load, devices)
    }

    /// Records that a copy of `target` uses its own link only for about `took`, after earlier ones.
    pub(crate) fn keep_apart(&self, target: DeviceId, direction: Direction, took: Micros) {
        self.keep_apart_at(micros(self.begin.elapsed()), target, direction, took);
    }

    /// Like [`Contention::of`]; reads the clock only if GPUs have contended before.
    fn at(
        &self,
        now: impl FnOnce() -> u64,
        target: DeviceId,
        direction: Direction,
        load: &Load,
        devices: usize,
    ) -> Contenders {
        let others = || (0_u32..).map(DeviceId).take(devices).filter(|other| *other != target);
        let links = || (0_u32..).map(DeviceId).take(devices);
        let copied = |other: &DeviceId| links().any(|link| !load.target(*other, link, direction).is_zero());
        let seen: DeviceSet = others().filter(copied).collect();
        let last = &self.last[direction.index()];
        if seen.is_empty() && last.load(Ordering::Relaxed) == 0 {
            return Contenders::default();
        }
        let now = now();
        let later = |moments: &Moments, other: &DeviceId| {
            place(moments, *other, direction).is_some_and(|moment| now < moment.load(Ordering::Relaxed))
        };
        let met = seen.union(others().filter(|other| later(&self.busy, other)).collect());
        let rivals: DeviceSet = others().filter(|other| later(&self.until, other)).collect();
        if !met.is_empty() {
            let until = now.saturating_add(micros(EXPECTED));
            for gpu in met.union(DeviceSet::of(target)).iter() {
                if let Some(place) = place(&self.until, gpu, direction) {
                    place.store(until, Ordering::Relaxed);
                }
            }
            last.store(until, Ordering::Relaxed);
        }
        Contenders { rivals, expected: rivals.without(met).len() }
    }

    fn keep_apart_at(&self, now: u64, target: DeviceId, direction: Direction, took: Micros) {
        if let Some(busy) = place(&self.busy, target, direction) {
            let begin = busy.load(Ordering::Relaxed).max(now);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            // saturates; not a number is nothing
            busy.store(begin.saturating_add(took.0 as u64), Ordering::Relaxed);
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn place(moments: &Moments, gpu: DeviceId, direction: Direction) -> Option<&AtomicU64> {
    moments[direction.index()].get(usize::try_from(gpu.0).ok()?)
}

#[cfg(test)]
mod tests {
    use glake_units::Bytes;

    use super::*;

    const TO: Direction = Direction::ToGpu;

    fn contenders_of(rivals: DeviceSet, expected: u32) -> Contenders {
        Contenders { rivals, expected }
    }

    #[test]
    fn those_that_met_are_expected_to_meet_again() {
        let (rivals, load) = (Contention::new(), Load::new());
        let [a, b, idle] = [0, 1, 2].map(DeviceId);
        let at = |now: u64, gpu| rivals.at(|| now, gpu, TO, &load, 3);
        assert_eq!(at(0, a), Contenders::default());
        load.begin(a, b, TO, Bytes::mib(1));
        // Where they meet first, the first one's copy uses both links already.
        assert_eq!(at(1, b), Contenders::default());
        load.end(a, b, TO, Bytes::mib(1));
        assert_eq!(at(2, a), contenders_of(DeviceSet::of(b), 1));
        assert_eq!(at(2, b), contenders_of(DeviceSet::of(a), 1));
        assert_eq!(at(2, idle), contenders_of(DeviceSet::of(a).union(DeviceSet::of(b)), 2));
        assert_eq!(rivals.at(|| 2, a, Direction::FromGpu, &load, 3), Contenders::default());
        assert_eq!(at(1 + micros(EXPECTED), a), Contenders::default(), "not for ever");
    }

    #[test]
    fn copies_that_nobody_sees_end_keep_the_expectation_up() {
        let (rivals, load) = (Contention::new(), Load::new());
        let [a, b] = [0, 1].map(DeviceId);
        let at = |now: u64, gpu| rivals.at(|| now, gpu, TO, &load, 2);
        load.begin(a, b, TO, Bytes::mib(1));
        at(0, b);
        load.end(a, b, TO, Bytes::mib(1));
        // A round in 50 ms, whose copies take 20 ms each.
        for round in 1..100 {
            let now = round * 50_000;
            assert_eq!(at(now, a), contenders_of(DeviceSet::of(b), 1));
            rivals.keep_apart_at(now, a, TO, Micros(20_000.0));
            assert_eq!(at(now + 10, b), contenders_of(DeviceSet::of(a), 0), "it is under way");
            assert_eq!(at(now + 30_000, b), contenders_of(DeviceSet::of(a), 1), "it has ended");
        }
    }
}
