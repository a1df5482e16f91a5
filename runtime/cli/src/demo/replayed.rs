//! A real trace, which is part of the program: a convolutional network in training.

use std::path::Path;

use super::{DemoError, Stage, figures};
use glake_replay::glake::{Glake, Options};
use glake_replay::machine::Machine;
use glake_replay::trace::Trace;
use glake_replay::{Setting, replay};
use glake_runtime::config::Config;

const TRACE: &[u8] = include_bytes!("../../../../tests/traces/convmix.trace.gz");

pub(super) fn stage(machine: &Machine, config: &Config) -> Result<Stage, DemoError> {
    let trace = Trace::from_bytes(Path::new("convmix.trace.gz"), TRACE, None)?;
    let glake = Glake::on(machine.clone(), config.pool.clone());
    let mut subject = glake.subject(&trace, Options { gpu_lag_ms: 100, limit: None, verify: true })?;
    let report = replay(&trace, subject.as_mut(), &Setting::default(), None, &mut |_| ())?.report;
    let recorded = trace.recorded().map(|recorded| recorded.reserved_peak);
    let says = format!(
        "{} allocations of a recorded training run ({}), every block stamped and compared: {} reserved for {} live{}, {} \
         driver calls in {:.1} ms",
        report.allocations,
        trace.name(),
        report.reserved_peak,
        report.active_peak,
        recorded
            .map_or(String::new(), |recorded| format!(" (PyTorch reserved {recorded} when it was recorded)")),
        report.driver_calls,
        report.driver_us / 1e3,
    );
    let short = format!("{} reserved for {} live", report.reserved_peak, report.active_peak);
    let figures = figures! {
        "trace": trace.name(),
        "events": report.events,
        "allocations": report.allocations,
        "active_bytes": report.active_peak.get(),
        "reserved_bytes": report.reserved_peak.get(),
        "recorded_reserved_bytes": recorded.map(|recorded| recorded.get()),
        "utilization": report.utilization,
        "driver_calls": report.driver_calls,
        "driver_us": report.driver_us,
    };
    let ok = report.ooms == 0;
    Ok(Stage { stage: "replay", says, short, picture: None, figures, ok })
}
