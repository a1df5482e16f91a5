//! When host memory is touched and pinned. That takes the host's memory from copies, so that what these take meanwhile says nothing of links.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts what pins; shared by pools and by those who time copies.
#[derive(Debug, Default)]
pub struct Pinning {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// Memory is being touched and pinned, until it is dropped.
#[derive(Debug)]
pub struct PinningUnderWay(Arc<Pinning>);

impl Pinning {
    /// Somebody begins.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> PinningUnderWay {
        self.begun.fetch_add(1, Ordering::AcqRel);
        PinningUnderWay(self.clone())
    }

    /// `None` while anybody pins; else a number that is another once anybody has.
    pub fn idle_since(&self) -> Option<u64> {
        // In this order: what begins in between is seen as under way.
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
