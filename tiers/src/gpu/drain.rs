//! All work of the process, waited for before memory leaves its GPU.
//!
//! ```text
//! own device, watched peers ── one epoch, as for every release ──┐
//! every other device that has a context ── an epoch each ────────┴─► waited for ─► the first extent is unmapped
//! ```
//!
//! Epochs cover whoever the pool let touch its memory. A program can let others touch it without a word to the pool, so what leaves
//! while blocks live waits once for all of them.
//!
//! Invariants: no context is made by asking, and all is recorded before anything is waited for: where a capture is open the call is
//! refused and has waited for nothing but frees. A device that is lost runs nothing any more; one that is not the pool's own, nor
//! watched, fails nothing of the pool's.

use glake_device::owned::{DeviceSet, Epoch};
use glake_device::{DeviceId, DriverError};

use super::execute::retry;
use super::{GpuPool, PoolError, Result};

impl GpuPool {
    /// Waits for all work that was enqueued before on any device, in its primary context.
    pub(crate) fn drain(&self) -> Result<()> {
        self.settle()?;
        let own = self.completion_point()?;
        let others = self.devices.without(self.reach.watched());
        let recorded = others.iter().map(|device| self.record_other(device)).collect::<Result<Vec<_>>>()?;
        self.passed(own)?;
        recorded
            .into_iter()
            .flatten()
            .try_for_each(|mut epoch| self.unless_lost(retry(|| epoch.wait())).map(|_| ()))
    }

    fn record_other(&self, device: DeviceId) -> Result<Option<Epoch>> {
        self.unless_lost(retry(|| self.epochs.record(DeviceSet::of(device))))
    }

    fn unless_lost<T>(&self, answer: std::result::Result<T, DriverError>) -> Result<Option<T>> {
        match answer {
            Ok(done) => Ok(Some(done)),
            Err(error) if error.is_sticky() => Ok(None),
            Err(error) => Err(PoolError::Driver(error)),
        }
    }
}
