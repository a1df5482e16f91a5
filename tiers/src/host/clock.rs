//! When memory that was given back may be handed out again: once an epoch has passed that was recorded after it came back.

use glake_device::DriverError;
use glake_device::owned::{DeviceSet, Epoch, Passed};
use parking_lot::MutexGuard;

use super::{HostPool, Result};

impl HostPool {
    /// Looks whether more may be handed out than before. Never waits.
    pub(super) fn poll(&self) -> Result<bool> {
        match self.clock.try_lock() {
            Some(clock) => self.pass(clock, |epoch| epoch.poll()),
            None => Ok(false),
        }
    }

    /// Waits until all that is free may be handed out; while a capture is open nothing is waited for.
    pub(super) fn wait(&self) -> Result<bool> {
        self.pass(self.clock.lock(), |epoch| epoch.wait().map(Some))
    }

    /// Whether any epoch has passed.
    fn pass(
        &self,
        mut clock: MutexGuard<'_, Option<Epoch>>,
        mut ask: impl FnMut(&mut Epoch) -> glake_device::Result<Option<Passed>>,
    ) -> Result<bool> {
        let mut moved = false;
        while self.is_pending() {
            let mut epoch = match clock.take() {
                Some(epoch) => epoch,
                None => match self.epochs.record(self.options.devices) {
                    Ok(epoch) => epoch,
                    Err(DriverError::Capturing { .. }) => break,
                    Err(error) => return Err(error.into()),
                },
            };
            let Some(passed) = ask(&mut epoch)? else {
                *clock = Some(epoch);
                break;
            };
            let mut core = self.core.lock();
            core.passed = core.passed.max(passed.sequence());
            moved = true;
        }
        Ok(moved)
    }

    /// Whether a capture is open, which a wait for a whole context would break.
    pub(super) fn is_capturing(&self) -> bool {
        matches!(self.epochs.record(DeviceSet::EMPTY), Err(DriverError::Capturing { .. }))
    }

    fn is_pending(&self) -> bool {
        let core = self.core.lock();
        core.free.is_pending(core.passed)
    }
}
