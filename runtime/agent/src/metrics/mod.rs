//! Metrics of the agent, each described once: counters since the agent's start, and their output in Prometheus' text format, version 0.0.4
//! (prometheus.io/docs/instrumenting/exposition_formats).
//!
//! Names end with the unit, and counters with `_total`. Sums over a metric's labels are meaningful; values that do not add up are separate
//! metrics.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};

use glake_arbiter::{Action, Denied, GpuId, OPERATIONS, RequestKind};
use glake_units::Bytes;
use glake_units::metrics::{Histogram, Kind, Label, Metric, Stability, Unit};
use glake_wire::{GpuRow, Snapshot, WatchedWorker};

use crate::Agent;

/// Metrics of an agent, in the order of output.
pub const METRICS: &[Metric] = &[
    GPU_LIMIT,
    GPU_CLAIMED,
    GPU_USED,
    GPU_UNMANAGED,
    WORKER_LEASE,
    WORKER_BYTES,
    WORKER_PLACES,
    WORKER_WAKE,
    HOST_PINNED,
    WANTS,
    WAITS,
    SWITCHES,
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
/// Places of a worker's memory that add up to all of it.
const WHERE: &[&str] = &["context", "gpu", "host", "peer", "file", "unknown"];
const KINDS: &[&str] = &["want", "growth"];
const ENDS: &[&str] = &["granted", "denied"];

/// Limit of the workers with samples of their own; the others share [`OTHERS`], which cannot be the name of a worker.
const MOST_WORKERS: usize = 1000;
const OTHERS: &str = "(others)";

const GPU_LIMIT: Metric =
    gauge("glake_gpu_limit_bytes", Unit::Bytes, &[GPU], "What workers may have of a GPU together.");
const GPU_CLAIMED: Metric = gauge(
    "glake_gpu_claimed_bytes",
    Unit::Bytes,
    &[GPU],
    "What counts as memory of workers: floors, leases, and what dead ones had until the meter shows it free.",
);
const GPU_USED: Metric = gauge(
    "glake_gpu_used_bytes",
    Unit::Bytes,
    &[GPU],
    "Memory of a GPU in use by all programs, at the meter's last reading; no sample before the first.",
);
const GPU_UNMANAGED: Metric = gauge(
    "glake_gpu_unmanaged_bytes",
    Unit::Bytes,
    &[GPU],
    "The part of it that belongs to no worker of this agent.",
);
const WORKER_LEASE: Metric =
    gauge("glake_worker_lease_bytes", Unit::Bytes, &[WORKER], "What a worker may hold, of all GPUs.");
const WORKER_BYTES: Metric = gauge(
    "glake_worker_bytes",
    Unit::Bytes,
    &[WORKER, Label { name: "place", values: PLACES }],
    "A worker's memory, of all GPUs: what is resident, and what is evicted.",
);
const WORKER_PLACES: Metric = gauge(
    "glake_worker_place_bytes",
    Unit::Bytes,
    &[WORKER, Label { name: "place", values: WHERE }],
    "A worker's memory by place, of all GPUs: its contexts, what is on its GPUs, and copies of evicted memory in host memory, on other GPUs, \
     in files, or in a place that a worker of an earlier release does not say.",
);
const HOST_PINNED: Metric = gauge(
    "glake_host_pinned_bytes",
    Unit::Bytes,
    &[],
    "Pinned host memory that copies of all workers take, copies of resident memory included.",
);
const WORKER_WAKE: Metric = experimental(gauge(
    "glake_worker_wake_seconds",
    Unit::Seconds,
    &[WORKER],
    "How long a worker's memory would take to come back, as predicted.",
));
const WANTS: Metric = gauge("glake_wants", Unit::Count, &[], "Gangs whose uses wait for memory.");
const WAITS: Metric = Metric {
    kind: Kind::Histogram,
    ..gauge(
        "glake_wait_seconds",
        Unit::Seconds,
        &[Label { name: "kind", values: KINDS }, Label { name: "end", values: ENDS }],
        "How long requests waited until all of their memory was granted, or until they were denied; starts of workers are wants.",
    )
};
const SWITCHES: Metric = Metric {
    kind: Kind::Histogram,
    ..gauge(
        "glake_switch_seconds",
        Unit::Seconds,
        &[Label { name: "what", values: OPERATIONS }],
        "How long completed operations took: parks until uses stood, shrinks, refills and starts from their decision to their end.",
    )
};
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
    let Snapshot { gpus: rows, workers, hosted, .. } = agent.snapshot();
    let of = |gpu| counts.gpus.get(&gpu).copied().unwrap_or_default();
    let each_row = |of: fn(&GpuRow) -> Option<Bytes>| {
        rows.iter().filter_map(move |row| Some(([row.gpu.as_str()], of(row)?.get())))
    };
    text.metric(&GPU_LIMIT, each_row(|row| Some(row.limit)));
    text.metric(&GPU_CLAIMED, each_row(|row| Some(row.claimed)));
    text.metric(&GPU_USED, each_row(|row| row.used));
    text.metric(&GPU_UNMANAGED, each_row(|row| row.used.map(|_| row.unmanaged)));
    let workers = by_worker(&workers);
    text.metric(&WORKER_LEASE, workers.iter().map(|of| ([of.name], of.lease.get())));
    let places = |of: &Figures<'_>| PLACES.iter().copied().zip([of.resident.get(), of.evicted.get()]);
    text.metric(
        &WORKER_BYTES,
        workers.iter().flat_map(|of| places(of).map(|(place, bytes)| ([of.name, place], bytes))),
    );
    let places = |of: &Figures<'_>| WHERE.iter().copied().zip(of.places);
    let placed =
        workers.iter().flat_map(|of| places(of).map(|(place, bytes)| ([of.name, place], bytes.get())));
    text.metric(&WORKER_PLACES, placed);
    text.metric(&WORKER_WAKE, workers.iter().map(|of| ([of.name], of.wake_s)));
    text.metric(&HOST_PINNED, [([], hosted.get())]);
    text.metric(&WANTS, [([], arbiter.waiting())]);
    let waits = |(kind, name)| {
        ENDS.iter()
            .zip([true, false])
            .map(move |(end, is_granted)| ([name, *end], arbiter.timings().waits(kind, is_granted)))
    };
    let kinds = [RequestKind::Refill, RequestKind::Growth].into_iter().zip(KINDS.iter().copied());
    text.histogram(&WAITS, kinds.flat_map(waits));
    text.histogram(&SWITCHES, OPERATIONS.iter().map(|name| [*name]).zip(arbiter.timings().switches()));
    text.metric(&DENIED, each_word(WHY, &counts.denied));
    text.metric(&GROWTHS_DENIED, each_gpu(&gpus, |gpu| of(gpu).growths_denied));
    text.metric(&GRANTS, each_gpu(&gpus, |gpu| of(gpu).grants));
    text.metric(&GRANTED, each_gpu(&gpus, |gpu| of(gpu).granted.get()));
    text.metric(&PARKS, [([], counts.parks)]);
    text.metric(&SHRINKS, each_gpu(&gpus, |gpu| of(gpu).shrinks));
    text.metric(&FAILED, each_word(WHAT, &counts.failed));
    text.metric(&DISTRUSTED, [([], counts.distrusted)]);
    text.metric(&GIVEN_UP, [([], counts.given_up)]);
    text.metric(&LINK_DUTY, rows.iter().map(|row| ([row.gpu.as_str()], row.link_duty)));
    text.histogram(&DECISIONS, [([], &counts.decisions)]);
    text.text()
}

/// Figures of a worker, or of all workers beyond [`MOST_WORKERS`].
#[derive(Default)]
struct Figures<'a> {
    name: &'a str,
    lease: Bytes,
    resident: Bytes,
    evicted: Bytes,
    /// Memory at each place of [`WHERE`].
    places: [Bytes; WHERE.len()],
    wake_s: f64,
}

impl Figures<'_> {
    fn add(&mut self, WatchedWorker { row, gpus, .. }: &WatchedWorker) {
        let add = |sum: &mut Bytes, bytes: Bytes| *sum = sum.saturating_add(bytes);
        add(&mut self.lease, row.leased);
        add(&mut self.resident, row.resident);
        add(&mut self.evicted, row.evicted);
        self.wake_s += row.predicted_wake_s;
        for of in gpus {
            let [context, gpu, host, peer, file, unknown] = &mut self.places;
            add(context, of.context);
            add(gpu, of.resident);
            match (of.in_peers, of.in_files) {
                (Some(in_peers), Some(in_files)) => {
                    add(peer, in_peers);
                    add(file, in_files);
                    add(host, of.evicted.saturating_sub(in_peers).saturating_sub(in_files));
                }
                _ => add(unknown, of.evicted),
            }
        }
    }
}

/// Returns the figures of the first workers, by name, and the sum of the rest.
fn by_worker(workers: &[WatchedWorker]) -> Vec<Figures<'_>> {
    let (own, rest) = workers.split_at(workers.len().min(MOST_WORKERS));
    let mut figures: Vec<Figures<'_>> = Vec::new();
    for worker in own {
        let mut of = Figures { name: &worker.row.worker, ..Figures::default() };
        of.add(worker);
        figures.push(of);
    }
    let mut others = Figures { name: OTHERS, ..Figures::default() };
    rest.iter().for_each(|worker| others.add(worker));
    figures.extend((!rest.is_empty()).then_some(others));
    figures
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

/// Upper ends of the buckets of decision times, in seconds.
const BUCKETS: &[f64] = &[5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2];

/// Reasons for denials, as label values.
pub(crate) const WHY: &[&str] = &["too_large", "deadline", "incomplete", "lost"];
/// Operations that workers failed to carry out, as label values.
pub(crate) const WHAT: &[&str] = &["park", "shrink", "refill", "other"];

/// Counters of the agent.
#[derive(Debug)]
pub(crate) struct Counts {
    pub(crate) gpus: BTreeMap<GpuId, GpuCounts>,
    pub(crate) parks: u64,
    /// Failures by operation; see [`WHAT`].
    pub(crate) failed: BTreeMap<&'static str, u64>,
    /// Denials by reason; see [`WHY`].
    pub(crate) denied: BTreeMap<&'static str, u64>,
    pub(crate) distrusted: u64,
    pub(crate) given_up: u64,
    pub(crate) decisions: Histogram,
}

/// Counters of one GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GpuCounts {
    pub(crate) grants: u64,
    pub(crate) granted: Bytes,
    pub(crate) shrinks: u64,
    pub(crate) growths_denied: u64,
}

impl Default for Counts {
    fn default() -> Self {
        Counts {
            gpus: BTreeMap::new(),
            parks: 0,
            failed: BTreeMap::new(),
            denied: BTreeMap::new(),
            distrusted: 0,
            given_up: 0,
            decisions: Histogram::new(BUCKETS),
        }
    }
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

    /// Adds a histogram for each value of the metric's labels: cumulative counts in ascending order, the total count and the sum.
    pub(crate) fn histogram<'a, const LABELS: usize>(
        &mut self,
        metric: &Metric,
        histograms: impl IntoIterator<Item = ([&'a str; LABELS], &'a Histogram)>,
    ) {
        self.begin(metric);
        let bucket = format!("{}_bucket", metric.name);
        for (values, histogram) in histograms {
            let names = metric.labels.iter().map(|label| label.name);
            let labels: Vec<(&str, &str)> = names.zip(values).collect();
            for (end, count) in histogram.within() {
                let end = end.to_string();
                self.sample(&bucket, labels.iter().copied().chain([("le", end.as_str())]), count);
            }
            self.sample(&bucket, labels.iter().copied().chain([("le", "+Inf")]), histogram.count());
            self.sample(
                &format!("{}_sum", metric.name),
                labels.iter().copied(),
                histogram.sum().as_secs_f64(),
            );
            self.sample(&format!("{}_count", metric.name), labels.iter().copied(), histogram.count());
        }
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
    use std::time::Duration;

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
        let mut histogram = Histogram::new(&[0.5, 1.0]);
        [0.5, 4.0].map(Duration::from_secs_f64).into_iter().for_each(|took| histogram.add(took));
        text.histogram(&TOOK, [([], &histogram)]);
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
