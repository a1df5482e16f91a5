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

mod field;
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

/// Which way a region goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ShrinkPhase {
    /// Out of its GPU.
    Shrink,
    /// Back.
    Refill,
}

/// Where its bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ShrinkTier {
    /// To pinned memory of the host.
    Host,
    /// To another GPU's memory.
    Peer,
    /// To files.
    File,
}

/// What `glake bench shrink` measures.
#[derive(Clone, Debug)]
pub struct ShrinkOptions {
    /// The region's bytes; `None`: 16 GiB, or 64 MiB where GPUs are simulated.
    pub bytes: Option<Bytes>,
    /// In how many blocks, which are about equal.
    pub tensors: u32,
    /// Where they go, one measurement each.
    pub tiers: Vec<ShrinkTier>,
    /// How many GPUs' links serve the copies, the region's own among them; `None`: all.
    pub paths: Option<u32>,
    /// Whose memory.
    pub target: u32,
    /// How often it goes and comes after the first time.
    pub runs: u32,
    /// Whether host memory is pinned before the first shrink.
    pub prepare: bool,
    /// Whether the region is sealed, so that it goes without copies once one is there.
    pub sealed: bool,
    /// Whether digests of the bytes are taken before they leave and compared when they are back, as the product does on demand.
    pub verify: bool,
    /// The GPU that lends its memory; `None`: the first other one.
    pub peer: Option<u32>,
    /// Where files lie; `None`: a folder of its own among the system's temporary files.
    pub folder: Option<PathBuf>,
}

/// One direction of one tier, the first time or the median of the others.
#[derive(Clone, Debug, Serialize)]
pub struct ShrinkReport {
    /// The backend.
    pub device: String,
    /// Whose memory.
    pub target: u32,
    /// Which way.
    pub phase: ShrinkPhase,
    /// Where its bytes go.
    pub tier: ShrinkTier,
    /// The region's bytes.
    pub bytes: u64,
    /// In how many blocks.
    pub tensors: u32,
    /// How many links between the host and GPUs carried something, the target's own too; 1 where none had to.
    pub paths: u32,
    /// Whether it was not the first time.
    pub warm: bool,
    /// Of how many times it is the median.
    pub runs: u32,
    /// 10^9 bytes a second of one copy of the driver's over the target's own link, the same way, the median of this tier's.
    pub link_gbps: f64,
    /// The region's bytes by the time until the call returned.
    pub gbps: f64,
    /// That time, in microseconds.
    pub us: f64,
    /// What was copied, of the last time.
    pub copied_bytes: u64,
    /// The driver's calls of the last time, by their names.
    pub driver: BTreeMap<&'static str, DriverCalls>,
    /// What the GPU, and the one that lent its memory, have less than before the tier was measured, after everything was freed.
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
    /// How many.
    pub calls: u64,
    /// How long they took on the host, in microseconds, waits included.
    pub us: f64,
}

/// What is told while it measures.
#[derive(Clone, Debug)]
pub enum ShrinkNews {
    /// What is done next, of so many steps done.
    Next(String, u64),
    /// Something to know about the results.
    Note(String),
    /// A measurement.
    Shrink(ShrinkReport),
}

/// Tells of a step that begins.
type Say<'a> = &'a mut dyn FnMut(String) -> Result<(), BenchError>;

/// How many steps a measurement has.
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
