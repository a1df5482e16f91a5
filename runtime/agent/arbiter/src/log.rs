//! Log of decisions and their reasons, for `glake explain`, and durations of waits and operations.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::time::Duration;

use glake_units::Bytes;
use glake_units::metrics::Histogram;
use serde::Serialize;

use crate::overview::RequestKind;
use crate::{Denied, GangId, GpuId, Why};

const KEPT: usize = 256;

/// Decision on a want, a denied growth, or the checkpoint of a worker (`needed` is then 0).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decision {
    /// Time of the decision.
    pub at: Duration,
    /// Gang whose want waited.
    pub gang: GangId,
    /// Class of the want at that time.
    pub class: i64,
    /// Time waited so far.
    pub waited: Duration,
    /// Missing memory on each GPU.
    pub needed: Vec<(GpuId, Bytes)>,
    /// Victims and the reasons.
    pub taken: Vec<Victim>,
    /// Predicted time until the memory is back.
    pub predicted: Duration,
    /// Outcome, updated when it is known.
    pub outcome: Outcome,
}

/// Memory taken from a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Victim {
    pub gang: GangId,
    pub gpu: GpuId,
    pub bytes: Bytes,
    pub why: Why,
}

/// Outcome of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Outcome {
    /// The operation is still under way.
    UnderWay,
    /// Refilled completely after this time.
    Refilled(Duration),
    /// No bytes came in time and no victim was left: the gang gave its grants back and waits again.
    Returned,
    /// The restore failed, and the gang waits again.
    NotRestored,
    /// The driver checkpointed the worker after a long idle time.
    Checkpointed,
    /// The checkpoint failed, and the worker keeps running.
    Kept,
    /// The driver cannot restore the worker.
    Lost,
    /// The gang missed its deadline.
    Late,
    /// The arbiter denied the want.
    Denied(Denied),
    /// The arbiter denied a request to grow beyond the lease.
    GrowthDenied(Denied),
    /// A process of the gang died.
    Died,
}

/// Decision in the log.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoggedDecision {
    /// Number of the decision, from 1. A decision that replaces an equal one keeps its number.
    pub number: u64,
    /// Number of the last change of the log that concerned this decision. Changes are numbered from 1.
    pub changed: u64,
    #[serde(flatten)]
    pub decision: Decision,
}

impl Deref for LoggedDecision {
    type Target = Decision;

    fn deref(&self) -> &Decision {
        &self.decision
    }
}

/// Ring of the latest decisions, and the durations of what was decided. Later decisions never depend on the log.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log {
    decisions: VecDeque<LoggedDecision>,
    /// Number of decisions, and of changes, so far.
    count: u64,
    changes: u64,
    pub(crate) timings: Timings,
}

impl Log {
    pub(crate) fn decided(&mut self, decision: Decision) {
        // A program that tries again and again must not push all other decisions out.
        let is_growth = matches!(decision.outcome, Outcome::GrowthDenied(_));
        let same = |last: &LoggedDecision| last.gang == decision.gang && last.outcome == decision.outcome;
        let replaced = self.decisions.pop_back_if(|last| is_growth && same(last));
        if self.decisions.len() == KEPT {
            self.decisions.pop_front();
        }
        self.count += u64::from(replaced.is_none());
        self.changes += 1;
        let number = replaced.map_or(self.count, |replaced| replaced.number);
        self.decisions.push_back(LoggedDecision { number, changed: self.changes, decision });
    }

    pub(crate) fn ended(&mut self, gang: GangId, outcome: Outcome) {
        let open = |of: &&mut LoggedDecision| of.gang == gang && of.outcome == Outcome::UnderWay;
        if let Some(of) = self.decisions.iter_mut().rev().find(open) {
            self.changes += 1;
            (of.decision.outcome, of.changed) = (outcome, self.changes);
        }
    }

    pub(crate) fn decisions(&self) -> impl Iterator<Item = &LoggedDecision> {
        self.decisions.iter()
    }
}

/// Upper ends of the buckets of durations, in seconds.
const BUCKETS: &[f64] = &[0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0];

/// Operations whose durations are recorded, as label values.
pub const OPERATIONS: &[&str] = &["park", "shrink", "refill", "start"];

/// Durations of waits for memory and of operations.
#[derive(Clone, Debug)]
pub struct Timings {
    /// Waits by kind and success: those of wants, granted and denied, then those of growths.
    waits: [Histogram; 4],
    /// Completed operations, in the order of [`OPERATIONS`].
    switches: Vec<Histogram>,
}

impl Default for Timings {
    fn default() -> Self {
        let empty = || Histogram::new(BUCKETS);
        Timings {
            waits: [empty(), empty(), empty(), empty()],
            switches: OPERATIONS.iter().map(|_| empty()).collect(),
        }
    }
}

impl Timings {
    pub(crate) fn waited(&mut self, kind: RequestKind, is_granted: bool, took: Duration) {
        let at = Self::place(kind, is_granted);
        self.waits[at].add(took);
    }

    pub(crate) fn switched(&mut self, operation: &str, took: Duration) {
        let at = OPERATIONS.iter().position(|known| *known == operation);
        at.and_then(|at| self.switches.get_mut(at)).into_iter().for_each(|of| of.add(took));
    }

    /// Returns the waits of one kind that ended with or without memory. A start counts as a refill.
    pub fn waits(&self, kind: RequestKind, is_granted: bool) -> &Histogram {
        &self.waits[Self::place(kind, is_granted)]
    }

    /// Returns the durations of completed operations, in the order of [`OPERATIONS`].
    pub fn switches(&self) -> &[Histogram] {
        &self.switches
    }

    fn place(kind: RequestKind, is_granted: bool) -> usize {
        2 * usize::from(kind == RequestKind::Growth) + usize::from(!is_granted)
    }
}

impl PartialEq for Log {
    fn eq(&self, _: &Log) -> bool {
        true
    }
}

impl Eq for Log {}

impl Hash for Log {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}
