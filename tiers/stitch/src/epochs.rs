//! Completion of work as the core sees it: the order of frees, and how far of it has passed.
//!
//! ```text
//! passed ──── closed, its event recorded ──── open: frees belong to it now
//! ```
//!
//! Invariant: an epoch passes after it was closed, so `passed` is always before `open`.

use crate::ids::Epoch;

/// The epochs of one device.
#[derive(Debug)]
pub(crate) struct Epochs {
    /// Frees belong to this epoch; it closes when an event is recorded for it.
    open: Epoch,
    /// Whether anything was freed in it.
    uncovered: bool,
    passed: Epoch,
}

impl Default for Epochs {
    fn default() -> Self {
        Epochs { open: Epoch(1), uncovered: false, passed: Epoch(0) }
    }
}

impl Epochs {
    /// The one that frees belong to now.
    #[inline]
    pub(crate) fn open(&self) -> Epoch {
        self.open
    }

    /// The last one that has passed.
    #[inline]
    pub(crate) fn passed(&self) -> Epoch {
        self.passed
    }

    /// Whether work of an epoch may still run.
    #[inline]
    pub(crate) fn is_pending(&self, epoch: Epoch) -> bool {
        epoch > self.passed
    }

    /// The open epoch, where it has frees that no recorded event covers.
    pub(crate) fn uncovered(&self) -> Option<Epoch> {
        self.uncovered.then_some(self.open)
    }

    /// Something was freed in the open epoch, or the event of the last one could not be recorded.
    #[inline]
    pub(crate) fn uncover(&mut self) {
        self.uncovered = true;
    }

    /// The event of the open epoch was recorded; returns that epoch.
    pub(crate) fn close(&mut self) -> Epoch {
        let closed = self.open;
        self.open = closed.next();
        self.uncovered = false;
        closed
    }

    /// All work enqueued before this epoch was closed has completed.
    pub(crate) fn pass(&mut self, epoch: Epoch) {
        debug_assert!(epoch < self.open, "an epoch passes after it was closed");
        self.passed = self.passed.max(epoch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frees_are_pending_until_their_epoch_passes() {
        let mut epochs = Epochs::default();
        assert_eq!((epochs.uncovered(), epochs.passed()), (None, Epoch(0)));
        epochs.uncover();
        let freed = epochs.open();
        assert_eq!(epochs.uncovered(), Some(freed));
        assert_eq!(epochs.close(), freed);
        assert!(epochs.uncovered().is_none() && epochs.is_pending(freed));
        let later = epochs.close();
        epochs.pass(later);
        epochs.pass(freed);
        assert_eq!(epochs.passed(), later, "what has passed stays passed");
        assert!(!epochs.is_pending(freed) && epochs.is_pending(epochs.open()));
    }
}
