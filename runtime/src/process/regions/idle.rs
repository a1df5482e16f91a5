//! Idle state of a region (pure).
//!
//! ```text
//! busy ──no use runs──► working ──all work done──► quiet ──long enough──► cleaned, prepared ──► clean
//!   ▲                      ▲                          │                                       │
//!   └── a use begins ──────┴── something changed ─────┴───────────────────────────────────────┘
//! ```

use std::time::Duration;

/// Observed state of a region without a running use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    /// Number of the region's last use.
    pub(super) after_use: u64,
    /// Version of the region's contents ([`glake_tiers::Region::state_number`]).
    pub(super) state: u64,
}

/// Idle state of a region; times are relative to an arbitrary origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Idleness {
    /// A use of the region runs.
    #[default]
    Busy,
    /// The region's work was marked and has not finished.
    Working(Look),
    /// All work has been finished since this time. A time in the future is that of a retry of unfinished cleaning.
    Quiet(Look, Duration),
    /// Nothing is left to do until the region changes.
    Clean(Look),
}

/// Action after a look at a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Todo {
    Nothing,
    /// Mark all work enqueued so far.
    Mark,
    /// Clean the region, which has been idle long enough.
    Clean,
}

impl Idleness {
    /// Returns the next state and action after a look; `None` means that a use runs. `is_done`: the marked work has finished.
    pub(super) fn next(
        self,
        look: Option<Look>,
        is_done: bool,
        now: Duration,
        wait: Duration,
    ) -> (Idleness, Todo) {
        let Some(look) = look else { return (Idleness::Busy, Todo::Nothing) };
        let state = match self {
            Idleness::Working(of) if of == look && is_done => Idleness::Quiet(look, now),
            Idleness::Working(of) | Idleness::Quiet(of, _) | Idleness::Clean(of) if of == look => self,
            _ => return (Idleness::Working(look), Todo::Mark),
        };
        match state {
            Idleness::Quiet(_, since) if now >= since.saturating_add(wait) => (state, Todo::Clean),
            state => (state, Todo::Nothing),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_millis(100);

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn it_is_cleaned_once_its_work_has_been_done_for_long_enough() {
        let look = Some(Look { after_use: 1, state: 7 });
        let mut idleness = Idleness::default();
        let mut at = |look, is_done, now| {
            let (next, todo) = idleness.next(look, is_done, ms(now), WAIT);
            idleness = next;
            todo
        };
        assert_eq!(at(None, true, 0), Todo::Nothing);
        assert_eq!(at(look, true, 10), Todo::Mark);
        assert_eq!(at(look, false, 500), Todo::Nothing, "its work is not done");
        assert_eq!(at(look, true, 600), Todo::Nothing);
        assert_eq!(at(look, false, 699), Todo::Nothing);
        assert_eq!(at(look, false, 700), Todo::Clean);
        let used = Some(Look { after_use: 2, state: 7 });
        assert_eq!(at(used, true, 710), Todo::Mark, "a use began and ended in between");
        assert_eq!(at(used, true, 720), Todo::Nothing);
        let allocated = Some(Look { after_use: 2, state: 8 });
        assert_eq!(at(allocated, true, 900), Todo::Mark);
        assert_eq!(at(None, true, 910), Todo::Nothing);
        assert_eq!(at(allocated, true, 920), Todo::Mark);
    }

    #[test]
    fn what_was_left_to_be_done_is_tried_again_later() {
        let look = Look { after_use: 1, state: 7 };
        for wait in [Duration::ZERO, WAIT] {
            let again = Idleness::Quiet(look, ms(1000));
            assert_eq!(again.next(Some(look), true, ms(900), wait), (again, Todo::Nothing));
            assert_eq!(again.next(Some(look), true, ms(1000) + wait, wait), (again, Todo::Clean));
        }
    }

    #[test]
    fn what_is_clean_stays_so_until_it_changes() {
        let look = Look { after_use: 1, state: 7 };
        let clean = Idleness::Clean(look);
        assert_eq!(clean.next(Some(look), true, ms(9999), WAIT), (clean, Todo::Nothing));
        let changed = Look { state: 8, ..look };
        assert_eq!(clean.next(Some(changed), true, ms(9999), WAIT), (Idleness::Working(changed), Todo::Mark));
    }
}
