//! `glake bench copy`.

use std::io::{self, Write as _};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use glake_units::Bytes;

use super::Failure;
use super::output::{Output, table};
use super::progress::Progress;
use crate::bench::{
    self, BenchError, CopyDirection, CopyMemory, CopyNews, CopyOptions, CopyReport, CriticalReport,
    OverheadReport,
};
use glake_runtime::config::Config;

/// What `glake bench copy` can be asked.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CopyArguments {
    /// Which way: h2d to the GPU, d2h from it
    #[arg(long, value_name = "WAY", default_value = "both")]
    direction: Way,
    /// What memory: pool (pinned, and GLake's), foreign (pinned, and cuMemAlloc's), pageable (malloc's, and GLake's),
    /// scattered (pool, in blocks that lie anywhere), broadcast (pool, to every GPU at once). Several with commas
    #[arg(long, value_name = "M", value_delimiter = ',', default_value = "pool")]
    memory: Vec<Memory>,
    /// How much, several with commas [default: 1MiB to 4GiB, or to 64MiB on the simulator; 4KiB to 1MiB with
    /// --overhead, 16MiB with --critical]
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    sizes: Vec<Bytes>,
    /// How many GPUs take part, the measured one among them [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    paths: Option<u32>,
    /// Whose memory
    #[arg(long, value_name = "GPU", default_value_t = 0)]
    target: u32,
    /// How often each is timed [default: 20; 1000 with --overhead and --critical]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    runs: Option<u32>,
    /// The size of a scattered block
    #[arg(long, value_name = "SIZE", default_value = "16KiB")]
    block: Bytes,
    /// What a copy below the break-even costs more than the driver's own, in turns; of pool memory
    #[arg(long, conflicts_with = "memory")]
    overhead: bool,
    /// What a critical copy takes while background copies keep every link busy; of pool memory
    #[arg(long, conflicts_with_all = ["memory", "overhead"])]
    critical: bool,
    /// The size of these background copies: two of them are under way
    #[arg(long, value_name = "SIZE", default_value = "256MiB", requires = "critical")]
    background: Bytes,
}

const EXAMPLES: &str = "\
Examples:
  glake bench copy                                     GPU 0 over every link, both ways
  glake bench copy --memory foreign,pageable --sizes 16MiB,1GiB
  glake bench copy --memory scattered --sizes 1600MiB --direction h2d
  glake bench copy --paths 2 --json
  glake bench copy --overhead                          what small copies pay
  glake bench copy --critical                          what a copy that cannot wait pays

Figures:
  GB/s are 10^9 bytes a second of the median, timed on the host from the first call until the
  stream is done. Of a broadcast the bytes of one GPU count. Native is cuMemcpyAsync: one copy, or
  one for each block or GPU; on the simulator it is the library's own with GLAKE_COPY_DIRECT.

JSON fields: device, direction, memory, bytes, paths, native_gbps, limit_gbps, engine_gbps; and target,
runs, native_us, limit_us, engine_us, host_us (until the engine's call had returned), cpu_cores
(processor time of the process while it copies, nobody waiting in a loop), calibrated, verified.
With --overhead: device, target, direction, bytes, runs, native_us, engine_us, overhead_us,
native_call_us, engine_call_us.
With --critical: device, target, direction, bytes, runs, medians and 99th percentiles native_us,
native_p99_us, alone_us, alone_p99_us, beside_us, beside_p99_us, of the call alone_call_p99_us,
beside_call_p99_us; background_bytes (of a copy; two are under way), background_gbps, verified.

libgmlake.so is the one beside the program, or the one that GLAKE_LIBRARY names";

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Way {
    H2d,
    D2h,
    Both,
}

/// What memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Memory {
    Pool,
    Foreign,
    Pageable,
    Scattered,
    Broadcast,
}

impl CopyArguments {
    fn options(&self, library: Option<PathBuf>) -> CopyOptions {
        let directions = match self.direction {
            Way::H2d => vec![CopyDirection::H2d],
            Way::D2h => vec![CopyDirection::D2h],
            Way::Both => vec![CopyDirection::H2d, CopyDirection::D2h],
        };
        let memory = |memory: &Memory| match memory {
            Memory::Pool => CopyMemory::Pool,
            Memory::Foreign => CopyMemory::Foreign,
            Memory::Pageable => CopyMemory::Pageable,
            Memory::Scattered => CopyMemory::Scattered,
            Memory::Broadcast => CopyMemory::Broadcast,
        };
        let mut sizes = self.sizes.clone();
        if sizes.is_empty() && self.overhead {
            sizes = [4, 16, 64, 256, 512, 1024].map(Bytes::kib).into();
        }
        if sizes.is_empty() && self.critical {
            sizes = vec![Bytes::mib(16)];
        }
        CopyOptions {
            directions,
            memory: self.memory.iter().map(memory).collect(),
            sizes,
            paths: self.paths,
            target: self.target,
            runs: self.runs.unwrap_or(if self.overhead || self.critical { 1000 } else { 20 }),
            block: self.block,
            background: self.background,
            library,
        }
    }
}

pub(super) fn run(
    arguments: &CopyArguments,
    config: &Config,
    output: &mut Output,
    library: Option<PathBuf>,
) -> Result<(), Failure> {
    if arguments.sizes.iter().chain([&arguments.block, &arguments.background]).any(|size| size.is_zero()) {
        return Err(Failure::usage(
            "bench copy: --sizes, --block and --background take sizes from 1 byte up, and one is 0",
        ));
    }
    let options = arguments.options(library);
    let backend = super::found(config)?;
    let steps = options.directions.len() * options.memory.len() * options.sizes.len().max(4);
    let progress = Progress::new(steps as u64);
    let (mut copies, mut overheads, mut criticals) = (Vec::new(), Vec::new(), Vec::new());
    let mut untold = None;
    let news = |news: CopyNews| {
        let told = match news {
            CopyNews::Next(what, done) => {
                progress.say(what);
                progress.reach(done);
                Ok(())
            }
            CopyNews::Note(text) => {
                // Whoever closed standard error does not want to hear it.
                progress.pause(|| drop(writeln!(io::stderr(), "glake: {text}")));
                Ok(())
            }
            CopyNews::Copy(report) if output.is_json() => progress.pause(|| output.object(&report)),
            CopyNews::Overhead(report) if output.is_json() => progress.pause(|| output.object(&report)),
            CopyNews::Critical(report) if output.is_json() => progress.pause(|| output.object(&report)),
            CopyNews::Copy(report) => {
                copies.push(report);
                Ok(())
            }
            CopyNews::Overhead(report) => {
                overheads.push(report);
                Ok(())
            }
            CopyNews::Critical(report) => {
                criticals.push(report);
                Ok(())
            }
        };
        told.map_err(|failure| {
            untold = Some(failure);
            BenchError::Untold
        })
    };
    let measured = match (arguments.overhead, arguments.critical) {
        (true, _) => bench::overhead(&backend, config, &options, news),
        (_, true) => bench::critical(&backend, config, &options, news),
        _ => bench::copy(&backend, config, &options, news),
    };
    drop(progress);
    // What was measured before a failure is told all the same.
    if !copies.is_empty() {
        output.text(&copy_table(&copies))?;
    }
    if !overheads.is_empty() {
        output.text(&overhead_table(&overheads))?;
    }
    if !criticals.is_empty() {
        output.text(&critical_table(&criticals))?;
    }
    match (measured, untold) {
        (_, Some(failure)) => Err(failure),
        (Err(error @ (BenchError::NoSuchGpu { .. } | BenchError::NoForeignMemory)), None) => {
            Err(Failure::usage(error))
        }
        (measured, None) => measured.map_err(Failure::failed),
    }
}

fn copy_table(reports: &[CopyReport]) -> String {
    let headers = [
        "direction",
        "memory",
        "bytes",
        "paths",
        "native GB/s",
        "engine GB/s",
        "limit GB/s",
        "of native",
        "of limit",
        "engine us",
        "call us",
        "cores",
    ];
    let row = |report: &CopyReport| {
        vec![
            way(report.direction).to_owned(),
            format!("{:?}", report.memory).to_lowercase(),
            Bytes::new(report.bytes).to_string(),
            report.paths.to_string(),
            format!("{:.1}", report.native_gbps),
            format!("{:.1}", report.engine_gbps),
            format!("{:.1}", report.limit_gbps),
            format!("{:.2}", report.native_us / report.engine_us),
            format!("{:.2}", report.limit_us / report.engine_us),
            format!("{:.1}", report.engine_us),
            format!("{:.1}", report.host_us),
            format!("{:.2}", report.cpu_cores),
        ]
    };
    table(2, &headers, &reports.iter().map(row).collect::<Vec<_>>())
}

fn overhead_table(reports: &[OverheadReport]) -> String {
    let headers =
        ["direction", "bytes", "native us", "engine us", "more us", "native call us", "engine call us"];
    let row = |report: &OverheadReport| {
        vec![
            way(report.direction).to_owned(),
            Bytes::new(report.bytes).to_string(),
            format!("{:.2}", report.native_us),
            format!("{:.2}", report.engine_us),
            format!("{:+.2}", report.overhead_us),
            format!("{:.2}", report.native_call_us),
            format!("{:.2}", report.engine_call_us),
        ]
    };
    table(1, &headers, &reports.iter().map(row).collect::<Vec<_>>())
}

fn critical_table(reports: &[CriticalReport]) -> String {
    let headers = [
        "direction",
        "bytes",
        "native us",
        "p99",
        "alone us",
        "p99",
        "beside us",
        "p99",
        "p99 of alone",
        "p99 of median",
        "background GB/s",
    ];
    let row = |report: &CriticalReport| {
        let us = |us: f64| format!("{us:.1}");
        vec![
            way(report.direction).to_owned(),
            Bytes::new(report.bytes).to_string(),
            us(report.native_us),
            us(report.native_p99_us),
            us(report.alone_us),
            us(report.alone_p99_us),
            us(report.beside_us),
            us(report.beside_p99_us),
            format!("{:.2}", report.beside_p99_us / report.alone_p99_us),
            format!("{:.2}", report.beside_p99_us / report.alone_us),
            us(report.background_gbps),
        ]
    };
    table(1, &headers, &reports.iter().map(row).collect::<Vec<_>>())
}

fn way(direction: CopyDirection) -> &'static str {
    match direction {
        CopyDirection::H2d => "h2d",
        CopyDirection::D2h => "d2h",
    }
}
