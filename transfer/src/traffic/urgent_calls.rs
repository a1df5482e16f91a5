//! Threads that are enqueuing copies with priority over background ones.
//!
//! The driver's locks favour the thread that calls most often, which is a background copy: it makes two calls per slice. Therefore it makes
//! none while another copy is being enqueued.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Maximum time that a slice yields. Other calls take about 20 us; if one waits for a lock held by the background copy's thread, it
/// continues after this time.
const LONGEST_YIELD: Duration = Duration::from_micros(200);

/// Urgent calls of an engine.
#[derive(Debug)]
pub(crate) struct UrgentCalls {
    now: AtomicU32,
    /// Time of the last call, in milliseconds since `begun`; 0: none so far.
    last: AtomicU64,
    begun: Instant,
}

/// Urgent call in progress; dropping it ends the call.
#[derive(Debug)]
pub(crate) struct UrgentCall<'a>(&'a UrgentCalls);

impl UrgentCalls {
    pub(crate) fn new() -> UrgentCalls {
        UrgentCalls { now: AtomicU32::new(0), last: AtomicU64::new(0), begun: Instant::now() }
    }

    /// Begins an urgent call.
    pub(crate) fn begin(&self) -> UrgentCall<'_> {
        self.now.fetch_add(1, Ordering::Relaxed);
        self.last.store(self.milliseconds(), Ordering::Relaxed);
        UrgentCall(self)
    }

    /// Returns whether a call was made within a period.
    pub(crate) fn were_here(&self, within: Duration) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        last > 0 && u128::from(self.milliseconds().saturating_sub(last)) < within.as_millis()
    }

    /// Yields until urgent calls have ended, at most for [`LONGEST_YIELD`].
    pub(crate) fn yield_to_them(&self) {
        if self.now.load(Ordering::Relaxed) == 0 {
            return;
        }
        let begin = Instant::now();
        while self.now.load(Ordering::Relaxed) > 0 && begin.elapsed() < LONGEST_YIELD {
            std::thread::yield_now();
        }
    }

    /// Returns the milliseconds since creation, plus 1.
    fn milliseconds(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }
}

impl Drop for UrgentCall<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_let_calls_pass_but_not_for_ever() {
        let urgent_calls = UrgentCalls::new();
        assert!(!urgent_calls.were_here(Duration::MAX));
        urgent_calls.yield_to_them();
        let call = urgent_calls.begin();
        let begin = Instant::now();
        urgent_calls.yield_to_them();
        assert!(begin.elapsed() >= LONGEST_YIELD);
        drop(call);
        urgent_calls.yield_to_them();
        assert_eq!(urgent_calls.now.load(Ordering::Relaxed), 0);
        assert!(urgent_calls.were_here(Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(3));
        assert!(!urgent_calls.were_here(Duration::from_millis(1)));
    }

    #[test]
    fn a_slice_goes_on_when_the_last_call_has_ended() {
        let urgent_calls = UrgentCalls::new();
        std::thread::scope(|scope| {
            let first = urgent_calls.begin();
            let second = urgent_calls.begin();
            drop(first);
            scope.spawn(|| {
                std::thread::sleep(Duration::from_micros(50));
                drop(second);
            });
            urgent_calls.yield_to_them();
        });
        assert_eq!(urgent_calls.now.load(Ordering::Relaxed), 0);
    }
}
