//! `glake bench copy`: copies through `libgmlake.so`, next to the driver's own copies and to the limit of the links.
//!
//! ```text
//! a run:  native   one copy of the driver's           host ══link 0══► GPU 0
//!         engine   one copy through the C interface   host ══links 0 to 3══► GPU 0
//!         limit    each GPU its own share to itself   host ══link k══► GPU k, all at once
//! ```
//!
//! The three take turns in every run, so that a disturbance affects all of them; the reports contain medians. Times are taken on the host,
//! from the first call until the stream is done. The simulated device has no driver: native copies are then the library's own with
//! `GLAKE_COPY_DIRECT`, and times are those of this machine's memory. [`copy_in_virtual_time`] uses the model instead of the library.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use glake_abi::client::{CudaAllocator, Gmlake};
use glake_runtime::backend::Backend;
use glake_runtime::config::{Config, Gpu, MultiPath};
use glake_units::Bytes;
use harness::{Case, Harness};
use serde::Serialize;

use super::BenchError;
use super::library::start;
use super::times::gbps;
use crate::rig::{check, check_host_memory};

pub use model::copy_in_virtual_time;

mod harness;
mod model;
mod rounds;

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CopyDirection {
    /// From the host to the device.
    H2d,
    /// From the device to the host.
    D2h,
}

/// Memory kind of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CopyMemory {
    /// Pinned, and of the pool.
    Pool,
    /// Pinned, and of `cuMemAlloc`.
    Foreign,
    /// Pinned, and of `cuMemAllocAsync`.
    Mempool,
    /// Pageable, and of the pool.
    Pageable,
    /// Like `pool`, in many blocks at scattered addresses.
    Scattered,
    /// Like `pool`, to every GPU at once.
    Broadcast,
}

impl CopyMemory {
    /// Returns the driver's allocator of the memory; `None` for pool memory.
    pub(crate) fn allocator(self) -> Option<CudaAllocator> {
        match self {
            CopyMemory::Foreign => Some(CudaAllocator::Plain),
            CopyMemory::Mempool => Some(CudaAllocator::Mempool),
            CopyMemory::Pool | CopyMemory::Pageable | CopyMemory::Scattered | CopyMemory::Broadcast => None,
        }
    }
}

/// Options of `glake bench copy`.
#[derive(Clone, Debug)]
pub struct CopyOptions {
    /// Directions of the copies to measure.
    pub directions: Vec<CopyDirection>,
    /// Memory kinds to measure.
    pub memory: Vec<CopyMemory>,
    /// Sizes of the copies to measure.
    pub sizes: Vec<Bytes>,
    /// Number of GPUs that take part, the measured one included; `None`: all.
    pub paths: Option<u32>,
    /// Index of the GPU to measure.
    pub target: u32,
    /// Number of timed repetitions.
    pub runs: u32,
    /// The size of a scattered block: [`LEAST_BLOCK`] or more, and [`MOST_BLOCKS`] at most.
    pub block: Bytes,
    /// Size of the background copies next to which a critical copy is measured.
    pub background: Bytes,
    /// The library's file; `None`: the one beside the program.
    pub library: Option<PathBuf>,
}

/// Minimum size of a scattered block: pool memory comes in multiples of it.
pub const LEAST_BLOCK: Bytes = Bytes::new(512);
/// Maximum number of blocks per copy: the driver's copy needs one call per block.
pub const MOST_BLOCKS: u64 = 1 << 20;

/// Progress and results of a measurement.
#[derive(Clone, Debug)]
pub enum CopyNews {
    /// Next measurement, and the number of completed ones.
    Next(String, u64),
    /// Note on the results.
    Note(String),
    /// Result of a measurement.
    Copy(CopyReport),
    /// A measurement of `overhead`.
    Overhead(OverheadReport),
    /// A measurement of `critical`.
    Critical(CriticalReport),
}

impl CopyNews {
    /// Returns a note on the origin of the paths.
    fn paths(calibrated: bool) -> CopyNews {
        CopyNews::Note(match calibrated {
            true => "the paths are calibrated".to_owned(),
            false => "the paths are assumed, not calibrated: glake topo --calibrate measures them".to_owned(),
        })
    }
}

/// Measures copies, one report for each direction, memory and size.
///
/// # Errors
/// [`BenchError`]: the library or its device cannot be had, a copy fails, or bytes differ.
pub fn copy(
    backend: &Backend,
    config: &Config,
    options: &CopyOptions,
    mut news: impl FnMut(CopyNews) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let (bench, calibrated) = Bench::start(backend, config, options, &mut news)?;
    let harness = bench.harness(options)?;
    for (done, case) in (0..).zip(cases(options)) {
        news(CopyNews::Next(case.name(), done))?;
        let times = rounds::measure(&harness, &case, options.runs)?;
        let gbps = |us| gbps(case.size.get(), us);
        news(CopyNews::Copy(CopyReport {
            device: bench.name.clone(),
            virtual_time: false,
            target: options.target,
            direction: case.direction,
            memory: case.memory,
            bytes: case.size.get(),
            paths: times.paths,
            runs: options.runs,
            native_gbps: gbps(times.native_us),
            limit_gbps: gbps(times.limit_us),
            engine_gbps: gbps(times.engine_us),
            native_us: times.native_us,
            limit_us: times.limit_us,
            engine_us: times.engine_us,
            host_us: times.host_us,
            cpu_cores: times.cpu_cores,
            calibrated,
            verified: true,
        }))?;
    }
    Ok(())
}

/// Measures what a copy below the break-even costs more than the driver's own.
///
/// # Errors
/// As [`copy`].
pub fn overhead(
    backend: &Backend,
    config: &Config,
    options: &CopyOptions,
    mut news: impl FnMut(CopyNews) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let (bench, _) = Bench::start(backend, config, options, &mut news)?;
    let harness = bench.harness(options)?;
    for (done, case) in (0..).zip(cases(options)) {
        news(CopyNews::Next(case.name(), done))?;
        let report = rounds::overhead(&harness, &case, options, bench.name.clone())?;
        news(CopyNews::Overhead(report))?;
    }
    Ok(())
}

/// Measures what a critical copy takes while background copies keep every link busy.
///
/// # Errors
/// As [`copy`].
pub fn critical(
    backend: &Backend,
    config: &Config,
    options: &CopyOptions,
    mut news: impl FnMut(CopyNews) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let (bench, _) = Bench::start(backend, config, options, &mut news)?;
    let harness = bench.harness(options)?;
    let busy = (0..rounds::STREAMS).map(|_| bench.harness(options)).collect::<Result<Vec<_>, _>>()?;
    for (done, case) in (0..).zip(cases(options)) {
        news(CopyNews::Next(case.name(), done))?;
        let report = rounds::critical(&harness, &busy, &case, options, bench.name.clone())?;
        news(CopyNews::Critical(report))?;
    }
    Ok(())
}

/// Returns all cases: every memory and size in each direction; a broadcast goes to the GPUs only.
fn cases(options: &CopyOptions) -> impl Iterator<Item = Case> {
    let ways =
        options.memory.iter().flat_map(|memory| options.directions.iter().map(move |way| (*memory, *way)));
    let there = ways.filter(|(memory, way)| (*memory, *way) != (CopyMemory::Broadcast, CopyDirection::D2h));
    there.flat_map(move |(memory, direction)| {
        options.sizes.iter().map(move |&size| Case { memory, direction, size, block: options.block })
    })
}

/// Library started for measurements.
struct Bench {
    name: String,
    library: Gmlake,
}

impl Bench {
    /// Starts the library on a backend, waits until its relays are ready and wakes the links. Returns whether the paths are calibrated.
    fn start(
        backend: &Backend,
        config: &Config,
        options: &CopyOptions,
        news: &mut impl FnMut(CopyNews) -> Result<(), BenchError>,
    ) -> Result<(Bench, bool), BenchError> {
        let mut config = config.clone();
        let devices = u32::try_from(backend.topology()?.devices.len()).unwrap_or(u32::MAX);
        check(devices, options.target, options.paths)?;
        let largest = options.sizes.iter().copied().max().unwrap_or(Bytes::ZERO);
        // Host memory, the measured GPU's, and as much on the others; of pageable memory also a pinned copy.
        let others = if options.memory.contains(&CopyMemory::Broadcast) { devices.into() } else { 1 };
        check_host_memory(backend, Bytes::new(largest.get().saturating_mul(3 + others)))?;
        let paths = options.paths.unwrap_or(u32::MAX);
        // This program is one process, whichever launcher started it: local ranks do not count.
        if config.transfer.multi_path != MultiPath::Never {
            config.transfer.multi_path = if paths > 1 { MultiPath::Always } else { MultiPath::Never };
        }
        // The limit is measured with memory on every GPU.
        config.transfer.shared_gpus = true;
        let others = (0..devices).filter(|device| *device != options.target);
        let beyond = others.skip(usize::try_from(paths.saturating_sub(1)).unwrap_or(usize::MAX));
        config.transfer.exclude.extend(beyond.map(Gpu::Index));
        let mut library = start(options.library.as_deref(), backend, config)?;
        if !matches!(backend, Backend::Sim { .. }) {
            library.load_driver()?;
        }
        let bench = Bench { name: backend.name(), library };
        let calibrated = bench.wait_for_relays(options, news)?;
        rounds::wake(&bench.harness(options)?)?;
        Ok((bench, calibrated))
    }

    fn harness(&self, options: &CopyOptions) -> Result<Harness<'_>, BenchError> {
        Harness::new(&self.library, options)
    }

    /// Waits until the relays are ready, which the first copies of a program do not. Returns whether the paths are calibrated.
    fn wait_for_relays(
        &self,
        options: &CopyOptions,
        news: &mut impl FnMut(CopyNews) -> Result<(), BenchError>,
    ) -> Result<bool, BenchError> {
        const TIMEOUT: Duration = Duration::from_secs(30);
        let is = |key: &str| -> Result<bool, BenchError> { Ok(copy_stats(&self.library)?[key] == true) };
        let devices = self.library.device_count()?;
        if options.paths.unwrap_or(u32::MAX).min(devices) > 1 {
            self.library.enable_multi_path()?;
            let begin = Instant::now();
            while !is("ready")? {
                if begin.elapsed() > TIMEOUT {
                    news(CopyNews::Note("no GPU became a relay: copies take one link each".to_owned()))?;
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let calibrated = is("calibrated")?;
        news(CopyNews::paths(calibrated))?;
        Ok(calibrated)
    }
}

/// Returns the library's statistics of copies.
fn copy_stats(library: &Gmlake) -> Result<serde_json::Value, BenchError> {
    Ok(serde_json::from_str(&library.copy_stats()?).unwrap_or_default())
}

/// Result of one measurement.
#[derive(Clone, Debug, Serialize)]
pub struct CopyReport {
    /// Backend of the GPUs.
    pub device: String,
    /// Whether the times come from the model instead of a measurement.
    pub virtual_time: bool,
    /// GPU that was measured.
    pub target: u32,
    /// Direction of the copy.
    pub direction: CopyDirection,
    /// Memory kind of the copy.
    pub memory: CopyMemory,
    /// Bytes that arrived, on one GPU of a broadcast.
    pub bytes: u64,
    /// Number of links that the engine's copies used, the target's own included.
    pub paths: u32,
    /// Number of timed repetitions.
    pub runs: u32,
    /// Rate of the driver's copy at the median time, in GB/s (10^9 bytes per second).
    pub native_gbps: f64,
    /// Rate of all GPUs copying their own shares at once.
    pub limit_gbps: f64,
    /// Rate of the engine.
    pub engine_gbps: f64,
    /// Median time of the driver's copy in microseconds.
    pub native_us: f64,
    /// Median time of all GPUs copying their own shares, in microseconds.
    pub limit_us: f64,
    /// Median time of the engine's copy in microseconds.
    pub engine_us: f64,
    /// Median time until the engine's call returned, in microseconds; 0 in virtual time, which does not pass during calls.
    pub host_us: f64,
    /// Processor time of this process while the engine's copies ran, in cores; 0 in virtual time.
    pub cpu_cores: f64,
    /// Whether the rates of the paths were measured instead of assumed.
    pub calibrated: bool,
    /// Whether the bytes were compared after the engine's copies: always where copies were measured; in virtual time up to 64 MiB.
    pub verified: bool,
}

/// Overhead of a copy below the break-even.
#[derive(Clone, Debug, Serialize)]
pub struct OverheadReport {
    /// Backend of the GPUs.
    pub device: String,
    /// GPU that was measured.
    pub target: u32,
    /// Direction of the copy.
    pub direction: CopyDirection,
    /// Size of the copy.
    pub bytes: u64,
    /// Number of timed repetitions, in turns.
    pub runs: u32,
    /// Median time from the driver's call until the stream is done, in microseconds.
    pub native_us: f64,
    /// Median time of the library's copy, in microseconds.
    pub engine_us: f64,
    /// Median difference between neighbouring copies of the library and the driver, in microseconds.
    pub overhead_us: f64,
    /// Median time until the driver's call returned, in microseconds.
    pub native_call_us: f64,
    /// Median time until the library's call returned, in microseconds.
    pub engine_call_us: f64,
}

/// Time of a critical copy next to background copies.
#[derive(Clone, Debug, Serialize)]
pub struct CriticalReport {
    /// Backend of the GPUs.
    pub device: String,
    /// GPU that was measured.
    pub target: u32,
    /// Direction of the copy.
    pub direction: CopyDirection,
    /// Size of the copy.
    pub bytes: u64,
    /// Number of timed repetitions.
    pub runs: u32,
    /// Median time of the driver's copy alone, from the call until the stream is done, in microseconds.
    pub native_us: f64,
    /// 99th percentile of the time of the driver's copy alone, in microseconds.
    pub native_p99_us: f64,
    /// Median time of a critical copy alone, in microseconds.
    pub alone_us: f64,
    /// 99th percentile of the time of a critical copy alone, in microseconds.
    pub alone_p99_us: f64,
    /// Median time of a critical copy next to background copies, in microseconds.
    pub beside_us: f64,
    /// 99th percentile of the time of a critical copy next to background copies, in microseconds.
    pub beside_p99_us: f64,
    /// Time until the call returned, alone, at the 99th percentile.
    pub alone_call_p99_us: f64,
    /// Time until the call returned, next to background copies, at the 99th percentile.
    pub beside_call_p99_us: f64,
    /// Size of the background copies.
    pub background_bytes: u64,
    /// Rate of the background copies meanwhile, in GB/s (10^9 bytes per second).
    pub background_gbps: f64,
    /// Whether the bytes were compared; always true in a report.
    pub verified: bool,
}
