//! How long streams stood still for lenders: the GPU time of waits that `borrow = wait` makes and no program asked for.
//!
//! ```text
//! taker's stream:  … work ─ event ─ wait for the lenders ─ event ─ work …        the time between the two events
//! ```
//!
//! Streams of a capture neither lend nor borrow, so no event of a pair is ever recorded into one. Measuring never fails a
//! request: a wait that cannot be measured is counted and not timed.

use std::time::Duration;

use glake_device::owned::OwnedEvent;
use glake_device::{EventKind, Stream};

use super::GpuPool;
use super::execute::retry;

/// So many waits are timed at once; beyond, they are counted only.
const MOST: usize = 256;

/// The waits of takers for lenders, until the pool last looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuWaits {
    /// How many there were.
    pub count: u64,
    /// Of them, over and measured.
    pub timed: u64,
    /// How long those took on the GPU.
    pub time: Duration,
}

/// Two timed events around the waits of one grant.
#[derive(Debug)]
pub(super) struct Pair {
    before: OwnedEvent,
    after: OwnedEvent,
}

/// What is being timed and what was.
#[derive(Debug, Default)]
pub(super) struct WaitTimes {
    idle: Vec<Pair>,
    open: Vec<Pair>,
    told: GpuWaits,
}

impl WaitTimes {
    /// Notes how long the waits took that are over.
    fn poll(&mut self) {
        for pair in std::mem::take(&mut self.open) {
            match pair.after.is_passed() {
                Ok(false) => self.open.push(pair),
                Ok(true) => {
                    if let Ok(micros) = pair.after.since(&pair.before) {
                        self.told.timed += 1;
                        self.told.time += Duration::from_secs_f64(micros.max(0.0) / 1e6);
                    }
                    self.idle.push(pair);
                }
                // The pool hears of a lost context where it matters.
                Err(_) => {}
            }
        }
    }
}

impl GpuPool {
    /// The GPU time that streams spent in waits for other streams which the program did not ask for, made under
    /// [`glake_stitch::Borrow::Wait`]. Waits that are not over yet are counted, not timed.
    pub fn gpu_waits(&self) -> GpuWaits {
        let mut waits = self.waits.lock();
        waits.poll();
        waits.told
    }

    pub(super) fn poll_waits(&self) {
        self.waits.lock().poll();
    }

    pub(super) fn reset_waits(&self) {
        self.waits.lock().told = GpuWaits::default();
    }

    /// Counts a wait that `stream` is about to make, and begins to time it.
    pub(super) fn begin_wait(&self, stream: Stream) -> Option<Pair> {
        let idle = {
            let mut waits = self.waits.lock();
            waits.told.count += 1;
            if waits.open.len() >= MOST {
                waits.poll();
            }
            if waits.open.len() >= MOST {
                return None;
            }
            waits.idle.pop()
        };
        let event = || OwnedEvent::new(&self.driver, self.device, EventKind::Timed);
        let pair = match idle {
            Some(pair) => pair,
            None => Pair { before: event().ok()?, after: event().ok()? },
        };
        retry(|| pair.before.record(stream)).ok().map(|()| pair)
    }

    /// The wait is enqueued.
    pub(super) fn end_wait(&self, pair: Option<Pair>, stream: Stream) {
        let Some(pair) = pair else { return };
        if retry(|| pair.after.record(stream)).is_ok() {
            self.waits.lock().open.push(pair);
        }
    }
}
