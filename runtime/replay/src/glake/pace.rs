//! Completion points in the trace's time, at the pace of the pool's own thread.
//!
//! The thread wakes up at the first free after a pause, ticks at every interval while frees are pending, and sleeps otherwise. Between two
//! events, only two ticks have an effect: the first, which records a completion point, and the last, which detects completed ones. Only
//! these are performed, at the times when they are due.

use std::time::Duration;

use glake_device::Lag;
use glake_tiers::{GpuPool, PoolError};

/// Times of the ticks.
#[derive(Debug)]
pub(super) struct Pace {
    interval_us: u64,
    now_us: u64,
    due_us: u64,
    /// Whether the simulated thread is awake.
    ticking: bool,
}

impl Pace {
    pub(super) fn new(interval: Duration) -> Self {
        let interval_us = u64::try_from(interval.as_micros()).unwrap_or(u64::MAX);
        Pace { interval_us, now_us: 0, due_us: 0, ticking: false }
    }

    /// Advances the time to `now_us` and performs the ticks that are due by then.
    pub(super) fn advance(&mut self, now_us: u64, lag: &Lag, pool: &GpuPool) -> Result<(), PoolError> {
        if now_us == self.now_us {
            return Ok(());
        }
        if self.ticking && self.due_us <= now_us {
            self.tick(self.due_us, lag, pool)?;
            // Of further ticks, only the last one.
            let left = (now_us - self.due_us).checked_div(self.interval_us).unwrap_or(u64::MAX);
            let last = if left == u64::MAX { now_us } else { self.due_us + left * self.interval_us };
            if last > self.due_us && pool.clock().is_ticking() {
                self.tick(last, lag, pool)?;
            }
            self.due_us = last.saturating_add(self.interval_us);
            self.ticking = pool.clock().is_ticking();
        }
        self.now_us = now_us;
        lag.set_now(Duration::from_micros(now_us));
        Ok(())
    }

    /// Records a free: the thread wakes up if it slept, and ticks immediately.
    pub(super) fn freed(&mut self) {
        if !self.ticking {
            self.ticking = true;
            self.due_us = self.now_us.saturating_add(self.interval_us.min(1));
        }
    }

    fn tick(&self, at_us: u64, lag: &Lag, pool: &GpuPool) -> Result<(), PoolError> {
        lag.set_now(Duration::from_micros(at_us));
        pool.tick()
    }
}
