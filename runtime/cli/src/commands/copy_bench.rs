//! `glake bench copy`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use glake_units::Bytes;

use super::Failure;
use super::output::{Output, Progress, note, table};
use crate::bench::{
    self, BenchError, CopyDirection, CopyMemory, CopyNews, CopyOptions, CopyReport, CriticalReport,
    LEAST_BLOCK, MOST_BLOCKS, OverheadReport,
};
use glake_runtime::backend::Backend;
use glake_runtime::config::Config;

/// Arguments of `glake bench copy`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CopyArguments {
    /// Direction of the copies: h2d (host to device) or d2h (device to host)
    #[arg(long, value_name = "DIRECTION", default_value = "both")]
    direction: Directions,
    /// Kinds of memory, separated by commas: pool (pinned, and GLake's), foreign (pinned, and cuMemAlloc's), mempool (pinned, and
    /// cuMemAllocAsync's), pageable (malloc's, and GLake's), scattered (pool, in blocks at scattered addresses), broadcast (pool, to every
    /// GPU at once)
    #[arg(long, value_name = "M", value_delimiter = ',', default_value = "pool")]
    memory: Vec<Memory>,
    /// Copy sizes, several with commas [default: 1MiB to 4GiB; 4KiB to 1MiB with --overhead, 16MiB with --critical]
    #[arg(long, value_name = "SIZE", value_delimiter = ',')]
    sizes: Vec<Bytes>,
    /// Number of GPUs that take part, the measured one included [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    paths: Option<u32>,
    /// Index of the GPU to measure
    #[arg(long, value_name = "GPU", default_value_t = 0)]
    target: u32,
    /// Number of timed repetitions [default: 20, or 3 in virtual time; 1000 with --overhead and --critical]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    runs: Option<u32>,
    /// The size of a scattered block [default: 16KiB]
    #[arg(long, value_name = "SIZE")]
    block: Option<Bytes>,
    /// Measure the overhead of a copy below the break-even compared with the driver's own, in turns; pool memory
    #[arg(long, conflicts_with = "memory")]
    overhead: bool,
    /// Measure a critical copy while background copies keep every link busy; pool memory
    #[arg(long, conflicts_with_all = ["memory", "overhead"])]
    critical: bool,
    /// The size of these background copies: two of them are under way
    #[arg(long, value_name = "SIZE", default_value = "256MiB", requires = "critical")]
    background: Bytes,
}

const EXAMPLES: &str = "\
Examples:
  glake bench copy
      GPU 0 over every link, both ways
  glake bench copy --memory foreign,pageable --sizes 16MiB,1GiB
  glake bench copy --memory scattered --sizes 1600MiB --direction h2d
  glake bench copy --paths 2 --json
  glake bench copy --overhead
      what small copies pay
  glake bench copy --critical
      what a copy that cannot wait pays
  glake bench copy --device sim:h20x8
      how fast copies would be on that server

Figures:
  GB/s are 10^9 bytes a second of the median, timed on the host from the first
  call until the stream is done. Of a broadcast the bytes of one GPU count.
  Native is cuMemcpyAsync: one copy, or one for each block or GPU.
  On a simulated device times are virtual: what the model's links give, at any
  size, in a moment. Sizes up to 64MiB are copied once more on real bytes and
  compared. Pageable memory, --overhead and --critical are about this machine's
  processor: they run in real time there, native is the library's own with
  GLAKE_COPY_DIRECT, sizes end at 64MiB, and their figures say nothing of a
  GPU's.

JSON fields: device, virtual_time, direction, memory, bytes, paths, native_gbps,
limit_gbps, engine_gbps; and target, runs, native_us, limit_us, engine_us,
host_us (until the engine's call had returned), cpu_cores (processor time of the
process while it copies, nobody waiting in a loop), calibrated, verified. In
virtual time host_us and cpu_cores are 0.
With --overhead: device, target, direction, bytes, runs, native_us, engine_us,
overhead_us, native_call_us, engine_call_us.
With --critical: device, target, direction, bytes, runs, medians and 99th
percentiles native_us, native_p99_us, alone_us, alone_p99_us, beside_us,
beside_p99_us, of the call alone_call_p99_us, beside_call_p99_us;
background_bytes (of a copy; two are under way), background_gbps, verified.

libgmlake.so is the one beside the program, or the one that GLAKE_LIBRARY names";

/// Default block size of scattered memory.
const BLOCK: Bytes = Bytes::kib(16);

/// Directions of the copies to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Directions {
    H2d,
    D2h,
    Both,
}

/// Memory kinds to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Memory {
    Pool,
    Foreign,
    Mempool,
    Pageable,
    Scattered,
    Broadcast,
}

impl CopyArguments {
    fn options(&self, library: Option<PathBuf>) -> CopyOptions {
        let directions = match self.direction {
            Directions::H2d => vec![CopyDirection::H2d],
            Directions::D2h => vec![CopyDirection::D2h],
            Directions::Both => vec![CopyDirection::H2d, CopyDirection::D2h],
        };
        let memory = |memory: &Memory| match memory {
            Memory::Pool => CopyMemory::Pool,
            Memory::Foreign => CopyMemory::Foreign,
            Memory::Mempool => CopyMemory::Mempool,
            Memory::Pageable => CopyMemory::Pageable,
            Memory::Scattered => CopyMemory::Scattered,
            Memory::Broadcast => CopyMemory::Broadcast,
        };
        CopyOptions {
            directions,
            memory: self.memory.iter().map(memory).collect(),
            sizes: self.sizes.clone(),
            paths: self.paths,
            target: self.target,
            runs: self.runs.unwrap_or(if self.overhead || self.critical { 1000 } else { 20 }),
            block: self.block.unwrap_or(BLOCK),
            background: self.background,
            library,
        }
    }

    /// The measurements that this is on such a backend, each with its options.
    fn measurements(&self, simulated: bool, library: Option<PathBuf>) -> Vec<(Measurement, CopyOptions)> {
        let options = self.options(library);
        let with = |memory: Vec<CopyMemory>, default: &[Bytes]| {
            let sizes = if self.sizes.is_empty() { default.to_vec() } else { self.sizes.clone() };
            CopyOptions { memory, sizes, ..options.clone() }
        };
        if self.overhead {
            let sizes = [4, 16, 64, 256, 512, 1024].map(Bytes::kib);
            return vec![(Measurement::Overhead, with(options.memory.clone(), &sizes))];
        }
        if self.critical {
            return vec![(Measurement::Critical, with(options.memory.clone(), &[Bytes::mib(16)]))];
        }
        let sizes = [1, 4, 16, 64, 256, 1024, 4096].map(Bytes::mib);
        if !simulated {
            return vec![(Measurement::Copy, with(options.memory.clone(), &sizes))];
        }
        // What fills and empties pageable memory is this machine's processor, which no model knows.
        let (pageable, modelled): (Vec<_>, Vec<_>) =
            options.memory.iter().partition(|memory| **memory == CopyMemory::Pageable);
        let runs = self.runs.unwrap_or(3);
        let measurements = [
            (Measurement::Model, CopyOptions { runs, ..with(modelled, &sizes) }),
            (Measurement::Copy, with(pageable, &sizes[..4])),
        ];
        measurements.into_iter().filter(|(_, options)| !options.memory.is_empty()).collect()
    }

    /// Rejects options that no device can measure.
    fn check(&self) -> Result<(), Failure> {
        if self.sizes.iter().chain(&self.block).chain([&self.background]).any(|size| size.is_zero()) {
            return Err(Failure::usage(
                "bench copy: --sizes, --block and --background take sizes from 1 byte up, and one is 0",
            ));
        }
        let scattered = self.memory.contains(&Memory::Scattered) && !self.overhead && !self.critical;
        match self.block {
            Some(block) if !scattered => Err(Failure::usage(format!(
                "bench copy: --block {} is the size of scattered blocks, and none are measured: add --memory scattered",
                block.get()
            ))),
            Some(block) if block < LEAST_BLOCK => Err(Failure::usage(format!(
                "bench copy: --block {}: scattered blocks have {LEAST_BLOCK} or more; write --block {}",
                block.get(),
                LEAST_BLOCK.get()
            ))),
            _ => Ok(()),
        }
    }
}

/// No copy may be cut into more blocks than are measured.
fn check_blocks(options: &CopyOptions) -> Result<(), Failure> {
    let scattered = options.memory.contains(&CopyMemory::Scattered);
    let Some(largest) = options.sizes.iter().max().filter(|_| scattered) else { return Ok(()) };
    let (block, count) = (options.block.get(), largest.get().div_ceil(options.block.get()));
    if count <= MOST_BLOCKS {
        return Ok(());
    }
    let enough = largest.get().div_ceil(MOST_BLOCKS).next_power_of_two();
    Err(Failure::usage(format!(
        "bench copy: --block {block}: {largest} of it are {count} blocks, and {MOST_BLOCKS} are measured at most; write --block \
         {enough} or smaller --sizes"
    )))
}

/// Kind of copy measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measurement {
    Copy,
    Model,
    Overhead,
    Critical,
}

pub(super) fn run(
    arguments: &CopyArguments,
    config: &Config,
    output: &mut Output,
    library: Option<PathBuf>,
) -> Result<(), Failure> {
    arguments.check()?;
    let backend = super::found(config)?;
    let simulated = matches!(backend, Backend::Sim { .. });
    let measurements = arguments.measurements(simulated, library);
    measurements.iter().try_for_each(|(_, options)| check_blocks(options))?;
    for (measurement, options) in measurements {
        if simulated {
            output.text(&title(&backend.name(), measurement))?;
        }
        measure(measurement, &backend, config, &options, output)?;
    }
    Ok(())
}

/// Returns a title that says what the times mean on simulated GPUs.
fn title(device: &str, measurement: Measurement) -> String {
    match measurement {
        Measurement::Model => {
            format!("{device} in virtual time: what the model's links give, not a measurement")
        }
        _ => format!(
            "{device} in real time: the times are of this machine's memory, and say nothing of a GPU's"
        ),
    }
}

fn measure(
    measurement: Measurement,
    backend: &Backend,
    config: &Config,
    options: &CopyOptions,
    output: &mut Output,
) -> Result<(), Failure> {
    let steps = options.directions.len() * options.memory.len() * options.sizes.len();
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
                progress.pause(|| note(text));
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
    let measured = match measurement {
        Measurement::Copy => bench::copy(backend, config, options, news),
        Measurement::Model => bench::copy_in_virtual_time(backend, config, options, news),
        Measurement::Overhead => bench::overhead(backend, config, options, news),
        Measurement::Critical => bench::critical(backend, config, options, news),
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
        (Err(error), None) if error.is_usage() => Err(Failure::usage(format!("bench copy: {error}"))),
        (measured, None) => measured.map_err(Failure::failed),
    }
}

fn copy_table(reports: &[CopyReport]) -> String {
    // Virtual time stands still while the host works.
    let measured = !reports.iter().any(|report| report.virtual_time);
    let mut headers = vec![
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
    ];
    headers.extend(["call us", "cores"].iter().filter(|_| measured));
    let row = |report: &CopyReport| {
        let mut row = vec![
            direction_name(report.direction).to_owned(),
            format!("{:?}", report.memory).to_lowercase(),
            Bytes::new(report.bytes).to_string(),
            report.paths.to_string(),
            format!("{:.1}", report.native_gbps),
            format!("{:.1}", report.engine_gbps),
            format!("{:.1}", report.limit_gbps),
            format!("{:.2}", report.native_us / report.engine_us),
            format!("{:.2}", report.limit_us / report.engine_us),
            format!("{:.1}", report.engine_us),
        ];
        if measured {
            row.extend([format!("{:.1}", report.host_us), format!("{:.2}", report.cpu_cores)]);
        }
        row
    };
    table(2, &headers, &reports.iter().map(row).collect::<Vec<_>>())
}

fn overhead_table(reports: &[OverheadReport]) -> String {
    let headers =
        ["direction", "bytes", "native us", "engine us", "more us", "native call us", "engine call us"];
    let row = |report: &OverheadReport| {
        vec![
            direction_name(report.direction).to_owned(),
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
            direction_name(report.direction).to_owned(),
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

fn direction_name(direction: CopyDirection) -> &'static str {
    match direction {
        CopyDirection::H2d => "h2d",
        CopyDirection::D2h => "d2h",
    }
}
