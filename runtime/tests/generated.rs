//! Files that are written from the code are what the code says. `UPDATE=1 cargo test -p glake-runtime --test generated` writes them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // also in the functions that tests call

use std::fmt::{Debug, Write as _};
use std::path::Path;
use std::{env, fs};

use glake_runtime::config::{Config, Environment, Knob};
use glake_runtime::metrics::{Counters, GROUPS, OwnStats, PoolStats};
use glake_units::metrics::{Label, Metric};

const DEFAULTS_HEAD: &str = "\
# Every key with its default, what it does, and in brackets what its value may be. Written from the code; docs/TUNING.md
# says more. Order of precedence: flags, environment, this kind of file (GLAKE_CONFIG or --config), preset, defaults.
# Sizes are bytes or text with a unit of 1024s: \"512KiB\", \"16MiB\", \"32GiB\".
# Keys that are commented out are absent by default.
";

#[test]
fn the_default_file_is_written_from_the_knobs() {
    let (config, mut text, mut of) = (Config::default(), DEFAULTS_HEAD.to_owned(), "");
    for knob in Knob::all() {
        let (table, name) = knob.name();
        if table != of {
            write!(text, "\n[{table}]\n").unwrap();
            of = table;
        }
        let absent =
            knob.absent.map_or(String::new(), |(means, _)| format!("; absent: {}", means.replace('`', "")));
        let about = summary(knob).join(" ").replace('`', "");
        let allowed = if knob.allowed == "true or false" { "" } else { &format!(" [{}]", allowed(knob)) };
        wrap(&mut text, &format!("{about}{allowed}{absent}"));
        match (knob.value(&config), knob.absent) {
            (Some(value), _) => writeln!(text, "{name} = {value}").unwrap(),
            (None, Some((_, shown))) => writeln!(text, "#{name} = {shown}").unwrap(),
            (None, None) => panic!("{} has no default and no meaning without a value", knob.key),
        }
    }
    compare("configs/default.toml", |_| text);
}

#[test]
fn the_reference_of_knobs_is_written_from_them() {
    let (config, mut text, mut of) = (Config::default(), String::new(), "");
    for knob in Knob::all() {
        let (table, name) = knob.name();
        if table != of {
            write!(text, "\n| `[{table}]` | default | allowed | |\n|---|---|---|---|\n").unwrap();
            of = table;
        }
        let variables: Vec<_> = Environment::names(knob.key).collect();
        let variables =
            if variables.is_empty() { String::new() } else { format!(" ({})", variables.join(", ")) };
        let default = match (knob.value(&config), knob.absent) {
            (Some(value), _) => format!("`{value}`"),
            (None, absent) => absent.map_or("", |(means, _)| means).to_owned(),
        };
        let about: Vec<_> =
            knob.about.iter().map(|line| line.trim()).filter(|line| !line.is_empty()).collect();
        writeln!(text, "| `{name}`{variables} | {default} | {} | {} |", allowed(knob), about.join(" "))
            .unwrap();
    }
    within("docs/TUNING.md", &text);
}

#[test]
fn the_structures_of_c_are_written_from_the_metrics() {
    let fields = |metrics: &[Metric]| -> String {
        let field =
            |metric: &Metric| format!("    /// {}\n    pub {}: {},\n", metric.help, metric.name, metric.kind);
        metrics.iter().map(field).collect()
    };
    let pools = fields(PoolStats::METRICS);
    let device = fields(&[Counters::METRICS, OwnStats::METRICS].concat());
    let text = STATISTICS.replace("    {pools}\n", &pools).replace("    {device}\n", &device);
    compare("ffi/abi/src/statistics.rs", |_| text);
}

#[test]
fn the_page_of_metrics_is_written_from_them() {
    let (mut text, mut of) = (String::new(), "");
    for group in GROUPS {
        if group.function != of {
            of = group.function;
            write!(text, "\n## `{of}`\n\n| key | unit | stability | |\n|---|---|---|---|\n").unwrap();
        }
        let part = |part: &&[&str]| {
            if let [one] = part { (*one).to_owned() } else { format!("({})", part.join(", ")) }
        };
        let key = group.keys.iter().map(part).collect::<Vec<_>>().join(".");
        for Metric { name, unit, stability, help, .. } in group.metrics {
            let stability = word(stability);
            writeln!(text, "| `{}` | {unit} | {stability} | {help} |", key.replace("{}", name)).unwrap();
        }
    }
    text.push_str(AGENT_HEAD);
    for Metric { name, kind, unit, labels, stability, help } in glake_agent::METRICS {
        let stability = word(stability);
        let key = format!("{name}{}", braces(labels));
        writeln!(text, "| `{key}` | {kind} | {unit} | {stability} | {help} |").unwrap();
    }
    within("docs/METRICS.md", &text);
}

/// A variant, as pages have it.
fn word(variant: &impl Debug) -> String {
    format!("{variant:?}").to_lowercase()
}

/// Labels, each with what it may be.
fn braces(labels: &[Label]) -> String {
    let label = |Label { name, values }: &Label| match values {
        [] => (*name).to_owned(),
        values => format!("{name}=({})", values.join(", ")),
    };
    let labels: Vec<String> = labels.iter().map(label).collect();
    if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(", ")) }
}

const AGENT_HEAD: &str = "
## `glake ps --metrics`

What the node agent (`glake serve`) counts. `glake ps --metrics` prints it in Prometheus' text format, version 0.0.4.
Nothing listens for Prometheus itself: have a timer write what is printed to a file of node_exporter's textfile
collector. Times are seconds here. In braces stand labels, in brackets what one may be: `gpu` is a GPU as the meter
names it, `worker` a name that `glake ps` shows, or `(others)`: the sum of all workers after the first 1,000. Counters
begin at 0 with each start of the agent; a worker's samples end when it leaves.

| metric | kind | unit | stability | |
|---|---|---|---|---|
";

const STATISTICS: &str = "\
//! What is counted for a device. Written from `glake_runtime::metrics`: `make generated` writes it anew.

/// One statistic.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: i64,
    /// The most since the peaks were reset.
    pub peak: i64,
    /// All that was ever added.
    pub allocated: i64,
    /// All that was ever taken away.
    pub freed: i64,
}

/// Those of requests up to 1 MiB, of larger ones, or of both.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    {pools}
}

/// Everything that is counted for a device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Both pools.
    pub all: PoolStats,
    /// Requests up to 1 MiB.
    pub small_pool: PoolStats,
    /// Larger requests.
    pub large_pool: PoolStats,
    {device}
}
";

/// What may be written, but for how sizes are, which both files say once.
fn allowed(knob: &Knob) -> &'static str {
    knob.allowed.split(": bytes").next().unwrap_or_default()
}

/// The lines before the first empty one.
fn summary(knob: &Knob) -> Vec<&'static str> {
    knob.about.iter().map(|line| line.trim()).take_while(|line| !line.is_empty()).collect()
}

/// A comment in lines of at most 120 characters.
fn wrap(text: &mut String, comment: &str) {
    let mut line = String::from("#");
    for word in comment.split(' ') {
        if line.len() + 1 + word.len() > 120 {
            writeln!(text, "{line}").unwrap();
            line = String::from("#");
        }
        write!(line, " {word}").unwrap();
    }
    writeln!(text, "{line}").unwrap();
}

/// Holds the part of a file between two marks against `text`.
fn within(file: &str, text: &str) {
    const MARKS: [&str; 2] = ["<!-- written from the code -->\n", "<!-- until here -->\n"];
    compare(file, |there| {
        let (before, rest) = there.split_once(MARKS[0]).expect("a first mark");
        let (_, after) = rest.split_once(MARKS[1]).expect("a last mark");
        [before, MARKS[0], text, "\n", MARKS[1], after].concat()
    });
}

/// Holds a file against what it should be, given what is there; `UPDATE` writes it.
fn compare(file: &str, written: impl FnOnce(&str) -> String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
    let there = fs::read_to_string(&path).unwrap_or_default();
    let written = written(&there);
    if env::var_os("UPDATE").is_some() {
        return fs::write(&path, written).unwrap();
    }
    assert!(there == written, "{file} is not what the code says: run make generated");
}
