//! Measurements of one case: native, engine and limit in turns, with their medians; the overhead of small copies; and a critical copy
//! alone and while background copies keep every link busy.
//!
//! ```text
//!   two threads, a stream each   ═══ background ══════ background ══════ background ═══
//!   this one, after each rest        ┤critical├        ┤critical├        ┤critical├
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use glake_abi::client::Work;
use glake_abi::{GLAKE_COPY_BACKGROUND, GLAKE_COPY_CRITICAL};
use glake_units::Bytes;

use super::super::times::{changed, gbps, median, percentile, us};
use super::harness::{Case, Field, Harness};
use super::{BenchError, CopyDirection, CopyMemory, CopyOptions, CriticalReport, OverheadReport, copy_stats};

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

/// Minimum duration of work whose processor time is measured.
const WATCHED: Duration = Duration::from_millis(50);
/// Maximum number of copies.
const MOST: u32 = 500;
/// Time that idle GPUs take to reach full speed.
const WAKING: Duration = Duration::from_millis(500);
/// Timeout for a stream's paths, which are set up in the background after the first large copy.
const TIMEOUT: Duration = Duration::from_millis(300);

/// Measures one case over several runs.
///
/// # Errors
/// Errors of the library; [`BenchError::Differs`].
pub(super) fn measure<'a>(harness: &'a Harness<'a>, case: &Case, runs: u32) -> Result<Times, BenchError> {
    let mut field = harness.field(*case)?;
    field.verify(1)?;
    warm_up(harness, &field.engine(), 0)?;
    let before = paths(harness)?;
    let (mut native, mut engine, mut limit, mut host) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for run in 0..runs.max(1) {
        for turn in 0..3 {
            match (run + turn) % 3 {
                0 => native.push(us(harness.timed(&field.native(), 0)?.done)),
                1 => {
                    let time = harness.timed(&field.engine(), 0)?;
                    engine.push(us(time.done));
                    host.push(us(time.issued));
                }
                _ => limit.push(us(harness.timed(&field.limit(), 0)?.done)),
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

/// Keeps every link busy for a moment. The first copies of idle GPUs begin about 10 us late, which would distort small copies. Does nothing
/// on the simulated device.
pub(super) fn wake(harness: &Harness<'_>) -> Result<(), BenchError> {
    if !harness.library.has_driver() {
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
        harness.timed(&field.limit(), 0)?;
    }
    Ok(())
}

/// Copies until more than one link takes part.
pub(super) fn warm_up(harness: &Harness<'_>, work: &[Work<'_>], flags: u32) -> Result<(), BenchError> {
    let (before, begin) = (paths(harness)?, Instant::now());
    while harness.gpus() > 1 && begin.elapsed() < TIMEOUT {
        harness.timed(work, flags)?;
        if changed(&before, &paths(harness)?) > 1 {
            break;
        }
    }
    Ok(())
}

/// Returns the average number of processor cores in use during the engine's copies. The measuring thread sleeps while a row of copies runs,
/// instead of polling.
fn cores(harness: &Harness<'_>, work: &[Work<'_>], engine_us: f64) -> Result<f64, BenchError> {
    let wanted = (us(WATCHED) / engine_us.max(1.0)).ceil().clamp(1.0, f64::from(MOST));
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // between 1 and 500
    let times = wanted as usize;
    let all: Vec<Work<'_>> = work.iter().cycle().take(work.len() * times).cloned().collect();
    let nap = Duration::from_secs_f64(engine_us * wanted * 0.95 / 1e6);
    let before = processor_time();
    let took = harness.library.timed(&all, 0, nap)?.done;
    let spent = processor_time().saturating_sub(before);
    Ok(spent.as_secs_f64() / took.as_secs_f64())
}

/// Returns the processor time of all threads of this process so far.
fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns the bytes that each link carried so far, per direction.
fn paths(harness: &Harness<'_>) -> Result<Vec<(String, u64)>, BenchError> {
    let stats = copy_stats(harness.library)?;
    let path = |path: &serde_json::Value| {
        let name = format!("{} {}", path["relay"], path["direction"]);
        (name, path["bytes"].as_u64().unwrap_or(0))
    };
    Ok(stats["paths"].as_array().map_or_else(Vec::new, |paths| paths.iter().map(path).collect()))
}

/// Measures the overhead of copies too small for several links: the driver's copy and the library's, in turns.
///
/// # Errors
/// Errors of the library; [`BenchError::Differs`].
pub(super) fn overhead<'a>(
    harness: &'a Harness<'a>,
    case: &Case,
    options: &CopyOptions,
    device: String,
) -> Result<OverheadReport, BenchError> {
    let mut field = harness.field(*case)?;
    field.verify(1)?;
    let (native, engine) = (field.native(), field.engine());
    let (mut native_us, mut engine_us, mut differences) = (Vec::new(), Vec::new(), Vec::new());
    let (mut native_call_us, mut engine_call_us) = (Vec::new(), Vec::new());
    for _ in 0..options.runs.max(1) {
        let one = harness.timed(&native, 0)?;
        let other = harness.timed(&engine, 0)?;
        native_us.push(us(one.done));
        engine_us.push(us(other.done));
        differences.push(us(other.done) - us(one.done));
        native_call_us.push(us(one.issued));
        engine_call_us.push(us(other.issued));
    }
    Ok(OverheadReport {
        device,
        target: options.target,
        direction: case.direction,
        bytes: case.size.get(),
        runs: options.runs,
        native_us: median(native_us),
        engine_us: median(engine_us),
        overhead_us: median(differences),
        native_call_us: median(native_call_us),
        engine_call_us: median(engine_call_us),
    })
}

/// Number of background streams: one copy is enqueued while the other runs.
pub(super) const STREAMS: usize = 2;
/// Between critical copies, in which background ones have the links.
const REST: Duration = Duration::from_micros(300);
/// The first of a row, which nobody counts.
const WARM_UP: u32 = 20;

/// Times of a row of copies, in microseconds.
#[derive(Debug, Default)]
struct Row {
    done: Vec<f64>,
    issued: Vec<f64>,
}

/// Measures copies of one size beside a large copy.
///
/// # Errors
/// Errors of the library; [`BenchError::Differs`].
pub(super) fn critical<'a>(
    harness: &'a Harness<'a>,
    busy: &'a [Harness<'a>],
    case: &Case,
    options: &CopyOptions,
    device: String,
) -> Result<CriticalReport, BenchError> {
    let mut field = harness.field(*case)?;
    field.verify(1)?;
    let background = Case { size: options.background, ..*case };
    let mut others = busy.iter().map(|harness| harness.field(background)).collect::<Result<Vec<_>, _>>()?;
    warm_up(harness, &field.engine(), GLAKE_COPY_CRITICAL)?;
    for (harness, field) in busy.iter().zip(&others) {
        warm_up(harness, &field.engine(), GLAKE_COPY_BACKGROUND)?;
    }
    let native = row(harness, &field.native(), 0, options.runs)?;
    let alone = row(harness, &field.engine(), GLAKE_COPY_CRITICAL, options.runs)?;
    let (beside, rate) = beside(harness, busy, &field, &others, options.runs)?;
    field.verify(2)?;
    for other in &mut others {
        other.verify(3)?;
    }
    let (median, p99) = (|times: &[f64]| percentile(times, 0.5), |times: &[f64]| percentile(times, 0.99));
    Ok(CriticalReport {
        device,
        target: options.target,
        direction: case.direction,
        bytes: case.size.get(),
        runs: options.runs,
        native_us: median(&native.done),
        native_p99_us: p99(&native.done),
        alone_us: median(&alone.done),
        alone_p99_us: p99(&alone.done),
        beside_us: median(&beside.done),
        beside_p99_us: p99(&beside.done),
        alone_call_p99_us: p99(&alone.issued),
        beside_call_p99_us: p99(&beside.issued),
        background_bytes: background.size.get(),
        background_gbps: rate,
        verified: true,
    })
}

/// The row beside background copies, and how many of these bytes went by meanwhile.
fn beside(
    harness: &Harness<'_>,
    busy: &[Harness<'_>],
    field: &Field<'_>,
    others: &[Field<'_>],
    runs: u32,
) -> Result<(Row, f64), BenchError> {
    let (over, moved) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        let begin = Instant::now();
        let threads = busy.iter().zip(others).map(|(harness, field)| {
            let (work, size, over, moved) = (field.engine(), field.size(), &over, &moved);
            scope.spawn(move || -> Result<(), BenchError> {
                loop {
                    harness.timed(&work, GLAKE_COPY_BACKGROUND)?;
                    moved.fetch_add(size.get(), Ordering::Relaxed);
                    if over.load(Ordering::Relaxed) {
                        return Ok(());
                    }
                }
            })
        });
        let threads: Vec<_> = threads.collect();
        let row = row(harness, &field.engine(), GLAKE_COPY_CRITICAL, runs);
        over.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok((row?, gbps(moved.load(Ordering::Relaxed), us(begin.elapsed()))))
    })
}

/// Copies with rests between.
fn row(harness: &Harness<'_>, work: &[Work<'_>], flags: u32, runs: u32) -> Result<Row, BenchError> {
    let mut row = Row::default();
    for run in 0..runs.max(1).saturating_add(WARM_UP) {
        thread::sleep(REST);
        let time = harness.timed(work, flags)?;
        if run >= WARM_UP {
            row.done.push(us(time.done));
            row.issued.push(us(time.issued));
        }
    }
    Ok(row)
}
