//! Memory that other allocators would need for the same program.

use glake_units::Bytes;
use serde_json::{Map, Value};

use super::replayed::recorded;
use super::{DemoError, LIMIT, Stage, figures, pool};
use glake_replay::baselines::{Caching, Expandable, GmLake, Knobs};
use glake_replay::glake::{Glake, Options};
use glake_replay::machine::Machine;
use glake_replay::trace::Trace;
use glake_replay::{Refusal, Report, Setting, Subject, find_limit, replay};
use glake_runtime::config::Config;

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
    let report = replay(trace, subject.as_mut(), &Setting::default(), None, &mut |_| ())?.report;
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
