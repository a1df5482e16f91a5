//! Request for a plan.

use glake_units::Bytes;

use super::Links;

/// Limits and purpose of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Maximum GPU memory of the process.
    pub budget: Bytes,
    /// Rates of the links.
    pub links: Links,
    /// Maximum host memory of offloaded items.
    pub host_room: Bytes,
    /// Purpose of the plan.
    pub preset: Preset,
}

/// Purpose of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Preset {
    /// Least time under the budget. Scopes that the program checkpoints are recomputed completely or not at all.
    #[default]
    Fit,
    /// Least memory without recomputing: offloads every item that frees memory. The budget is the memory this needs plus the two largest
    /// items or a thirtieth.
    Memory,
    /// Like `Fit`, but a checkpointed scope may keep or offload the outputs of some leaves and recompute the others.
    Hybrid,
}

impl Request {
    /// Creates a request for the least time under `budget` over `links`, with unlimited host memory.
    pub const fn new(budget: Bytes, links: Links) -> Self {
        Request { budget, links, host_room: Bytes::MAX, preset: Preset::Fit }
    }

    /// Sets the goal of the plan.
    #[must_use]
    pub const fn preset(mut self, preset: Preset) -> Self {
        self.preset = preset;
        self
    }

    /// Limits the host memory.
    #[must_use]
    pub const fn host_room(mut self, host_room: Bytes) -> Self {
        self.host_room = host_room;
        self
    }
}
