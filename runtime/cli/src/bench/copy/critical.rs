//! Time of a critical copy while background copies keep every link busy, compared with its time alone.
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

use super::super::times::{gbps, percentile, us};
use super::harness::{Case, Field, Harness};
use super::rounds::warm_up;
use super::{BenchError, CopyOptions, CriticalReport};

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
pub(super) fn measure<'a>(
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
