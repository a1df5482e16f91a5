//! The first shrink and refill, then others with one link's copies in turns, and their medians.

use std::time::{Duration, Instant};

use glake_device::Counters;
use glake_units::Bytes;

use super::super::times::{median, us};
use super::harness::{Field, Harness};
use super::{BenchError, Say, ShrinkOptions, ShrinkPhase, ShrinkTier};
use crate::bench::times::changed;
use glake_runtime::config::Config;

/// Result for one direction: the first cycle, or all others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Phased {
    pub(super) phase: ShrinkPhase,
    pub(super) warm: bool,
    pub(super) runs: u32,
    pub(super) us: f64,
    pub(super) link_us: f64,
    pub(super) copied: Bytes,
    pub(super) paths: u32,
    /// The driver's calls of the last time.
    pub(super) calls: Counters,
}

/// Timing of one move in one direction.
#[derive(Clone, Copy, Debug)]
struct Once {
    us: f64,
    copied: Bytes,
    paths: u32,
    calls: Counters,
}

/// Measures one tier; everything is freed when it returns.
///
/// # Errors
/// What the region answers; [`BenchError::Stayed`], [`BenchError::Differs`].
pub(super) fn measure(
    harness: &Harness,
    config: &Config,
    options: &ShrinkOptions,
    tier: ShrinkTier,
    say: Say<'_>,
) -> Result<Vec<Phased>, BenchError> {
    let name = format!("{tier:?}").to_lowercase();
    say(format!("{name}: {} in {} tensors", harness.bytes(), options.tensors))?;
    let field = Field::new(harness, config, options, tier)?;
    say(format!("{name}: the first time"))?;
    let first = out_and_in(harness, &field, &name)?;
    let (mut warm, mut links) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let phases = [ShrinkPhase::Shrink, ShrinkPhase::Refill];
    let runs = options.runs.max(1);
    for run in 1..=runs {
        say(format!("{name}: {run} of {runs}"))?;
        for (times, phase) in links.iter_mut().zip(phases) {
            times.push(harness.link_us(phase)?);
        }
        for (times, once) in warm.iter_mut().zip(out_and_in(harness, &field, &name)?) {
            times.push(once);
        }
    }
    field.end()?;
    let links = links.map(median);
    let told = |warm: bool, runs, phase, link_us, once: Once, us| Phased {
        phase,
        warm,
        runs,
        us,
        link_us,
        copied: once.copied,
        paths: once.paths,
        calls: once.calls,
    };
    let mut measured = Vec::new();
    for ((phase, once), link) in phases.into_iter().zip(first).zip(links) {
        measured.push(told(false, 1, phase, link, once, once.us));
    }
    for ((phase, all), link) in phases.into_iter().zip(&warm).zip(links) {
        let us = median(all.iter().map(|once| once.us).collect());
        measured.extend(all.last().map(|last| told(true, runs, phase, link, *last, us)));
    }
    Ok(measured)
}

/// Evicts, refills and compares the whole region.
fn out_and_in(harness: &Harness, field: &Field<'_>, name: &str) -> Result<[Once; 2], BenchError> {
    let (gone, out) = once(harness, || field.shrink())?;
    if !gone.resident.is_zero() {
        return Err(BenchError::Stayed { size: gone.resident, extents: gone.skipped.len() });
    }
    let (back, into) = once(harness, || field.refill())?;
    field.compare(name)?;
    Ok([Once { copied: gone.copied, ..out }, Once { copied: back.copied, ..into }])
}

/// Once, with its time and the links that it took; what it copied is told by the result.
fn once<T>(harness: &Harness, work: impl FnOnce() -> Result<T, BenchError>) -> Result<(T, Once), BenchError> {
    let (before, called) = (harness.carried(), harness.rig().calls());
    let (result, time) = timed(work)?;
    let paths = changed(&before, &harness.carried());
    let calls = harness.rig().calls().since(&called);
    Ok((result, Once { us: us(time), copied: Bytes::ZERO, paths, calls }))
}

fn timed<T>(work: impl FnOnce() -> Result<T, BenchError>) -> Result<(T, Duration), BenchError> {
    let begin = Instant::now();
    let result = work()?;
    Ok((result, begin.elapsed()))
}
