//! A refill that finds no memory waits for a shrink that is giving some back.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use glake_tiers::WaitPolicy;

use crate::sync::{Condvar, Mutex};

/// How soon a refill looks again: an extent of a shrink takes longer.
const STEP: Duration = Duration::from_millis(1);

/// The shrinks that give back memory of one device.
#[derive(Debug, Default)]
pub(super) struct OngoingShrinks {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    under_way: u32,
    ended: u64,
}

/// A shrink that is under way.
#[derive(Debug)]
pub(super) struct UnderWay<'f>(&'f OngoingShrinks);

/// Waits while there is one.
#[derive(Debug)]
pub(super) struct Waiting<'f> {
    ongoing_shrinks: &'f OngoingShrinks,
    /// How many had ended when it was last asked.
    seen: AtomicU64,
}

impl OngoingShrinks {
    pub(super) fn begin(&self) -> UnderWay<'_> {
        self.state.lock().under_way += 1;
        UnderWay(self)
    }

    pub(super) fn waiting(&self) -> Waiting<'_> {
        Waiting { ongoing_shrinks: self, seen: AtomicU64::new(self.state.lock().ended) }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.under_way -= 1;
        state.ended += 1;
        drop(state);
        self.0.changed.notify_all();
    }
}

impl WaitPolicy for Waiting<'_> {
    fn wait(&self) -> bool {
        let mut state = self.ongoing_shrinks.state.lock();
        if self.seen.swap(state.ended, Ordering::Relaxed) != state.ended {
            return true;
        }
        if state.under_way == 0 {
            return false;
        }
        self.ongoing_shrinks.changed.wait_for(&mut state, STEP);
        true
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    #[test]
    fn it_is_worth_waiting_while_and_once_after_a_shrink() {
        let ongoing_shrinks = OngoingShrinks::default();
        let waiting = ongoing_shrinks.waiting();
        assert!(!waiting.wait());
        let under_way = ongoing_shrinks.begin();
        assert!(waiting.wait() && waiting.wait());
        drop(under_way);
        assert!(waiting.wait(), "what it gave back last was not looked at");
        assert!(!waiting.wait() && !ongoing_shrinks.waiting().wait());
    }
}
