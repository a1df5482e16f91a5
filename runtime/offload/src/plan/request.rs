//! Request for a plan.
//!
//! Verdict on an item.
//!
//! Rates of the links between a GPU and the host.
//!
//! Errors of planning.

use std::time::Duration;

use glake_units::{Bandwidth, Bytes};

use crate::Pack;

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

/// Treatment of an item between its last use in the forward pass and its first use in the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Stays in GPU memory.
    #[default]
    Keep,
    /// Copied to pinned host memory when packed, and reloaded before it is unpacked.
    Offload,
    /// Dropped, and recomputed when its scope is first needed.
    Recompute,
}

impl Verdict {
    /// Returns the verdict of an item without a plan: leaves are recomputed, all others offloaded.
    pub(crate) fn unplanned(pack: &Pack) -> Self {
        if pack.leaf.is_some() { Verdict::Recompute } else { Verdict::Offload }
    }
}

/// Rates of copies out of a GPU and into it, over all paths that a pass may use.
///
/// ```
/// use glake_offload::Links;
/// use glake_units::Bandwidth;
///
/// let one = Links::new(Bandwidth(55.0), Bandwidth(55.0)).at_once(Bandwidth(51.0), Bandwidth(51.0));
/// assert_eq!(one.out_at_once, Bandwidth(51.0));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// Rate out of the GPU while the other direction is idle.
    pub out: Bandwidth,
    /// Rate into the GPU while the other direction is idle.
    pub into: Bandwidth,
    /// Rate out of the GPU while both directions are busy.
    pub out_at_once: Bandwidth,
    /// Rate into the GPU while both directions are busy.
    pub into_at_once: Bandwidth,
    /// Fixed cost of a copy.
    pub copy: Duration,
}

impl Links {
    /// Default fixed cost of a copy.
    pub const COPY: Duration = Duration::from_micros(10);

    /// Creates links whose directions do not slow each other down.
    pub const fn new(out: Bandwidth, into: Bandwidth) -> Self {
        Links { out, into, out_at_once: out, into_at_once: into, copy: Self::COPY }
    }

    /// Sets the rates while both directions are busy.
    #[must_use]
    pub const fn at_once(mut self, out: Bandwidth, into: Bandwidth) -> Self {
        (self.out_at_once, self.into_at_once) = (out, into);
        self
    }

    /// Reduces the rates into the GPU by the share of the time in which other copies take the link, as those of streamed weights do. At least
    /// a tenth is left.
    ///
    /// ```
    /// use glake_offload::Links;
    /// use glake_units::Bandwidth;
    ///
    /// let links = Links::new(Bandwidth(55.0), Bandwidth(50.0)).shared(0.25);
    /// assert_eq!((links.out, links.into), (Bandwidth(55.0), Bandwidth(37.5)));
    /// assert_eq!(links.shared(2.0).into, Bandwidth(3.75));
    /// ```
    #[must_use]
    pub fn shared(mut self, taken: f64) -> Self {
        let left = (1.0 - taken).clamp(0.1, 1.0);
        self.into.0 *= left;
        self.into_at_once.0 *= left;
        self
    }

    pub(super) fn check(&self) -> Result<(), PlanError> {
        let rates = [
            ("out of", self.out),
            ("out of", self.out_at_once),
            ("into", self.into),
            ("into", self.into_at_once),
        ];
        let bad = rates.into_iter().find(|(_, rate)| !(rate.0 > 0.0 && rate.0.is_finite()));
        bad.map_or(Ok(()), |(direction, rate)| Err(PlanError::Rate { direction, rate }))
    }
}

/// Reason why a request has no plan.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Budget below the minimum of the pass, whatever is offloaded.
    #[error(
        "a budget of {budget} was asked for, but the pass needs {minimum} where {host_room} of the host's memory may \
         be used: give at least that, or make the pass smaller"
    )]
    BelowFloor {
        /// Requested memory budget.
        budget: Bytes,
        /// Smallest budget with a plan.
        minimum: Bytes,
        /// Host memory available for offloading.
        host_room: Bytes,
    },
    /// Link rate of zero or less.
    #[error("a link of {} GB/s {direction} the GPU was given: give the rate that was measured, above 0", rate.0)]
    Rate {
        /// Direction of the link: out of the GPU or into it.
        direction: &'static str,
        /// Requested link rate.
        rate: Bandwidth,
    },
    /// Wrong number of verdicts, or an item to recompute that cannot be.
    #[error("{verdicts} verdicts were given for a tape of {items} items: give one for each item of the tape")]
    Verdicts {
        /// Number of verdicts given.
        verdicts: usize,
        /// Number of items of the tape.
        items: usize,
    },
}
