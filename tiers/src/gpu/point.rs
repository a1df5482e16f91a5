//! Points in time, and the proof that all earlier work has completed.

use glake_device::owned::{CompletionProof, RecordedPoint, Sequence};

use super::retry::retry;

/// Point in time, with the event that tells when all earlier work has completed.
#[derive(Debug)]
pub(crate) struct CompletionPoint {
    mark: Sequence,
    point: RecordedPoint,
}

/// Proof that all work enqueued before a point has completed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    pub(super) mark: Sequence,
    pub(super) passed: CompletionProof,
}

impl CompletionPoint {
    /// Creates a point; the mark must have been taken before the event was recorded.
    pub(super) fn new(mark: Sequence, point: RecordedPoint) -> Self {
        CompletionPoint { mark, point }
    }

    /// Returns whether the work has completed. Never waits.
    pub(crate) fn has_passed(&mut self) -> glake_device::Result<bool> {
        Ok(self.point.poll()?.is_some())
    }

    /// Waits for the completion of the work.
    pub(super) fn wait(mut self) -> glake_device::Result<Done> {
        let passed = retry(|| self.point.wait())?;
        Ok(Done { mark: self.mark, passed })
    }
}
