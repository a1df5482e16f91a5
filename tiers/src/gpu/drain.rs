//! Waits for all work of the process before memory leaves its GPU.
//!
//! ```text
//! own device, watched peers ── one completion point, as for every release ──┐
//! every other device that has a context ── a completion point each ────────┴─► waited for ─► the first extent is unmapped
//! ```
//!
//! Completion points cover only devices that the pool gave access to its memory. A program can give access to others without telling the
//! pool. Therefore memory that leaves while its blocks are live waits for all devices once.
//!
//! Invariants: querying creates no context, and everything is recorded before the first wait. While a capture is open the call is refused
//! and has waited for frees at most. A lost device runs no work; if it is neither the pool's own nor a watched peer, its loss is no error
//! of the pool.

use glake_device::DriverError;
use glake_device::owned::{DeviceSet, RecordedPoint};

use super::clock::CompletionClock;
use super::point::CompletionPoint;
use super::reach::Reach;
use super::retry::retry;
use super::{PoolError, Result};

/// Wait for all devices of the process.
#[derive(Debug)]
pub(crate) struct Drain<'a> {
    pub(super) clock: &'a CompletionClock,
    pub(super) reach: &'a Reach,
    /// Devices visible to the driver.
    pub(super) devices: DeviceSet,
}

/// Work enqueued on any device of the process before a point in time.
#[derive(Debug)]
pub struct PendingWork {
    own: CompletionPoint,
    others: Vec<RecordedPoint>,
}

impl PendingWork {
    /// Returns whether the work has completed. Never waits.
    ///
    /// # Errors
    /// The driver's error.
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
    /// Records all work enqueued so far on any device, in its primary context.
    pub(crate) fn begin(&self) -> Result<PendingWork> {
        let own = self.clock.completion_point()?;
        let others = self.devices.without(self.reach.watched());
        let record = |device| unless_lost(self.clock.record_other(DeviceSet::of(device)));
        let recorded = others.iter().map(record).collect::<Result<Vec<Option<RecordedPoint>>>>()?;
        Ok(PendingWork { own, others: recorded.into_iter().flatten().collect() })
    }

    /// Waits for all work enqueued so far on any device.
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
