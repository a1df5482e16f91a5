//! The policies that a trace can be replayed under.

use std::fmt;

use clap::ValueEnum;
use glake_units::Bytes;

use super::Failure;
use glake_replay::baselines;
use glake_replay::glake::{Glake, Options};
use glake_replay::trace::Trace;
use glake_replay::{Refusal, Setting, Subject};
use glake_runtime::config::{Config, DefragmentLevel};

/// Allocation policy of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// The product, on a device
    Glake,
    /// A model of the GMLake paper
    Gmlake,
    /// A model of PyTorch's caching allocator
    Caching,
    /// A model of PyTorch's expandable segments
    Expandable,
}

impl Policy {
    /// Policies in the order of the table.
    pub const ALL: [Policy; 4] = [Policy::Glake, Policy::Gmlake, Policy::Caching, Policy::Expandable];
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Policy::Glake => "glake",
            Policy::Gmlake => "gmlake",
            Policy::Caching => "caching",
            Policy::Expandable => "expandable",
        })
    }
}

/// Variant of a replay: its policy, and for the product the lag of the GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    pub(super) policy: Policy,
    pub(super) gpu_lag_ms: u64,
}

/// Makes the subjects of the replays; opens the device once, where the product is among them.
pub(super) struct Subjects<'a> {
    config: &'a Config,
    glake: Option<Glake>,
    verify: bool,
}

impl<'a> Subjects<'a> {
    pub(super) fn open(config: &'a Config, policies: &[Policy], verify: bool) -> Result<Self, Failure> {
        let glake = match policies.contains(&Policy::Glake) {
            true => Some(Glake::open(super::found(config)?, config).map_err(Failure::failed)?),
            false => None,
        };
        Ok(Subjects { config, glake, verify })
    }

    /// Returns the variant's name and settings for the report.
    pub(super) fn setting(&self, variant: Variant) -> Setting {
        let policy = variant.policy.to_string();
        match &self.glake {
            Some(glake) if variant.policy == Policy::Glake => Setting {
                policy,
                device: glake.device().to_owned(),
                gpu_lag_ms: Some(variant.gpu_lag_ms),
                borrow: Some(self.config.pool.borrow.to_string()),
            },
            _ => Setting { policy, device: "model".to_owned(), gpu_lag_ms: None, borrow: None },
        }
    }

    /// A fresh allocator, which may reserve no more than `limit`.
    pub(super) fn make<'s>(
        &'s self,
        trace: &'s Trace,
        variant: Variant,
        limit: Option<Bytes>,
    ) -> Result<Box<dyn Subject + 's>, Refusal> {
        let most = limit.unwrap_or(Bytes::MAX);
        match (variant.policy, &self.glake) {
            (Policy::Glake, Some(glake)) => {
                glake.subject(trace, Options { gpu_lag_ms: variant.gpu_lag_ms, limit, verify: self.verify })
            }
            (Policy::Glake, None) => Err(Refusal::Failed("the device was not opened".into())),
            (Policy::Gmlake, _) => Ok(Box::new(baselines::GmLake::new(self.paper(), most))),
            (Policy::Caching, _) => Ok(Box::new(baselines::Caching::new(most))),
            (Policy::Expandable, _) => Ok(Box::new(baselines::Expandable::new(most))),
        }
    }

    /// GMLake's own knobs mean the same to its model; what is not set is the tutorial's.
    fn paper(&self) -> baselines::Knobs {
        let pool = &self.config.pool;
        baselines::Knobs {
            fragment_limit: pool.fragment_limit.unwrap_or(baselines::Knobs::default().fragment_limit),
            reuse_limit: pool.reuse_limit,
            stitch_last: pool.defragment_level == DefragmentLevel::WhenFull,
            auto_gc: pool.auto_gc_limit,
        }
    }
}
