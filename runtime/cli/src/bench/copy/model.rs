//! Copies in the virtual time of a simulated server: what its links give by the model, at any size, in a moment.
//!
//! Nothing is measured here but the bytes: sizes that this machine's memory holds easily are copied once more on a server that
//! moves them, and compared.

use std::time::Duration;

use glake_device::DriverError;
use glake_units::Bytes;

use super::super::times::{gbps, median, us};
use super::{BenchError, Case, CopyNews, CopyOptions, CopyReport, cases};
use crate::bench::times::changed;
use crate::copies::{Copies, CopyError, Ends, Shape};
use crate::rig::{Rig, RigOptions};
use glake_runtime::backend::Backend;
use glake_runtime::config::Config;

/// Maximum size of compared copies: larger ones would need as much host memory, and are only timed.
const COMPARED: Bytes = Bytes::mib(64);
/// Size of warm-up copies, above every break-even: they get the stream's paths ready.
const LARGE: Bytes = Bytes::mib(64);

/// Reports copies on a simulated server in its virtual time, one report for each direction, memory and size.
///
/// # Errors
/// [`BenchError`]: the GPUs have no room, or bytes differ.
pub fn copy_in_virtual_time(
    backend: &Backend,
    config: &Config,
    options: &CopyOptions,
    mut news: impl FnMut(CopyNews) -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let part =
        |times_only| RigOptions { target: options.target, paths: options.paths, memory: None, times_only };
    let timed = Rig::open(backend, config, part(true))?;
    let moving = Rig::open(backend, config, part(false))?;
    let (copies, compared) = (Copies::of_all(&timed)?, Copies::of_all(&moving)?);
    news(CopyNews::paths(timed.is_calibrated()))?;
    let mut ready = None;
    for (done, case) in (0..).zip(cases(options)) {
        news(CopyNews::Next(case.name(), done))?;
        if ready.replace((case.memory, case.direction)) != Some((case.memory, case.direction)) {
            warm_up(&copies, &case)?;
            warm_up(&compared, &case)?;
        }
        let verified = case.size <= COMPARED;
        if verified {
            compare(&compared, &case)?;
        }
        news(CopyNews::Copy(report(&timed, &copies, &case, options, backend.name(), verified)?))?;
    }
    Ok(())
}

fn report(
    rig: &Rig,
    copies: &Copies<'_>,
    case: &Case,
    options: &CopyOptions,
    device: String,
    verified: bool,
) -> Result<CopyReport, BenchError> {
    let direction = case.direction;
    let ends = ends(copies, case)?;
    let runs = || 0..options.runs.max(1);
    let before = rig.carried();
    let middle = |once: &dyn Fn() -> Result<Duration, CopyError>| {
        let times = runs().map(|_| Ok::<_, BenchError>(us(once().map_err(|error| refused(error, case))?)));
        Ok::<_, BenchError>(median(times.collect::<Result<_, BenchError>>()?))
    };
    let engine_us = middle(&|| ends.engine(direction))?;
    let paths = changed(&before, &rig.carried());
    let native_us = middle(&|| ends.native(direction))?;
    let limit_us = middle(&|| ends.limit(direction))?;
    let gbps = |us| gbps(case.size.get(), us);
    Ok(CopyReport {
        device,
        virtual_time: true,
        target: options.target,
        direction,
        memory: case.memory,
        bytes: case.size.get(),
        paths,
        runs: options.runs,
        native_gbps: gbps(native_us),
        limit_gbps: gbps(limit_us),
        engine_gbps: gbps(engine_us),
        native_us,
        limit_us,
        engine_us,
        host_us: 0.0,
        cpu_cores: 0.0,
        calibrated: rig.is_calibrated(),
        verified,
    })
}

/// Gets the stream's paths ready for copies of the case's memory.
fn warm_up(copies: &Copies<'_>, case: &Case) -> Result<(), BenchError> {
    let shape = Shape { memory: case.memory, size: LARGE, block: case.block };
    Ok(copies.ends(shape)?.warm_up(case.direction)?)
}

fn compare(copies: &Copies<'_>, case: &Case) -> Result<(), BenchError> {
    let came = ends(copies, case)?.verify(case.direction, 1).map_err(|error| refused(error, case))?;
    if came == case.size { Ok(()) } else { Err(BenchError::Differs { case: case.name() }) }
}

fn ends<'a>(copies: &'a Copies<'a>, case: &Case) -> Result<Ends<'a>, BenchError> {
    let shape = Shape { memory: case.memory, size: case.size, block: case.block };
    copies.ends(shape).map_err(|error| refused(error, case))
}

/// Converts an error; one for lack of memory names the case.
fn refused(error: CopyError, case: &Case) -> BenchError {
    match error {
        CopyError::Driver(error) if error.is_out_of_memory() => BenchError::NoRoom { case: case.name() },
        CopyError::Driver(source @ DriverError::Os { .. }) => {
            BenchError::NoHostRoom { case: case.name(), source }
        }
        error => error.into(),
    }
}
