//! Stages `streams` and `compare`: when another stream gets freed memory, and how much memory other allocators need for the program of
//! stage `stitch`. A recorded trace is replayed as well, every block compared.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use glake_device::Lag;
use glake_device::owned::OwnedStream;
use glake_replay::baselines::{Caching, Expandable, GmLake, Knobs};
use glake_replay::glake::{Glake, Options};
use glake_replay::machine::Machine;
use glake_replay::trace::Trace;
use glake_replay::{Refusal, Report, Setting, Subject, find_limit, replay};
use glake_runtime::config::{Borrow, Config};
use glake_tiers::{GpuPool, PoolOptions, PoolStream};
use glake_units::Bytes;
use serde_json::{Map, Value};

use super::{DemoError, LIMIT, Stage, figures, pool};

type Make<'a> = &'a dyn Fn(Bytes) -> Result<Box<dyn Subject + 'a>, Refusal>;

/// Compares the memory that allocators need for the program of the first stage, and replays a recorded one.
pub(super) fn stage(machine: &Machine, trace: &Trace, config: &Config) -> Result<Stage, DemoError> {
    let product = Glake::on(machine.clone(), glake_runtime::config::Pool { limit: None, ..pool(config) });
    let product = |limit| {
        let limit = Some(limit);
        product.subject(trace, Options { limit, ..Options::default() })
    };
    let makers: [(&str, Make<'_>); 4] = [
        ("glake", &product),
        ("gmlake", &|limit| Ok(Box::new(GmLake::new(Knobs::default(), limit)))),
        ("caching", &|limit| Ok(Box::new(Caching::new(limit)))),
        ("expandable", &|limit| Ok(Box::new(Expandable::new(limit)))),
    ];
    let (mut fits, mut figures, mut ok) = (Vec::new(), Map::new(), true);
    for (policy, make) in makers {
        let (report, fit) = needs(trace, make)?;
        fits.push((policy, fit));
        figures.insert(policy.to_owned(), Value::Object(one(&report, fit)));
        ok &= report.ooms == 0;
    }
    let name = |policy| match policy {
        "glake" => "GLake",
        "gmlake" => "GMLake",
        "caching" => "PyTorch",
        _ => "expandable segments",
    };
    let told: Vec<String> = fits.iter().map(|(policy, fit)| format!("{} {fit}", name(*policy))).collect();
    let (recorded, recorded_figures, complete) = recorded(machine, config)?;
    let says = format!("The first stage's program fits in: {}.{recorded}", told.join(", "));
    figures.extend(recorded_figures);
    let gain = (fits[0].1, fits[2].1);
    let gain = Some(format!("memory   {} where PyTorch's allocator needs {}", gain.0, gain.1));
    Ok(Stage { stage: "compare", says, picture: None, figures, ok: ok && complete, gain })
}

fn needs(trace: &Trace, make: Make<'_>) -> Result<(Report, Bytes), DemoError> {
    let mut subject = make(Bytes::MAX)?;
    let report = replay(trace, subject.as_mut(), &Setting::default(), None, &mut |_| Ok(()))?.report;
    drop(subject);
    let ceiling = report.reserved_peak.max(LIMIT);
    let fit = find_limit(trace, ceiling, make, &mut |_| ())?;
    Ok((report, fit))
}

fn one(report: &Report, fit: Bytes) -> Map<String, Value> {
    figures! {
        "reserved_bytes": report.reserved_peak.get(),
        "utilization": report.utilization,
        "fit_limit_bytes": fit.get(),
        "extent_maps": report.extent_maps,
    }
}

const TRACE: &[u8] = include_bytes!("../../../../tests/traces/convmix.trace.gz");

/// Replays the recorded trace with every block stamped. Returns its sentence, its figures, and whether everything fit.
pub(super) fn recorded(
    machine: &Machine,
    config: &Config,
) -> Result<(String, Map<String, Value>, bool), DemoError> {
    let trace = Trace::from_bytes(Path::new("convmix.trace.gz"), TRACE, None)?;
    let glake = Glake::on(machine.clone(), config.pool.clone());
    let mut subject = glake.subject(&trace, Options { gpu_lag_ms: 100, limit: None, verify: true })?;
    let report = replay(&trace, subject.as_mut(), &Setting::default(), None, &mut |_| Ok(()))?.report;
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

const LAG: Duration = Duration::from_millis(100);
const SIZE: Bytes = Bytes::mib(64);

pub(super) fn streams(machine: &Machine, config: &Config) -> Result<Stage, DemoError> {
    let streams = [(); 2].map(|()| OwnedStream::new(machine.driver(), machine.id()));
    let [first, second] = streams;
    let (first, second) = (first?, second?);
    let known = |stream: &OwnedStream| PoolStream::of(&**machine.driver(), machine.id(), stream.id());
    let lag = Arc::new(Lag::new(Arc::new(machine.recorder()), LAG));
    let knobs = glake_runtime::config::Pool { borrow: Borrow::Completed, ..pool(config) };
    let settings = Some(machine.settings(&knobs));
    let pool = GpuPool::new(lag.clone(), machine.id(), PoolOptions { settings, ..PoolOptions::default() })?;

    let lent = pool.malloc(SIZE, known(&first)?)?;
    pool.write(lent.address, b"written by the first stream")?;
    pool.free(lent.address)?;
    let early = pool.malloc(SIZE, known(&second)?)?;
    lag.set_now(LAG + Duration::from_millis(1));
    pool.tick()?;
    let late = pool.malloc(SIZE, known(&second)?)?;
    let waits = pool.counters().stream_waits;

    let says = format!(
        "{SIZE} freed on one stream of a GPU that is {} ms behind: another stream that asks at once gets other memory, \
         and the same bytes once the GPU has passed the free. {waits} waits.",
        LAG.as_millis(),
    );
    let figures = figures! {
        "lag_ms": LAG.as_secs_f64() * 1e3,
        "block_bytes": SIZE.get(),
        "reserved_bytes": pool.reserved().get(),
        "stream_waits": waits,
        "apart_before": early.address != lent.address,
        "same_after": late.address == lent.address,
    };
    let ok = early.address != lent.address && late.address == lent.address && waits == 0;
    Ok(Stage { stage: "streams", says, picture: None, figures, ok, gain: None })
}
