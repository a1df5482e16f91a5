//! The policies that a plan compares: settings of one arbiter, and how fast memory moves.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::speeds::{Calibration, Speeds, rate};
use crate::node::Node;
use crate::{Preempt, Settings};

/// A policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Workers are started and stopped, least recently used first.
    StartStop,
    /// Whole workers leave, least recently used first, once their requests have ended: a copy a tensor, both ways, as in today's engines.
    DrainPerTensor,
    /// The product.
    Glake,
    /// The product, where nobody is parked.
    GlakeNoPreempt,
}

/// No policy is called so.
#[derive(Debug, thiserror::Error)]
#[error("there is no policy {name:?}: choose from {}", Policy::ALL.map(Policy::name).join(", "))]
pub struct UnknownPolicy {
    /// What was asked for.
    pub name: String,
}

impl Policy {
    /// All of them, in the order of the table.
    pub const ALL: [Policy; 4] =
        [Policy::StartStop, Policy::DrainPerTensor, Policy::GlakeNoPreempt, Policy::Glake];

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Policy::StartStop => "start-stop",
            Policy::DrainPerTensor => "drain-per-tensor",
            Policy::Glake => "glake",
            Policy::GlakeNoPreempt => "glake-no-preempt",
        }
    }

    pub(super) fn settings(self, speeds: &Speeds, node: &Node) -> Settings {
        let preempt = match self {
            Policy::Glake => Preempt::Step,
            _ => Preempt::Idle,
        };
        let partial = matches!(self, Policy::Glake | Policy::GlakeNoPreempt);
        // A stop takes as long as it takes: nobody looks for another victim.
        let least_late = match self {
            Policy::StartStop => Duration::from_secs(120),
            _ => Settings::default().least_late,
        };
        let link = match self {
            Policy::StartStop | Policy::DrainPerTensor => speeds.refill,
            // An agent knows what its file says, and no calibration.
            _ => node.link_gbps.map_or(Settings::default().link, rate),
        };
        Settings { link, preempt, partial, least_late, ..Settings::default() }
    }

    pub(super) fn speeds(self, calibration: &Calibration) -> Speeds {
        match self {
            Policy::StartStop => calibration.start_stop(),
            Policy::DrainPerTensor => calibration.per_tensor(),
            _ => calibration.ours(),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Policy::ALL.into_iter().find(|policy| policy.name() == name);
        found.ok_or_else(|| UnknownPolicy { name: name.to_owned() })
    }
}
