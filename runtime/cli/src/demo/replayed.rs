//! A real trace, which is part of the program: a convolutional network in training.

use std::path::Path;

use super::{DemoError, figures};
use glake_replay::glake::{Glake, Options};
use glake_replay::machine::Machine;
use glake_replay::trace::Trace;
use glake_replay::{Setting, replay};
use glake_runtime::config::Config;
use serde_json::{Map, Value};

const TRACE: &[u8] = include_bytes!("../../../../tests/traces/convmix.trace.gz");

/// Replays the recorded trace with every block stamped. Returns its sentence, its figures, and whether everything fit.
pub(super) fn recorded(
    machine: &Machine,
    config: &Config,
) -> Result<(String, Map<String, Value>, bool), DemoError> {
    let trace = Trace::from_bytes(Path::new("convmix.trace.gz"), TRACE, None)?;
    let glake = Glake::on(machine.clone(), config.pool.clone());
    let mut subject = glake.subject(&trace, Options { gpu_lag_ms: 100, limit: None, verify: true })?;
    let report = replay(&trace, subject.as_mut(), &Setting::default(), None, &mut |_| ())?.report;
    let recorded = trace.recorded().map(|recorded| recorded.reserved_peak);
    let says = format!(
        " A recorded training run, {} allocations, every block compared: {} reserved for {} live{}.",
        report.allocations,
        report.reserved_peak,
        report.active_peak,
        recorded.map_or(String::new(), |recorded| format!(", PyTorch reserved {recorded}")),
    );
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
    Ok((says, figures, report.ooms == 0))
}
