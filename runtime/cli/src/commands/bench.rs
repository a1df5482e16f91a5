//! `glake bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::Failure;
use super::copy_bench;
use super::copy_bench::CopyArguments;
use super::output::{Output, table};
use super::shrink_bench;
use super::shrink_bench::ShrinkArguments;
use crate::bench::{self, AllocOptions, BenchError};
use glake_runtime::config::Config;

/// Measurement of the command line.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// The hot path of malloc and free, beside a best fit on an ordered set
    ///
    /// Measures a malloc and free pair that needs no driver call, with locks and statistics on, on sizes drawn from a
    /// trace, through the C interface of libgmlake.so; beside it, in the same run, the pool itself and a best fit on an
    /// ordered set.
    Alloc(AllocArguments),
    /// Copies between the host and GPUs over every link, beside one link and beside what all give at most
    ///
    /// Each size is copied by the driver (native), by the engine through the C interface of libgmlake.so, and as each
    /// GPU's own share to its own memory (limit), in turns, in full stream order; medians are told, and the bytes are
    /// compared. Calibrated paths are used where there are some (glake topo --calibrate).
    Copy(CopyArguments),
    /// A region that leaves its GPU and comes back to its addresses, beside one link's own copies
    ///
    /// The first shrink and refill of the process, then medians of others, each timed from the call until it returns;
    /// every byte is compared after each refill. Calibrated paths are used where there are some (glake topo --calibrate).
    Shrink(ShrinkArguments),
}

/// Arguments of `glake bench alloc`.
#[derive(Debug, Args)]
#[command(after_help = "\
JSON fields: live_blocks, free_ranges, streams, pair_ns, ordered_set_pair_ns, driver_calls, heap_allocations;
and pool_pair_ns, of the pool without the C interface, and dutiful_set_pair_ns, of an ordered set with the
pool's mutex, gauges and streams. libgmlake.so is the one beside the program, or the one that GLAKE_LIBRARY
names")]
pub struct AllocArguments {
    /// Blocks alive while it measures
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    live_blocks: u32,
    /// Free ranges between them
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    free_ranges: u32,
    /// Numbers of streams, several with commas, one measurement each
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,3",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    streams: Vec<u32>,
    /// The trace that sizes are drawn from [default: built-in, of a training run of OPT-1.3B]
    trace: Option<PathBuf>,
}

pub(super) fn run(
    bench: &Bench,
    config: &Config,
    output: &mut Output,
    library: Option<PathBuf>,
) -> Result<(), Failure> {
    match bench {
        Bench::Alloc(arguments) => alloc(arguments, config, output, library),
        Bench::Copy(arguments) => copy_bench::run(arguments, config, output, library),
        Bench::Shrink(arguments) => shrink_bench::run(arguments, config, output),
    }
}

fn alloc(
    arguments: &AllocArguments,
    config: &Config,
    output: &mut Output,
    library: Option<PathBuf>,
) -> Result<(), Failure> {
    let options = AllocOptions {
        trace: arguments.trace.clone(),
        live_blocks: arguments.live_blocks,
        free_ranges: arguments.free_ranges,
        streams: arguments.streams.clone(),
        pairs: 100_000,
        library,
    };
    let reports = bench::alloc(super::found(config)?, config, &options).map_err(|error| match error {
        BenchError::Trace(_) => Failure::usage(error),
        _ => Failure::failed(error),
    })?;
    if output.is_json() {
        return reports.iter().try_for_each(|report| output.object(report));
    }
    let rows: Vec<_> = reports
        .iter()
        .map(|report| {
            vec![
                report.live_blocks.to_string(),
                report.free_ranges.to_string(),
                report.streams.to_string(),
                format!("{:.1}", report.pair_ns),
                format!("{:.1}", report.pool_pair_ns),
                format!("{:.1}", report.ordered_set_pair_ns),
                format!("{:.2}", report.pair_ns / report.ordered_set_pair_ns),
                format!("{:.1}", report.dutiful_set_pair_ns),
                format!("{:.2}", report.pair_ns / report.dutiful_set_pair_ns),
                report.driver_calls.to_string(),
                report.heap_allocations.to_string(),
            ]
        })
        .collect();
    let headers = [
        "live blocks",
        "free ranges",
        "streams",
        "pair ns",
        "pool alone ns",
        "ordered set ns",
        "ratio",
        "with duties ns",
        "ratio",
        "driver calls",
        "heap allocations",
    ];
    output.text(&table(0, &headers, &rows))
}
