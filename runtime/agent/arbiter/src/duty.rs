//! Utilization of a GPU's link by refills in the last ten seconds.

use std::time::Duration;

const SLOTS: usize = 10;
const LIMIT: u32 = 600;

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

    /// Stretches a quantum by the utilization: unchanged up to 60 %, growing to four times at 90 %.
    pub(crate) fn stretched(&self, now: Duration, quantum: Duration) -> Duration {
        let above = self.thousandths(now).saturating_sub(LIMIT).min(300);
        quantum * (100 + above) / 100
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_of_the_last_ten_seconds() {
        let (mut duty, at) = (LinkDuty::default(), Duration::from_secs);
        for second in 5..15 {
            duty.add(at(second), Duration::from_millis(900));
        }
        assert_eq!(duty.thousandths(at(14)), 900);
        assert_eq!(duty.stretched(at(14), at(1)), at(4));
        assert_eq!(duty.thousandths(at(19)), 450);
        assert_eq!(duty.stretched(at(19), at(1)), at(1));
        assert_eq!(duty.thousandths(at(100)), 0);
    }
}
