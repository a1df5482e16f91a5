//! Timing of waits that streams make for lenders and holds: GPU time that no program asked for.
//!
//! ```text
//! taker's stream:  … work ─ event ─ wait for these ─ event ─ work …        the time between the two events
//! ```
//!
//! Capturing streams neither lend nor borrow, so no event of a pair is recorded into a capture. Timing never fails a request: a wait that
//! cannot be timed is counted only.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::OwnedEvent;
use glake_device::{DeviceId, Driver, EventKind, Stream};
use parking_lot::Mutex;

use super::retry::retry;

/// Maximum number of waits timed concurrently; further waits are counted only.
const MOST: usize = 256;
/// Number of finished waits that are logged individually.
const LOG: usize = 4096;

/// Waits of streams for lenders and holds, up to the last poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuWaits {
    /// Number of waits, timed or not.
    pub count: u64,
    /// Number of waits finished and timed.
    pub timed: u64,
    /// Total GPU time of the timed waits.
    pub time: Duration,
}

/// Pair of timed events around the waits of one grant.
#[derive(Debug)]
pub(super) struct Pair {
    number: u64,
    stream: Stream,
    before: OwnedEvent,
    after: OwnedEvent,
}

/// Waits being timed, and results.
#[derive(Debug, Default)]
struct WaitTimes {
    idle: Vec<Pair>,
    open: Vec<Pair>,
    told: GpuWaits,
    /// Total number of waits, which is the number of the next one.
    made: u64,
    /// Finished waits with their numbers and streams.
    log: VecDeque<(u64, Stream, Duration)>,
}

impl WaitTimes {
    /// Collects the times of finished waits.
    fn poll(&mut self) {
        for pair in std::mem::take(&mut self.open) {
            match pair.after.is_passed() {
                Ok(false) => self.open.push(pair),
                Ok(true) => {
                    if let Ok(micros) = pair.after.since(&pair.before) {
                        let time = Duration::from_secs_f64(micros.max(0.0) / 1e6);
                        self.told.timed += 1;
                        self.told.time += time;
                        self.log.push_back((pair.number, pair.stream, time));
                        if self.log.len() > LOG {
                            self.log.pop_front();
                        }
                    }
                    self.idle.push(pair);
                }
                // A lost context is reported by the next call that needs it.
                Err(_) => {}
            }
        }
    }
}

/// Timer of the waits of one pool's streams.
#[derive(Debug)]
pub(super) struct WaitTimer {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    times: Mutex<WaitTimes>,
}

impl WaitTimer {
    pub(super) fn new(driver: Arc<dyn Driver>, device: DeviceId) -> Self {
        WaitTimer { driver, device, times: Mutex::default() }
    }

    /// Returns the counts and times up to now.
    pub(super) fn told(&self) -> GpuWaits {
        let mut times = self.times.lock();
        times.poll();
        times.told
    }

    pub(super) fn poll(&self) {
        self.times.lock().poll();
    }

    /// Returns the total number of waits.
    pub(super) fn made(&self) -> u64 {
        self.times.lock().made
    }

    /// Returns how long a stream stood still in the logged waits with these numbers.
    pub(super) fn time_of(&self, stream: Stream, numbers: &Range<u64>) -> Duration {
        let mut times = self.times.lock();
        times.poll();
        let of = |(number, on, _): &&(u64, Stream, Duration)| *on == stream && numbers.contains(number);
        times.log.iter().filter(of).map(|(_, _, time)| *time).sum()
    }

    pub(super) fn reset(&self) {
        self.times.lock().told = GpuWaits::default();
    }

    /// Counts a wait that `stream` is about to make, and starts timing it.
    pub(super) fn begin(&self, stream: Stream) -> Option<Pair> {
        let (idle, number) = {
            let mut times = self.times.lock();
            times.told.count += 1;
            let number = times.made;
            times.made += 1;
            if times.open.len() >= MOST {
                times.poll();
            }
            if times.open.len() >= MOST {
                return None;
            }
            (times.idle.pop(), number)
        };
        let event = || OwnedEvent::new(&self.driver, self.device, EventKind::Timed);
        let pair = match idle {
            Some(pair) => Pair { number, stream, ..pair },
            None => Pair { number, stream, before: event().ok()?, after: event().ok()? },
        };
        retry(|| pair.before.record(stream)).ok().map(|()| pair)
    }

    /// Stops timing a wait that has been enqueued.
    pub(super) fn end(&self, pair: Option<Pair>, stream: Stream) {
        let Some(pair) = pair else { return };
        if retry(|| pair.after.record(stream)).is_ok() {
            self.times.lock().open.push(pair);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{OWN, Parts};
    use super::*;

    #[test]
    fn waits_are_timed_up_to_so_many_and_counted_beyond() {
        let parts = Parts::new();
        let timer = WaitTimer::new(parts.driver.clone(), OWN);
        let stream = &parts.stream;
        let time = Duration::from_millis(1);
        parts.sim.enqueue_kernel(OWN, stream.id(), &[], &[], time, |_| {}).unwrap();
        for _ in 0..=MOST {
            timer.end(timer.begin(stream.id()), stream.id());
        }
        assert_eq!((timer.told().count, timer.told().timed), (MOST as u64 + 1, 0), "none is over");
        stream.synchronize().unwrap();
        assert_eq!(timer.told().timed, MOST as u64);
        timer.reset();
        assert_eq!(timer.told(), GpuWaits::default());
    }

    #[test]
    fn a_wait_takes_as_long_as_what_is_between_its_events() {
        let parts = Parts::new();
        let timer = WaitTimer::new(parts.driver.clone(), OWN);
        let stream = &parts.stream;
        let pair = timer.begin(stream.id());
        let time = Duration::from_millis(3);
        parts.sim.enqueue_kernel(OWN, stream.id(), &[], &[], time, |_| {}).unwrap();
        timer.end(pair, stream.id());
        stream.synchronize().unwrap();
        let told = timer.told();
        assert!(told.timed == 1 && told.time >= time, "{told:?}");
        assert_eq!((timer.made(), timer.time_of(stream.id(), &(0..1))), (1, told.time));
        let none = [timer.time_of(stream.id(), &(1..2)), timer.time_of(Stream(7), &(0..1))];
        assert_eq!(none, [Duration::ZERO; 2]);
    }
}
