//! Threads that enqueue copies which others give way to, on the host as on the links.
//!
//! The driver's locks go to whoever asks most often, which is a background copy: it makes two calls for each of its slices. So it makes
//! none while another copy is being enqueued.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a slice lets others pass. They take some 20 us; where one waits for what the background copy's thread holds, it goes on
/// after this.
const LONGEST_YIELD: Duration = Duration::from_micros(200);

/// The threads.
#[derive(Debug)]
pub(crate) struct UrgentCalls {
    now: AtomicU32,
    /// When the last one came, in milliseconds since `begun`; 0: none did.
    last: AtomicU64,
    begun: Instant,
}

/// One of them; dropping it ends its call.
#[derive(Debug)]
pub(crate) struct UrgentCall<'a>(&'a UrgentCalls);

impl UrgentCalls {
    pub(crate) fn new() -> UrgentCalls {
        UrgentCalls { now: AtomicU32::new(0), last: AtomicU64::new(0), begun: Instant::now() }
    }

    /// A copy is about to be enqueued.
    pub(crate) fn begin(&self) -> UrgentCall<'_> {
        self.now.fetch_add(1, Ordering::Relaxed);
        self.last.store(self.milliseconds(), Ordering::Relaxed);
        UrgentCall(self)
    }

    /// Whether one was so shortly ago.
    pub(crate) fn were_here(&self, within: Duration) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        last > 0 && u128::from(self.milliseconds().saturating_sub(last)) < within.as_millis()
    }

    /// Lets them be enqueued first.
    pub(crate) fn yield_to_them(&self) {
        if self.now.load(Ordering::Relaxed) == 0 {
            return;
        }
        let begin = Instant::now();
        while self.now.load(Ordering::Relaxed) > 0 && begin.elapsed() < LONGEST_YIELD {
            std::thread::yield_now();
        }
    }

    /// Since it was made, and one more.
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
