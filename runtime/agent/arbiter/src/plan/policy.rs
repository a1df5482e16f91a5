//! Policies that a plan compares: settings of the arbiter, and the speed of memory moves.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::speeds::{Calibration, Speeds, rate};
use crate::node::Node;
use crate::{Preempt, Settings};

/// Policy of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The first workers that fit stay; requests for the others are denied.
    Static,
    /// Workers are started and stopped, least recently used first.
    StartStop,
    /// A GPU serves one worker at a time.
    One,
    /// Whole workers leave, least recently used first, once their requests have ended.
    Drain,
    /// Like `Drain`, at the speed of today's engines: one copy per tensor in both directions.
    DrainPerTensor,
    /// The policy of the product.
    Glake,
    /// The product without parking.
    GlakeNoPreempt,
}

/// Error for an unknown name of a policy.
#[derive(Debug, thiserror::Error)]
#[error("there is no policy {name:?}: choose from {}", Policy::ALL.map(Policy::name).join(", "))]
pub struct UnknownPolicy {
    /// Requested name of a policy.
    pub name: String,
}

impl Policy {
    /// Every policy, in the order of the table.
    pub const ALL: [Policy; 7] = [
        Policy::Static,
        Policy::StartStop,
        Policy::One,
        Policy::DrainPerTensor,
        Policy::Drain,
        Policy::GlakeNoPreempt,
        Policy::Glake,
    ];

    /// Returns the name of the policy.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Static => "static",
            Policy::StartStop => "start-stop",
            Policy::One => "one",
            Policy::Drain => "drain",
            Policy::DrainPerTensor => "drain-per-tensor",
            Policy::Glake => "glake",
            Policy::GlakeNoPreempt => "glake-no-preempt",
        }
    }

    pub(super) fn settings(self, speeds: &Speeds, node: &Node) -> Settings {
        let preempt = match self {
            Policy::Static => Preempt::Never,
            Policy::Glake => Preempt::Step,
            _ => Preempt::Idle,
        };
        let partial = matches!(self, Policy::Glake | Policy::GlakeNoPreempt);
        // A stop takes as long as it takes: nobody looks for another victim.
        let least_late = match self {
            Policy::StartStop => Duration::from_secs(120),
            _ => Settings::default().least_late,
        };
        let exclusive = self == Policy::One;
        let link = match self {
            Policy::StartStop | Policy::DrainPerTensor => speeds.refill,
            // An agent knows what its file says, and no calibration.
            _ => node.link_gbps.map_or(Settings::default().link, rate),
        };
        Settings { link, preempt, partial, exclusive, least_late, ..Settings::default() }
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
