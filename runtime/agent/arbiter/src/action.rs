//! Actions that the arbiter asks of the agent.

use std::time::Duration;

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

use crate::{GpuId, WorkerId};

/// Action for the agent to carry out. Deadlines are on the clock of [`step`](crate::Arbiter::step); the arbiter handles a missed deadline
/// at its next step.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Action {
    /// Raises the lease of a worker: bytes of its refill, or the answer to a growth.
    Grant {
        worker: WorkerId,
        gpu: GpuId,
        bytes: Bytes,
    },
    /// Admits a want whose memory is granted completely: uses may run once the refill is over, parked ones first.
    Admit {
        worker: WorkerId,
    },
    /// Makes all uses of a worker wait at safe points.
    Park {
        worker: WorkerId,
        /// Deadline of the worker's answer.
        by: Duration,
    },
    /// Lets the parked uses of a worker continue.
    Unpark {
        worker: WorkerId,
    },
    /// Makes a worker give memory of a GPU back.
    Shrink {
        worker: WorkerId,
        gpu: GpuId,
        bytes: Bytes,
        /// Destination of the copies.
        tier: Tier,
        /// Deadline of the worker's answer.
        by: Duration,
    },
    /// Moves copies of an idle worker from host memory to files.
    Demote {
        worker: WorkerId,
        bytes: Bytes,
    },
    /// Ends a want without memory.
    Deny {
        worker: WorkerId,
        why: Denied,
        /// Time from now after which the worker may ask again; `None` if the arbiter would deny the want forever.
        retry_after: Option<Duration>,
    },
    /// Ends a growth without memory: the worker reports out of memory as at any limit.
    DenyGrowth {
        worker: WorkerId,
        gpu: GpuId,
        /// Size of the denied request.
        bytes: Bytes,
    },
    /// Reports a missed deadline. Until `until` the worker is never a victim, and its lease counts as used.
    StopCountingOn {
        worker: WorkerId,
        /// End of the exclusion, on the clock of `step`.
        until: Duration,
    },
    /// Asks the driver to checkpoint a worker. The agent records this in its journal before.
    Checkpoint {
        worker: WorkerId,
    },
    /// Asks the driver to restore a worker if it is checkpointed or locked.
    Restore {
        worker: WorkerId,
    },
    /// Asks for a reading of a GPU's meter now.
    Measure {
        gpu: GpuId,
    },
}

/// Destination of evicted memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Tier {
    /// Memory of another, idle GPU, granted for the copies.
    Peer(GpuId),
    /// Pinned memory of the host.
    Host,
    /// Files on a local disk.
    File,
}

/// Reason for denying a want.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Denied {
    /// The GPU cannot free enough memory now; without a time to ask again, it never could.
    TooLarge,
    /// The deadline passed, or would pass before the want's turn.
    Deadline,
    /// A rank of the gang has not joined, or died.
    Incomplete,
    /// The driver cannot restore the process, which must be started again.
    Lost,
}
