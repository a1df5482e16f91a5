//! Accounts of one GPU: its memory by owner, and the utilization of its host link.
//!
//! Invariant: a grant never makes `counted + reclaiming` exceed the limit. Only reports from outside do: a lower budget, a higher meter
//! reading, a larger floor, a worker that used more than its lease.

use std::collections::VecDeque;
use std::time::Duration;

use glake_units::Bytes;

/// Time within which the driver frees a dead process's memory. The remainder then counts as unmanaged.
const RECLAIM: Duration = Duration::from_secs(2);
/// Number of readings before the unmanaged memory follows them.
const READINGS: usize = 8;
/// Interval of readings while memory is being reclaimed.
const MEASURE: Duration = Duration::from_millis(50);

/// Number of seconds that count.
const SLOTS: usize = 10;

/// Busy time in each of the last ten seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct LinkDuty {
    busy: [Duration; SLOTS],
    second: u64,
}

impl LinkDuty {
    pub(crate) fn add(&mut self, now: Duration, busy: Duration) {
        self.advance(now);
        self.busy[slot(self.second)] += busy;
    }

    /// Returns the utilization in thousandths.
    pub(crate) fn thousandths(&self, now: Duration) -> u32 {
        let mut then = self.clone();
        then.advance(now);
        let busy: Duration = then.busy.iter().sum();
        u32::try_from(busy.as_millis() / SLOTS as u128).unwrap_or(u32::MAX)
    }

    fn advance(&mut self, now: Duration) {
        let passed = now.as_secs().saturating_sub(self.second);
        for second in 0..passed.min(SLOTS as u64) {
            self.busy[slot(now.as_secs() - second)] = Duration::ZERO;
        }
        self.second += passed;
    }
}

fn slot(second: u64) -> usize {
    usize::try_from(second % SLOTS as u64).unwrap_or(0)
}

/// Sums of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Gpu {
    budget: Bytes,
    total: Bytes,
    unmanaged: Bytes,
    /// Unmanaged memory of the last readings. A reading and the reports of workers are not simultaneous, so that single readings may show
    /// too much.
    unmanaged_before: VecDeque<Bytes>,
    /// Memory of dead workers; counts until the meter shows that the driver freed it.
    reclaiming: Bytes,
    reclaimed_by: Duration,
    measure_at: Duration,
    /// Floors, leases and overruns of all workers.
    pub(crate) counted: Bytes,
}

impl Gpu {
    /// Returns the memory of the GPU that all workers together may have.
    pub(crate) fn limit(&self) -> Bytes {
        self.budget.min(self.total.saturating_sub(self.unmanaged))
    }

    /// Returns whether unmanaged processes hold some of the memory that workers might have.
    pub(crate) fn is_curtailed(&self) -> bool {
        self.limit() < self.budget || !self.reclaiming.is_zero()
    }

    /// Returns the limit of workers if they alone used the GPU.
    pub(crate) fn most(&self) -> Bytes {
        self.budget.min(self.total)
    }

    pub(crate) fn claimed(&self) -> Bytes {
        self.counted.saturating_add(self.reclaiming)
    }

    pub(crate) fn free(&self) -> Bytes {
        self.limit().saturating_sub(self.claimed())
    }

    /// Returns the memory beyond the limit that must leave before any grant.
    pub(crate) fn excess(&self) -> Bytes {
        self.claimed().saturating_sub(self.limit())
    }

    pub(crate) fn set_capacity(&mut self, budget: Bytes, total: Bytes) {
        (self.budget, self.total) = (budget, total);
    }

    /// Applies a reading of the meter that started at `begun`. `others`: memory of everything except living workers, which is unmanaged
    /// processes and dead workers.
    ///
    /// A reading that started before a worker's death is ignored, because the worker may have grown after the reading. The meter is read
    /// again after a death.
    pub(crate) fn measured(&mut self, begun: Duration, now: Duration, others: Bytes) {
        if !self.reclaiming.is_zero() && begun + RECLAIM < self.reclaimed_by {
            return;
        }
        let before = self.unmanaged_before.iter().copied();
        let steady = before.chain([self.unmanaged]).min().unwrap_or_default();
        let dead = if now < self.reclaimed_by { others.saturating_sub(steady) } else { Bytes::ZERO };
        self.reclaiming = self.reclaiming.min(dead);
        if self.reclaiming.is_zero() {
            self.unmanaged_before.push_back(self.unmanaged);
            if self.unmanaged_before.len() > READINGS {
                self.unmanaged_before.pop_front();
            }
        }
        self.unmanaged = others.saturating_sub(self.reclaiming);
    }

    pub(crate) fn died(&mut self, now: Duration, footprint: Bytes) {
        self.counted = self.counted.saturating_sub(footprint);
        self.reclaiming = self.reclaiming.saturating_add(footprint);
        (self.reclaimed_by, self.measure_at) = (now + RECLAIM, now);
    }

    /// Returns the time of the next reading; `None` if no memory is being reclaimed.
    pub(crate) fn measure_at(&self) -> Option<Duration> {
        (!self.reclaiming.is_zero()).then_some(self.measure_at)
    }

    /// Returns whether a reading is due, and schedules the next one if so.
    pub(crate) fn measure_due(&mut self, now: Duration) -> bool {
        let due = self.measure_at().is_some_and(|at| at <= now);
        if due {
            self.measure_at = now + MEASURE;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_dead_is_free_when_the_meter_shows_it() {
        let (gib, at) = (Bytes::gib, Duration::from_millis);
        let mut gpu = Gpu { counted: gib(20), ..Gpu::default() };
        gpu.set_capacity(gib(30), gib(40));
        (0..=READINGS + 1).for_each(|_| gpu.measured(at(0), at(0), gib(15)));
        assert_eq!((gpu.limit(), gpu.free()), (gib(25), gib(5)));
        gpu.died(at(0), gib(8));
        assert_eq!(gpu.free(), gib(5));
        gpu.measured(at(100), at(100), gib(23));
        assert_eq!(gpu.free(), gib(5));
        gpu.measured(at(200), at(200), gib(16));
        assert_eq!(gpu.free(), gib(12));
        gpu.measured(at(300), at(300), gib(15));
        assert_eq!((gpu.free(), gpu.measure_at()), (gib(13), None));
        gpu.measured(at(400), at(400), gib(24));
        assert_eq!((gpu.free(), gpu.limit()), (gib(4), gib(16)));
    }

    /// A worker grows and dies during a reading, which does not show its memory.
    #[test]
    fn a_reading_that_began_before_a_death_frees_nothing() {
        let (gib, at) = (Bytes::gib, Duration::from_millis);
        let mut gpu = Gpu { counted: gib(24), ..Gpu::default() };
        gpu.set_capacity(gib(24), gib(80));
        gpu.died(at(20), gib(3));
        gpu.measured(at(10), at(30), Bytes::ZERO);
        assert_eq!(gpu.free(), Bytes::ZERO);
        gpu.measured(at(30), at(40), Bytes::ZERO);
        assert_eq!(gpu.free(), gib(3));
    }

    #[test]
    fn duty_covers_the_last_ten_seconds() {
        let (mut duty, at) = (LinkDuty::default(), Duration::from_secs);
        for second in 5..15 {
            duty.add(at(second), Duration::from_millis(900));
        }
        assert_eq!(duty.thousandths(at(14)), 900);
        assert_eq!(duty.thousandths(at(19)), 450);
        assert_eq!(duty.thousandths(at(100)), 0);
    }
}
