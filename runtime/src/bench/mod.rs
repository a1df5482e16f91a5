//! Measurements: `glake bench`.
//!
//! ```text
//! sizes (of a trace) ─► Program ─┬► Run on the pool         ─► ns a pair, driver calls, heap allocations
//!                                └► Run on the ordered set  ─► ns a pair
//! ```

mod measure;
mod ordered_set;
mod pool;
mod program;

use std::path::PathBuf;

use glake_device::DriverError;
use glake_tiers::PoolError;
use serde::Serialize;

use crate::backend::Backend;
use crate::config::Config;
use crate::machine::Machine;
use crate::trace::TraceError;
use measure::Run;
use ordered_set::OrderedSet;
use pool::PoolUnderTest;
use program::{Program, Sizes};

/// Pairs a round.
const PAIRS: usize = 100_000;
/// Rounds of which the best counts: what disturbs a round makes it slower, never faster.
const ROUNDS: usize = 20;
/// Rounds before those at most, until some need no driver call and no memory from the heap: tables have their size then.
const WARM_UP: usize = 80;
/// So many of them in a row.
const QUIET: usize = 10;

/// What `glake bench alloc` measures.
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
    /// How many allocations on the heap the process has made by now; of a counting global allocator.
    pub heap_allocations: fn() -> u64,
}

/// One measurement of the hot path.
#[derive(Clone, Debug, Serialize)]
pub struct AllocReport {
    /// Blocks alive while it measured.
    pub live_blocks: u32,
    /// Free ranges between them, counted in the middle of the measurement.
    pub free_ranges: u32,
    /// Streams that allocated in turn.
    pub streams: u32,
    /// Nanoseconds a malloc and a free together.
    pub pair_ns: f64,
    /// The same for a plain best fit on an ordered set, in the same run: no lock, no gauges, no streams.
    pub ordered_set_pair_ns: f64,
    /// The same for one with the pool's lock, gauges and streams.
    pub dutiful_set_pair_ns: f64,
    /// Driver calls in the measured pairs: 0 where every malloc was a hit.
    pub driver_calls: u64,
    /// Allocations on the heap in the measured pairs.
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
    /// The pool refused.
    #[error(transparent)]
    Pool(#[from] PoolError),
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
    let machine = Machine::open(backend)?;
    options.streams.iter().map(|&streams| measure_one(&machine, config, &sizes, options, streams)).collect()
}

fn measure_one(
    machine: &Machine,
    config: &Config,
    sizes: &Sizes,
    options: &AllocOptions,
    streams: u32,
) -> Result<AllocReport, BenchError> {
    let settings = machine.settings(&config.pool);
    let memory = settings.limit.min(settings.memory).get();
    let program = Program::new(sizes, options.live_blocks, options.free_ranges, PAIRS, streams, memory);
    let mut pool = Run::new(PoolUnderTest::new(machine, settings, streams)?, &program)?;
    let mut set = Run::new(OrderedSet::bare(memory), &program)?;
    let mut dutiful = Run::new(OrderedSet::new(memory, streams), &program)?;
    let heap = options.heap_allocations;
    let mut quiet = 0;
    for _ in 0..WARM_UP {
        set.round(heap)?;
        let round = pool.round(heap)?;
        quiet = if round.driver_calls == 0 && round.heap_allocations == 0 { quiet + 1 } else { 0 };
        if quiet == QUIET {
            break;
        }
    }
    let mut report = AllocReport {
        live_blocks: options.live_blocks,
        free_ranges: 0,
        streams,
        pair_ns: f64::INFINITY,
        ordered_set_pair_ns: f64::INFINITY,
        dutiful_set_pair_ns: f64::INFINITY,
        driver_calls: 0,
        heap_allocations: 0,
    };
    for done in 0..ROUNDS {
        let round = pool.round(heap)?;
        report.driver_calls += round.driver_calls;
        report.heap_allocations += round.heap_allocations;
        // A round with a miss in it says nothing of hits, unless there is no other.
        if round.driver_calls == 0 || report.pair_ns.is_infinite() {
            report.pair_ns = report.pair_ns.min(round.pair_ns);
        }
        report.ordered_set_pair_ns = report.ordered_set_pair_ns.min(set.round(heap)?.pair_ns);
        report.dutiful_set_pair_ns = report.dutiful_set_pair_ns.min(dutiful.round(heap)?.pair_ns);
        if done == ROUNDS / 2 {
            report.free_ranges = pool.allocator.free_ranges();
        }
    }
    Ok(report)
}
