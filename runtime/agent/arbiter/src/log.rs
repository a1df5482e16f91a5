//! What was decided, and why: for `glake explain`.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use glake_units::Bytes;
use serde::Serialize;

use crate::{Denied, GangId, GpuId, Why};

const KEPT: usize = 256;

/// One want that was decided on, or a worker that was to be checkpointed, of which nothing was needed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decision {
    /// When.
    pub at: Duration,
    /// Who waited.
    pub gang: GangId,
    /// Of which class it was by then.
    pub class: i64,
    /// How long.
    pub waited: Duration,
    /// For how much, on each GPU.
    pub needed: Vec<(GpuId, Bytes)>,
    /// Who was chosen, and why.
    pub taken: Vec<Taken>,
    /// How long it was to take.
    pub predicted: Duration,
    /// What came of it.
    pub outcome: Outcome,
}

/// What was taken of whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Taken {
    /// Of whom.
    pub gang: GangId,
    /// Where.
    pub gpu: GpuId,
    /// How much.
    pub bytes: Bytes,
    /// Why of them.
    pub why: Why,
}

/// What came of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Outcome {
    /// It goes on.
    UnderWay,
    /// All came back, and it took so long.
    Refilled(Duration),
    /// No bytes came in time and there was no other victim: it gave back what it had, and waits again.
    Returned,
    /// Its contexts were not restored: it waits again.
    NotRestored,
    /// It was idle for long: the driver checkpointed it.
    Checkpointed,
    /// It was to be checkpointed, and runs on.
    Kept,
    /// The driver did not restore it, and will not.
    Lost,
    /// It did not answer in time.
    Late,
    /// It was denied.
    Denied(Denied),
    /// It died.
    Died,
}

/// The last decisions. No part of the state: what is decided does not depend on it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log(VecDeque<Decision>);

impl Log {
    pub(crate) fn decided(&mut self, decision: Decision) {
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
