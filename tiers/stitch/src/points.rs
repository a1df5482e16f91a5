//! Completion points: the order of frees, and the last point whose work has completed.
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
    /// Completion point of the current frees; closed when an event is recorded for it.
    open: PointNumber,
    /// Whether the open point has frees.
    uncovered: bool,
    passed: PointNumber,
}

impl Default for CompletionPoints {
    fn default() -> Self {
        CompletionPoints { open: PointNumber(1), uncovered: false, passed: PointNumber(0) }
    }
}

impl CompletionPoints {
    /// Returns the open completion point, to which frees belong.
    #[inline]
    pub(crate) fn open(&self) -> PointNumber {
        self.open
    }

    /// Returns the last completion point that has passed.
    #[inline]
    pub(crate) fn passed(&self) -> PointNumber {
        self.passed
    }

    /// Returns whether work of a completion point may still run.
    #[inline]
    pub(crate) fn is_pending(&self, point: PointNumber) -> bool {
        point > self.passed
    }

    /// Returns the open completion point if it has frees that no recorded event covers.
    pub(crate) fn uncovered(&self) -> Option<PointNumber> {
        self.uncovered.then_some(self.open)
    }

    /// Marks the open completion point as in need of an event: a block was freed, or the last event could not be recorded.
    #[inline]
    pub(crate) fn uncover(&mut self) {
        self.uncovered = true;
    }

    /// Closes the open completion point, whose event was recorded, and returns it.
    pub(crate) fn close(&mut self) -> PointNumber {
        let closed = self.open;
        self.open = closed.next();
        self.uncovered = false;
        closed
    }

    /// Marks a completion point as passed.
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
