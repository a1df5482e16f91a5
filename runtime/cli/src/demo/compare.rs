//! Memory that other allocators would need for the same program.

use glake_units::Bytes;
use serde_json::{Map, Value};

use super::{DemoError, LIMIT, Stage, Story, figures, pool};
use glake_replay::baselines::{Caching, Expandable, GmLake, Knobs};
use glake_replay::glake::{Glake, Options};
use glake_replay::trace::Trace;
use glake_replay::{Refusal, Report, Setting, Subject, find_limit, replay};
use glake_runtime::config::Config;

type Make<'a> = &'a dyn Fn(Bytes) -> Result<Box<dyn Subject + 'a>, Refusal>;

pub(super) fn stage(story: &Story<'_>, config: &Config) -> Result<Stage, DemoError> {
    let trace = story.churn.trace()?;
    let product =
        Glake::on(story.machine.clone(), glake_runtime::config::Pool { limit: None, ..pool(config) });
    let product = |limit| {
        let limit = Some(limit);
        product.subject(&trace, Options { limit, ..Options::default() })
    };
    let makers: [(&str, Make<'_>); 4] = [
        ("glake", &product),
        ("gmlake", &|limit| Ok(Box::new(GmLake::new(Knobs::default(), limit)))),
        ("caching", &|limit| Ok(Box::new(Caching::new(limit)))),
        ("expandable", &|limit| Ok(Box::new(Expandable::new(limit)))),
    ];
    let (mut told, mut fits, mut figures, mut ok) = (Vec::new(), Vec::new(), Map::new(), true);
    for (policy, make) in makers {
        let (report, fit) = needs(&trace, make)?;
        let share = report.utilization.unwrap_or(0.0);
        told.push(format!("{policy} {} ({:.0} % used; fits in {fit})", report.reserved_peak, share * 100.0));
        fits.push(format!("{policy} {fit}"));
        figures.insert(policy.to_owned(), Value::Object(one(&report, fit)));
        ok &= report.ooms == 0;
    }
    let says = format!("the same program without a limit reserves under {}", told.join(", "));
    let short = format!("fits in: {}", fits.join(", "));
    Ok(Stage { stage: "compare", says, short, picture: None, figures, ok })
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
