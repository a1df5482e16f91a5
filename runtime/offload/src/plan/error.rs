//! Why there is no plan.

use glake_units::{Bandwidth, Bytes};

/// Why a request has no plan.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Less than the pass needs whatever leaves the GPU.
    #[error(
        "a budget of {budget} was asked for, but the pass needs {minimum} where {host_room} of the host's memory may \
         be used: give at least that, or make the pass smaller"
    )]
    BelowFloor {
        /// What was asked for.
        budget: Bytes,
        /// A budget for which there is a plan.
        minimum: Bytes,
        /// What of the host's memory may be used.
        host_room: Bytes,
    },
    /// A link moves nothing.
    #[error("a link of {} GB/s {direction} the GPU was given: give the rate that was measured, above 0", rate.0)]
    Rate {
        /// Out of the GPU, or into it.
        direction: &'static str,
        /// What was given.
        rate: Bandwidth,
    },
    /// Verdicts for another number of items than the tape has, or an item to recompute that cannot be.
    #[error("{verdicts} verdicts were given for a tape of {items} items: give one for each item of the tape")]
    Verdicts {
        /// How many were given.
        verdicts: usize,
        /// How many the tape has.
        items: usize,
    },
}
