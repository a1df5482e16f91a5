//! All work of the process, waited for before memory leaves its GPU.
//!
//! ```text
//! own device, watched peers ── one completion point, as for every release ──┐
//! every other device that has a context ── a completion point each ────────┴─► waited for ─► the first extent is unmapped
//! ```
//!
//! Completion points cover whoever the pool let touch its memory. A program can let others touch it without a word to the pool, so what leaves
//! while blocks live waits once for all of them.
//!
//! Invariants: no context is made by asking, and all is recorded before anything is waited for: where a capture is open the call is
//! refused and has waited for nothing but frees. A device that is lost runs nothing any more; one that is not the pool's own, nor
//! watched, fails nothing of the pool's.

use glake_device::DriverError;
use glake_device::owned::{DeviceSet, RecordedPoint};

use super::clock::CompletionClock;
use super::point::CompletionPoint;
use super::reach::Reach;
use super::retry::retry;
use super::{PoolError, Result};

/// A wait for every device.
#[derive(Debug)]
pub(crate) struct Drain<'a> {
    pub(super) clock: &'a CompletionClock,
    pub(super) reach: &'a Reach,
    /// All that the driver shows.
    pub(super) devices: DeviceSet,
}

/// All work that was enqueued by some moment on any device of a process.
#[derive(Debug)]
pub struct PendingWork {
    own: CompletionPoint,
    others: Vec<RecordedPoint>,
}

impl PendingWork {
    /// Whether it has ended. Never waits.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn has_ended(&mut self) -> Result<bool> {
        while let Some(other) = self.others.last_mut() {
            if let Some(None) = unless_lost(other.poll())? {
                return Ok(false);
            }
            self.others.pop();
        }
        Ok(self.own.has_passed()?)
    }
}

impl Drain<'_> {
    /// All work that was enqueued before on any device, in its primary context.
    pub(crate) fn begin(&self) -> Result<PendingWork> {
        let own = self.clock.completion_point()?;
        let others = self.devices.without(self.reach.watched());
        let record = |device| unless_lost(self.clock.record_other(DeviceSet::of(device)));
        let recorded = others.iter().map(record).collect::<Result<Vec<Option<RecordedPoint>>>>()?;
        Ok(PendingWork { own, others: recorded.into_iter().flatten().collect() })
    }

    /// Waits for it.
    pub(crate) fn wait(&self) -> Result<()> {
        self.clock.settle()?;
        let PendingWork { own, others } = self.begin()?;
        self.clock.passed(own)?;
        others.into_iter().try_for_each(|mut point| unless_lost(retry(|| point.wait())).map(|_| ()))
    }
}

fn unless_lost<T>(answer: std::result::Result<T, DriverError>) -> Result<Option<T>> {
    match answer {
        Ok(done) => Ok(Some(done)),
        Err(error) if error.is_sticky() => Ok(None),
        Err(error) => Err(PoolError::Driver(error)),
    }
}
