//! Why there is no pinned host memory.

use glake_device::DriverError;
use glake_units::Bytes;

/// A refusal of the host pool; a variant is what the caller can do about it. The pool is as it was before the call.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The budget does not allow it: raise it, drop retained copies, or stream.
    #[error(
        "{wanted} of pinned host memory was asked for, and the budget of {budget} does not allow it: {in_use} is in use, \
         {retained} holds retained copies, and the largest free piece is {largest}; raise the budget, drop retained copies, \
         or stream through a ring"
    )]
    OverBudget {
        /// What was asked.
        wanted: Bytes,
        /// The most that may be pinned.
        budget: Bytes,
        /// What callers have, retained copies not counted.
        in_use: Bytes,
        /// What retained copies take.
        retained: Bytes,
        /// The most that one block could have.
        largest: Bytes,
    },
    /// The host has not so much: end something else, lower the budget, or use the file tier.
    #[error(
        "{wanted} of host memory was to be pinned, and the host has {available} available, of which {spare} stays for others; \
         free host memory, raise the container's memory limit, or move to a file"
    )]
    Exhausted {
        /// What was to be pinned.
        wanted: Bytes,
        /// What the host has.
        available: Bytes,
        /// What is left to others.
        spare: Bytes,
    },
    /// The driver does not pin it: mostly a limit of the process.
    #[error(
        "{wanted} of host memory could not be pinned: {source}; this process may lock {} (RLIMIT_MEMLOCK): raise it with \
         ulimit -l, LimitMEMLOCK= or docker run --ulimit memlock=-1, or lower the budget",
        memlock.map_or_else(|| "any amount".to_owned(), |limit| limit.to_string())
    )]
    PinRefused {
        /// What was to be pinned.
        wanted: Bytes,
        /// The limit of the process; `None`: there is none.
        memlock: Option<Bytes>,
        /// What the driver answered.
        #[source]
        source: DriverError,
    },
    /// The driver failed otherwise.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Copies through all slots of a ring failed before.
    #[error(
        "copies through all slots of {slot} failed, and none is left to copy through; go on once the cause is gone"
    )]
    Spent {
        /// How long a slot was.
        slot: Bytes,
    },
    /// The operating system gives no threads to touch memory with.
    #[error(
        "{wanted} threads were to touch host memory before it is pinned: {source}; raise the limit of tasks, or ask for fewer"
    )]
    NoThreads {
        /// How many.
        wanted: usize,
        /// Why not.
        #[source]
        source: rayon::ThreadPoolBuildError,
    },
}

impl HostError {
    /// Whether less may be had: by streaming, or of another tier.
    pub fn is_shortage(&self) -> bool {
        matches!(
            self,
            HostError::OverBudget { .. } | HostError::Exhausted { .. } | HostError::PinRefused { .. }
        )
    }
}
