//! `glake bench shrink`: a region leaves its GPU and comes back, beside what one link gives in the same run.
//!
//! ```text
//! a tier:  first    shrink ─► refill ─► compare            nothing pinned before, unless it is prepared
//!          warm     link d2h ─► link h2d ─► shrink ─► refill ─► compare      runs times, medians told
//!          freed    everything ─► what the GPUs have less than before is leaked
//! ```
//!
//! Each is timed on the host from the call until it returns, mappings included. It is the process's own region, pool and
//! engine, without the C interface between: the library and Python do the same by the same calls.

mod harness;
mod rounds;

use std::collections::BTreeMap;
use std::path::PathBuf;

use glake_device::{Count, Counters};
use glake_units::Bytes;
use serde::Serialize;

use super::BenchError;
use super::times::{gbps, us};
use glake_runtime::backend::Backend;
use glake_runtime::config::Config;
use harness::Harness;
use rounds::Phased;

/// Direction of a region's move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ShrinkPhase {
    /// Out of its GPU.
    Shrink,
    /// Back to its GPU.
    Refill,
}

/// Destination of a region's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ShrinkTier {
    /// To pinned memory of the host.
    Host,
    /// To another GPU's memory.
    Peer,
    /// Files on a disk.
    File,
}

/// Options of `glake bench shrink`.
#[derive(Clone, Debug)]
pub struct ShrinkOptions {
    /// The region's bytes; `None`: 16 GiB, or 64 MiB where GPUs are simulated.
    pub bytes: Option<Bytes>,
    /// In how many blocks, which are about equal.
    pub tensors: u32,
    /// Destinations, one measurement each.
    pub tiers: Vec<ShrinkTier>,
    /// Number of GPUs whose links serve the copies, the region's own included; `None`: all.
    pub paths: Option<u32>,
    /// Index of the GPU to measure.
    pub target: u32,
    /// Number of shrink and refill cycles after the first.
    pub runs: u32,
    /// Whether host memory is pinned before the first shrink.
    pub prepare: bool,
    /// Whether the region is sealed, so that it goes without copies once one is there.
    pub sealed: bool,
    /// Whether digests of the bytes are taken before they leave and compared when they are back, as the product does on demand.
    pub verify: bool,
    /// The GPU that lends its memory; `None`: the first other one.
    pub peer: Option<u32>,
    /// Folder of the files; `None`: a new folder among the system's temporary files.
    pub folder: Option<PathBuf>,
}

/// Result for one direction of one tier: the first cycle, or the median of the others.
#[derive(Clone, Debug, Serialize)]
pub struct ShrinkReport {
    /// Backend of the GPUs.
    pub device: String,
    /// GPU that was measured.
    pub target: u32,
    /// Direction of the move.
    pub phase: ShrinkPhase,
    /// Destination of the bytes.
    pub tier: ShrinkTier,
    /// Size of the region.
    pub bytes: u64,
    /// In how many blocks.
    pub tensors: u32,
    /// Number of links between host and GPUs that carried bytes, the target's own included; at least 1.
    pub paths: u32,
    /// Whether it was not the first time.
    pub warm: bool,
    /// Number of cycles behind the median.
    pub runs: u32,
    /// 10^9 bytes a second of one copy of the driver's over the target's own link, the same way, the median of this tier's.
    pub link_gbps: f64,
    /// The region's bytes by the time until the call returned.
    pub gbps: f64,
    /// Duration of the phase in microseconds.
    pub us: f64,
    /// Bytes copied in the last cycle.
    pub copied_bytes: u64,
    /// The driver's calls of the last time, by their names.
    pub driver: BTreeMap<&'static str, DriverCalls>,
    /// Decrease of free memory, on the GPU and the one that lent its memory, since before the tier was measured. Read after everything was
    /// freed.
    pub leaked_bytes: u64,
    /// Whether host memory was pinned before the first time.
    pub prepared: bool,
    /// Whether it was sealed.
    pub sealed: bool,
    /// Whether digests were taken and compared, timed with the rest.
    pub checked: bool,
    /// Whether the paths were calibrated, and not assumed.
    pub calibrated: bool,
    /// Whether every byte was compared after each refill: always, or there is no report.
    pub verified: bool,
}

/// Calls of one kind.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DriverCalls {
    /// Number of driver calls.
    pub calls: u64,
    /// Time on the host in microseconds, waits included.
    pub us: f64,
}

/// Progress and results of a measurement.
#[derive(Clone, Debug)]
pub enum ShrinkNews {
    /// Next step, and the number of completed ones.
    Next(String, u64),
    /// Something to know about the results.
    Note(String),
    /// Result of a measurement.
    Shrink(ShrinkReport),
}

/// Tells of a step that begins.
type Say<'a> = &'a mut dyn FnMut(String) -> Result<(), BenchError>;

/// Returns the number of steps of a measurement.
pub fn shrink_steps(options: &ShrinkOptions) -> u64 {
    // The first time, the others, and the bytes before them.
    options.tiers.len() as u64 * (u64::from(options.runs.max(1)) + 2)
}

/// Measures shrinks and refills, four reports for each tier: each direction, the first time and warm.
///
/// # Errors
/// [`BenchError`]: the GPU is not there or has no room, a shrink or a refill fails, something stays, or bytes differ.
pub fn shrink(
    backend: &Backend,
    config: &Config,
    options: &ShrinkOptions,
    mut news: impl FnMut(ShrinkNews) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let harness = Harness::open(backend, config, options)?;
    for note in harness.notes() {
        news(ShrinkNews::Note(note))?;
    }
    let mut step = 0;
    for &tier in &options.tiers {
        let mut say = |what: String| {
            news(ShrinkNews::Next(what, step))?;
            step += 1;
            Ok(())
        };
        let before = harness.free_memory(tier)?;
        let measured = rounds::measure(&harness, config, options, tier, &mut say)?;
        let leaked = before.saturating_sub(harness.free_memory(tier)?);
        for Phased { phase, warm, runs, us, link_us, copied, paths, calls } in measured {
            news(ShrinkNews::Shrink(ShrinkReport {
                device: backend.name(),
                target: options.target,
                phase,
                tier,
                bytes: harness.bytes().get(),
                tensors: options.tensors,
                paths,
                warm,
                runs,
                link_gbps: gbps(harness.link_size().get(), link_us),
                gbps: gbps(harness.bytes().get(), us),
                us,
                copied_bytes: copied.get(),
                driver: driver_calls(&calls),
                leaked_bytes: leaked.get(),
                prepared: options.prepare && tier != ShrinkTier::Peer,
                sealed: options.sealed,
                checked: options.verify,
                calibrated: harness.is_calibrated(),
                verified: true,
            }))?;
        }
    }
    Ok(())
}

fn driver_calls(counters: &Counters) -> BTreeMap<&'static str, DriverCalls> {
    let of = |count: Count| DriverCalls { calls: count.calls, us: us(count.time) };
    counters.iter().map(|(verb, count)| (verb.name(), of(count))).collect()
}
