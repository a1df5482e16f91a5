//! Whether a region is idle: pure.
//!
//! ```text
//! busy ──no use runs──► working ──all work done──► quiet ──long enough──► cleaned, prepared ──► clean
//!   ▲                      ▲                          │                                       │
//!   └── a use begins ──────┴── something changed ─────┴───────────────────────────────────────┘
//! ```

use std::time::Duration;

/// What a region looks like while no use of it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    /// The number of its last use.
    pub(super) after_use: u64,
    /// What it has, as [`glake_tiers::Region::state_number`] says it.
    pub(super) state: u64,
}

/// How it stands with a region; times are since any moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Idleness {
    /// A use of it runs.
    #[default]
    Busy,
    /// Its work was marked, and is not known to be done.
    Working(Look),
    /// All work is done since then. Where something was left to be done, it is tried again after a moment that is yet to come.
    Quiet(Look, Duration),
    /// There is nothing to do before it changes.
    Clean(Look),
}

/// What is to be done after a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Todo {
    Nothing,
    /// All work that is enqueued by now is to be marked.
    Mark,
    /// It has been idle for long enough.
    Clean,
}

impl Idleness {
    /// After a look at it; `None`: a use of it runs. `is_done`: the work that was marked is.
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
