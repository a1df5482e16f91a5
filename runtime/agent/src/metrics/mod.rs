//! Metrics of the agent, each described once: counters since the agent's start, and their output in Prometheus' text format, version 0.0.4
//! (prometheus.io/docs/instrumenting/exposition_formats).
//!
//! Names end with the unit, and counters with `_total`. Sums over a metric's labels are meaningful; values that do not add up are separate
//! metrics.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::time::Duration;

use glake_arbiter::{Action, Denied, GpuId};
use glake_units::Bytes;
use glake_units::metrics::{Kind, Label, Metric, Stability, Unit};
use glake_wire::WorkerRow;

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
    let (arbiter, counts, gpus) = (&agent.arbiter, &agent.counts, agent.gpus());
    let rows: Vec<WorkerRow> = agent.snapshot().workers.into_iter().map(|worker| worker.row).collect();
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

/// Upper ends of the buckets of decision times, in microseconds.
const BUCKETS: [u32; 9] = [5, 10, 20, 50, 100, 200, 500, 1000, 10_000];

/// Reasons for denials, as label values.
pub(crate) const WHY: &[&str] = &["too_large", "deadline", "incomplete", "lost"];
/// Operations that workers failed to carry out, as label values.
pub(crate) const WHAT: &[&str] = &["park", "shrink", "refill", "other"];

/// Counters of the agent.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) gpus: BTreeMap<GpuId, GpuCounts>,
    pub(crate) parks: u64,
    /// Failures by operation; see [`WHAT`].
    pub(crate) failed: BTreeMap<&'static str, u64>,
    /// Denials by reason; see [`WHY`].
    pub(crate) denied: BTreeMap<&'static str, u64>,
    pub(crate) distrusted: u64,
    pub(crate) given_up: u64,
    pub(crate) decisions: Decisions,
}

/// Counters of one GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GpuCounts {
    pub(crate) grants: u64,
    pub(crate) granted: Bytes,
    pub(crate) shrinks: u64,
    pub(crate) growths_denied: u64,
}

/// Histogram of decision times.
#[derive(Debug, Default)]
pub(crate) struct Decisions {
    pub(crate) count: u64,
    pub(crate) took: Duration,
    within: [u64; BUCKETS.len()],
}

impl Counts {
    /// Counts an action of the arbiter.
    pub(crate) fn decided(&mut self, action: &Action) {
        match *action {
            Action::Grant { gpu, bytes, .. } => {
                let of = self.gpus.entry(gpu).or_default();
                of.grants += 1;
                of.granted = of.granted.saturating_add(bytes);
            }
            Action::Shrink { gpu, .. } => self.gpus.entry(gpu).or_default().shrinks += 1,
            Action::DenyGrowth { gpu, .. } => self.gpus.entry(gpu).or_default().growths_denied += 1,
            Action::Park { .. } => self.parks += 1,
            Action::Deny { why, .. } => *self.denied.entry(word(why)).or_default() += 1,
            Action::StopCountingOn { .. } => self.distrusted += 1,
            Action::Admit { .. }
            | Action::Unpark { .. }
            | Action::Demote { .. }
            | Action::Measure { .. }
            | Action::Checkpoint { .. }
            | Action::Restore { .. } => {}
        }
    }

    /// Counts a worker's failure to carry out an operation. Unknown operations of other versions count as "other".
    pub(crate) fn failed(&mut self, what: &str) {
        let known = WHAT.iter().find(|known| **known == what);
        *self.failed.entry(known.copied().unwrap_or("other")).or_default() += 1;
    }
}

impl Decisions {
    pub(crate) fn add(&mut self, took: Duration) {
        self.count += 1;
        self.took = self.took.saturating_add(took);
        let within = BUCKETS.iter().zip(&mut self.within);
        within.filter(|(most, _)| took.as_micros() <= u128::from(**most)).for_each(|(_, count)| *count += 1);
    }

    /// Returns the upper end of each bucket in seconds, and its cumulative count.
    pub(crate) fn within(&self) -> impl Iterator<Item = (f64, u64)> {
        BUCKETS.iter().map(|most| f64::from(*most) / 1e6).zip(self.within)
    }
}

/// Returns the label value of a reason.
fn word(why: Denied) -> &'static str {
    match why {
        Denied::TooLarge => "too_large",
        Denied::Deadline => "deadline",
        Denied::Incomplete => "incomplete",
        Denied::Lost => "lost",
    }
}

/// Builder of the text.
#[derive(Debug, Default)]
pub(crate) struct Exposition(String);

impl Exposition {
    /// Adds a metric with its samples. Each sample has values for the metric's labels, in their order.
    pub(crate) fn metric<'a, const LABELS: usize, V: Display>(
        &mut self,
        metric: &Metric,
        samples: impl IntoIterator<Item = ([&'a str; LABELS], V)>,
    ) {
        self.begin(metric);
        let names = || metric.labels.iter().map(|label| label.name);
        for (values, value) in samples {
            self.sample(metric.name, names().zip(values), value);
        }
    }

    /// Adds a histogram: cumulative counts in ascending order, the total count and the sum.
    pub(crate) fn histogram(
        &mut self,
        metric: &Metric,
        within: impl IntoIterator<Item = (f64, u64)>,
        count: u64,
        sum: f64,
    ) {
        self.begin(metric);
        let bucket = format!("{}_bucket", metric.name);
        for (most, count) in within {
            self.sample(&bucket, [("le", most.to_string().as_str())], count);
        }
        self.sample(&bucket, [("le", "+Inf")], count);
        self.sample(&format!("{}_sum", metric.name), [], sum);
        self.sample(&format!("{}_count", metric.name), [], count);
    }

    pub(crate) fn text(self) -> String {
        self.0
    }

    fn begin(&mut self, Metric { name, kind, help, .. }: &Metric) {
        // Quotation marks are not escaped in help texts.
        let help = help.replace('\\', r"\\").replace('\n', r"\n");
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample<'a>(
        &mut self,
        name: &str,
        labels: impl IntoIterator<Item = (&'a str, &'a str)>,
        value: impl Display,
    ) {
        let label = |(name, value)| format!("{name}=\"{}\"", escaped(value));
        let labels: Vec<String> = labels.into_iter().map(label).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }
}

/// Escapes a label's value for its quotation marks.
fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod exposition_tests {
    use glake_units::metrics::{Kind, Label, Stability, Unit};

    use super::*;

    const OF: Metric = Metric {
        name: "of",
        kind: Kind::Gauge,
        unit: Unit::Count,
        labels: &[Label { name: "a", values: &[] }, Label { name: "b", values: &[] }],
        stability: Stability::Stable,
        help: "\"C:\\\"\nand more.",
    };
    const TOOK: Metric = Metric { name: "took", kind: Kind::Histogram, labels: &[], help: "It.", ..OF };

    #[test]
    fn quotes_and_line_ends_are_escaped() {
        let mut text = Exposition::default();
        text.metric(&OF, [(["\\n", "\"\n}"], 7)]);
        assert_eq!(
            text.text(),
            "# HELP of \"C:\\\\\"\\nand more.\n# TYPE of gauge\nof{a=\"\\\\n\",b=\"\\\"\\n}\"} 7\n"
        );
    }

    #[test]
    fn a_histogram_ends_with_the_total() {
        let mut text = Exposition::default();
        text.histogram(&TOOK, [(0.5, 1), (1.0, 1)], 2, 4.5);
        let lines = [
            "# HELP took It.",
            "# TYPE took histogram",
            "took_bucket{le=\"0.5\"} 1",
            "took_bucket{le=\"1\"} 1",
            "took_bucket{le=\"+Inf\"} 2",
            "took_sum 4.5",
            "took_count 2",
        ];
        assert_eq!(text.text().lines().collect::<Vec<_>>(), lines);
    }
}
