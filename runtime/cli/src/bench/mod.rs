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

/// Rounds of which the best counts: what disturbs a round makes it slower, never faster.
const ROUNDS: usize = 20;
/// Rounds before those at most, until some need no driver call and no memory from the heap: tables have their size then.
const WARM_UP: usize = 80;
/// Required number of consecutive quiet measurements.
const QUIET: usize = 10;

/// Options of `glake bench alloc`.
#[derive(Clone, Debug)]
pub struct AllocOptions {
    /// The trace that sizes are drawn from; `None`: built-in sizes, of a training run of OPT-1.3B.
    pub trace: Option<PathBuf>,
    /// Blocks alive while it measures.
    pub live_blocks: u32,
    /// Free ranges between them, about.
    pub free_ranges: u32,
    /// With how many streams, one measurement each.
    pub streams: Vec<u32>,
    /// Pairs of a malloc and a free a round.
    pub pairs: usize,
    /// The library's file; `None`: the one beside the program.
    pub library: Option<PathBuf>,
}

/// Result of one measurement of the hot path.
#[derive(Clone, Debug, Serialize)]
pub struct AllocReport {
    /// Blocks alive while it measured.
    pub live_blocks: u32,
    /// Free ranges between them, counted at the end of the measurement.
    pub free_ranges: u32,
    /// Streams that allocated in turn.
    pub streams: u32,
    /// Nanoseconds a malloc and a free together, through the C interface.
    pub pair_ns: f64,
    /// The same for the pool without the C interface, in the same run.
    pub pool_pair_ns: f64,
    /// The same for a plain best fit on an ordered set, in the same run: no lock, no gauges, no streams.
    pub ordered_set_pair_ns: f64,
    /// The same for one with the pool's lock, gauges and streams.
    pub dutiful_set_pair_ns: f64,
    /// Driver calls of the library in the measured pairs: 0 where every malloc was a hit.
    pub driver_calls: u64,
    /// Allocations of the library on the heap in the measured pairs.
    pub heap_allocations: u64,
}

/// Why nothing was measured.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The sizes cannot be had.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The device cannot be had.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Error of the pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The library is not where it is looked for.
    #[error(
        "{} is not there: build it with make build (cargo build --release --package glake-ffi), or name it with GLAKE_LIBRARY",
        looked_for.display()
    )]
    NoLibrary {
        /// Path that was searched.
        looked_for: PathBuf,
    },
    /// The backend is not there.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A GPU has not that much free memory.
    #[error("{case}: a GPU has no room for it: choose a smaller --sizes, or end what else uses its memory")]
    NoRoom {
        /// Name of the failed measurement.
        case: String,
    },
    /// This machine has not that much memory for what is simulated.
    #[error("{case}: this machine has no memory for it ({source}): choose a smaller --sizes")]
    NoHostRoom {
        /// Name of the failed measurement.
        case: String,
        /// Error of the driver.
        source: DriverError,
    },
    /// The engine is wrong, or the memory is.
    #[error("{case}: the bytes that arrived are not those that were sent")]
    Differs {
        /// Name of the failed measurement.
        case: String,
    },
    /// The server cannot be opened.
    #[error(transparent)]
    Rig(#[from] RigError),
    /// Error of the engine.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// There is no pinned host memory.
    #[error(transparent)]
    Host(#[from] HostError),
    /// There is no folder for files.
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
    /// A copy that regions' copies are like failed.
    #[error("the links could not be tried: {0}")]
    Unmoved(MoveError),
    /// A shrink left something behind, so its time says nothing.
    #[error("{size} of the region stayed on the GPU, in {extents} extents that could not leave")]
    Stayed {
        /// Bytes that remained on the GPU.
        size: Bytes,
        /// In how many extents.
        extents: usize,
    },
    /// Receiver that accepts no more results.
    #[error("the results cannot be told")]
    Untold,
    /// The library cannot be loaded, or refused.
    #[error(transparent)]
    Library(#[from] ClientError),
    /// The ordered set refused.
    #[error("the ordered set has no room left for the program")]
    SetFull,
}

/// Measures a malloc and free pair, once for each number of streams.
///
/// # Errors
/// [`BenchError`]: the trace or the device cannot be had, or the program does not fit.
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
    /// Whether what was asked cannot be measured on this device, and something else can.
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

/// The best round of an allocator, and of the sets that it took turns with.
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
