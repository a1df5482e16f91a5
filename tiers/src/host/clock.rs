//! Completion points of returned memory: it may be handed out again once a completion point recorded after its return has passed.

use glake_device::DriverError;
use glake_device::owned::{CompletionProof, DeviceSet, RecordedPoint};
use parking_lot::MutexGuard;

use super::{HostPool, Result};

impl HostPool {
    /// Checks whether more memory may be handed out than before. Never waits.
    pub(super) fn poll(&self) -> Result<bool> {
        match self.clock.try_lock() {
            Some(clock) => self.pass(clock, |point| point.poll()),
            None => Ok(false),
        }
    }

    /// Waits until all free memory may be handed out; does not wait while a capture is open.
    pub(super) fn wait(&self) -> Result<bool> {
        self.pass(self.clock.lock(), |point| point.wait().map(Some))
    }

    /// Returns whether any completion point has passed.
    fn pass(
        &self,
        mut clock: MutexGuard<'_, Option<RecordedPoint>>,
        mut ask: impl FnMut(&mut RecordedPoint) -> glake_device::Result<Option<CompletionProof>>,
    ) -> Result<bool> {
        let mut moved = false;
        while self.is_pending() {
            let mut point = match clock.take() {
                Some(point) => point,
                None => match self.completion_events.record(self.options.devices) {
                    Ok(point) => point,
                    Err(DriverError::Capturing { .. }) => break,
                    Err(error) => return Err(error.into()),
                },
            };
            let Some(passed) = ask(&mut point)? else {
                *clock = Some(point);
                break;
            };
            let mut core = self.core.lock();
            core.passed = core.passed.max(passed.sequence());
            moved = true;
        }
        Ok(moved)
    }

    /// Returns whether a capture is open, which waiting for a whole context would break.
    pub(super) fn is_capturing(&self) -> bool {
        matches!(self.completion_events.record(DeviceSet::EMPTY), Err(DriverError::Capturing { .. }))
    }

    fn is_pending(&self) -> bool {
        let core = self.core.lock();
        core.free.is_pending(core.passed)
    }
}
