//! Completion of work as the core sees it: the order of frees, and how far of it has passed.
//!
//! ```text
//! passed ──── closed, its event recorded ──── open: frees belong to it now
//! ```
//!
//! Invariant: a completion point passes after it was closed, so `passed` is always before `open`.

use crate::ids::PointNumber;

/// The completion points of one device.
#[derive(Debug)]
pub(crate) struct CompletionPoints {
    /// Frees belong to this completion point; it closes when an event is recorded for it.
    open: PointNumber,
    /// Whether anything was freed in it.
    uncovered: bool,
    passed: PointNumber,
}

impl Default for CompletionPoints {
    fn default() -> Self {
        CompletionPoints { open: PointNumber(1), uncovered: false, passed: PointNumber(0) }
    }
}

impl CompletionPoints {
    /// The one that frees belong to now.
    #[inline]
    pub(crate) fn open(&self) -> PointNumber {
        self.open
    }

    /// The last one that has passed.
    #[inline]
    pub(crate) fn passed(&self) -> PointNumber {
        self.passed
    }

    /// Whether work of a completion point may still run.
    #[inline]
    pub(crate) fn is_pending(&self, point: PointNumber) -> bool {
        point > self.passed
    }

    /// The open completion point, where it has frees that no recorded event covers.
    pub(crate) fn uncovered(&self) -> Option<PointNumber> {
        self.uncovered.then_some(self.open)
    }

    /// Something was freed in the open completion point, or the event of the last one could not be recorded.
    #[inline]
    pub(crate) fn uncover(&mut self) {
        self.uncovered = true;
    }

    /// The event of the open completion point was recorded; returns that completion point.
    pub(crate) fn close(&mut self) -> PointNumber {
        let closed = self.open;
        self.open = closed.next();
        self.uncovered = false;
        closed
    }

    /// All work enqueued before this completion point was closed has completed.
    pub(crate) fn pass(&mut self, point: PointNumber) {
        debug_assert!(point < self.open, "a completion point passes after it was closed");
        self.passed = self.passed.max(point);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frees_are_pending_until_their_point_passes() {
        let mut points = CompletionPoints::default();
        assert_eq!((points.uncovered(), points.passed()), (None, PointNumber(0)));
        points.uncover();
        let freed = points.open();
        assert_eq!(points.uncovered(), Some(freed));
        assert_eq!(points.close(), freed);
        assert!(points.uncovered().is_none() && points.is_pending(freed));
        let later = points.close();
        points.pass(later);
        points.pass(freed);
        assert_eq!(points.passed(), later, "what has passed stays passed");
        assert!(!points.is_pending(freed) && points.is_pending(points.open()));
    }
}
