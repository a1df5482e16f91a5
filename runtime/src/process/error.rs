//! Why the memory of this process does not do what it is asked.

use glake_device::topology::TopologyError;
use glake_device::{Address, DeviceId, DriverError, Stream};
use glake_tiers::PoolError;
use glake_transfer::TransferError;

use super::{PoolId, Shortage};
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
    /// Relays are off by configuration.
    #[error(
        "copies cannot use other GPUs' links: transfer.relays is {configured}{}; set transfer.relays = true to use them all the same",
        ranks.map_or(String::new(), |ranks| format!(", and {ranks} processes of this program run on the machine"))
    )]
    NoRelays {
        /// What the configuration says.
        configured: &'static str,
        /// How many processes share the links, where that is why.
        ranks: Option<u32>,
    },
    /// A part of the memory that is none.
    #[error("a memory fraction of {fraction} is out of range: 0 to 1 is allowed")]
    BadFraction {
        /// What was given.
        fraction: f64,
    },
    /// The operating system gives no thread to keep epochs going.
    #[error("no thread for completion points: {source}; raise the limit of threads")]
    NoThread {
        /// Its answer.
        #[source]
        source: std::io::Error,
    },
}
