//! The messages of workers and of the agent. All sizes are bytes, all times durations in milliseconds.

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

/// Message from a worker to the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum ToAgent {
    /// Identity and holdings of the worker: the first frame of every connection, not numbered. The activity page arrives with its bytes, as
    /// a descriptor.
    Hello(Hello),
    /// Request for all evicted memory: uses are waiting for it.
    Want {
        /// Maximum wait in milliseconds.
        deadline_ms: Option<u64>,
    },
    /// Cancels the open want.
    Cancel,
    /// Request of a running use for memory above the lease.
    Grow {
        /// GPU to grow on.
        gpu: String,
        /// Bytes above the lease.
        bytes: Bytes,
        /// Maximum wait in milliseconds.
        within_ms: u64,
    },
    /// Memory was returned to the driver; the lease shrinks by it.
    Returned {
        /// GPU of the memory.
        gpu: String,
        /// Amount of returned memory.
        bytes: Bytes,
    },
    /// Answer to `park`: every use waits at a safe point or has ended.
    Parked,
    /// Answer to `shrink`: the shrink has ended.
    Shrunk {
        /// Holdings after the shrink.
        holdings: Vec<Holding>,
    },
    /// Answer to a grant: the wanted memory is resident, or the start has ended.
    Refilled {
        /// Holdings after the refill.
        holdings: Vec<Holding>,
    },
    /// A command or a refill failed. Memory returned before the failure counts.
    Failed {
        /// Name of the command, or `refill`.
        what: String,
        /// Reason of the failure.
        why: String,
        /// Holdings after the failure.
        holdings: Vec<Holding>,
    },
    /// Holdings have changed. Also the answer to `demote`.
    Changed {
        /// Current holdings of each GPU.
        holdings: Vec<Holding>,
    },
    /// The worker leaves the agent and continues without it.
    Bye,
    /// Acknowledgement without content.
    Ack,
    /// Message of a later version.
    #[serde(other)]
    Unknown,
}

/// Message from the agent to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum ToWorker {
    /// Answer to `hello`, not numbered.
    Welcome(Welcome),
    /// Answer to `hello`, not numbered: the worker must run without this agent.
    Refused {
        /// Reason, and how to fix it.
        why: String,
        /// Whether a later `hello` may be accepted.
        #[serde(default)]
        passes: bool,
    },
    /// Raises the lease of a GPU.
    Grant {
        /// GPU of the lease.
        gpu: String,
        /// Bytes added to the lease.
        bytes: Bytes,
    },
    /// The open want is granted completely.
    Admit,
    /// Makes every use wait at a safe point; answered by `parked`.
    Park {
        /// Timeout of the answer; uses continue by themselves after it.
        within_ms: u64,
    },
    /// Parked uses may continue.
    Unpark,
    /// Memory must leave the GPU; answered by `shrunk`, with `returned` in between.
    Shrink {
        /// Name of the GPU to shrink.
        gpu: String,
        /// Amount of memory to evict.
        bytes: Bytes,
        /// Destination of the copies.
        tier: Tier,
        /// Timeout of the answer.
        within_ms: u64,
        /// Whether another shrink of the same worker follows, on another GPU: parked uses stay parked.
        #[serde(default)]
        more: bool,
    },
    /// Copies in host memory must move to files while the worker is idle; answered by `changed`.
    Demote {
        /// Amount of memory to move.
        bytes: Bytes,
    },
    /// The want ends without memory.
    Deny {
        /// Reason of the denial.
        why: Denied,
        /// Delay before the next want. None: every later want would be denied too.
        retry_after_ms: Option<u64>,
        /// Occupancy of the GPUs of the want.
        #[serde(default)]
        gpus: Vec<Occupancy>,
    },
    /// The growth ends without memory.
    DenyGrowth {
        /// GPU of the growth.
        gpu: String,
        /// Bytes that were requested.
        bytes: Bytes,
        /// Workers with a lease on the GPU, the largest lease first.
        #[serde(default)]
        holders: Vec<Holder>,
        /// Memory of the GPU for all workers. 0: unknown.
        #[serde(default)]
        budget: Bytes,
        /// Reason of the denial. None: the agent is of a release that does not say.
        #[serde(default)]
        why: Option<Denied>,
    },
    /// A client requests the worker's memory back: the worker sends `want`, and `refilled` when it is complete.
    Refill,
    /// Acknowledgement without content.
    Ack,
    /// Message of a later version.
    #[serde(other)]
    Unknown,
}

/// Identity of a joining worker, and its holdings at that moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hello {
    /// Name of the worker: 1 to 64 of `A-Z a-z 0-9 . _ -`; for a rank followed by `/` and its number.
    pub name: String,
    /// Process id and start time, as the worker sees them.
    pub peer: Peer,
    /// Version of the library.
    pub build: String,
    /// Launcher's name for all ranks that must be resident together. None: the worker is alone.
    pub gang: Option<String>,
    /// Number of ranks in the gang.
    pub ranks: u32,
    /// Epoch of the agent that the worker was connected to last. 0: none.
    pub epoch: u64,
    /// Number of the last message received from the agent of `epoch`.
    pub received: u64,
    /// Whether the worker has just begun to load its memory; `refilled` reports the end of the load.
    pub starting: bool,
    /// Whether uses are waiting for the worker's memory.
    pub wants: bool,
    /// Holdings on each GPU that the worker uses.
    pub holdings: Vec<Holding>,
}

/// Identity of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Peer {
    /// Id of the process.
    pub pid: u32,
    /// Start time in the kernel's ticks since boot; distinguishes the process from others with the same id.
    pub start: u64,
}

/// Memory of a worker on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Holding {
    /// PCI address of the GPU, or the number of a simulated one.
    pub gpu: String,
    /// The worker's own number of the GPU: its index in the activity page.
    pub device: u32,
    /// Maximum bytes that the worker may hold.
    pub lease: Bytes,
    /// Bytes that its pools hold, in flight included.
    pub resident: Bytes,
    /// Part of `resident` that cannot be evicted.
    pub fixed: Bytes,
    /// Evicted bytes that are copied back before the next use.
    pub evicted: Bytes,
    /// Bytes that the next use needs in addition, without a copy: memory whose content was discarded.
    pub room: Bytes,
    /// Room to grow for a use whose memory comes back (`lease.growth`), granted from free bytes. 0: nothing is evicted.
    pub growth: Bytes,
    /// Bytes that a complete eviction would copy out now.
    pub dirty: Bytes,
    /// Bytes that could be evicted and restored without a copy.
    pub discardable: Bytes,
    /// Pinned host memory that holds copies.
    pub hosted: Bytes,
    /// Part of `evicted` in files; the rest, without `in_peers`, is in host memory. None: the worker is of a release that does not say.
    pub in_files: Option<Bytes>,
    /// Part of `evicted` on other GPUs. None: the worker is of a release that does not say.
    pub in_peers: Option<Bytes>,
    /// The part of `resident` with no live bytes, which is copied out once it has some: a request may put a block there at any time. None:
    /// the worker is of a release that does not say.
    pub unused: Option<Bytes>,
    /// Number of uses that had begun, as the activity page counts them, when these figures were taken: they hold until the next one begins.
    /// None: a use ran, or the worker is of a release that does not say.
    pub as_of: Option<u64>,
}

/// Worker with a lease on a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Name of the worker.
    pub name: String,
    /// Lease of the worker on that GPU.
    pub lease: Bytes,
}

/// Memory of a GPU, and the workers that hold it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Occupancy {
    /// Name of the GPU.
    pub gpu: String,
    /// Memory of the GPU for all workers.
    pub budget: Bytes,
    /// Workers with a lease on the GPU, the largest lease first.
    pub holders: Vec<Holder>,
}

/// Answer of the agent to `hello`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Welcome {
    /// Number of this conversation. It changes if the agent was restarted or has removed the worker.
    pub epoch: u64,
    /// Number of the last message received from this worker. 0: none.
    pub received: u64,
    /// Number that the agent assigned to the worker.
    pub worker: u64,
    /// Whether a starting worker must wait for `admit` before it allocates.
    pub wait: bool,
}

/// Destination of evicted copies. `G` identifies a GPU: its name in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier<G = String> {
    /// Memory of another GPU, which was granted for the copies.
    Peer(G),
    /// Pinned host memory.
    Host,
    /// Files on a disk.
    File,
}

/// Reason of a denied want.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Denied {
    /// The want exceeds the capacity of its GPU.
    TooLarge,
    /// The deadline has passed, or would pass before the memory arrives.
    Deadline,
    /// A rank of the gang has not joined, or died.
    Incomplete,
    /// The driver cannot restore the worker: it must be started again.
    Lost,
}

impl<G> Tier<G> {
    /// Converts the identification of the GPU.
    pub fn map<H>(self, convert: impl FnOnce(G) -> H) -> Tier<H> {
        match self {
            Tier::Peer(gpu) => Tier::Peer(convert(gpu)),
            Tier::Host => Tier::Host,
            Tier::File => Tier::File,
        }
    }
}

impl ToWorker {
    /// Returns whether the message only acknowledges.
    pub fn is_ack(&self) -> bool {
        matches!(self, ToWorker::Ack)
    }
}

impl ToAgent {
    /// Returns whether the message only acknowledges.
    pub fn is_ack(&self) -> bool {
        matches!(self, ToAgent::Ack)
    }
}
