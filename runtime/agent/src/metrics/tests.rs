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
    let memory = glake_meter::GpuMemory { used: Bytes::gib(2), ..glake_meter::GpuMemory::default() };
    agent.metered(&[(GpuId(0), &memory)], Duration::ZERO);
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
            let is_histogram = metric.kind == Kind::Histogram;
            let part = ["_bucket", "_sum", "_count"].into_iter().find_map(|part| rest.strip_prefix(part));
            let rest = if is_histogram { part.unwrap() } else { rest };
            // Label values contain no comma here.
            let labels = rest.strip_prefix('{').map(|rest| rest.strip_suffix('}').unwrap().split(','));
            let labels: Vec<_> =
                labels.into_iter().flatten().map(|label| label.split_once('=').unwrap()).collect();
            let names: Vec<&str> = metric.labels.iter().map(|label| label.name).collect();
            let told = labels.iter().map(|(name, _)| *name).filter(|name| !is_histogram || *name != "le");
            assert_eq!(told.collect::<Vec<_>>(), names, "{line}");
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

#[test]
fn memory_is_shown_by_place_and_adds_up() {
    let mut agent = agent();
    let worker = join(&mut agent);
    let (mib, gpu) = (Bytes::mib, || "odd \"0\"".to_owned());
    let (resident, lease, evicted) = (mib(100), mib(100), mib(60));
    let known = Holding { gpu: gpu(), lease, resident, evicted, ..Holding::default() };
    let place = |agent: &Agent, place| {
        told(agent, &format!("glake_worker_place_bytes{{worker=\"model\",place=\"{place}\"}}"))
            / f64::from(1 << 20)
    };
    let places = |agent: &Agent| ["gpu", "host", "peer", "file", "unknown"].map(|name| place(agent, name));
    let says = Holding { in_files: Some(mib(20)), in_peers: Some(mib(10)), ..known.clone() };
    for (seq, holding, expected) in
        [(1, known, [100.0, 0.0, 0.0, 0.0, 60.0]), (2, says, [100.0, 30.0, 10.0, 20.0, 0.0])]
    {
        agent.hear(worker, seq, 0, ToAgent::Changed { holdings: vec![holding] }, Duration::ZERO).unwrap();
        assert_eq!(places(&agent), expected);
    }
    assert_eq!(place(&agent, "context"), 640.0);
}

#[test]
fn unmanaged_memory_is_what_no_worker_has() {
    let mut agent = agent();
    join(&mut agent);
    assert!(!text(&agent).contains("glake_gpu_used_bytes{"), "the meter was not read");
    let own = glake_meter::ProcessMemory { pid: 1, used: Bytes::gib(3) };
    let memory = glake_meter::GpuMemory { used: Bytes::gib(5), processes: vec![own], ..Default::default() };
    agent.metered(&[(GpuId(0), &memory)], Duration::ZERO);
    let gib = |name: &str| told(&agent, &format!("{name}{{gpu=\"odd \\\"0\\\"\"}}")) / f64::from(1 << 30);
    assert_eq!((gib("glake_gpu_used_bytes"), gib("glake_gpu_unmanaged_bytes")), (5.0, 2.0));
}

#[test]
fn waits_and_switches_are_counted() {
    let mut agent = agent();
    let worker = join(&mut agent);
    let at = Duration::from_secs;
    let said = |seq, message, now| (seq, message, at(now));
    let holdings = |resident: Bytes, evicted| {
        vec![Holding {
            gpu: "odd \"0\"".to_owned(),
            lease: resident,
            resident,
            evicted,
            ..Holding::default()
        }]
    };
    let grow = ToAgent::Grow { gpu: "odd \"0\"".to_owned(), bytes: Bytes::gib(90), within_ms: 100 };
    for (seq, message, now) in [
        said(1, ToAgent::Want { deadline_ms: None }, 1),
        said(2, ToAgent::Refilled { holdings: holdings(Bytes::gib(1), Bytes::ZERO) }, 3),
        said(3, grow, 4),
    ] {
        agent.hear(worker, seq, 0, message, now).unwrap();
    }
    agent.saw(
        worker,
        Some(crate::PageReading {
            activity: glake_wire::Activity { begun: 1, ..Default::default() },
            idle_for: at(1),
        }),
        at(5),
    );
    agent.ask_to_shrink(worker, at(9), at(5));
    let shrunk = ToAgent::Shrunk { holdings: holdings(Bytes::ZERO, Bytes::gib(1)) };
    agent.hear(worker, 4, 0, shrunk, at(9)).unwrap();
    let wait =
        |kind, end| told(&agent, &format!("glake_wait_seconds_count{{kind=\"{kind}\",end=\"{end}\"}}"));
    let waits = [("want", "granted"), ("want", "denied"), ("growth", "granted"), ("growth", "denied")];
    assert_eq!(waits.map(|(kind, end)| wait(kind, end)), [1.0, 0.0, 0.0, 1.0]);
    let switch = |what| told(&agent, &format!("glake_switch_seconds_sum{{what=\"{what}\"}}"));
    assert_eq!(["park", "shrink", "refill", "start"].map(switch), [0.0, 4.0, 2.0, 0.0]);
    assert_eq!(told(&agent, "glake_switch_seconds_bucket{what=\"shrink\",le=\"3\"}"), 0.0);
    assert_eq!(told(&agent, "glake_switch_seconds_bucket{what=\"shrink\",le=\"10\"}"), 1.0);
}

#[test]
fn workers_beyond_a_thousand_share_one_label() {
    let mut agent = agent();
    for number in 0..1003_u32 {
        let held = Holding { gpu: "odd \"0\"".to_owned(), evicted: Bytes::mib(7), ..Holding::default() };
        let hello =
            Hello { name: format!("w{number:0>4}"), holdings: vec![held], ranks: 1, ..Hello::default() };
        let who = Identity { peer: Peer { pid: number + 1, start: 1 }, uid: 0 };
        agent.hello(who, hello, Duration::ZERO).unwrap();
    }
    let text = text(&agent);
    let samples: Vec<&str> = text.lines().filter(|line| line.starts_with("glake_worker_bytes{")).collect();
    assert_eq!(samples.len(), 2 * 1001);
    assert!(text.contains("worker=\"w0999\"") && !text.contains("worker=\"w1000\""));
    assert_eq!(
        told(&agent, "glake_worker_bytes{worker=\"(others)\",place=\"evicted\"}"),
        f64::from(21 << 20)
    );
}
