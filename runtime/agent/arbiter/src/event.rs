//! Events that the agent reports to the arbiter.

use std::time::Duration;

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

use crate::{GangId, GpuId, WorkerId};

/// Event in the life of a worker or a GPU. The agent reports each event of a worker once and in order.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Event {
    /// Sets the memory of a GPU for workers: at most `budget` for all of them, and at most `total` minus unmanaged memory. Both exclude the
    /// reserve.
    Capacity {
        gpu: GpuId,
        /// Memory of all managed processes, contexts included.
        budget: Bytes,
        /// Memory of all processes.
        total: Bytes,
    },
    /// A reading of the meter. A worker missing from `physical` counts with its lease.
    Measured {
        gpu: GpuId,
        /// Start of the reading. A reading that started before a worker's death proves nothing about the memory of that worker.
        begun: Duration,
        /// Memory used by all processes together.
        used: Bytes,
        /// Memory in the pools of each worker, as reported at the time of the reading, in-flight changes included and floors excluded.
        physical: Vec<(WorkerId, Bytes)>,
    },
    /// A journal names a worker that has not joined the new agent yet: its memory counts in full and the worker is never a victim.
    Expected(Joined),
    /// A worker joined or rejoined. Its own account replaces all earlier ones.
    Joined(Joined),
    /// A worker's memory changed. The lease remains the arbiter's number.
    Changed {
        worker: WorkerId,
        /// State on each of the worker's GPUs.
        holdings: Vec<Holding>,
    },
    /// The activity of a worker changed.
    Activity {
        worker: WorkerId,
        activity: Activity,
        /// Idle time so far, for an idle worker.
        idle_for: Duration,
    },
    /// Uses of a worker wait for its memory.
    Want {
        worker: WorkerId,
        /// Longest wait of the uses; `None`: the default.
        deadline: Option<Duration>,
    },
    /// The uses of a worker no longer wait.
    Cancelled {
        worker: WorkerId,
    },
    /// A running use needs more memory.
    Grow {
        worker: WorkerId,
        gpu: GpuId,
        bytes: Bytes,
        /// Longest wait of the use.
        within: Duration,
    },
    /// Every use of a worker waits at a safe point or has ended.
    Parked {
        worker: WorkerId,
    },
    /// A worker returned memory to the driver: its lease falls by `bytes`.
    Returned {
        worker: WorkerId,
        gpu: GpuId,
        bytes: Bytes,
    },
    /// A shrink has ended.
    Shrunk {
        worker: WorkerId,
        /// State after the shrink.
        holdings: Vec<Holding>,
    },
    /// A refill or a start has ended: all memory is resident.
    Refilled {
        worker: WorkerId,
        /// State after the refill.
        holdings: Vec<Holding>,
    },
    /// A worker made progress since its last status page: an ongoing refill is not late.
    Progress {
        worker: WorkerId,
    },
    /// A worker could not carry out a command. Memory that it returned before still counts.
    Failed {
        worker: WorkerId,
        what: Task,
        /// State after the failure.
        holdings: Vec<Holding>,
    },
    /// The result of a [`Checkpoint`](crate::Action::Checkpoint) or a [`Restore`](crate::Action::Restore), each of which gets an answer; or
    /// the unknown state of a worker that a journal names.
    Contexts {
        worker: WorkerId,
        contexts: Contexts,
    },
    /// The operator requests a refill. The agent forwards the request to the worker, which is restored first if necessary.
    Refill {
        worker: WorkerId,
    },
    /// A process died. Its memory counts until the meter shows that the driver has freed it.
    Died {
        worker: WorkerId,
    },
    /// The operator requests a shrink of a worker.
    Shrink {
        worker: WorkerId,
    },
    /// Time passed without another event.
    Tick,
}

/// Location of a worker's contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Contexts {
    /// Present on its GPUs: restored, or never checkpointed and still running.
    Present,
    /// In the driver's checkpoint: its calls block, and its floors are free.
    Checkpointed,
    /// Unknown state (running, locked or checkpointed): attempt a restore to find out.
    Unknown,
    /// In the driver's checkpoint for good: a restore failed permanently.
    Lost,
}

/// Command to a worker, or the refill that it was admitted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Task {
    /// Make uses wait at safe points.
    Park,
    /// Give memory back to the driver.
    Shrink,
    /// Bring evicted memory back, or start.
    Refill,
}

/// Activity of a worker's uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Activity {
    /// No use is running.
    #[default]
    Idle,
    /// Uses run and reach safe points.
    Busy,
    /// Uses run without safe points: memory can leave once the running uses have ended and no other has begun.
    Running,
    /// Uses run that cannot be stopped, such as a graph capture.
    Capturing,
}

/// Description of a worker that joins.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Joined {
    pub worker: WorkerId,
    /// Gang of the worker; a gang of one rank for a single process.
    pub gang: GangId,
    /// Number of ranks of the gang. The gang gets memory after all ranks have joined.
    pub ranks: u32,
    /// Activity, as far as known at the join.
    pub activity: Activity,
    /// Lease of each GPU that a starting worker needs to load; empty for other workers. It applies until the start ends, whatever holdings
    /// the worker reports. Until then no other worker of these GPUs starts, shrinks or refills.
    pub start: Vec<(GpuId, Bytes)>,
    /// Scheduling attributes of the worker.
    pub profile: Profile,
    /// State on each of the worker's GPUs.
    pub holdings: Vec<Holding>,
}

impl Joined {
    /// Describes an idle worker of one rank that has already started; its gang has the same number.
    pub fn alone(worker: WorkerId, holdings: Vec<Holding>) -> Self {
        let (gang, profile) = (GangId(worker.0), Profile::default());
        let activity = Activity::Idle;
        Joined { worker, gang, ranks: 1, activity, start: Vec::new(), profile, holdings }
    }
}

/// Scheduling attributes of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Profile {
    /// Scheduling priority. Higher ones go first and are not parked for lower ones.
    pub priority: i32,
    /// Tenant of the worker; tenants have equal shares.
    pub tenant: u32,
    /// Condition under which the worker's memory may be taken.
    pub preempt: Preempt,
    /// Longest predicted pause of its uses; a longer one rules out parking.
    pub max_pause: Option<Duration>,
}

/// Condition under which a worker's memory may be taken for another's want.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Preempt {
    /// The worker is never a victim.
    Never,
    /// While no use runs.
    Idle,
    /// Between two steps of its uses, or between two uses without steps.
    #[default]
    Step,
}

/// Memory of a worker on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Holding {
    pub gpu: GpuId,
    /// Memory of context, modules and libraries, which counts and never leaves.
    pub floor: Bytes,
    /// Allowed memory beyond the floor. A joining worker requests it; the arbiter decides it from then on.
    pub lease: Bytes,
    /// Memory in the worker's pools. The worker may create the rest of its lease without asking.
    pub resident: Bytes,
    /// Part of the lease that cannot leave.
    pub fixed: Bytes,
    /// Evicted memory, copied back before a use.
    pub evicted: Bytes,
    /// Memory that a use needs beyond the evicted one, without a copy, because its content was discarded; for a starting worker, all the
    /// memory to load.
    pub room: Bytes,
    /// Room to grow for a use whose memory returns, granted from free bytes without waiters.
    pub growth: Bytes,
    /// Memory to copy out if all of it left now.
    pub dirty: Bytes,
    /// Memory that could leave and return without a copy.
    pub discardable: Bytes,
    /// Memory that may have been written since its last copy, in addition to `dirty`: counted against host memory.
    pub unknown: Bytes,
    /// Pinned host memory that the worker's copies occupy.
    pub hosted: Bytes,
}

impl Holding {
    /// Limits a size to more than any machine has, so that sums cannot overflow.
    pub(crate) fn at_most(bytes: Bytes) -> Bytes {
        bytes.min(Bytes::new(1 << 48))
    }

    /// Limits the reported sizes to possible ones.
    pub(crate) fn possible(self) -> Self {
        let most = Holding::at_most;
        let (floor, lease) = (most(self.floor), most(self.lease));
        Holding { floor, lease, resident: most(self.resident), growth: most(self.growth), ..self }
    }

    /// Returns a holding that consists of a floor only.
    pub fn nothing(gpu: GpuId, floor: Bytes) -> Self {
        let zero = Bytes::ZERO;
        Holding {
            gpu,
            floor,
            lease: zero,
            resident: zero,
            fixed: zero,
            evicted: zero,
            room: zero,
            growth: zero,
            dirty: zero,
            discardable: zero,
            unknown: zero,
            hosted: zero,
        }
    }
}
