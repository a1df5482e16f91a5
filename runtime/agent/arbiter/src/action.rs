//! What the arbiter decides that is to be done.

use std::time::Duration;

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

use crate::{GpuId, WorkerId};

/// One thing to do. Times are on the clock of [`step`](crate::Arbiter::step); what is not answered by then is dealt
/// with at the next step.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Action {
    /// The lease is higher by so much: it refills, or a growth is answered.
    Grant {
        /// Who.
        worker: WorkerId,
        /// Where.
        gpu: GpuId,
        /// How much.
        bytes: Bytes,
    },
    /// The want has all that it needs: uses may run once the refill is over, parked ones first.
    Admit {
        /// Who.
        worker: WorkerId,
    },
    /// All uses are to wait at safe points.
    Park {
        /// Who.
        worker: WorkerId,
        /// When an answer is late.
        by: Duration,
    },
    /// They may go on.
    Unpark {
        /// Who.
        worker: WorkerId,
    },
    /// So much is to leave.
    Shrink {
        /// Who.
        worker: WorkerId,
        /// Where.
        gpu: GpuId,
        /// How much.
        bytes: Bytes,
        /// Where copies go.
        tier: Tier,
        /// When an answer is late.
        by: Duration,
    },
    /// Copies in host memory are to go to files, while nobody waits.
    Demote {
        /// Who.
        worker: WorkerId,
        /// How much.
        bytes: Bytes,
    },
    /// A want ends without memory.
    Deny {
        /// Who.
        worker: WorkerId,
        /// Why.
        why: Denied,
        /// When to ask again, from now; never, where it would always be denied.
        retry_after: Option<Duration>,
    },
    /// A growth ends without memory: it is out of memory as at any limit.
    DenyGrowth {
        /// Who.
        worker: WorkerId,
        /// Where.
        gpu: GpuId,
        /// What it asked for.
        bytes: Bytes,
    },
    /// A command was not answered in time: the worker is no victim until then, and its lease counts.
    StopCountingOn {
        /// Who.
        worker: WorkerId,
        /// How long.
        until: Duration,
    },
    /// The driver is to checkpoint it; that this was asked is to be in the journal before.
    Checkpoint {
        /// Who.
        worker: WorkerId,
    },
    /// The driver is to restore it, if it is checkpointed or locked.
    Restore {
        /// Who.
        worker: WorkerId,
    },
    /// The meter is to be read now.
    Measure {
        /// Which.
        gpu: GpuId,
    },
}

/// Where stored copies go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Tier {
    /// An idle GPU's memory, granted for it.
    Peer(GpuId),
    /// Pinned host memory.
    Host,
    /// Files.
    File,
}

/// Why a want was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Denied {
    /// More than could be freed of its GPU now; without a time to ask again, more than the GPU could ever give.
    TooLarge,
    /// Its deadline would pass, or passed, before its turn.
    Deadline,
    /// A rank of its gang has not joined, or died.
    Incomplete,
    /// The driver does not restore it: it has to be started again.
    Lost,
}
