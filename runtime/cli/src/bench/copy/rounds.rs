//! Native, engine and limit in turns, and their medians.

use std::time::{Duration, Instant};

use glake_client::Timed;
use glake_units::Bytes;

use super::super::links::changed;
use super::super::times::{median, us};
use super::harness::{Case, Harness, Work};
use super::{BenchError, CopyDirection, CopyMemory};

/// Medians of the rounds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) native_us: f64,
    pub(super) limit_us: f64,
    pub(super) engine_us: f64,
    pub(super) host_us: f64,
    pub(super) cpu_cores: f64,
    pub(super) paths: u32,
}

/// Work that is watched for its processor time takes at least so long.
const WATCHED: Duration = Duration::from_millis(50);
/// Maximum number of copies.
const MOST: u32 = 500;
/// Time that idle GPUs take to reach full speed.
const WAKING: Duration = Duration::from_millis(500);
/// A stream gets its paths in the background once it has asked for them; small copies may never ask.
const TIMEOUT: Duration = Duration::from_millis(300);

/// Measures one case over several runs.
///
/// # Errors
/// Errors of the library; [`BenchError::Differs`].
pub(super) fn measure<'a>(harness: &'a Harness<'a>, case: &Case, runs: u32) -> Result<Times, BenchError> {
    let mut field = harness.field(*case)?;
    field.verify(1)?;
    let timed =
        |work: Work<'_>| -> Result<Timed, BenchError> { Ok(harness.library.timed(harness.cuda, &work, 0)?) };
    warm_up(harness, &field.engine(), 0)?;
    let before = paths(harness)?;
    let (mut native, mut engine, mut limit, mut host) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for run in 0..runs.max(1) {
        for turn in 0..3 {
            match (run + turn) % 3 {
                0 => native.push(us(timed(field.native())?.done)),
                1 => {
                    let time = timed(field.engine())?;
                    engine.push(us(time.done));
                    host.push(us(time.issued));
                }
                _ => limit.push(us(timed(field.limit())?.done)),
            }
        }
    }
    let links = changed(&before, &paths(harness)?);
    let engine_us = median(engine);
    let cpu_cores = cores(harness, &field.engine(), engine_us)?;
    field.verify(2)?;
    Ok(Times {
        native_us: median(native),
        limit_us: median(limit),
        engine_us,
        host_us: median(host),
        cpu_cores,
        paths: links,
    })
}

/// Keeps every link busy for a moment: GPUs that were idle begin some 10 us later at first, which small copies would be blamed for.
/// Simulated ones do not.
pub(super) fn wake(harness: &Harness<'_>) -> Result<(), BenchError> {
    if harness.cuda.is_none() {
        return Ok(());
    }
    let case = Case {
        memory: CopyMemory::Pool,
        direction: CopyDirection::H2d,
        size: Bytes::mib(4),
        block: Bytes::kib(16),
    };
    let field = harness.field(case)?;
    let begin = Instant::now();
    while begin.elapsed() < WAKING {
        harness.library.timed(harness.cuda, &field.limit(), 0)?;
    }
    Ok(())
}

/// Copies until more than one link takes part.
pub(super) fn warm_up(harness: &Harness<'_>, work: &Work<'_>, flags: u32) -> Result<(), BenchError> {
    let (before, begin) = (paths(harness)?, Instant::now());
    while harness.gpus() > 1 && begin.elapsed() < TIMEOUT {
        harness.library.timed(harness.cuda, work, flags)?;
        if changed(&before, &paths(harness)?) > 1 {
            break;
        }
    }
    Ok(())
}

/// Processor time a time while the engine copies and nobody waits in a loop: copies in a row, enqueued and slept over.
fn cores(harness: &Harness<'_>, work: &Work<'_>, engine_us: f64) -> Result<f64, BenchError> {
    let wanted = (us(WATCHED) / engine_us.max(1.0)).ceil().clamp(1.0, f64::from(MOST));
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // between 1 and 500
    let times = wanted as u32;
    let nap = Duration::from_secs_f64(engine_us * wanted * 0.95 / 1e6);
    let before = processor_time();
    let took = harness.library.repeated(harness.cuda, work, 0, times, nap)?;
    let spent = processor_time().saturating_sub(before);
    Ok(spent.as_secs_f64() / took.as_secs_f64())
}

/// Returns the processor time of all threads of this process so far.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Bytes by the link that they went over, and which way.
fn paths(harness: &Harness<'_>) -> Result<Vec<(String, u64)>, BenchError> {
    let stats: serde_json::Value = serde_json::from_str(&harness.library.copy_stats()?).unwrap_or_default();
    let path = |path: &serde_json::Value| {
        let name = format!("{} {}", path["relay"], path["direction"]);
        (name, path["bytes"].as_u64().unwrap_or(0))
    };
    Ok(stats["paths"].as_array().map_or_else(Vec::new, |paths| paths.iter().map(path).collect()))
}
