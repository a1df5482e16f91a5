//! What is asked of a plan.

use glake_units::Bytes;

use super::Links;

/// What a plan may use, and what it is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// The most that the process may have of the GPU's memory.
    pub budget: Bytes,
    /// What links give.
    pub links: Links,
    /// The most that offloaded items may have of the host's memory.
    pub host_room: Bytes,
    /// What the plan is for.
    pub preset: Preset,
}

/// What a plan is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preset {
    /// The least time under the budget. A scope that the program checkpoints is recomputed as a whole or not at all.
    #[default]
    Fit,
    /// The least memory without recomputing: every item is offloaded that a copy frees memory of, and the budget is no
    /// more than that needs beside the two largest items or a thirtieth.
    Memory,
    /// The least memory at which no copy is waited for; what the program checkpoints is recomputed as ever.
    Hidden,
    /// As `Fit`, but a checkpointed scope may keep or offload some leaves' outputs and recompute the others.
    Hybrid,
}

impl Request {
    /// The least time under `budget`, over `links`, in as much host memory as it takes.
    pub const fn new(budget: Bytes, links: Links) -> Self {
        Request { budget, links, host_room: Bytes::MAX, preset: Preset::Fit }
    }

    /// The same for `preset`.
    #[must_use]
    pub const fn preset(mut self, preset: Preset) -> Self {
        self.preset = preset;
        self
    }

    /// The same in at most so much of the host's memory.
    #[must_use]
    pub const fn host_room(mut self, host_room: Bytes) -> Self {
        self.host_room = host_room;
        self
    }
}
