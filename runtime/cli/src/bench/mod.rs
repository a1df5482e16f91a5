//! Measurements: `glake bench`.
//!
//! ```text
//! sizes (of a trace) ─► Program ─┬► Run on libgmlake.so     ─► ns a pair, driver calls, heap allocations
//!                                ├► Run on the pool itself  ─► ns a pair: what the C interface costs is the difference
//!                                └► Run on the ordered set  ─► ns a pair
//! ```

mod copy;
mod library;
mod ordered_set;
mod program;
mod shrink;
pub(crate) mod times;

use std::path::PathBuf;

use glake_abi::client::{ClientError, Gmlake};
use glake_device::DriverError;
use glake_tiers::{FileError, HostError, MoveError, PoolError, RegionError};
use glake_transfer::TransferError;
use glake_units::Bytes;
use serde::Serialize;

use crate::copies::CopyError;
use crate::rig::RigError;
pub use copy::{
    CopyDirection, CopyMemory, CopyNews, CopyOptions, CopyReport, CriticalReport, LEAST_BLOCK, MOST_BLOCKS,
    OverheadReport, copy, copy_in_virtual_time, critical, overhead,
};
use glake_replay::machine::Machine;
use glake_replay::trace::TraceError;
use glake_runtime::backend::{Backend, BackendError};
use glake_runtime::config::Config;
use library::{LibraryUnderTest, PoolUnderTest};
use ordered_set::OrderedSet;
use program::{Allocates, Program, Run, Sizes};
pub use shrink::{ShrinkNews, ShrinkOptions, ShrinkPhase, ShrinkReport, ShrinkTier, shrink, shrink_steps};

/// Number of timed rounds. The fastest one is reported: disturbances only make a round slower.
const ROUNDS: usize = 20;
/// Maximum number of warm-up rounds. Warm-up ends early after [`QUIET`] rounds without driver calls and heap allocations.
const WARM_UP: usize = 80;
/// Number of consecutive rounds without driver calls and heap allocations that end the warm-up.
const QUIET: usize = 10;

/// Options of `glake bench alloc`.
#[derive(Clone, Debug)]
pub struct AllocOptions {
    /// Trace from which sizes are drawn; `None`: built-in sizes of a training run of OPT-1.3B.
    pub trace: Option<PathBuf>,
    /// Number of live blocks during the measurement.
    pub live_blocks: u32,
    /// Approximate number of free ranges between live blocks.
    pub free_ranges: u32,
    /// Numbers of streams, with one measurement each.
    pub streams: Vec<u32>,
    /// Number of pairs of a malloc and a free per round.
    pub pairs: usize,
    /// Path of the library; `None`: the one next to the program.
    pub library: Option<PathBuf>,
}

/// Result of one measurement of the hot path.
#[derive(Clone, Debug, Serialize)]
pub struct AllocReport {
    /// Number of live blocks during the measurement.
    pub live_blocks: u32,
    /// Number of free ranges between live blocks at the end of the measurement.
    pub free_ranges: u32,
    /// Number of streams that allocated in turn.
    pub streams: u32,
    /// Time of a malloc and a free together through the C interface, in nanoseconds.
    pub pair_ns: f64,
    /// Time of a pair in the pool without the C interface, in the same run, in nanoseconds.
    pub pool_pair_ns: f64,
    /// Time of a pair with a plain best fit on an ordered set, without lock, gauges and streams, in nanoseconds.
    pub ordered_set_pair_ns: f64,
    /// Time of a pair with a best fit on an ordered set with the pool's lock, gauges and streams, in nanoseconds.
    pub dutiful_set_pair_ns: f64,
    /// Number of driver calls in the measured pairs; 0 if every malloc was a hit.
    pub driver_calls: u64,
    /// Number of the library's heap allocations in the measured pairs.
    pub heap_allocations: u64,
}

/// Error of a measurement.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Error of reading the trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Error of the driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Error of the pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Missing library file.
    #[error(
        "{} is not there: build it with make build (cargo build --release --package glake-ffi), or name it with GLAKE_LIBRARY",
        looked_for.display()
    )]
    NoLibrary {
        /// Path that was searched.
        looked_for: PathBuf,
    },
    /// Error of the backend.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A GPU lacks free memory for the measurement.
    #[error("{case}: a GPU has no room for it: choose a smaller --sizes, or end what else uses its memory")]
    NoRoom {
        /// Name of the failed measurement.
        case: String,
    },
    /// The host lacks memory for the simulated GPUs.
    #[error("{case}: this machine has no memory for it ({source}): choose a smaller --sizes")]
    NoHostRoom {
        /// Name of the failed measurement.
        case: String,
        /// Error of the driver.
        source: DriverError,
    },
    /// Copied bytes differ.
    #[error("{case}: the bytes that arrived are not those that were sent")]
    Differs {
        /// Name of the failed measurement.
        case: String,
    },
    /// Error of opening the rig.
    #[error(transparent)]
    Rig(#[from] RigError),
    /// Error of the engine.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// Error of allocating pinned host memory.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Error of the folder for files.
    #[error(transparent)]
    File(#[from] FileError),
    /// No other GPU lends its memory.
    #[error(
        "GPU {target} has no peer to lend it memory: name another GPU with --peer, or choose --tier host or file"
    )]
    NoPeer {
        /// Index of the target GPU.
        target: u32,
    },
    /// A region could not be shrunk or refilled.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A warm-up copy failed.
    #[error("the links could not be tried: {0}")]
    Unmoved(MoveError),
    /// A shrink left bytes on the GPU, so its time is meaningless.
    #[error("{size} of the region stayed on the GPU, in {extents} extents that could not leave")]
    Stayed {
        /// Bytes that remained on the GPU.
        size: Bytes,
        /// Number of extents that hold them.
        extents: usize,
    },
    /// The receiver of results failed.
    #[error("the results cannot be told")]
    Untold,
    /// Error of loading or calling the library.
    #[error(transparent)]
    Library(#[from] ClientError),
    /// The ordered set has no free range for a request.
    #[error("the ordered set has no room left for the program")]
    SetFull,
}

/// Measures a malloc and free pair, once for each number of streams.
///
/// # Errors
/// [`BenchError`]: the trace or the device is unusable, or the program does not fit.
pub fn alloc(
    backend: Backend,
    config: &Config,
    options: &AllocOptions,
) -> Result<Vec<AllocReport>, BenchError> {
    let sizes = Sizes::of(options.trace.as_deref())?;
    let mut library_config = config.clone();
    // The library's thread must not tick while pairs are measured: `pause` does its work in between.
    library_config.pool.completion_interval_us = u64::from(u32::MAX);
    let library = library::start(options.library.as_deref(), &backend, library_config)?;
    let machine = Machine::open(&backend)?;
    let measure = |&streams: &u32| measure_one(&library, &machine, config, &sizes, options, streams);
    options.streams.iter().map(measure).collect()
}

fn measure_one(
    library: &Gmlake,
    machine: &Machine,
    config: &Config,
    sizes: &Sizes,
    options: &AllocOptions,
    streams: u32,
) -> Result<AllocReport, BenchError> {
    let settings = machine.settings(&config.pool);
    let memory = settings.limit.min(settings.memory).get();
    let program =
        Program::new(sizes, options.live_blocks, options.free_ranges, options.pairs, streams, memory);
    let mut set = Run::new(OrderedSet::bare(memory), &program)?;
    let mut dutiful = Run::new(OrderedSet::new(memory, streams), &program)?;
    // One after the other: a device need not hold the program twice.
    let mut product = Run::new(LibraryUnderTest::new(library, streams)?, &program)?;
    let through_c = best_of(&mut product, &mut set, &mut dutiful)?;
    let free_ranges = product.allocator.free_ranges()?;
    product.finish()?;
    library.trim(library::DEVICE, 0)?;
    let mut pool = Run::new(PoolUnderTest::new(machine, settings, streams)?, &program)?;
    let alone = best_of(&mut pool, &mut set, &mut dutiful)?;
    Ok(AllocReport {
        live_blocks: options.live_blocks,
        free_ranges,
        streams,
        pair_ns: through_c.pair_ns,
        pool_pair_ns: alone.pair_ns,
        ordered_set_pair_ns: through_c.set_ns.min(alone.set_ns),
        dutiful_set_pair_ns: through_c.dutiful_ns.min(alone.dutiful_ns),
        driver_calls: through_c.driver_calls,
        heap_allocations: through_c.heap_allocations,
    })
}

impl BenchError {
    /// Returns whether other arguments would work on this device.
    pub(crate) fn is_usage(&self) -> bool {
        matches!(
            self,
            BenchError::Library(ClientError::NoDriver)
                | BenchError::NoPeer { .. }
                | BenchError::Rig(RigError::NoSuchGpu { .. } | RigError::TooManyPaths { .. })
        )
    }
}

impl From<CopyError> for BenchError {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::Driver(error) => BenchError::Driver(error),
            CopyError::Transfer(error) => BenchError::Transfer(error),
            CopyError::Host(error) => BenchError::Host(error),
        }
    }
}

/// Fastest rounds of an allocator and of the ordered sets that ran in turn with it.
#[derive(Clone, Copy, Debug)]
struct Best {
    pair_ns: f64,
    set_ns: f64,
    dutiful_ns: f64,
    driver_calls: u64,
    heap_allocations: u64,
}

fn best_of<A: Allocates>(
    subject: &mut Run<'_, A>,
    set: &mut Run<'_, OrderedSet>,
    dutiful: &mut Run<'_, OrderedSet>,
) -> Result<Best, BenchError> {
    let mut quiet = 0;
    for _ in 0..WARM_UP {
        set.round()?;
        let round = subject.round()?;
        quiet = if round.driver_calls == 0 && round.heap_allocations == 0 { quiet + 1 } else { 0 };
        if quiet == QUIET {
            break;
        }
    }
    let none = f64::INFINITY;
    let mut best =
        Best { pair_ns: none, set_ns: none, dutiful_ns: none, driver_calls: 0, heap_allocations: 0 };
    for _ in 0..ROUNDS {
        let round = subject.round()?;
        best.driver_calls += round.driver_calls;
        best.heap_allocations += round.heap_allocations;
        // A round with a miss in it says nothing of hits, unless there is no other.
        if round.driver_calls == 0 || best.pair_ns.is_infinite() {
            best.pair_ns = best.pair_ns.min(round.pair_ns);
        }
        best.set_ns = best.set_ns.min(set.round()?.pair_ns);
        best.dutiful_ns = best.dutiful_ns.min(dutiful.round()?.pair_ns);
    }
    Ok(best)
}
