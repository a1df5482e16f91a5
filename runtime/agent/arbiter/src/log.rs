//! Log of decisions and their reasons, for `glake explain`.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use glake_units::Bytes;
use serde::Serialize;

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

/// Ring of the latest decisions. Later decisions never depend on the log.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log(VecDeque<Decision>);

impl Log {
    pub(crate) fn decided(&mut self, decision: Decision) {
        // A program that tries again and again must not push all other decisions out.
        let is_growth = matches!(decision.outcome, Outcome::GrowthDenied(_));
        let same = |last: &Decision| last.gang == decision.gang && last.outcome == decision.outcome;
        if is_growth && self.0.back().is_some_and(same) {
            self.0.pop_back();
        }
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(decision);
    }

    pub(crate) fn ended(&mut self, gang: GangId, outcome: Outcome) {
        let open = |decision: &&mut Decision| decision.gang == gang && decision.outcome == Outcome::UnderWay;
        if let Some(decision) = self.0.iter_mut().rev().find(open) {
            decision.outcome = outcome;
        }
    }

    pub(crate) fn decisions(&self) -> impl Iterator<Item = &Decision> {
        self.0.iter()
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
