//! A moment, and how it is known that all work from before it is done.

use glake_device::owned::{Epoch, Passed, Sequence};

use super::retry::retry;

/// A moment, and the completion that tells that all work from before it is done.
#[derive(Debug)]
pub(crate) struct CompletionPoint {
    mark: Sequence,
    epoch: Epoch,
}

/// A moment from before which all work is done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    pub(super) mark: Sequence,
    pub(super) passed: Passed,
}

impl CompletionPoint {
    /// The mark comes before the epoch was recorded.
    pub(super) fn new(mark: Sequence, epoch: Epoch) -> Self {
        CompletionPoint { mark, epoch }
    }

    /// Whether that work is done. Never waits.
    pub(crate) fn has_passed(&mut self) -> glake_device::Result<bool> {
        Ok(self.epoch.poll()?.is_some())
    }

    /// Waits until it is.
    pub(super) fn wait(mut self) -> glake_device::Result<Done> {
        let passed = retry(|| self.epoch.wait())?;
        Ok(Done { mark: self.mark, passed })
    }
}
