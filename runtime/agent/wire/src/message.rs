//! The messages of workers and of the agent. All sizes are bytes, all times durations in milliseconds.

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

/// What a worker says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum ToAgent {
    /// Who it is and what it holds: the first frame of every connection, without a number. The activity page comes with
    /// its bytes, as a descriptor.
    Hello(Hello),
    /// Uses wait for its memory.
    Want {
        /// How long they wait at most.
        deadline_ms: Option<u64>,
    },
    /// Nobody waits any more.
    Cancel,
    /// A use that runs needs more memory, and waits so long for it.
    Grow {
        /// Which.
        gpu: String,
        /// How much above the lease.
        bytes: Bytes,
        /// How long it waits at most.
        within_ms: u64,
    },
    /// Memory went back to the driver; the lease is lower by it.
    Returned {
        /// Which.
        gpu: String,
        /// How much.
        bytes: Bytes,
    },
    /// Answers `park`: all uses wait at safe points, or have ended.
    Parked,
    /// Answers `shrink`: it has ended.
    Shrunk {
        /// What it holds now.
        holdings: Vec<Holding>,
    },
    /// All that was wanted is resident; or a start is over.
    Refilled {
        /// What it holds now.
        holdings: Vec<Holding>,
    },
    /// A command, or a refill, could not be carried out. What was returned before counts.
    Failed {
        /// Which command, or `refill`.
        what: String,
        /// Why.
        why: String,
        /// What it holds now.
        holdings: Vec<Holding>,
    },
    /// What it holds is another than was said. Answers `demote` too.
    Changed {
        /// What it holds now.
        holdings: Vec<Holding>,
    },
    /// It leaves the agent, and goes on without one.
    Bye,
    /// Nothing but what was received.
    Ack,
    /// One of a later version.
    #[serde(other)]
    Unknown,
}

/// What the agent says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum ToWorker {
    /// Answers `hello`, without a number.
    Welcome(Welcome),
    /// Answers `hello`, without a number: it goes on without this agent.
    Refused {
        /// Why, and what to do.
        why: String,
        /// Whether the reason may be gone when it says hello again.
        #[serde(default)]
        passes: bool,
    },
    /// The lease is higher by so much.
    Grant {
        /// Which.
        gpu: String,
        /// How much.
        bytes: Bytes,
    },
    /// All that was wanted has been granted.
    Admit,
    /// All uses are to wait at safe points; answered by `parked`.
    Park {
        /// When an answer is late; uses go on by themselves then.
        within_ms: u64,
    },
    /// They may go on.
    Unpark,
    /// So much is to leave; answered by `shrunk`, with `returned` meanwhile.
    Shrink {
        /// Which.
        gpu: String,
        /// How much.
        bytes: Bytes,
        /// Where copies go.
        tier: Tier,
        /// When an answer is late.
        within_ms: u64,
        /// Another shrink of the same worker follows, of another GPU: what is parked stays so.
        #[serde(default)]
        more: bool,
    },
    /// Copies in host memory are to go to files, while nobody waits; answered by `changed`.
    Demote {
        /// How much.
        bytes: Bytes,
    },
    /// A want ends without memory.
    Deny {
        /// Why.
        why: Denied,
        /// When to ask again; never, where it would always be denied.
        retry_after_ms: Option<u64>,
    },
    /// A growth ends without memory.
    DenyGrowth {
        /// Which.
        gpu: String,
        /// What it asked for.
        bytes: Bytes,
        /// Who holds the GPU, most first.
        #[serde(default)]
        holders: Vec<Holder>,
    },
    /// The operator wants its memory back: it says `want`, and `refilled` in the end.
    Refill,
    /// Nothing but what was received.
    Ack,
    /// One of a later version.
    #[serde(other)]
    Unknown,
}

/// Who joins, and what it holds at this moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hello {
    /// What it is called: 1 to 64 of `A-Z a-z 0-9 . _ -`, and for a rank `/` and its number.
    pub name: String,
    /// Its process id, as it knows it, and when it started, in the kernel's ticks since boot.
    pub peer: Peer,
    /// The version of the library.
    pub build: String,
    /// The launcher's name for all ranks that run or do not run as a whole; none: it is alone.
    pub gang: Option<String>,
    /// How many ranks those are.
    pub ranks: u32,
    /// The agent that it heard last, and the last number it received from that one: 0, where it heard none.
    pub epoch: u64,
    /// See `epoch`.
    pub received: u64,
    /// It has just begun to load what it will hold: `refilled` says when that is over.
    pub starting: bool,
    /// Uses wait for its memory now.
    pub wants: bool,
    /// What it holds, on each GPU that it uses.
    pub holdings: Vec<Holding>,
}

/// A process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Peer {
    /// Its number.
    pub pid: u32,
    /// When it started: with its number this tells it from every other process since boot.
    pub start: u64,
}

/// What a worker holds of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Holding {
    /// Which: its PCI address, or the number of a simulated one.
    pub gpu: String,
    /// The worker's own number of it: its place in the activity page.
    pub device: u32,
    /// What it may hold.
    pub lease: Bytes,
    /// What its pools hold, in flight included.
    pub resident: Bytes,
    /// The part of it that cannot leave.
    pub fixed: Bytes,
    /// What is evicted and is copied back before a use.
    pub evicted: Bytes,
    /// What a use needs beside, without a copy: memory whose content was discarded.
    pub room: Bytes,
    /// Room to grow for a use whose memory comes back (`lease.growth`), granted from free bytes; 0 where nothing is evicted.
    pub growth: Bytes,
    /// What would have to be copied out if all left now.
    pub dirty: Bytes,
    /// What could leave and come back without any copy.
    pub discardable: Bytes,
    /// Pinned host memory that copies take.
    pub hosted: Bytes,
    /// The part of `resident` with no live bytes, which is copied out once it has some: a request may put a block there at any time. None:
    /// the worker is of a release that does not say.
    pub unused: Option<Bytes>,
    /// Number of uses that had begun, as the activity page counts them, when these figures were taken: they hold until the next one begins.
    /// None: a use ran, or the worker is of a release that does not say.
    pub as_of: Option<u64>,
}

/// A worker, and how much of a GPU it may hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// What it is called.
    pub name: String,
    /// Its lease.
    pub lease: Bytes,
}

/// The agent's answer to `hello`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Welcome {
    /// The number of this conversation: another one where the agent was started since, or has given the worker up.
    pub epoch: u64,
    /// The last number that it received from this worker; 0: none.
    pub received: u64,
    /// The worker's number.
    pub worker: u64,
    /// A worker that starts is to wait for `admit` before it makes memory.
    pub wait: bool,
}

/// Where stored copies go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Another GPU's memory, which was granted for it.
    Peer(String),
    /// Pinned host memory.
    Host,
    /// Files.
    File,
}

/// Why a want was denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Denied {
    /// More than its GPU could ever give.
    TooLarge,
    /// Its deadline would pass, or passed, before its turn.
    Deadline,
    /// A rank of its gang has not joined, or died.
    Incomplete,
    /// The driver does not restore it: it has to be started again.
    Lost,
}

impl ToWorker {
    /// Whether it says nothing but what was received.
    pub fn is_ack(&self) -> bool {
        matches!(self, ToWorker::Ack)
    }
}

impl ToAgent {
    /// Whether it says nothing but what was received.
    pub fn is_ack(&self) -> bool {
        matches!(self, ToAgent::Ack)
    }
}
