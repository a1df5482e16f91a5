//! Errors of the host pool.

use glake_device::DriverError;
use glake_units::Bytes;

/// Error of the host pool. Each variant stands for one possible reaction of the caller. The pool is unchanged.
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
        /// Requested size in bytes.
        wanted: Bytes,
        /// Maximum of pinned memory.
        budget: Bytes,
        /// Memory in use by callers, without retained copies.
        in_use: Bytes,
        /// Memory in retained copies.
        retained: Bytes,
        /// Largest block that could be had.
        largest: Bytes,
    },
    /// The host has too little memory: end other programs, lower the budget, or use the file tier.
    #[error(
        "{wanted} of host memory was to be pinned, and the host has {available} available, of which {spare} stays for others; \
         free host memory, raise the container's memory limit, or move to a file"
    )]
    Exhausted {
        /// Size of the memory to be pinned.
        wanted: Bytes,
        /// Available memory of the host.
        available: Bytes,
        /// Memory kept available for other programs.
        spare: Bytes,
    },
    /// The driver cannot pin the memory, usually because of a limit of the process.
    #[error(
        "{wanted} of host memory could not be pinned: {source}; this process may lock {} (RLIMIT_MEMLOCK): raise it with \
         ulimit -l, LimitMEMLOCK= or docker run --ulimit memlock=-1, or lower the budget",
        memlock.map_or_else(|| "any amount".to_owned(), |limit| limit.to_string())
    )]
    PinRefused {
        /// Size of the memory to be pinned.
        wanted: Bytes,
        /// Limit of locked memory of the process; `None`: unlimited.
        memlock: Option<Bytes>,
        /// Error of the driver.
        #[source]
        source: DriverError,
    },
    /// Another error of the driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Every slot of a ring was given up after failed copies.
    #[error(
        "copies through all slots of {slot} failed, and none is left to copy through; go on once the cause is gone"
    )]
    Spent {
        /// Size of a slot.
        slot: Bytes,
    },
    /// The operating system cannot start threads that touch the memory.
    #[error(
        "{wanted} threads were to touch host memory before it is pinned: {source}; raise the limit of tasks, or ask for fewer"
    )]
    NoThreads {
        /// Number of threads requested.
        wanted: usize,
        /// Error of the thread pool.
        #[source]
        source: rayon::ThreadPoolBuildError,
    },
}

impl HostError {
    /// Returns whether less memory may be available: by streaming, or in another tier.
    pub fn is_shortage(&self) -> bool {
        matches!(
            self,
            HostError::OverBudget { .. } | HostError::Exhausted { .. } | HostError::PinRefused { .. }
        )
    }
}
