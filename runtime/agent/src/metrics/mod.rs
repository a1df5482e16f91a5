//! Metrics of the agent in Prometheus' format, each described once.
//!
//! Names end with the unit, and counters with `_total`. Sums over a metric's labels are meaningful; values that do not add up are separate
//! metrics.

mod counts;
mod exposition;

use std::collections::BTreeMap;

use glake_arbiter::GpuId;
use glake_units::metrics::{Kind, Label, Metric, Stability, Unit};
use glake_wire::WorkerRow;

pub(crate) use counts::Counts;
use counts::{WHAT, WHY};
use exposition::Exposition;

use crate::Agent;

/// Metrics of an agent, in the order of output.
pub const METRICS: &[Metric] = &[
    GPU_LIMIT,
    GPU_CLAIMED,
    WORKER_LEASE,
    WORKER_BYTES,
    WORKER_WAKE,
    WANTS,
    DENIED,
    GROWTHS_DENIED,
    GRANTS,
    GRANTED,
    PARKS,
    SHRINKS,
    FAILED,
    DISTRUSTED,
    GIVEN_UP,
    LINK_DUTY,
    DECISIONS,
];

const GPU: Label = any("gpu");
const WORKER: Label = any("worker");
const PLACES: &[&str] = &["resident", "evicted"];

const GPU_LIMIT: Metric =
    gauge("glake_gpu_limit_bytes", Unit::Bytes, &[GPU], "What workers may have of a GPU together.");
const GPU_CLAIMED: Metric = gauge(
    "glake_gpu_claimed_bytes",
    Unit::Bytes,
    &[GPU],
    "What counts as memory of workers: floors, leases, and what dead ones had until the meter shows it free.",
);
const WORKER_LEASE: Metric =
    gauge("glake_worker_lease_bytes", Unit::Bytes, &[WORKER], "What a worker may hold, of all GPUs.");
const WORKER_BYTES: Metric = gauge(
    "glake_worker_bytes",
    Unit::Bytes,
    &[WORKER, Label { name: "place", values: PLACES }],
    "A worker's memory, of all GPUs: what is resident, and what is evicted.",
);
const WORKER_WAKE: Metric = experimental(gauge(
    "glake_worker_wake_seconds",
    Unit::Seconds,
    &[WORKER],
    "How long a worker's memory would take to come back, as predicted.",
));
const WANTS: Metric = gauge("glake_wants", Unit::Count, &[], "Gangs whose uses wait for memory.");
const DENIED: Metric = counter(
    "glake_denied_total",
    Unit::Count,
    &[Label { name: "why", values: WHY }],
    "Wants that ended without memory, one a worker.",
);
const GROWTHS_DENIED: Metric = counter(
    "glake_growths_denied_total",
    Unit::Count,
    &[GPU],
    "Requests above a lease that got no memory: out of memory, as at any limit.",
);
const GRANTS: Metric = counter(
    "glake_grants_total",
    Unit::Count,
    &[GPU],
    "Grants: one for each part of a refill, as it became free, and for each growth.",
);
const GRANTED: Metric =
    counter("glake_granted_bytes_total", Unit::Bytes, &[GPU], "What grants added to leases.");
const PARKS: Metric =
    counter("glake_parks_total", Unit::Count, &[], "Times that a worker was told to park its uses.");
const SHRINKS: Metric = counter(
    "glake_shrinks_total",
    Unit::Count,
    &[GPU],
    "Times that a worker was told to give back memory of a GPU.",
);
const FAILED: Metric = experimental(counter(
    "glake_failed_total",
    Unit::Count,
    &[Label { name: "what", values: WHAT }],
    "Commands and refills of which workers said that they failed.",
));
const DISTRUSTED: Metric = experimental(counter(
    "glake_distrusted_total",
    Unit::Count,
    &[],
    "Times that a worker was distrusted: no victim for a while, as it failed, was late, or held more than its lease.",
));
const GIVEN_UP: Metric = counter(
    "glake_given_up_total",
    Unit::Count,
    &[],
    "Workers that were not heard of for ten seconds and do not count any more, but for what the meter shows.",
);
const LINK_DUTY: Metric = experimental(gauge(
    "glake_link_duty_ratio",
    Unit::Ratio,
    &[GPU],
    "The part of the last ten seconds in which refills kept a GPU's link busy.",
));
const DECISIONS: Metric = experimental(Metric {
    kind: Kind::Histogram,
    ..gauge(
        "glake_agent_decision_seconds",
        Unit::Seconds,
        &[],
        "How long the agent took to decide on what it was told.",
    )
});

const fn any(name: &'static str) -> Label {
    Label { name, values: &[] }
}

const fn gauge(name: &'static str, unit: Unit, labels: &'static [Label], help: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, unit, labels, stability: Stability::Stable, help }
}

const fn counter(name: &'static str, unit: Unit, labels: &'static [Label], help: &'static str) -> Metric {
    Metric { kind: Kind::Counter, ..gauge(name, unit, labels, help) }
}

const fn experimental(metric: Metric) -> Metric {
    Metric { stability: Stability::Experimental, ..metric }
}

/// Returns all metrics, as `glake ps --metrics` prints them. Counters are present from the start, as 0.
pub(crate) fn text(agent: &Agent) -> String {
    let mut text = Exposition::default();
    let (arbiter, counts, gpus, rows) = (&agent.arbiter, &agent.counts, agent.gpus(), agent.rows());
    let of = |gpu| counts.gpus.get(&gpu).copied().unwrap_or_default();
    text.metric(&GPU_LIMIT, each_gpu(&gpus, |gpu| arbiter.limit(gpu).get()));
    text.metric(&GPU_CLAIMED, each_gpu(&gpus, |gpu| arbiter.claimed(gpu).get()));
    text.metric(&WORKER_LEASE, rows.iter().map(|row| ([row.worker.as_str()], row.leased.get())));
    let places = |row: &WorkerRow| PLACES.iter().copied().zip([row.resident.get(), row.evicted.get()]);
    let placed =
        rows.iter().flat_map(|row| places(row).map(|(place, bytes)| ([row.worker.as_str(), place], bytes)));
    text.metric(&WORKER_BYTES, placed);
    text.metric(&WORKER_WAKE, rows.iter().map(|row| ([row.worker.as_str()], row.predicted_wake_s)));
    text.metric(&WANTS, [([], arbiter.waiting())]);
    text.metric(&DENIED, each_word(WHY, &counts.denied));
    text.metric(&GROWTHS_DENIED, each_gpu(&gpus, |gpu| of(gpu).growths_denied));
    text.metric(&GRANTS, each_gpu(&gpus, |gpu| of(gpu).grants));
    text.metric(&GRANTED, each_gpu(&gpus, |gpu| of(gpu).granted.get()));
    text.metric(&PARKS, [([], counts.parks)]);
    text.metric(&SHRINKS, each_gpu(&gpus, |gpu| of(gpu).shrinks));
    text.metric(&FAILED, each_word(WHAT, &counts.failed));
    text.metric(&DISTRUSTED, [([], counts.distrusted)]);
    text.metric(&GIVEN_UP, [([], counts.given_up)]);
    text.metric(&LINK_DUTY, each_gpu(&gpus, |gpu| arbiter.link_duty(gpu)));
    let decisions = &counts.decisions;
    text.histogram(&DECISIONS, decisions.within(), decisions.count, decisions.took.as_secs_f64());
    text.text()
}

fn each_gpu<V>(gpus: &[(GpuId, String)], value: impl Fn(GpuId) -> V) -> impl Iterator<Item = ([&str; 1], V)> {
    gpus.iter().map(move |(gpu, name)| ([name.as_str()], value(*gpu)))
}

fn each_word(
    words: &'static [&'static str],
    counted: &BTreeMap<&'static str, u64>,
) -> impl Iterator<Item = ([&'static str; 1], u64)> {
    words.iter().map(|word| ([*word], counted.get(word).copied().unwrap_or_default()))
}

#[cfg(test)]
mod tests;
