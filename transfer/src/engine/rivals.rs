//! GPUs whose memory is copied at the same time as other GPUs': for a while each has its link to itself.
//!
//! ```text
//!   at first     GPU 0  ══links 0, 1══        GPU 1  ══links 0, 1══      both at once: links that serve two copies give less
//!   after that   GPU 0  ══link 0══            GPU 1  ══link 1══          and the links of idle GPUs serve either
//! ```
//!
//! A program that copies to all its GPUs does so again and again, and the first copy of each round cannot know of the others. A
//! wrong guess costs time alone.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;

use crate::graph::{Direction, Load, MOST_GPUS};

/// For so long after copies of two GPUs met, they are expected to meet again.
const EXPECTED: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct Rivals {
    begin: Instant,
    /// Until when each GPU's memory is expected to be copied beside others', by direction: microseconds from the begin.
    until: [[AtomicU64; MOST_GPUS]; 2],
    /// The latest of these.
    last: [AtomicU64; 2],
}

impl Rivals {
    pub(super) fn new() -> Rivals {
        let none = || [const { AtomicU64::new(0) }; MOST_GPUS];
        Rivals { begin: Instant::now(), until: [none(), none()], last: [const { AtomicU64::new(0) }; 2] }
    }

    /// The GPUs that had copies beside those of `target`, or that `target` had beside theirs, a short time ago. Takes note of
    /// those that have some now.
    pub(super) fn of(
        &self,
        target: DeviceId,
        direction: Direction,
        load: &Load,
        devices: usize,
    ) -> DeviceSet {
        let others = || (0_u32..).map(DeviceId).take(devices).filter(|other| *other != target);
        let links = || (0_u32..).map(DeviceId).take(devices);
        let copied = |other: &DeviceId| links().any(|link| !load.target(*other, link, direction).is_zero());
        let met: DeviceSet = others().filter(copied).collect();
        let last = &self.last[direction.index()];
        if met.is_empty() && last.load(Ordering::Relaxed) == 0 {
            return DeviceSet::EMPTY;
        }
        let now = u64::try_from(self.begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        let expected = |other: &DeviceId| self.until(*other, direction).is_some_and(|until| now < until);
        let rivals = others().filter(expected).collect();
        if !met.is_empty() {
            let until = now.saturating_add(u64::try_from(EXPECTED.as_micros()).unwrap_or(u64::MAX));
            for gpu in met.union(DeviceSet::of(target)).iter() {
                self.expect(gpu, direction, until);
            }
            last.store(until, Ordering::Relaxed);
        }
        rivals
    }

    fn until(&self, gpu: DeviceId, direction: Direction) -> Option<u64> {
        let place = self.until[direction.index()].get(usize::try_from(gpu.0).ok()?)?;
        Some(place.load(Ordering::Relaxed))
    }

    fn expect(&self, gpu: DeviceId, direction: Direction, until: u64) {
        let place = usize::try_from(gpu.0).ok().and_then(|gpu| self.until[direction.index()].get(gpu));
        if let Some(place) = place {
            place.store(until, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use glake_units::Bytes;

    use super::*;

    #[test]
    fn those_that_met_are_expected_to_meet_again() {
        let (rivals, load) = (Rivals::new(), Load::new());
        let [a, b, idle] = [0, 1, 2].map(DeviceId);
        let of = |gpu| rivals.of(gpu, Direction::ToGpu, &load, 3);
        assert!(of(a).is_empty());
        load.begin(a, b, Direction::ToGpu, Bytes::mib(1));
        // Where they meet first, the first one's copy uses both links already.
        assert!(of(b).is_empty());
        load.end(a, b, Direction::ToGpu, Bytes::mib(1));
        assert_eq!(of(a), DeviceSet::of(b));
        assert_eq!(of(b), DeviceSet::of(a));
        assert_eq!(of(idle), DeviceSet::of(a).union(DeviceSet::of(b)));
        assert!(rivals.of(a, Direction::FromGpu, &load, 3).is_empty());
    }
}
