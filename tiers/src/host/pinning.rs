//! Record of when host memory is touched and pinned. Pinning takes host memory bandwidth from copies, so that timings of these copies are
//! no link measurement.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counter of pinning threads; shared by pools and by components that time copies.
#[derive(Debug, Default)]
pub struct Pinning {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// Guard while memory is touched and pinned.
#[derive(Debug)]
pub struct PinningUnderWay(Arc<Pinning>);

impl Pinning {
    /// Marks the beginning of pinning.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> PinningUnderWay {
        self.begun.fetch_add(1, Ordering::AcqRel);
        PinningUnderWay(self.clone())
    }

    /// Returns `None` while any thread pins, else a number that changes with each pinning.
    pub fn idle_since(&self) -> Option<u64> {
        // In this order: pinning that begins in between counts as in progress.
        let ended = self.ended.load(Ordering::Acquire);
        (self.begun.load(Ordering::Acquire) == ended).then_some(ended)
    }
}

impl Drop for PinningUnderWay {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_idle_between_those_who_pin() {
        let pinning = Arc::new(Pinning::default());
        let first = pinning.idle_since();
        assert_eq!(first, pinning.idle_since());
        let (one, other) = (pinning.begin(), pinning.begin());
        drop(one);
        assert_eq!((first.is_some(), pinning.idle_since()), (true, None));
        drop(other);
        assert!(pinning.idle_since().is_some_and(|since| Some(since) != first));
    }
}
