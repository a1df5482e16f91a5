//! Who waits for memory, and who goes first.

use std::cmp::Reverse;
use std::time::Duration;

use crate::{GangId, Settings};

/// The least goes first: the highest class; of it, who was not parked or has waited for long; then the oldest.
pub(crate) type Order = (Reverse<i64>, bool, Duration, GangId);

/// A gang's uses wait for its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Want {
    pub(crate) since: Duration,
    pub(crate) deadline: Duration,
}

impl Want {
    /// The worker's priority, and one more for each quarter of the deadline waited (of a minute, if that is less): so
    /// whoever waits goes first some day.
    pub(crate) fn class(&self, priority: i32, now: Duration) -> i64 {
        let quarter = (self.deadline - self.since).min(Duration::from_secs(60)).as_millis().max(4) / 4;
        let waited = now.saturating_sub(self.since).as_millis();
        i64::from(priority) + i64::try_from(waited / quarter).unwrap_or(i64::MAX / 2)
    }

    pub(crate) fn new(now: Duration, deadline: Option<Duration>, settings: &Settings) -> Self {
        Want {
            since: now,
            deadline: now + deadline.unwrap_or(settings.longest_wait).min(settings.longest_wait),
        }
    }
}
