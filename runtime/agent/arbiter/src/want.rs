//! Wants: waiting for memory, and their order.

use std::cmp::Reverse;
use std::time::Duration;

use crate::{GangId, Settings};

/// Order of wants, the smallest first: highest class, then gangs that were not parked or waited long, then age.
pub(crate) type Order = (Reverse<i64>, bool, Duration, GangId);

/// Want of a gang whose uses wait for its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Want {
    pub(crate) since: Duration,
    pub(crate) deadline: Duration,
}

impl Want {
    /// Returns the class: the worker's priority plus one per quarter of the deadline waited (at most a minute), which prevents starvation.
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
