//! Interface of the arbiter: identifiers, events that the agent reports, actions that it carries out, and parameters of the policy.

use std::fmt;
use std::time::Duration;

use glake_units::Bytes;
use glake_wire::Denied;
use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($number:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $number);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(
    /// Number of a process that joined, valid for its lifetime; the agent never reuses a number.
    WorkerId(u64)
);
id!(
    /// Number of a gang: a single worker, or all ranks of one launcher.
    GangId(u64)
);
id!(
    /// Index of a GPU of the server.
    GpuId(u16)
);

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
        accounts: Vec<Account>,
    },
    /// The activity of a worker changed.
    Activity {
        worker: WorkerId,
        activity: UseState,
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
    Cancel { worker: WorkerId },
    /// A running use needs more memory.
    Grow {
        worker: WorkerId,
        gpu: GpuId,
        bytes: Bytes,
        /// Longest wait of the use.
        within: Duration,
    },
    /// Every use of a worker waits at a safe point or has ended.
    Parked { worker: WorkerId },
    /// A worker returned memory to the driver: its lease falls by `bytes`.
    Returned { worker: WorkerId, gpu: GpuId, bytes: Bytes },
    /// A shrink has ended.
    Shrunk {
        worker: WorkerId,
        /// State after the shrink.
        accounts: Vec<Account>,
    },
    /// A refill or a start has ended: all memory is resident.
    Refilled {
        worker: WorkerId,
        /// State after the refill.
        accounts: Vec<Account>,
    },
    /// A worker made progress since its last status page: an ongoing refill is not late.
    Progress { worker: WorkerId },
    /// A worker could not carry out a command. Memory that it returned before still counts.
    Failed {
        worker: WorkerId,
        what: Task,
        /// State after the failure.
        accounts: Vec<Account>,
    },
    /// The result of a [`Checkpoint`](crate::Action::Checkpoint) or a [`Restore`](crate::Action::Restore), each of which gets an answer; or
    /// the unknown state of a worker that a journal names.
    Contexts { worker: WorkerId, contexts: Contexts },
    /// The operator requests a refill. The agent forwards the request to the worker, which is restored first if necessary.
    Refill { worker: WorkerId },
    /// A process died. Its memory counts until the meter shows that the driver has freed it.
    Died { worker: WorkerId },
    /// The operator requests a shrink of a worker.
    Shrink {
        worker: WorkerId,
        /// Time for its uses to end, or to stop at safe points.
        within: Duration,
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

/// UseState of a worker's uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum UseState {
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
    /// UseState, as far as known at the join.
    pub activity: UseState,
    /// Lease of each GPU that a starting worker needs to load; empty for other workers. It applies until the start ends, whatever accounts
    /// the worker reports. Until then no other worker of these GPUs starts, shrinks or refills.
    pub start: Vec<(GpuId, Bytes)>,
    /// Scheduling attributes of the worker.
    pub profile: Profile,
    /// State on each of the worker's GPUs.
    pub accounts: Vec<Account>,
}

impl Joined {
    /// Describes an idle worker of one rank that has already started; its gang has the same number.
    pub fn alone(worker: WorkerId, accounts: Vec<Account>) -> Self {
        let (gang, profile) = (GangId(worker.0), Profile::default());
        let activity = UseState::Idle;
        Joined { worker, gang, ranks: 1, activity, start: Vec::new(), profile, accounts }
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
pub struct Account {
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

impl Account {
    /// Limits a size to more than any machine has, so that sums cannot overflow.
    pub(crate) fn at_most(bytes: Bytes) -> Bytes {
        bytes.min(Bytes::new(1 << 48))
    }

    /// Limits the reported sizes to possible ones.
    pub(crate) fn possible(self) -> Self {
        let most = Account::at_most;
        let (floor, lease) = (most(self.floor), most(self.lease));
        Account { floor, lease, resident: most(self.resident), growth: most(self.growth), ..self }
    }

    /// Returns an account that consists of a floor only.
    pub fn nothing(gpu: GpuId, floor: Bytes) -> Self {
        let zero = Bytes::ZERO;
        Account {
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

/// Action for the agent to carry out. Deadlines are on the clock of [`step`](crate::Arbiter::step); the arbiter handles a missed deadline
/// at its next step.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Action {
    /// Raises the lease of a worker: bytes of its refill, or the answer to a growth.
    Grant { worker: WorkerId, gpu: GpuId, bytes: Bytes },
    /// Admits a want whose memory is granted completely: uses may run once the refill is over, parked ones first.
    Admit { worker: WorkerId },
    /// Makes all uses of a worker wait at safe points.
    Park {
        worker: WorkerId,
        /// Deadline of the worker's answer.
        by: Duration,
    },
    /// Lets the parked uses of a worker continue.
    Unpark { worker: WorkerId },
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
    Demote { worker: WorkerId, bytes: Bytes },
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
        why: Denied,
    },
    /// Reports a missed deadline. Until `until` the worker is never a victim, and its lease counts as used.
    StopCountingOn {
        worker: WorkerId,
        /// End of the exclusion, on the clock of `step`.
        until: Duration,
    },
    /// Asks the driver to checkpoint a worker. The agent records this in its journal before.
    Checkpoint { worker: WorkerId },
    /// Asks the driver to restore a worker if it is checkpointed or locked.
    Restore { worker: WorkerId },
    /// Asks for a reading of a GPU's meter now.
    Measure { gpu: GpuId },
}

/// Destination of evicted memory.
pub type Tier = glake_wire::Tier<GpuId>;

impl Action {
    /// Returns the worker that gets a message about the action, if any.
    pub fn worker(&self) -> Option<WorkerId> {
        match *self {
            Action::Grant { worker, .. }
            | Action::Admit { worker }
            | Action::Park { worker, .. }
            | Action::Unpark { worker }
            | Action::Shrink { worker, .. }
            | Action::Demote { worker, .. }
            | Action::Deny { worker, .. }
            | Action::DenyGrowth { worker, .. } => Some(worker),
            Action::StopCountingOn { .. }
            | Action::Measure { .. }
            | Action::Checkpoint { .. }
            | Action::Restore { .. } => None,
        }
    }
}

/// Retry interval of a want whose gang is incomplete, or whose memory is held by unmanaged processes.
pub(crate) const RETRY: Duration = Duration::from_secs(1);

/// Parameters of the policy; the defaults are those of the product.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// Assumed link rate in bytes per second, until measured.
    pub link: Bytes,
    /// Minimum time between a refill and the next park.
    pub least_quantum: Duration,
    /// Length of the quantum in multiples of the worker's refill time.
    pub quantum_refills: u32,
    /// Number of parks after which turns of alternately parked workers stop growing.
    pub longest_turn: u32,
    /// Time for which the want of a parked worker waits behind newer wants of its class.
    pub resume_after: Duration,
    /// Timeout of a command in multiples of its predicted duration, before another victim is chosen.
    pub late: u32,
    /// Minimum timeout of a command.
    pub least_late: Duration,
    /// Minimum timeout of the first shrink of a worker, which pins host memory and creates contexts and page tables.
    pub first_late: Duration,
    /// Timeout of a command whose uses must run to their end.
    pub drain: Duration,
    /// Timeout of a start.
    pub start: Duration,
    /// Longest wait of a want without its own deadline.
    pub longest_wait: Duration,
    /// Initial exclusion of a worker that missed a deadline; doubles each time.
    pub distrust: Duration,
    /// Upper bound on every worker's own `preempt`.
    pub preempt: Preempt,
    /// Whether a victim gives only the needed bytes, instead of all.
    pub partial: bool,
    /// Pinned host memory of all workers: above 90 % copies go to files, and demotion ends at 80 %.
    pub host_budget: Bytes,
    /// Whether copies may go to idle GPUs.
    pub peers: bool,
    /// Idle time after which the driver checkpoints a worker without leases; `None`: never.
    pub checkpoint_after: Option<Duration>,
    /// Predicted duration of a restore by the driver.
    pub restore: Duration,
}

impl Settings {
    /// Returns the longest predicted parking time: its timeout is then `longest_wait`.
    pub(crate) fn longest_park(&self) -> Duration {
        self.longest_wait / self.late.max(1)
    }
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            link: Bytes::new(50_000_000_000),
            least_quantum: Duration::from_millis(300),
            quantum_refills: 2,
            longest_turn: 4,
            resume_after: Duration::from_secs(1),
            late: 4,
            least_late: Duration::from_millis(200),
            // The slowest first shrink that was measured moved 3.7 GB/s: four times what its first 512 MiB took.
            first_late: Duration::from_secs(2),
            drain: Duration::from_secs(30),
            start: Duration::from_secs(600),
            longest_wait: Duration::from_secs(300),
            distrust: Duration::from_secs(60),
            preempt: Preempt::Step,
            partial: true,
            host_budget: Bytes::MAX,
            peers: false,
            checkpoint_after: None,
            // Measured for a shrunk worker on one H200.
            restore: Duration::from_millis(560),
        }
    }
}
