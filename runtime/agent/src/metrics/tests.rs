//! Tests that the output matches the descriptions.

use std::time::Duration;

use glake_arbiter::node::NodeFile;
use glake_arbiter::{Action, Denied, Tier, WorkerId};
use glake_units::Bytes;
use glake_wire::{Hello, Holding, Peer, ToAgent};

use super::*;
use crate::Identity;

/// Creates an agent of a GPU whose name no meter reports.
fn agent() -> Agent {
    Agent::new(NodeFile::parse("").unwrap(), vec![("odd \"0\"".to_owned(), Bytes::gib(24))], 1)
}

/// Joins a worker with 1 GiB of evicted memory.
fn join(agent: &mut Agent) -> WorkerId {
    let held = Holding { gpu: "odd \"0\"".to_owned(), evicted: Bytes::gib(1), ..Holding::default() };
    let hello = Hello { name: "model".to_owned(), holdings: vec![held], ranks: 1, ..Hello::default() };
    let who = Identity { peer: Peer { pid: 1, start: 1 }, uid: 0 };
    agent.hello(who, hello, Duration::ZERO).unwrap().0
}

fn told(agent: &Agent, sample: &str) -> f64 {
    let text = text(agent);
    let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {sample} in {text}")).parse().unwrap()
}

#[test]
fn every_sample_is_of_a_metric_with_its_labels() {
    let mut agent = agent();
    join(&mut agent);
    let text = text(&agent);
    let heads: Vec<String> = text.lines().filter(|line| line.starts_with('#')).map(str::to_owned).collect();
    let described = METRICS.iter().flat_map(|Metric { name, help, kind, .. }| {
        [format!("# HELP {name} {help}"), format!("# TYPE {name} {kind}")]
    });
    assert_eq!(heads, described.collect::<Vec<_>>());
    let mut sampled = 0;
    for block in text.split("# HELP ").skip(1) {
        let metric = METRICS.iter().find(|metric| block.starts_with(&format!("{} ", metric.name))).unwrap();
        for line in block.lines().skip(2) {
            sampled += 1;
            let (sample, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().unwrap() >= 0.0, "{line}");
            let rest = sample.strip_prefix(metric.name).unwrap();
            if metric.kind == Kind::Histogram {
                assert!(
                    ["_bucket{le=\"", "_sum", "_count"].iter().any(|part| rest.starts_with(part)),
                    "{line}"
                );
                continue;
            }
            // Label values contain no comma here.
            let labels = rest.strip_prefix('{').map(|rest| rest.strip_suffix('}').unwrap().split(','));
            let labels: Vec<_> =
                labels.into_iter().flatten().map(|label| label.split_once('=').unwrap()).collect();
            let names: Vec<&str> = metric.labels.iter().map(|label| label.name).collect();
            assert_eq!(labels.iter().map(|(name, _)| *name).collect::<Vec<_>>(), names, "{line}");
            for (label, (_, value)) in metric.labels.iter().zip(labels) {
                let value = value.strip_prefix('"').unwrap().strip_suffix('"').unwrap();
                let allowed = match label.name {
                    "gpu" => &["odd \\\"0\\\""],
                    "worker" => &["model"][..],
                    _ => label.values,
                };
                assert!(allowed.contains(&value), "{line}");
            }
        }
        assert!(block.lines().count() > 2, "no sample of {}", metric.name);
    }
    let words = PLACES.len() + WHY.len() + WHAT.len();
    assert!(sampled > METRICS.len() + words - 3, "{sampled}");
}

#[test]
fn names_say_their_unit_and_whether_they_only_rise() {
    for Metric { name, kind, unit, help, .. } in METRICS {
        let base = name.strip_suffix("_total");
        assert_eq!(base.is_some(), *kind == Kind::Counter, "{name}");
        let base = base.unwrap_or(name);
        let suffixes = [(Unit::Bytes, "_bytes"), (Unit::Seconds, "_seconds"), (Unit::Ratio, "_ratio")];
        let said = suffixes.iter().find(|(_, suffix)| base.ends_with(suffix)).map(|(unit, _)| *unit);
        assert_eq!(said.unwrap_or(Unit::Count), *unit, "{name}");
        assert!(name.starts_with("glake_") && help.ends_with('.'), "{name}");
        assert!(METRICS.iter().filter(|other| other.name == *name).count() == 1, "{name}");
    }
}

#[test]
fn each_decision_is_counted_once() {
    let (worker, gpu) = (WorkerId(1), GpuId(0));
    let (bytes, by) = (Bytes::gib(2), Duration::ZERO);
    let mut agent = agent();
    for (action, counted) in [
        (Action::Grant { worker, gpu, bytes }, "glake_grants_total{gpu=\"odd \\\"0\\\"\"}"),
        (Action::Park { worker, by }, "glake_parks_total"),
        (
            Action::Shrink { worker, gpu, bytes, tier: Tier::Host, by },
            "glake_shrinks_total{gpu=\"odd \\\"0\\\"\"}",
        ),
        (
            Action::DenyGrowth { worker, gpu, bytes, why: glake_wire::Denied::Deadline },
            "glake_growths_denied_total{gpu=\"odd \\\"0\\\"\"}",
        ),
        (Action::StopCountingOn { worker, until: by }, "glake_distrusted_total"),
        (
            Action::Deny { worker, why: Denied::TooLarge, retry_after: None },
            "glake_denied_total{why=\"too_large\"}",
        ),
        (
            Action::Deny { worker, why: Denied::Deadline, retry_after: None },
            "glake_denied_total{why=\"deadline\"}",
        ),
        (
            Action::Deny { worker, why: Denied::Incomplete, retry_after: None },
            "glake_denied_total{why=\"incomplete\"}",
        ),
        (Action::Deny { worker, why: Denied::Lost, retry_after: None }, "glake_denied_total{why=\"lost\"}"),
    ] {
        assert_eq!(told(&agent, counted), 0.0);
        agent.act(&action, false);
        assert_eq!(told(&agent, counted), 1.0);
    }
    assert_eq!(told(&agent, "glake_granted_bytes_total{gpu=\"odd \\\"0\\\"\"}"), 2.0 * f64::from(1 << 30));
}

#[test]
fn failures_are_counted_by_known_operation() {
    let mut agent = agent();
    let worker = join(&mut agent);
    for (seq, what) in (1..).zip(["shrink", "shrink", "refill", "\"} 1", ""]) {
        let failed = ToAgent::Failed { what: what.to_owned(), why: "no".to_owned(), holdings: Vec::new() };
        agent.hear(worker, seq, 0, failed, Duration::ZERO).unwrap();
    }
    let failed = |what: &str| told(&agent, &format!("glake_failed_total{{what=\"{what}\"}}"));
    assert_eq!(["park", "shrink", "refill", "other"].map(failed), [0.0, 2.0, 1.0, 2.0]);
}

#[test]
fn a_removed_worker_is_counted_and_has_no_sample() {
    let mut agent = agent();
    let worker = join(&mut agent);
    assert_eq!(told(&agent, "glake_worker_bytes{worker=\"model\",place=\"evicted\"}"), f64::from(1 << 30));
    agent.give_up(worker, Duration::from_secs(10));
    assert_eq!(told(&agent, "glake_given_up_total"), 1.0);
    assert!(!text(&agent).contains("model"));
}
