//! A moment, and how it is known that all work from before it is done.

use glake_device::owned::{CompletionProof, RecordedPoint, Sequence};

use super::retry::retry;

/// A moment, and the completion that tells that all work from before it is done.
#[derive(Debug)]
pub(crate) struct CompletionPoint {
    mark: Sequence,
    point: RecordedPoint,
}

/// A moment from before which all work is done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    pub(super) mark: Sequence,
    pub(super) passed: CompletionProof,
}

impl CompletionPoint {
    /// The mark comes before the completion point was recorded.
    pub(super) fn new(mark: Sequence, point: RecordedPoint) -> Self {
        CompletionPoint { mark, point }
    }

    /// Whether that work is done. Never waits.
    pub(crate) fn has_passed(&mut self) -> glake_device::Result<bool> {
        Ok(self.point.poll()?.is_some())
    }

    /// Waits until it is.
    pub(super) fn wait(mut self) -> glake_device::Result<Done> {
        let passed = retry(|| self.point.wait())?;
        Ok(Done { mark: self.mark, passed })
    }
}
