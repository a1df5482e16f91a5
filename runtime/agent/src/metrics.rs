//! What the agent counts, as Prometheus reads it.

use std::cell::Cell;
use std::fmt::Write as _;
use std::time::Duration;

use glake_units::Bytes;

use crate::Agent;

/// Upper ends of the buckets that decisions are counted in, in microseconds.
const BUCKETS: [u32; 9] = [5, 10, 20, 50, 100, 200, 500, 1000, 10_000];

/// What the shell counts.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    decisions: Cell<u64>,
    seconds: Cell<f64>,
    within: [Cell<u64>; BUCKETS.len()],
}

impl Counts {
    pub(crate) fn decided(&self, took: Duration) {
        self.decisions.set(self.decisions.get() + 1);
        self.seconds.set(self.seconds.get() + took.as_secs_f64());
        let within =
            BUCKETS.iter().zip(&self.within).filter(|(most, _)| took.as_micros() <= u128::from(**most));
        within.for_each(|(_, count)| count.set(count.get() + 1));
    }
}

/// One metric: its name, its kind, and what it says.
const METRICS: [(&str, &str, &str); 6] = [
    (
        "glake_gpu_bytes",
        "gauge",
        "Memory of a GPU: what workers may have together, and what counts as theirs.",
    ),
    ("glake_worker_bytes", "gauge", "A worker's memory: its lease, what is resident, what is evicted."),
    ("glake_wants", "gauge", "Workers whose uses wait for memory."),
    ("glake_link_duty", "gauge", "The part of the last ten seconds in which refills kept a GPU's link busy."),
    ("glake_worker_wake_seconds", "gauge", "How long a worker's memory would take to come back."),
    ("glake_agent_decision_seconds", "histogram", "How long it took to decide on what was told."),
];

pub(crate) fn text(agent: &Agent, counts: &Counts) -> String {
    let mut text = String::new();
    for (name, kind, help) in METRICS {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        match name {
            "glake_gpu_bytes" => {
                for (gpu, called) in agent.gpus() {
                    let limit = agent.arbiter.limit(gpu);
                    let claimed = agent.arbiter.claimed(gpu);
                    for (state, bytes) in [("limit", limit), ("claimed", claimed)] {
                        let _ =
                            writeln!(text, "{name}{{gpu=\"{called}\",state=\"{state}\"}} {}", bytes.get());
                    }
                }
            }
            "glake_link_duty" => {
                for (gpu, called) in agent.gpus() {
                    let _ = writeln!(text, "{name}{{gpu=\"{called}\"}} {}", agent.arbiter.link_duty(gpu));
                }
            }
            "glake_worker_bytes" => {
                for row in agent.rows() {
                    let places: [(&str, Bytes); 3] =
                        [("leased", row.leased), ("resident", row.resident), ("evicted", row.evicted)];
                    for (place, bytes) in places {
                        let worker = &row.worker;
                        let _ =
                            writeln!(text, "{name}{{worker=\"{worker}\",place=\"{place}\"}} {}", bytes.get());
                    }
                }
            }
            "glake_worker_wake_seconds" => {
                for row in agent.rows() {
                    let _ = writeln!(text, "{name}{{worker=\"{}\"}} {}", row.worker, row.predicted_wake_s);
                }
            }
            "glake_wants" => drop(writeln!(text, "{name} {}", agent.arbiter.waiting())),
            _ => {
                for (most, count) in BUCKETS.iter().zip(&counts.within) {
                    let most = f64::from(*most) / 1e6;
                    let _ = writeln!(text, "{name}_bucket{{le=\"{most}\"}} {}", count.get());
                }
                let (count, sum) = (counts.decisions.get(), counts.seconds.get());
                let _ = writeln!(
                    text,
                    "{name}_bucket{{le=\"+Inf\"}} {count}\n{name}_sum {sum}\n{name}_count {count}"
                );
            }
        }
    }
    text
}
