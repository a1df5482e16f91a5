//! Test with a thousand workers.

use std::time::{Duration, Instant};

use glake_units::Bytes;

use crate::processes::{Node, Process};

/// Returns the number of workers in `make test` and in `make soak`.
fn count() -> usize {
    if std::env::var_os("GLAKE_SOAK").is_some() { 1000 } else { 50 }
}

#[test]
fn soak_many_workers_take_turns() {
    // A thousand contexts would not fit on any GPU.
    let node = Node::with_floor(Bytes::gib(60), 8);
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
    let (name, metrics) = ("glake_agent_decision_seconds", node.metrics());
    let all = metrics.of(&format!("{name}_count"));
    let within = |most: &str| 100.0 * metrics.of(&format!("{name}_bucket{{le=\"{most}\"}}")) / all;
    eprintln!(
        "{} workers: {all} decisions, {:.1} us on average, {:.1} % within 50 us, {:.1} % within 1 ms; {peak} KiB at \
         most, {:.2} ms a turn",
        count(),
        metrics.of(&format!("{name}_sum")) / all * 1e6,
        within("0.00005"),
        within("0.001"),
        took.as_secs_f64() * 1e3 / (count() as f64 * 4.0 / 3.0),
    );
    std::thread::sleep(Duration::from_secs(1));
    let before = node.wakes();
    std::thread::sleep(Duration::from_secs(if count() > 100 { 10 } else { 1 }));
    assert_eq!(node.wakes(), before, "it was woken while nobody wanted anything");
}
