//! How soon a lost agent is looked for again: pure.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(50);
const MOST: Duration = Duration::from_secs(2);
/// While somebody waits for memory.
const URGENT: Duration = Duration::from_millis(200);

/// Doubles from one attempt to the next.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BackOff {
    last: Option<Duration>,
}

impl BackOff {
    /// How long to wait before the next attempt.
    pub(super) fn next(&mut self) -> Duration {
        let next = self.last.map_or(FIRST, |last| (last * 2).min(MOST));
        *self.last.insert(next)
    }

    /// No longer than this while somebody waits for memory.
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
