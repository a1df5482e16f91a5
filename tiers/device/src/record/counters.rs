//! Calls, failures and time of each verb.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::Verb;

const VERBS: usize = Verb::ALL.len();
/// Sampling period of copy verbs: only one call in this many is timed. A copy over four links is sixteen calls, and each timing reads the
/// clock twice.
const TIMED: u64 = 16;

/// Cost of one verb so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Number of calls, including failures.
    pub calls: u64,
    /// Number of failed calls.
    pub failures: u64,
    /// Total time of the calls, extrapolated from the timed ones.
    pub time: Duration,
}

/// Costs of all verbs up to a moment.
#[derive(Clone, Copy, Debug)]
pub struct Counters {
    counts: [Count; VERBS],
}

impl Counters {
    /// Returns the costs of one verb.
    pub fn of(&self, verb: Verb) -> Count {
        self.counts[verb as usize]
    }

    /// Returns the calls of all verbs together.
    pub fn calls(&self) -> u64 {
        self.counts.iter().map(|count| count.calls).sum()
    }

    /// Returns the time of all verbs together.
    pub fn time(&self) -> Duration {
        self.counts.iter().map(|count| count.time).sum()
    }

    /// Returns the costs since an earlier reading.
    pub fn since(&self, earlier: &Counters) -> Counters {
        let counts = std::array::from_fn(|i| Count {
            calls: self.counts[i].calls.saturating_sub(earlier.counts[i].calls),
            failures: self.counts[i].failures.saturating_sub(earlier.counts[i].failures),
            time: self.counts[i].time.saturating_sub(earlier.counts[i].time),
        });
        Counters { counts }
    }

    /// Iterates over the verbs that were called, in the order of [`Verb::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Verb, Count)> + '_ {
        Verb::ALL.iter().map(|&verb| (verb, self.of(verb))).filter(|(_, count)| count.calls > 0)
    }
}

/// Live counters behind [`Counters`].
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
    /// Returns whether the next call of a verb should be timed.
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
