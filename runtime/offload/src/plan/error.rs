//! Errors of planning.

use glake_units::{Bandwidth, Bytes};

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
