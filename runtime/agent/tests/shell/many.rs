//! A thousand workers.

use std::time::{Duration, Instant};

use glake_units::Bytes;
use glake_wire::{Answer, Ask};

use crate::processes::{Node, Process};

/// How many, in `make test` and in `make soak`.
fn count() -> usize {
    if std::env::var_os("GLAKE_SOAK").is_some() { 1000 } else { 50 }
}

#[test]
fn soak_many_workers_take_turns() {
    let node = Node::new(Bytes::gib(60), "");
    let mut workers: Vec<Process> = (0..count()).map(|n| node.worker(&format!("w{n} 4GiB"))).collect();
    workers.iter().for_each(|worker| drop(worker.hear("joined").unwrap()));
    let begin = Instant::now();
    for place in (0..count()).chain((0..count()).step_by(3)) {
        workers[place].tell("want");
        workers[place].hear("resident").unwrap();
        workers[place].tell("use");
        workers[place].tell("end");
        workers[place].hear("ended").unwrap();
    }
    node.check();
    let took = begin.elapsed();
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.agent.child.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 64 << 10, "{peak} KiB");
    let Answer::Text { text } = &node.ask(Ask::Metrics).unwrap()[0] else { panic!() };
    let figure = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()
    };
    let decided = figure("glake_agent_decision_seconds_total ") / figure("glake_agent_decisions_total ");
    eprintln!(
        "{} workers: {:.1} us a decision on average, {peak} KiB at most, {:.2} ms a turn",
        count(),
        decided * 1e6,
        took.as_secs_f64() * 1e3 / (count() as f64 * 4.0 / 3.0),
    );
    let wakes = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", node.agent.child.id())).unwrap();
        let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
        lines.map(|line| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()).sum::<u64>()
    };
    std::thread::sleep(Duration::from_secs(1));
    let before = wakes();
    std::thread::sleep(Duration::from_secs(if count() > 100 { 10 } else { 1 }));
    assert_eq!(wakes(), before, "it was woken while nobody wanted anything");
}
