//! Calls, failures and time of each verb.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::Verb;

const VERBS: usize = Verb::ALL.len();
/// Of so many calls of a verb that copies are made of, one is timed: a copy over four links is sixteen calls, and the clock would be asked
/// twice for each.
const TIMED: u64 = 16;

/// What one verb has cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// How often it was called, failures included.
    pub calls: u64,
    /// How often it failed.
    pub failures: u64,
    /// How long the calls took in all, reckoned from those that were timed.
    pub time: Duration,
}

/// What every verb has cost up to a moment.
#[derive(Clone, Copy, Debug)]
pub struct Counters {
    counts: [Count; VERBS],
}

impl Counters {
    /// One verb's.
    pub fn of(&self, verb: Verb) -> Count {
        self.counts[verb as usize]
    }

    /// Calls of all verbs.
    pub fn calls(&self) -> u64 {
        self.counts.iter().map(|count| count.calls).sum()
    }

    /// Time of all verbs.
    pub fn time(&self) -> Duration {
        self.counts.iter().map(|count| count.time).sum()
    }

    /// What came after an earlier moment.
    pub fn since(&self, earlier: &Counters) -> Counters {
        let counts = std::array::from_fn(|i| Count {
            calls: self.counts[i].calls.saturating_sub(earlier.counts[i].calls),
            failures: self.counts[i].failures.saturating_sub(earlier.counts[i].failures),
            time: self.counts[i].time.saturating_sub(earlier.counts[i].time),
        });
        Counters { counts }
    }

    /// The verbs that were called, in the order of [`Verb::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Verb, Count)> + '_ {
        Verb::ALL.iter().map(|&verb| (verb, self.of(verb))).filter(|(_, count)| count.calls > 0)
    }
}

/// The same, while it is being counted.
#[derive(Debug)]
pub(super) struct Tally {
    rows: [Row; VERBS],
}

#[derive(Debug, Default)]
struct Row {
    calls: AtomicU64,
    failures: AtomicU64,
    timed: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Default for Tally {
    fn default() -> Self {
        Tally { rows: std::array::from_fn(|_| Row::default()) }
    }
}

impl Tally {
    /// Whether the next call of a verb is to be timed.
    pub(super) fn is_due(&self, verb: Verb) -> bool {
        !is_frequent(verb) || self.rows[verb as usize].calls.load(Relaxed).is_multiple_of(TIMED)
    }

    pub(super) fn add(&self, verb: Verb, done: bool, time: Option<Duration>) {
        let row = &self.rows[verb as usize];
        row.calls.fetch_add(1, Relaxed);
        if !done {
            row.failures.fetch_add(1, Relaxed);
        }
        if let Some(time) = time {
            row.timed.fetch_add(1, Relaxed);
            row.nanoseconds.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
        }
    }

    pub(super) fn snapshot(&self) -> Counters {
        Counters { counts: std::array::from_fn(|i| self.rows[i].count()) }
    }
}

impl Row {
    fn count(&self) -> Count {
        let (calls, timed) = (self.calls.load(Relaxed), self.timed.load(Relaxed));
        let nanoseconds = self.nanoseconds.load(Relaxed);
        let all = u128::from(nanoseconds) * u128::from(calls) / u128::from(timed.max(1));
        let time = Duration::from_nanos(u64::try_from(all).unwrap_or(u64::MAX));
        Count { calls, failures: self.failures.load(Relaxed), time }
    }
}

const fn is_frequent(verb: Verb) -> bool {
    matches!(
        verb,
        Verb::Copy
            | Verb::CaptureState
            | Verb::EventRecord
            | Verb::EventQuery
            | Verb::StreamDevice
            | Verb::StreamWaitEvent
    )
}
