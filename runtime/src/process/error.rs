//! Errors of the memory of this process.

use std::path::PathBuf;
use std::time::Duration;

use glake_device::{Address, DeviceId, DriverError, Stream};
use glake_sim::TopologyError;
use glake_tiers::{HostError, PoolError, RegionError};
use glake_transfer::TransferError;
use glake_units::Bytes;
use glake_wire::{FrameError, PageError, SocketError};

use super::{Grantor, Moved, PoolId, Shortage, Tags, UseId};
use crate::share::ShareError;

/// Error of an operation; a variant says what the caller can do about it.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// No CUDA driver was found. A program's memory is simulated only on request.
    #[error(
        "no CUDA driver: {library} {found}; torch programs need a GPU and the NVIDIA driver; without a GPU, glake demo, glake replay and glake \
         bench run on simulated ones, and so do programs that call gmlake.h, with GLAKE_DEVICE=sim"
    )]
    NoDriver {
        /// Library that was searched for.
        library: &'static str,
        /// Result of the search.
        found: &'static str,
    },
    /// The requested topology to simulate does not exist or is incomplete.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// Not enough memory: ask for less, free something, or raise the limit.
    #[error(transparent)]
    OutOfMemory(Box<Shortage>),
    /// Any other error of the pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Error of the CUDA driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The driver refused a copy that leaves the block in which it begins.
    #[error(
        "a copy of {asked} at {at} leaves its block, which has {size} at {block} of {device}: copy no more than lies behind {at} in the \
         block ({source})"
    )]
    LeavesBlock {
        /// Device of the block.
        device: DeviceId,
        /// Address of the block.
        block: Address,
        /// Size of the block.
        size: Bytes,
        /// Start of the copied range.
        at: Address,
        /// Size of the copied range.
        asked: Bytes,
        /// Error of the driver.
        #[source]
        source: DriverError,
    },
    /// The device does not exist.
    #[error("device {device} does not exist: {count} are here, counted from 0")]
    NoSuchDevice {
        /// Device that was requested.
        device: i64,
        /// Number of devices of the process.
        count: usize,
    },
    /// No pool contains the address.
    #[error("no block begins at {address}: it was freed before, or never handed out by this library")]
    UnknownAddress {
        /// Address of the request.
        address: Address,
    },
    /// The address is in no block and no pool.
    #[error("{address} is in no block: it was freed before, or never handed out by this library")]
    InNoBlock {
        /// Address of the request.
        address: Address,
    },
    /// Bytes were to be read from their copy in host memory, and are not there.
    #[error(
        "not all of these bytes at {address} are in host memory: read memory on the GPU with a copy, and memory on a peer or in a file after a \
         refill of '{tag}'"
    )]
    NotInHostMemory {
        /// Address of the request.
        address: Address,
        /// Tag of the region.
        tag: String,
    },
    /// The block cannot be shared, or the shared memory cannot be opened.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// The copy engine refuses, or an earlier copy failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// Offloading is impossible during a capture.
    #[error(
        "stream {:#x} of {device} is captured into a graph: bytes can neither be offloaded nor be brought back by a graph; do it outside of the \
         capture, or leave them on the GPU",
        stream.0
    )]
    OffloadCaptured {
        /// Device of the stream.
        device: DeviceId,
        /// Stream that is captured.
        stream: Stream,
    },
    /// A pass needs more than its budget.
    #[error(
        "a budget of {budget} was asked for, but passes of this shape need {} MiB of the GPU, contexts included, with {host_room} of the \
         host's memory: give at least that (glake.offload), or make the pass smaller",
        minimum.get().div_ceil(1 << 20)
    )]
    Budget {
        /// Budget that was requested.
        budget: glake_units::Bytes,
        /// Smallest budget that suffices.
        minimum: glake_units::Bytes,
        /// Host memory that may be used.
        host_room: glake_units::Bytes,
    },
    /// No plan could be made.
    #[error(transparent)]
    Plan(#[from] glake_offload::PlanError),
    /// A pass was recorded in an impossible order.
    #[error("what the site that offloads was told is not of its pass: {0}")]
    Pass(#[from] glake_offload::TapeError),
    /// A captured copy cannot be waited for.
    #[error(
        "stream {:#x} of {device} is captured into a graph, and a captured copy cannot be waited for: it runs when the graph does",
        stream.0
    )]
    Captured {
        /// Device of the stream.
        device: DeviceId,
        /// Stream that is captured.
        stream: Stream,
    },
    /// A wait for a copy requires the primary context of its GPU.
    #[error(
        "nobody can wait here for a copy under a context that is not its GPU's primary one: make that one current, or wait for the \
         stream"
    )]
    ForeignContext,
    /// The operating system provides no thread.
    #[error(
        "no thread for {what}: {source}; raise the limit of threads (ulimit -u, TasksMax=, docker run --pids-limit)"
    )]
    NoThread {
        /// Purpose of the thread.
        what: &'static str,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// A region refuses or could not be moved; nothing is lost, and the text describes its state.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A shrink failed halfway: the listed memory is evicted, the rest is in place.
    #[error("{freed} went back to the driver and {copied} were copied, then the shrink stopped: {source}")]
    Partly {
        /// Memory returned to the driver.
        freed: Bytes,
        /// Bytes copied out before the failure.
        copied: Bytes,
        /// Moved bytes by region and device.
        regions: Vec<Moved>,
        /// Error that stopped the shrink.
        #[source]
        source: Box<ProcessError>,
    },
    /// Host memory cannot be allocated.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The GPU, or the lease of this process, has no room for memory that was given back.
    #[error(
        "{device}: there is no memory for '{tag}': {evicted} of it is evicted, {free} of the GPU is free. {}: {source}",
        refused_by(.grantor.as_deref())
    )]
    NoRoom {
        /// Device of the refill.
        device: DeviceId,
        /// Region of the refill.
        tag: String,
        /// Bytes of the region on the GPU.
        resident: Bytes,
        /// Bytes of the region that are evicted.
        evicted: Bytes,
        /// Free memory of the GPU.
        free: Bytes,
        /// Grantor of the lease, if the lease has no room.
        grantor: Option<Box<Grantor>>,
        /// Error of the attempt.
        #[source]
        source: Box<RegionError>,
    },
    /// The agent is not joined, or controls what was to be changed.
    #[error(transparent)]
    Agent(Box<AgentError>),
    /// Uses did not end in time; the gate is open again and nothing was moved.
    #[error(
        "{uses} {} of {tags} {} still running after {waited:.1?}: the gate is open again and nothing of that was moved; wait for them, or allow \
         more time",
        if *uses == 1 { "use" } else { "uses" },
        if *uses == 1 { "was" } else { "were" }
    )]
    StillUsed {
        /// Regions of the shrink.
        tags: Tags,
        /// Number of uses still running.
        uses: usize,
        /// Time for which the call waited.
        waited: Duration,
    },
    /// A use needs memory that is or will be evicted.
    #[error("the gate is closed: {tags} is not on its GPU, or about to leave it; refill it, or wait for it")]
    Closed {
        /// Regions of the use.
        tags: Tags,
    },
    /// The gate did not open in time.
    #[error(
        "a use of {tags} was held for {waited:.1?}, and the gate is still closed: refill it, or allow more time"
    )]
    HeldTooLong {
        /// Regions of the use.
        tags: Tags,
        /// Time for which the use waited.
        waited: Duration,
    },
    /// The refill did not finish in time and continues in the background.
    #[error(
        "the refill of {tags} is not over after {waited:.1?}: it goes on in the background; wait for it, or allow more time"
    )]
    StillComing {
        /// Regions of the refill.
        tags: Tags,
        /// Time for which the call waited.
        waited: Duration,
    },
    /// The request cannot be served; the text says why, and what to do.
    #[error("{message}")]
    Refused {
        /// Reaction that the error calls for.
        kind: ErrorKind,
        /// Reason and remedy.
        message: String,
    },
}

/// Kind of a [`ProcessError::Refused`].
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is wrong, comes at the wrong time, or names an object that does not exist.
    Invalid,
    /// The operation is impossible for this memory or in this configuration.
    Unsupported,
    /// The gate or the program prevents the move now. Nothing was moved; a later attempt may succeed.
    Closed,
    /// The program did not let the move begin in time. Nothing was moved.
    Timeout,
    /// Bytes are lost.
    Lost,
}

impl ProcessError {
    pub(super) fn invalid(message: impl Into<String>) -> ProcessError {
        ProcessError::Refused { kind: ErrorKind::Invalid, message: message.into() }
    }

    pub(super) fn unsupported(message: impl Into<String>) -> ProcessError {
        ProcessError::Refused { kind: ErrorKind::Unsupported, message: message.into() }
    }

    pub(super) fn closed(message: impl Into<String>) -> ProcessError {
        ProcessError::Refused { kind: ErrorKind::Closed, message: message.into() }
    }

    pub(super) fn timeout(message: impl Into<String>) -> ProcessError {
        ProcessError::Refused { kind: ErrorKind::Timeout, message: message.into() }
    }

    pub(super) fn lost(message: impl Into<String>) -> ProcessError {
        ProcessError::Refused { kind: ErrorKind::Lost, message: message.into() }
    }

    pub(super) fn unknown_pool(device: DeviceId, id: PoolId) -> ProcessError {
        ProcessError::invalid(format!(
            "{device} has no private pool {id}: it was never begun or created, or was released"
        ))
    }

    pub(super) fn unknown_copy(handle: u64) -> ProcessError {
        ProcessError::invalid(format!(
            "no copy has the handle {handle}: it was waited for before, or never given"
        ))
    }

    pub(super) fn unknown_offload(id: u64) -> ProcessError {
        ProcessError::invalid(format!(
            "nothing is offloaded under the number {id}: it was released before, or never given"
        ))
    }

    pub(super) fn unknown_site(id: u64) -> ProcessError {
        ProcessError::invalid(format!(
            "no site that offloads has the number {id}: it was released before, or never made"
        ))
    }

    pub(super) fn unknown_use(id: UseId) -> ProcessError {
        ProcessError::invalid(format!("no use has the number {}: it was ended before, or never begun", id.0))
    }

    /// Creates the error for a live block with decommitted parts.
    pub(super) fn decommitted(address: Address, size: Bytes) -> ProcessError {
        ProcessError::invalid(format!(
            "some of the {size} at {address} was decommitted, and has no memory: commit it first (glake.commit, glake_commit)"
        ))
    }

    pub(super) fn no_files() -> ProcessError {
        ProcessError::unsupported(
            "nothing can go to files here: set tiers.files to a folder on a local disk, or take \"host\" or \"peer\"",
        )
    }

    /// Creates the error for bytes of a device that no other GPU can hold.
    pub(super) fn no_peer(device: Option<DeviceId>) -> ProcessError {
        let of = device.map_or_else(String::new, |device| format!(" of {device}"));
        ProcessError::unsupported(format!(
            "bytes{of} cannot go to another GPU here: name another one that is visible, or take \"host\" or \"file\""
        ))
    }

    /// Creates the error for a background refill that was cancelled.
    pub(super) fn refill_given_up(tags: &Tags) -> ProcessError {
        ProcessError::closed(format!(
            "the refill of {tags} was given up: it got no thread (the log says why), or the process ends; what is evicted stays so"
        ))
    }

    /// Creates the error for a parked use that voted against the move, because another rank could not be parked.
    pub(super) fn not_agreed(tags: &Tags) -> ProcessError {
        ProcessError::closed(format!(
            "not all that use {tags} agreed to be parked: another rank of the process group was not parked at the same step, or its work \
             did not end. Nothing was moved, they go on; shrink on all ranks, and again later"
        ))
    }

    /// Returns whether the request was refused with this text in the message.
    #[cfg(test)]
    pub(super) fn says(&self, text: &str) -> bool {
        matches!(self, ProcessError::Refused { message, .. } if message.contains(text))
    }
}

/// Returns who refused the memory of a refill, and what to do.
fn refused_by(grantor: Option<&Grantor>) -> String {
    match grantor {
        None => "End the process that took the memory, or shrink other regions, then refill again".to_owned(),
        Some(Grantor::Program) => {
            "The lease is too small: raise it (glake.lease.grant), then refill again".to_owned()
        }
        Some(Grantor::Agent(None)) => {
            "The node agent has not granted it in time: look at its decision (glake explain), or wait \
                                       longer (lease.refill_timeout_ms)"
                .to_owned()
        }
        Some(Grantor::Agent(Some(denial))) => format!("The node agent denied it: {denial}"),
    }
}

/// Error of joining an agent. Each variant calls for a different reaction of the caller.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The socket cannot be trusted or has no usable path.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// No agent serves the socket.
    #[error("no agent answers at {}: {source}; start it (glake serve), or name its socket (GLAKE_AGENT=PATH)", .path.display())]
    NotThere {
        /// Path of the agent's socket.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The agent did not answer in time.
    #[error(
        "the agent at {} did not answer within {seconds} s: continue its process if it is stopped (kill -CONT), or look at its log \
         (glake serve)", .path.display()
    )]
    Silent {
        /// Path of the agent's socket.
        path: PathBuf,
        /// Timeout that expired, in seconds.
        seconds: u64,
    },
    /// The agent closed the connection before it answered.
    #[error("the agent at {} closed the connection before it answered: look at its log (glake serve)", .path.display())]
    Closed {
        /// Path of the agent's socket.
        path: PathBuf,
    },
    /// The agent refuses this worker.
    #[error("the agent at {} refuses this worker: {why}", .path.display())]
    Refused {
        /// Path of the agent's socket.
        path: PathBuf,
        /// Reason and remedy in the agent's words.
        why: String,
        /// Whether the reason may be gone at the next attempt.
        passes: bool,
    },
    /// The agent's answer cannot be decoded.
    #[error("the agent at {} does not speak as an agent does: {source}; are both of the same release?", .path.display())]
    Garbled {
        /// Path of the agent's socket.
        path: PathBuf,
        /// Error of the decoder.
        source: FrameError,
    },
    /// The agent's first message is not an answer to hello.
    #[error("the agent at {} says something else before its welcome; are both of the same release?", .path.display())]
    NoWelcome {
        /// Path of the agent's socket.
        path: PathBuf,
    },
    /// The worker's name has characters or a length that are not allowed.
    #[error("a worker cannot be called {name:?}: a name has 1 to 64 of the characters A-Z a-z 0-9 . _ -")]
    BadName {
        /// Name that was requested.
        name: String,
    },
    /// The process has joined another agent, or the same one under another name.
    #[error("this process has joined the agent at {} as {name} already: leave it first (glake.leave, glake_leave)", .path.display())]
    Joined {
        /// Socket of the joined agent.
        path: PathBuf,
        /// Name of the worker at that agent.
        name: String,
    },
    /// The program cannot set a lease that the agent controls.
    #[error(
        "leases are the agent's while this process is with one: leave it first (glake.leave, glake_leave)"
    )]
    LeasesAreTheAgents,
    /// The program still loads: its memory may be in use although no use has begun.
    #[error(
        "the process loads what it will hold: nothing is taken of it before its first use or glake.join (glake_join)"
    )]
    Loading,
    /// The process is ending.
    #[error("the process is exiting: it joins no agent any more")]
    Ending,
    /// The operating system provides no thread or descriptor.
    #[error("the operating system does not give what a worker needs ({what}): {source}")]
    Os {
        /// Resource that was requested: a thread or a descriptor.
        what: &'static str,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The activity page cannot be created.
    #[error(transparent)]
    Page(#[from] PageError),
}

impl AgentError {
    /// Returns whether the caller must change its request, whatever the agent does.
    pub fn is_misuse(&self) -> bool {
        use AgentError as E;
        matches!(
            self,
            E::BadName { .. }
                | E::Joined { .. }
                | E::LeasesAreTheAgents
                | E::Socket(SocketError::Relative { .. })
        )
    }

    /// Returns whether the error may pass by itself, so that a retry makes sense.
    pub(super) fn may_pass(&self) -> bool {
        !matches!(self, AgentError::Refused { passes: false, .. } | AgentError::Ending)
    }

    /// Returns whether an agent runs there and may welcome the worker soon.
    pub(super) fn is_brief(&self) -> bool {
        matches!(self, AgentError::Refused { passes: true, .. })
    }
}

impl From<AgentError> for ProcessError {
    fn from(error: AgentError) -> ProcessError {
        ProcessError::Agent(Box::new(error))
    }
}
