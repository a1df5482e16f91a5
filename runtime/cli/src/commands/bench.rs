//! `glake bench`, `glake bench alloc` and `glake bench shrink`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use glake_runtime::config::Config;
use glake_units::Bytes;

use super::copy_bench::CopyArguments;
use super::output::{Output, Progress, note, table};
use super::{Failure, copy_bench};
use crate::bench::{
    self, AllocOptions, BenchError, ShrinkNews, ShrinkOptions, ShrinkPhase, ShrinkReport, ShrinkTier,
};

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
JSON fields: live_blocks, free_ranges, streams, pair_ns, ordered_set_pair_ns,
driver_calls, heap_allocations; and pool_pair_ns, of the pool without the C
interface, and dutiful_set_pair_ns, of an ordered set with the pool's mutex,
gauges and streams. libgmlake.so is the one beside the program, or the one that
GLAKE_LIBRARY names")]
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
        Bench::Shrink(arguments) => run_shrink(arguments, config, output),
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

/// Arguments of `glake bench shrink`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ShrinkArguments {
    /// The region's bytes [default: 16GiB, or 64MiB on the simulator]
    #[arg(long, value_name = "SIZE")]
    bytes: Option<Bytes>,
    /// In how many blocks
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    tensors: u32,
    /// Destination of the bytes: host (pinned memory), peer (another GPU's), file. Several with commas
    #[arg(long, value_name = "TIER", value_delimiter = ',', default_value = "host")]
    tier: Vec<Tier>,
    /// Number of GPUs whose links serve the copies, the region's own included; 1: no relays [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    paths: Option<u32>,
    /// Index of the GPU to measure
    #[arg(long, value_name = "GPU", default_value_t = 0)]
    target: u32,
    /// Number of shrink and refill cycles after the first
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Pin the host memory before the first shrink
    #[arg(long)]
    prepare: bool,
    /// Seal the region, so that it leaves without another copy once there is one
    #[arg(long)]
    sealed: bool,
    /// Take digests before bytes leave and compare them when they are back, timed with the rest
    #[arg(long)]
    verify: bool,
    /// The GPU that lends its memory [default: the first other one]
    #[arg(long, value_name = "GPU")]
    peer: Option<u32>,
    /// Folder of the files, whose disk is measured [default: the system's temporary files]
    #[arg(long, value_name = "DIR", value_parser = folder)]
    folder: Option<PathBuf>,
}

/// A folder that is there, or can be made in one that is.
fn folder(text: &str) -> Result<PathBuf, String> {
    let folder = PathBuf::from(text);
    match folder.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => {
            Err(format!("{} is not there: make it first", parent.display()))
        }
        _ => Ok(folder),
    }
}

const EXAMPLES: &str = "\
Examples:
  glake bench shrink
      16 GiB of GPU 0 to the host and back over every link
  glake bench shrink --paths 1
      over its own link alone
  glake bench shrink --prepare
      the first shrink as fast as the others
  glake bench shrink --bytes 32GiB --sealed
      a clean region, shrunk again
  glake bench shrink --tier host,peer --verify --json
  glake bench shrink --tier file --folder /nvme/glake --bytes 4GiB

Figures:
  GB/s are 10^9 bytes a second: all of the region's, by the time until the call
  returned, mappings included; the first time, and the median of the others. The
  link's are one copy of cuMemcpyAsync over the GPU's own link, in turns with
  these. Every byte is compared after each refill, untimed. Leaked is what the
  GPU (and a peer) has less than before, after everything was freed. The first
  time nothing of the region's host memory is pinned, unless --prepare does;
  relays are ready.

JSON fields: device, phase (shrink, refill), tier (host, peer, file), bytes,
tensors, paths, warm, link_gbps, gbps, copied_bytes, leaked_bytes, verified; and
target, runs, us, prepared, sealed, checked (by digests), calibrated, driver
(calls and us of each kind, the last time)";

/// Destination of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Tier {
    Host,
    Peer,
    File,
}

impl ShrinkArguments {
    fn options(&self) -> ShrinkOptions {
        let tier = |tier: &Tier| match tier {
            Tier::Host => ShrinkTier::Host,
            Tier::Peer => ShrinkTier::Peer,
            Tier::File => ShrinkTier::File,
        };
        ShrinkOptions {
            bytes: self.bytes,
            tensors: self.tensors,
            tiers: self.tier.iter().map(tier).collect(),
            paths: self.paths,
            target: self.target,
            runs: self.runs,
            prepare: self.prepare,
            sealed: self.sealed,
            verify: self.verify,
            peer: self.peer,
            folder: self.folder.clone(),
        }
    }
}

fn run_shrink(arguments: &ShrinkArguments, config: &Config, output: &mut Output) -> Result<(), Failure> {
    if arguments.bytes.is_some_and(|bytes| bytes.get() < u64::from(arguments.tensors)) {
        return Err(Failure::usage(format!(
            "bench shrink: --bytes must be 1 byte a tensor or more, and {} were asked for",
            arguments.tensors
        )));
    }
    let options = arguments.options();
    let backend = super::found(config)?;
    let progress = Progress::new(bench::shrink_steps(&options));
    let (mut reports, mut untold) = (Vec::new(), None);
    let measured = bench::shrink(&backend, config, &options, |news| {
        let told = match news {
            ShrinkNews::Next(what, done) => {
                progress.say(what);
                progress.reach(done);
                Ok(())
            }
            ShrinkNews::Note(text) => {
                progress.pause(|| note(text));
                Ok(())
            }
            ShrinkNews::Shrink(report) if output.is_json() => progress.pause(|| output.object(&report)),
            ShrinkNews::Shrink(report) => {
                reports.push(report);
                Ok(())
            }
        };
        told.map_err(|failure| {
            untold = Some(failure);
            BenchError::Untold
        })
    });
    drop(progress);
    // What was measured before a failure is told all the same.
    if !reports.is_empty() {
        output.text(&shrink_table(&reports))?;
    }
    match (measured, untold) {
        (_, Some(failure)) => Err(failure),
        (Err(error), None) if error.is_usage() => Err(Failure::usage(format!("bench shrink: {error}"))),
        (measured, None) => measured.map_err(Failure::failed),
    }
}

fn shrink_table(reports: &[ShrinkReport]) -> String {
    let headers = [
        "tier",
        "phase",
        "",
        "bytes",
        "tensors",
        "paths",
        "link GB/s",
        "GB/s",
        "of link",
        "ms",
        "copied",
        "leaked",
    ];
    let row = |report: &ShrinkReport| {
        let phase = match report.phase {
            ShrinkPhase::Shrink => "shrink",
            ShrinkPhase::Refill => "refill",
        };
        vec![
            format!("{:?}", report.tier).to_lowercase(),
            phase.to_owned(),
            if report.warm { "warm" } else { "first" }.to_owned(),
            Bytes::new(report.bytes).to_string(),
            report.tensors.to_string(),
            report.paths.to_string(),
            format!("{:.1}", report.link_gbps),
            format!("{:.1}", report.gbps),
            format!("{:.2}", report.gbps / report.link_gbps),
            format!("{:.1}", report.us / 1e3),
            Bytes::new(report.copied_bytes).to_string(),
            Bytes::new(report.leaked_bytes).to_string(),
        ]
    };
    table(3, &headers, &reports.iter().map(row).collect::<Vec<_>>())
}
