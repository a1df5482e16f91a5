//! Overhead of a copy that is too small for several links: the driver's copy and the library's, in turns.

use super::super::times::{median, us};
use super::harness::{Case, Harness};
use super::{BenchError, CopyOptions, OverheadReport};

/// Measures the overhead for copies of one size.
///
/// # Errors
/// Errors of the library; [`BenchError::Differs`].
pub(super) fn measure<'a>(
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
        let one = harness.library.timed(harness.cuda, &native, 0)?;
        let other = harness.library.timed(harness.cuda, &engine, 0)?;
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
