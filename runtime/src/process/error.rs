//! Errors of the memory of this process.

use std::path::PathBuf;
use std::time::Duration;

use glake_device::{Address, DeviceId, DriverError, Stream};
use glake_sim::TopologyError;
use glake_tiers::{HostError, PoolError, RegionError, RegionOptions};
use glake_transfer::TransferError;
use glake_units::Bytes;
use glake_wire::{FrameError, PageError, SocketError};

use super::regions::{copy_name, policy_name};
use super::{Moved, PoolId, Shortage, Tags};
use crate::config::MultiPath;
use crate::share::ShareError;

/// Error of an operation; a variant says what the caller can do about it.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// No CUDA driver was found. A program's memory is simulated only on request.
    #[error(
        "no CUDA driver: {library} {found}; install the NVIDIA driver, or choose the simulator with GLAKE_DEVICE=sim"
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
    /// The private pool does not exist.
    #[error("{device} has no private pool {id}: it was never begun or created, or was released")]
    UnknownPool {
        /// Device of the request.
        device: DeviceId,
        /// Private pool of the request.
        id: PoolId,
    },
    /// Allocations already go to the private pool.
    #[error("allocations of {device} go to private pool {id} already: end that first")]
    PoolOpen {
        /// Device of the request.
        device: DeviceId,
        /// Private pool of the request.
        id: PoolId,
    },
    /// The block cannot be shared, or the shared memory cannot be opened.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// No memory of another process is open at the address.
    #[error("no memory of another process is open at {base}: it was closed as often as it was opened")]
    NotOpen {
        /// Address of the request.
        base: Address,
    },
    /// The stream was not created by this process.
    #[error("{device} has no stream {:#x} that this library made", stream.0)]
    UnknownStream {
        /// Device of the request.
        device: DeviceId,
        /// Stream of the request.
        stream: Stream,
    },
    /// The copy engine refuses, or an earlier copy failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The copy does not exist.
    #[error("no copy has the handle {handle}: it was waited for before, or never given")]
    UnknownCopy {
        /// Handle of the request.
        handle: u64,
    },
    /// The memory belongs to no pool of this process.
    #[error(
        "{address} is no memory of this library's pools, so its bytes cannot be offloaded: leave them where they are, or let this library \
         allocate them (glake.enable)"
    )]
    NotOurs {
        /// Address of the request.
        address: Address,
    },
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
    /// Memory of a private pool belongs to the pool's owner and is not offloaded.
    #[error(
        "memory at {address} of {device} belongs to the private pool {id}, whose owner relies on its blocks: leave it on the GPU"
    )]
    OffloadPrivate {
        /// Device of the memory.
        device: DeviceId,
        /// Start address of the memory.
        address: Address,
        /// Private pool that contains the memory.
        id: PoolId,
    },
    /// The offloaded memory does not exist.
    #[error("nothing is offloaded under the number {id}: it was released before, or never given")]
    UnknownOffload {
        /// Number of the request.
        id: u64,
    },
    /// The site does not exist.
    #[error("no site that offloads has the number {id}: it was released before, or never made")]
    UnknownSite {
        /// Number of the request.
        id: u64,
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
    /// No reload was started.
    #[error("what is offloaded under the number {id} is not on its way back: begin to reload it first")]
    NotReloading {
        /// Number of the request.
        id: u64,
    },
    /// Offloaded bytes are lost: their block was freed and the copy failed twice.
    #[error(
        "what is offloaded under the number {id} is lost: its block was freed, and the copy of what it had then failed twice; run the step again"
    )]
    OffloadTorn {
        /// Number of the request.
        id: u64,
    },
    /// Offloaded bytes can only return to the GPU that they left.
    #[error(
        "what is offloaded under the number {id} left {device}, and was to come back to memory of {asked}: reload it to {device}, and copy it on"
    )]
    OffloadedElsewhere {
        /// Number of the request.
        id: u64,
        /// GPU that the bytes left.
        device: DeviceId,
        /// GPU of the request.
        asked: DeviceId,
    },
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
    /// Relays are disabled by configuration.
    #[error(
        "copies cannot use other GPUs' links: transfer.multi_path is {configured}{}; set transfer.multi_path = \"always\" to use them all the same",
        ranks.map_or(String::new(), |ranks| format!(", and {ranks} processes of this program run on the machine"))
    )]
    NoRelays {
        /// Configured value of `transfer.multi_path`.
        configured: MultiPath,
        /// Number of processes that share the links, if that is the reason.
        ranks: Option<u32>,
    },
    /// The fraction of the memory is out of range.
    #[error("a memory fraction of {fraction} is out of range: 0 to 1 is allowed")]
    BadFraction {
        /// Fraction of the request.
        fraction: f64,
    },
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
    /// Another user of the GPU took the memory that was given back.
    #[error(
        "{device}: there is no memory for '{tag}': {evicted} of it is evicted, {free} of the GPU is free. End what took the memory, or shrink \
         other regions, then refill again: {source}"
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
        /// Error of the attempt.
        #[source]
        source: Box<RegionError>,
    },
    /// Parts of a live block are decommitted.
    #[error(
        "some of the {size} at {address} was decommitted, and has no memory: commit it first (glake.commit, glake_commit)"
    )]
    Decommitted {
        /// Start address of the copy.
        address: Address,
        /// Size of the copy.
        size: Bytes,
    },
    /// The device has no lease to add to.
    #[error("{device} has no lease to add to: set one first (glake.lease.set, glake_lease_set)")]
    NoLease {
        /// Device of the request.
        device: DeviceId,
    },
    /// No GPU has this name.
    #[error("GPU {gpu} is none of this process's")]
    NoSuchGpu {
        /// Name of the request: a PCI address, or the number of a simulated GPU.
        gpu: String,
    },
    /// The agent is not joined, or controls what was to be changed.
    #[error(transparent)]
    Agent(Box<AgentError>),
    /// The region does not exist.
    #[error("there is no region '{tag}': {} are there; define it first", named(known))]
    UnknownTag {
        /// Region of the request.
        tag: String,
        /// Regions that exist.
        known: Vec<String>,
    },
    /// The name is reserved for memory outside regions.
    #[error(
        "a region cannot be called '{tag}': that is memory outside of regions; take another name, of one letter or more"
    )]
    ReservedTag {
        /// Name of the request.
        tag: String,
    },
    /// The region exists with other options.
    #[error(
        "region '{tag}' is there as {}, and was asked for as {}: take another tag, or the same options",
        described(defined),
        described(asked)
    )]
    OtherOptions {
        /// Region of the request.
        tag: String,
        /// Options of the existing region.
        defined: Box<RegionOptions>,
        /// Options of the request.
        asked: Box<RegionOptions>,
    },
    /// The thread is in no region.
    #[error("this thread is in no region: it left as often as it entered")]
    InNoRegion,
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
    /// The work of parked uses did not finish in time. Nothing was moved; the uses continue.
    #[error(
        "work of {tags} was still running on a GPU {waited:.1?} after all that use it were parked at safe points: does it wait for another \
         rank, or for the host? Nothing was moved, they go on; shrink again later"
    )]
    ParkedWork {
        /// Regions of the shrink.
        tags: Tags,
        /// Time for which the call waited.
        waited: Duration,
    },
    /// A parked use voted against the move, because another rank could not be parked. Nothing was moved; the use continues.
    #[error(
        "not all that use {tags} agreed to be parked: another rank of the process group was not parked at the same step, or its work did not end. \
         Nothing was moved, they go on; shrink on all ranks, and again later"
    )]
    NotAgreed {
        /// Regions of the shrink.
        tags: Tags,
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
    /// A background refill was cancelled: it got no thread, or the process ends.
    #[error(
        "the refill of {tags} was given up: it got no thread (the log says why), or the process ends; what is evicted stays so"
    )]
    RefillGivenUp {
        /// Regions of the refill.
        tags: Tags,
    },
    /// The use does not exist.
    #[error("no use has the number {id}: it was ended before, or never begun")]
    UnknownUse {
        /// Number of the request.
        id: u64,
    },
    /// The program's hook refused: nothing was moved.
    #[error(
        "the hook {when} refused{}: nothing was moved where it comes before; see what it said, or set another",
        answer.map_or_else(|| " without an answer".to_owned(), |answer| format!(" with {answer}"))
    )]
    HookRefused {
        /// Moment of the hook: before or after a move.
        when: &'static str,
        /// Return value of the hook.
        answer: Option<i32>,
    },
    /// The program's hook timed out: nothing was moved.
    #[error(
        "the hook {when} took longer than {timeout:.1?}: nothing was moved where it comes before; allow it more time, or mend it"
    )]
    HookTimedOut {
        /// Moment of the hook: before or after a move.
        when: &'static str,
        /// Timeout of the hook.
        timeout: Duration,
    },
    /// The request cannot be parsed.
    #[error("the request to {what} is wrong: {}", without_place(source))]
    BadAsk {
        /// Kind of request.
        what: &'static str,
        /// Error of the parser.
        #[source]
        source: serde_json::Error,
    },
    /// No folder for files is configured.
    #[error(
        "nothing can go to files here: set tiers.files to a folder on a local disk, or take \"host\" or \"peer\""
    )]
    NoFiles,
    /// No other GPU is available.
    #[error(
        "bytes{} cannot go to another GPU here: name another one that is visible, or take \"host\" or \"file\"",
        device.map_or_else(String::new, |device| format!(" of {device}"))
    )]
    NoPeer {
        /// Device of the bytes, if known.
        device: Option<DeviceId>,
    },
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
    #[error("the agent at {} did not answer within {seconds} s: look at its log (glake serve)", .path.display())]
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

/// Joins quoted names; an empty list gives a placeholder word.
fn named(tags: &[String]) -> String {
    match tags {
        [] => "none".to_owned(),
        tags => tags.iter().map(|tag| format!("'{tag}'")).collect::<Vec<_>>().join(", "),
    }
}

fn described(options: &RegionOptions) -> String {
    format!("{} with host_copy {}", policy_name(options.policy), copy_name(options.host_copy))
}

/// Formats a parser error without its position, unless the position helps: programs write these requests.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    match error.classify() {
        serde_json::error::Category::Data => text.strip_suffix(&place).unwrap_or(&text).to_owned(),
        _ => text,
    }
}
