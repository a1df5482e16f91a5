//! Intervals between attempts to reconnect to a lost agent (pure).

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(50);
const MOST: Duration = Duration::from_secs(2);
/// Maximum interval while a caller waits for memory.
const URGENT: Duration = Duration::from_millis(200);

/// Interval that doubles with each attempt.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BackOff {
    last: Option<Duration>,
}

impl BackOff {
    /// Returns the wait before the next attempt.
    pub(super) fn next(&mut self) -> Duration {
        let next = self.last.map_or(FIRST, |last| (last * 2).min(MOST));
        *self.last.insert(next)
    }

    /// Limits `wait` to [`URGENT`] if a caller waits for memory.
    pub(super) fn bounded(wait: Duration, urgent: bool) -> Duration {
        if urgent { wait.min(URGENT) } else { wait }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_two_seconds() {
        let mut back_off = BackOff::default();
        let waits: Vec<u128> = (0..8).map(|_| back_off.next().as_millis()).collect();
        assert_eq!(waits, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(BackOff::bounded(MOST, true), URGENT);
        assert_eq!((BackOff::bounded(FIRST, true), BackOff::bounded(MOST, false)), (FIRST, MOST));
    }
}
