//! Measurements of a pass.

use std::time::Duration;

use crate::{ItemId, Position, ScopeId};

/// Measurements of a pass, available once its work has completed.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Time from the first pack to the begin of a step.
    pub marks: Vec<(Position, Duration)>,
    /// Time that the work waited for a copy before a step.
    pub waits: Vec<(Position, Duration)>,
    /// Time to compute each leaf.
    pub leaves: Vec<(ItemId, Duration)>,
    /// Time to replay each scope, with the position of the step after it.
    pub replays: Vec<(Position, ScopeId, Duration)>,
}

impl Measured {
    /// Returns the total time that the pass waited.
    pub fn waited(&self) -> Duration {
        self.waits.iter().map(|(_, wait)| *wait).sum()
    }
}
