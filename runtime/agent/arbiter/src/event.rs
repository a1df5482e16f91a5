//! What the arbiter is told.

use std::time::Duration;

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

use crate::{GangId, GpuId, WorkerId};

/// One thing that happened. Whoever tells it tells each once, in order, for each worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Event {
    /// How much of a GPU workers may have: at most `budget` of them together, and no more than `total` less what is
    /// unmanaged. The reserve is taken off both already.
    Capacity {
        /// Which.
        gpu: GpuId,
        /// For managed processes, contexts included.
        budget: Bytes,
        /// For all processes.
        total: Bytes,
    },
    /// The meter was read. A worker that is not listed counts with what it may have.
    Measured {
        /// Which.
        gpu: GpuId,
        /// When the reading began. One that began before a worker died says nothing of that worker's memory.
        begun: Duration,
        /// By all processes.
        used: Bytes,
        /// What workers' pools hold, as they said at that moment, in flight included; floors not.
        physical: Vec<(WorkerId, Bytes)>,
    },
    /// A journal names a worker that has not joined the new agent yet: it counts in full and nothing is taken of it.
    Expected(Joined),
    /// A worker joined, or joined again: what it says of itself is the truth.
    Joined(Joined),
    /// What a worker holds is another than was said. Its lease is the arbiter's number and stays.
    Changed {
        /// Who.
        worker: WorkerId,
        /// On each of its GPUs.
        holdings: Vec<Holding>,
    },
    /// What a worker is doing.
    Activity {
        /// Who.
        worker: WorkerId,
        /// What.
        activity: Activity,
        /// How long it has been idle already, if it is.
        idle_for: Duration,
    },
    /// Uses of a worker wait for its memory.
    Want {
        /// Who.
        worker: WorkerId,
        /// How long they wait at most.
        deadline: Option<Duration>,
    },
    /// Nobody waits any more.
    Cancelled {
        /// Who.
        worker: WorkerId,
    },
    /// A use that runs needs more memory.
    Grow {
        /// Who.
        worker: WorkerId,
        /// Where.
        gpu: GpuId,
        /// How much.
        bytes: Bytes,
        /// How long it waits at most.
        within: Duration,
    },
    /// All uses of a worker wait at safe points, or have ended.
    Parked {
        /// Who.
        worker: WorkerId,
    },
    /// Memory was given back to the driver: the lease is lower by it.
    Returned {
        /// Who.
        worker: WorkerId,
        /// Where.
        gpu: GpuId,
        /// How much.
        bytes: Bytes,
    },
    /// A shrink has ended.
    Shrunk {
        /// Who.
        worker: WorkerId,
        /// What it holds now.
        holdings: Vec<Holding>,
    },
    /// A refill or a start has ended: all is resident.
    Refilled {
        /// Who.
        worker: WorkerId,
        /// What it holds now.
        holdings: Vec<Holding>,
    },
    /// Memory of a worker was made since its page was read last: a refill that is under way is not late.
    Progress {
        /// The worker.
        worker: WorkerId,
    },
    /// A command could not be carried out. What was given back before counts.
    Failed {
        /// Who.
        worker: WorkerId,
        /// Which.
        what: Task,
        /// What it holds now.
        holdings: Vec<Holding>,
    },
    /// What came of a [`Checkpoint`](crate::Action::Checkpoint) or a [`Restore`](crate::Action::Restore), each of which
    /// is answered; or that a journal names a worker of which nobody knows.
    Contexts {
        /// Who.
        worker: WorkerId,
        /// Where its contexts are.
        contexts: Contexts,
    },
    /// The operator wants a worker's memory back: it is told by whoever tells this, and is restored first.
    Refill {
        /// Who.
        worker: WorkerId,
    },
    /// A process is gone; its memory is not, until the meter shows it.
    Died {
        /// Who.
        worker: WorkerId,
    },
    /// The operator wants a worker's memory off its GPUs.
    Shrink {
        /// Who.
        worker: WorkerId,
    },
    /// Nothing but time.
    Tick,
}

/// Where a worker's contexts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Contexts {
    /// On its GPUs: it was restored, or was not checkpointed and runs on.
    Present,
    /// In the driver's checkpoint: its calls wait, and its floors are free.
    Checkpointed,
    /// One or the other, or locked: the driver is to be asked, by a restore.
    Unknown,
    /// In the driver's checkpoint for good: it was asked to restore them, and does not.
    Lost,
}

/// What a worker was asked to do, or what it was admitted to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Task {
    /// To let its uses wait at safe points.
    Park,
    /// To give memory back.
    Shrink,
    /// To bring its memory back, or to start.
    Refill,
}

/// What a worker does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Activity {
    /// No use runs.
    #[default]
    Idle,
    /// Uses run, and meet safe points.
    Busy,
    /// Uses run that meet no safe point: memory leaves once those that run have ended and no other has begun.
    Running,
    /// Uses run that cannot be stopped, as the capture of a graph.
    Capturing,
}

/// Who joined.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Joined {
    /// The process.
    pub worker: WorkerId,
    /// The gang that it is a rank of; of one rank, where it is alone.
    pub gang: GangId,
    /// How many ranks the gang has: it is given memory when all have joined.
    pub ranks: u32,
    /// What it does, as far as that is known by now.
    pub activity: Activity,
    /// Lease of each GPU that a worker needs to load; empty, unless it starts. It holds until the start ends, whatever
    /// the worker says of its holdings. Until then no other worker of these GPUs starts, shrinks or refills.
    pub start: Vec<(GpuId, Bytes)>,
    /// What may be asked of it.
    pub profile: Profile,
    /// What it holds, on each of its GPUs.
    pub holdings: Vec<Holding>,
}

impl Joined {
    /// A worker of one rank that has started already and is idle, and whose gang has its number.
    pub fn alone(worker: WorkerId, holdings: Vec<Holding>) -> Self {
        let (gang, profile) = (GangId(worker.0), Profile::default());
        let activity = Activity::Idle;
        Joined { worker, gang, ranks: 1, activity, start: Vec::new(), profile, holdings }
    }
}

/// What may be asked of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Profile {
    /// Higher goes first, and is not parked for lower.
    pub priority: i32,
    /// Whose it is: tenants have equal shares.
    pub tenant: u32,
    /// When its memory may be taken.
    pub preempt: Preempt,
    /// Where a pause of its uses would be longer, as predicted, they are not parked.
    pub max_pause: Option<Duration>,
}

/// When a worker's memory may be taken for another's want.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Preempt {
    /// Never.
    Never,
    /// While no use runs.
    Idle,
    /// Between two steps of its uses, or between two uses where they have no steps.
    #[default]
    Step,
}

/// What a worker holds of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Holding {
    /// Which.
    pub gpu: GpuId,
    /// Context, modules, libraries: counted, and never leaves.
    pub floor: Bytes,
    /// What it may hold beside. Asked when it joins, and the arbiter's number from then on.
    pub lease: Bytes,
    /// What its pools hold: what is leased beyond it may be made without asking.
    pub resident: Bytes,
    /// The part of the lease that cannot leave.
    pub fixed: Bytes,
    /// What is evicted and is copied back before a use.
    pub evicted: Bytes,
    /// What a use needs beside, without a copy: memory whose content was discarded; of a worker that starts, all it will hold.
    pub room: Bytes,
    /// Room to grow for a use whose memory comes back: granted from free bytes that nobody waits for.
    pub growth: Bytes,
    /// What would have to be copied out if all left now.
    pub dirty: Bytes,
    /// What could leave and come back without any copy.
    pub discardable: Bytes,
    /// What may have to be copied out beside `dirty`, as it may have been written since: counted against the host's memory.
    pub unknown: Bytes,
    /// Pinned host memory that copies take.
    pub hosted: Bytes,
}

impl Holding {
    /// No more than any machine has, so that sums do not overflow.
    pub(crate) fn at_most(bytes: Bytes) -> Bytes {
        bytes.min(Bytes::new(1 << 48))
    }

    /// What a worker says, as far as it can be.
    pub(crate) fn possible(self) -> Self {
        let most = Holding::at_most;
        let (floor, lease) = (most(self.floor), most(self.lease));
        Holding { floor, lease, resident: most(self.resident), growth: most(self.growth), ..self }
    }

    /// Nothing but a floor.
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
