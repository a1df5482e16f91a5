//! Why the memory of this process does not do what it is asked.

use std::time::Duration;

use glake_device::{Address, DeviceId, DriverError, Stream};
use glake_sim::TopologyError;
use glake_tiers::{HostError, PoolError, RegionError, RegionOptions};
use glake_transfer::TransferError;
use glake_units::Bytes;

use super::agent::AgentError;
use super::regions::{copy_name, policy_name};
use super::{Moved, PoolId, Shortage, Tags};
use crate::config::MultiPath;
use crate::share::ShareError;

/// A refusal; a variant is what the caller can do about it.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// No driver answers, and a program's memory is simulated only where that was asked for.
    #[error(
        "no CUDA driver: {library} {found}; install the NVIDIA driver, or choose the simulator with GLAKE_DEVICE=sim"
    )]
    NoDriver {
        /// What was looked for.
        library: &'static str,
        /// What was found instead.
        found: &'static str,
    },
    /// There is no such model to simulate, or it is not whole.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// There is not enough memory: ask for less, free something, raise the limit.
    #[error(transparent)]
    OutOfMemory(Box<Shortage>),
    /// The pool refuses for another reason.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The driver refuses.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// There is no such device.
    #[error("device {device} does not exist: {count} are here, counted from 0")]
    NoSuchDevice {
        /// What was asked for.
        device: i64,
        /// How many there are.
        count: usize,
    },
    /// No pool owns this address.
    #[error("no block begins at {address}: it was freed before, or never handed out by this library")]
    UnknownAddress {
        /// What was given.
        address: Address,
    },
    /// No pool owns this address, and it is in no block either.
    #[error("{address} is in no block: it was freed before, or never handed out by this library")]
    InNoBlock {
        /// What was given.
        address: Address,
    },
    /// There is no such private pool.
    #[error("{device} has no private pool {id}: it was never begun or created, or was released")]
    UnknownPool {
        /// Where.
        device: DeviceId,
        /// What was given.
        id: PoolId,
    },
    /// Allocations go to this private pool already.
    #[error("allocations of {device} go to private pool {id} already: end that first")]
    PoolOpen {
        /// Where.
        device: DeviceId,
        /// What was given.
        id: PoolId,
    },
    /// The block cannot be shared, or what was shared cannot be opened.
    #[error(transparent)]
    Share(#[from] ShareError),
    /// No memory of another process is open there.
    #[error("no memory of another process is open at {base}: it was closed as often as it was opened")]
    NotOpen {
        /// What was given.
        base: Address,
    },
    /// No such stream was made here.
    #[error("{device} has no stream {:#x} that this library made", stream.0)]
    UnknownStream {
        /// Where.
        device: DeviceId,
        /// What was given.
        stream: Stream,
    },
    /// The engine refuses, or an earlier copy failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// There is no such copy.
    #[error("no copy has the handle {handle}: it was waited for before, or never given")]
    UnknownCopy {
        /// What was given.
        handle: u64,
    },
    /// No pool of this process has the memory.
    #[error(
        "{address} is no memory of this library's pools, so its bytes cannot be offloaded: leave them where they are, or let this library \
         allocate them (glake.enable)"
    )]
    NotOurs {
        /// What was given.
        address: Address,
    },
    /// Nothing is offloaded in a capture.
    #[error(
        "stream {:#x} of {device} is captured into a graph: bytes can neither be offloaded nor be brought back by a graph; do it outside of the \
         capture, or leave them on the GPU",
        stream.0
    )]
    OffloadCaptured {
        /// Where.
        device: DeviceId,
        /// Which.
        stream: Stream,
    },
    /// Memory of a private pool is its owner's.
    #[error(
        "memory at {address} of {device} is of the private pool {id}, whose owner counts on its blocks: leave it on the GPU"
    )]
    OffloadPrivate {
        /// Where it is.
        device: DeviceId,
        /// Where it begins.
        address: Address,
        /// Whose it is.
        id: PoolId,
    },
    /// There is no such offloaded memory.
    #[error("nothing is offloaded under the number {id}: it was released before, or never given")]
    UnknownOffload {
        /// What was given.
        id: u64,
    },
    /// There is no such site.
    #[error("no site that offloads has the number {id}: it was released before, or never made")]
    UnknownSite {
        /// What was given.
        id: u64,
    },
    /// A pass needs more than the budget that it was given.
    #[error(
        "a budget of {budget} was asked for, but passes of this shape need {} MiB of the GPU, contexts included, with {host_room} of the \
         host's memory: give at least that (glake.offload), or make the pass smaller",
        minimum.get().div_ceil(1 << 20)
    )]
    Budget {
        /// What was asked for.
        budget: glake_units::Bytes,
        /// What is enough.
        minimum: glake_units::Bytes,
        /// What of the host's memory may be used.
        host_room: glake_units::Bytes,
    },
    /// There is no plan.
    #[error(transparent)]
    Plan(#[from] glake_offload::PlanError),
    /// A pass was told of what it has not.
    #[error("what the site that offloads was told is not of its pass: {0}")]
    Pass(#[from] glake_offload::TapeError),
    /// No copy in was begun.
    #[error("what is offloaded under the number {id} is not on its way back: begin to reload it first")]
    NotReloading {
        /// What was given.
        id: u64,
    },
    /// Bytes were to be copied out once more, and that failed.
    #[error(
        "what is offloaded under the number {id} is lost: its block was freed, and the copy of what it had then failed twice; run the step again"
    )]
    OffloadTorn {
        /// What was given.
        id: u64,
    },
    /// Bytes come back to the GPU that they left.
    #[error(
        "what is offloaded under the number {id} left {device}, and was to come back to memory of {asked}: reload it to {device}, and copy it on"
    )]
    OffloadedElsewhere {
        /// What was given.
        id: u64,
        /// Where it was.
        device: DeviceId,
        /// Where it was to go.
        asked: DeviceId,
    },
    /// A stream is captured into a graph, and what is captured cannot be waited for.
    #[error(
        "stream {:#x} of {device} is captured into a graph, and a captured copy cannot be waited for: it runs when the graph does",
        stream.0
    )]
    Captured {
        /// Where.
        device: DeviceId,
        /// Which.
        stream: Stream,
    },
    /// A copy is waited for under a context that is not its GPU's primary one.
    #[error(
        "nobody can wait here for a copy under a context that is not its GPU's primary one: make that one current, or wait for the \
         stream"
    )]
    ForeignContext,
    /// Relays are off by configuration.
    #[error(
        "copies cannot use other GPUs' links: transfer.multi_path is {configured}{}; set transfer.multi_path = \"always\" to use them all the same",
        ranks.map_or(String::new(), |ranks| format!(", and {ranks} processes of this program run on the machine"))
    )]
    NoRelays {
        /// What the configuration says.
        configured: MultiPath,
        /// How many processes share the links, where that is why.
        ranks: Option<u32>,
    },
    /// A part of the memory that is none.
    #[error("a memory fraction of {fraction} is out of range: 0 to 1 is allowed")]
    BadFraction {
        /// What was given.
        fraction: f64,
    },
    /// The operating system gives no thread.
    #[error(
        "no thread for {what}: {source}; raise the limit of threads (ulimit -u, TasksMax=, docker run --pids-limit)"
    )]
    NoThread {
        /// What it was to do.
        what: &'static str,
        /// Its answer.
        #[source]
        source: std::io::Error,
    },
    /// A region refuses, or could not be moved; it is as the text says, and nothing is lost.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A shrink stopped after something had left: that is evicted, the rest is where it was.
    #[error("{freed} went back to the driver and {copied} were copied, then the shrink stopped: {source}")]
    Partly {
        /// Memory that went back to the driver.
        freed: Bytes,
        /// Bytes that were copied.
        copied: Bytes,
        /// By region and device.
        regions: Vec<Moved>,
        /// Why it stopped.
        #[source]
        source: Box<ProcessError>,
    },
    /// There is no host memory.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Somebody took the memory that was given back.
    #[error(
        "{device}: there is no memory for '{tag}': {evicted} of it is evicted, {free} of the GPU is free. End what took the memory, or shrink \
         other regions, then refill again: {source}"
    )]
    NoRoom {
        /// Where.
        device: DeviceId,
        /// Of which region.
        tag: String,
        /// How much of it is on the GPU.
        resident: Bytes,
        /// How much is not.
        evicted: Bytes,
        /// What nobody holds of the GPU's memory.
        free: Bytes,
        /// What was met.
        #[source]
        source: Box<RegionError>,
    },
    /// Parts of a live block have no memory now.
    #[error(
        "some of the {size} at {address} was decommitted, and has no memory: commit it first (glake.commit, glake_commit)"
    )]
    Decommitted {
        /// Where a copy was to begin.
        address: Address,
        /// How much was to be copied.
        size: Bytes,
    },
    /// There is nothing to add to.
    #[error("{device} has no lease to add to: set one first (glake.lease.set, glake_lease_set)")]
    NoLease {
        /// Which.
        device: DeviceId,
    },
    /// There is no GPU of this name.
    #[error("GPU {gpu} is none of this process's")]
    NoSuchGpu {
        /// What was asked for: a PCI address, or the number of a simulated one.
        gpu: String,
    },
    /// The agent is not joined, or is in the way.
    #[error(transparent)]
    Agent(Box<AgentError>),
    /// There is no such region.
    #[error("there is no region '{tag}': {} are there; define it first", named(known))]
    UnknownTag {
        /// What was given.
        tag: String,
        /// What is there.
        known: Vec<String>,
    },
    /// The name is taken for memory that is in no region.
    #[error(
        "a region cannot be called '{tag}': that is memory outside of regions; take another name, of one letter or more"
    )]
    ReservedTag {
        /// What was given.
        tag: String,
    },
    /// The region was defined with other options.
    #[error(
        "region '{tag}' is there as {}, and was asked for as {}: take another tag, or the same options",
        described(defined),
        described(asked)
    )]
    OtherOptions {
        /// Which.
        tag: String,
        /// What it was defined with.
        defined: Box<RegionOptions>,
        /// What was asked for.
        asked: Box<RegionOptions>,
    },
    /// The thread has left every region.
    #[error("this thread is in no region: it left as often as it entered")]
    InNoRegion,
    /// Uses did not end in time; the gate is open again, and nothing of that was moved.
    #[error(
        "{uses} {} of {tags} {} still running after {waited:.1?}: the gate is open again and nothing of that was moved; wait for them, or allow \
         more time",
        if *uses == 1 { "use" } else { "uses" },
        if *uses == 1 { "was" } else { "were" }
    )]
    StillUsed {
        /// What was to leave.
        tags: Tags,
        /// How many uses of it run.
        uses: usize,
        /// For how long they were waited for.
        waited: Duration,
    },
    /// The work of uses that were parked at safe points did not end in time. Nothing was moved; they go on.
    #[error(
        "work of {tags} was still running on a GPU {waited:.1?} after all that use it were parked at safe points: does it wait for another \
         rank, or for the host? Nothing was moved, they go on; shrink again later"
    )]
    ParkedWork {
        /// What was to leave.
        tags: Tags,
        /// For how long it was waited for.
        waited: Duration,
    },
    /// A use that was parked at a safe point voted against the move: another rank could not be parked. Nothing was moved; it goes on.
    #[error(
        "not all that use {tags} agreed to be parked: another rank of the process group was not parked at the same step, or its work did not end. \
         Nothing was moved, they go on; shrink on all ranks, and again later"
    )]
    NotAgreed {
        /// What was to leave.
        tags: Tags,
    },
    /// What a use needs is evicted, or about to be.
    #[error("the gate is closed: {tags} is not on its GPU, or about to leave it; refill it, or wait for it")]
    Closed {
        /// What.
        tags: Tags,
    },
    /// Nobody opened the gate in time.
    #[error(
        "a use of {tags} was held for {waited:.1?}, and the gate is still closed: refill it, or allow more time"
    )]
    HeldTooLong {
        /// What was asked for.
        tags: Tags,
        /// For how long.
        waited: Duration,
    },
    /// A refill takes longer than it was to be waited for: it goes on.
    #[error(
        "the refill of {tags} is not over after {waited:.1?}: it goes on in the background; wait for it, or allow more time"
    )]
    StillComing {
        /// What was asked for.
        tags: Tags,
        /// For how long it was waited for.
        waited: Duration,
    },
    /// A refill in the background was given up: it got no thread, or the process ends.
    #[error(
        "the refill of {tags} was given up: it got no thread (the log says why), or the process ends; what is evicted stays so"
    )]
    RefillGivenUp {
        /// What was asked for.
        tags: Tags,
    },
    /// There is no such use.
    #[error("no use has the number {id}: it was ended before, or never begun")]
    UnknownUse {
        /// What was given.
        id: u64,
    },
    /// The program's hook said no: nothing was moved.
    #[error(
        "the hook {when} refused{}: nothing was moved where it comes before; see what it said, or set another",
        answer.map_or_else(|| " without an answer".to_owned(), |answer| format!(" with {answer}"))
    )]
    HookRefused {
        /// Before or after.
        when: &'static str,
        /// What it answered.
        answer: Option<i32>,
    },
    /// The program's hook takes too long: nothing was moved.
    #[error(
        "the hook {when} took longer than {timeout:.1?}: nothing was moved where it comes before; allow it more time, or mend it"
    )]
    HookTimedOut {
        /// Before or after.
        when: &'static str,
        /// What it was allowed.
        timeout: Duration,
    },
    /// The request cannot be read.
    #[error("the request to {what} is wrong: {}", without_place(source))]
    BadAsk {
        /// Which.
        what: &'static str,
        /// Why not.
        #[source]
        source: serde_json::Error,
    },
    /// No folder for files is configured.
    #[error(
        "nothing can go to files here: set tiers.files to a folder on a local disk, or take \"host\" or \"peer\""
    )]
    NoFiles,
    /// There is no other GPU.
    #[error(
        "bytes{} cannot go to another GPU here: name another one that is visible, or take \"host\" or \"file\"",
        device.map_or_else(String::new, |device| format!(" of {device}"))
    )]
    NoPeer {
        /// Whose bytes.
        device: Option<DeviceId>,
    },
}

/// Names, quoted; a word where there is none.
fn named(tags: &[String]) -> String {
    match tags {
        [] => "none".to_owned(),
        tags => tags.iter().map(|tag| format!("'{tag}'")).collect::<Vec<_>>().join(", "),
    }
}

fn described(options: &RegionOptions) -> String {
    format!("{} with host_copy {}", policy_name(options.policy), copy_name(options.host_copy))
}

/// What a request lacks, without its column where it can be read: it was written by a program.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    match error.classify() {
        serde_json::error::Category::Data => text.strip_suffix(&place).unwrap_or(&text).to_owned(),
        _ => text,
    }
}
