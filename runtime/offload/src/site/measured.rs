//! What was measured of a pass.

use std::time::Duration;

use crate::{ItemId, Position, ScopeId};

/// What was measured of a pass, once its work is done.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// How long after the first pack the step at a position began.
    pub marks: Vec<(Position, Duration)>,
    /// How long the work stood still for a copy before a step.
    pub waits: Vec<(Position, Duration)>,
    /// How long leaves took to compute.
    pub leaves: Vec<(ItemId, Duration)>,
    /// How long scopes took to be computed again, each with the position of the step behind that.
    pub replays: Vec<(Position, ScopeId, Duration)>,
}

impl Measured {
    /// How long the pass stood still.
    pub fn waited(&self) -> Duration {
        self.waits.iter().map(|(_, wait)| *wait).sum()
    }
}
