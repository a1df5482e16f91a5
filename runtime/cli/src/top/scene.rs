//! The contents of a frame, without their arrangement: made of an agent's snapshot, or of counters pages and a meter alone.
//!
//! ```text
//! workers    Snapshot of an agent ──┐
//!                                   ├► Scene: GPUs with their parts, rows, queue, events ─► draw
//! processes  Reading of pages ──────┘
//! ```
//!
//! Invariants: of each GPU, the parts add up to the used memory, unless single readings are older than others; then none is hidden. Names of
//! other programs are escaped and cut here.

use std::collections::BTreeMap;

use glake_units::{Bytes, printable};

/// Longest name of a worker or process, in characters.
pub(super) const LONGEST_NAME: usize = 64;
/// Longest sentence of an agent, in characters.
pub(super) const LONGEST_SENTENCE: usize = 300;

/// Contents of a frame.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scene {
    /// Source of the contents.
    pub source: String,
    /// Whether an agent answers: rows are workers, and there is a queue.
    pub is_agent: bool,
    /// GPUs in the order of the meter.
    pub gpus: Vec<Gpu>,
    /// Workers or processes: those that wait or move first, then by memory.
    pub rows: Vec<Row>,
    /// Requests for memory in the order of service.
    pub queue: Vec<Waiter>,
    /// Latest decisions, the newest first.
    pub events: Vec<Event>,
}

/// Memory of a GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gpu {
    /// Name of the GPU.
    pub name: String,
    /// Memory of the GPU.
    pub total: Bytes,
    /// Memory in use, of the driver too.
    pub used: Bytes,
    /// Parts of the used memory, in the order of the bar.
    pub parts: Vec<Part>,
    /// Free memory that no worker gets: outside of the agent's budget, or its reserve.
    pub kept: Bytes,
}

/// Part of a GPU's used memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Owner of the memory.
    pub owner: Owner,
    /// Size of the memory.
    pub bytes: Bytes,
}

/// Owner of memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    /// Memory of the row with this key.
    Row(String),
    /// Free memory in the pool of the row with this key, which only it can use.
    Waste(String),
    /// Programs that are no rows, and memory without a living process.
    Others,
    /// The driver.
    Driver,
}

/// Kind of a row's state, which decides its place and emphasis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// It has failed or ended unexpectedly.
    Troubled,
    /// It waits for memory.
    Waits,
    /// Its memory moves.
    Moves,
    /// It works.
    Busy,
    /// It does not work, and its memory is on its GPUs.
    #[default]
    Idle,
    /// It is asleep.
    Asleep,
    /// It has not joined.
    Absent,
}

/// Worker or process.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Row {
    /// Name in commands, or a key that no other row has.
    pub key: String,
    /// Name for people.
    pub name: String,
    /// Short name, for the bars of GPUs.
    pub label: String,
    /// Process id; 0: no process.
    pub pid: u32,
    /// Kind of the state.
    pub kind: Kind,
    /// State in words.
    pub state: String,
    /// Names of its GPUs.
    pub gpus: String,
    /// Memory on its GPUs, contexts included.
    pub on_gpu: Bytes,
    /// Free memory in its pools. None: unknown.
    pub waste: Option<Bytes>,
    /// Evicted memory whose contents are in host memory.
    pub in_host: Bytes,
    /// Evicted memory whose contents are in files.
    pub in_files: Bytes,
    /// Evicted memory whose contents are on other GPUs.
    pub in_peers: Bytes,
    /// Predicted seconds until evicted memory is back. None: unknown, or nothing is evicted.
    pub wake_s: Option<f64>,
    /// Seconds since it worked last. None: it works, or that is unknown.
    pub idle_s: Option<f64>,
    /// Whether it can be put to sleep, and woken.
    pub may_sleep: bool,
    /// Whether it can be woken.
    pub may_wake: bool,
}

/// Request for memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Waiter {
    /// Name of the worker.
    pub name: String,
    /// Whether all memory is granted.
    pub is_served: bool,
    /// Requested memory, on all GPUs.
    pub needs: Bytes,
    /// Part of it that is granted.
    pub granted: Bytes,
    /// The request in words.
    pub what: String,
    /// Whom it waits for and why, in words.
    pub why: String,
}

/// Decision.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Event {
    /// Seconds since the decision.
    pub ago_s: f64,
    /// The decision in words.
    pub text: String,
}

/// Returns a list of at most two names, and the number of the others.
pub(super) fn listed(names: impl Iterator<Item = String>) -> String {
    let names: Vec<String> = names.collect();
    match names.len() {
        0..=2 => names.join(" "),
        many => format!("{} {} +{}", names[0], names[1], many - 2),
    }
}

pub(super) fn order(one: &Row, other: &Row) -> std::cmp::Ordering {
    one.kind.cmp(&other.kind).then(other.on_gpu.cmp(&one.on_gpu)).then_with(|| one.key.cmp(&other.key))
}

/// Returns names of GPUs for people: PCI addresses without the part that all have in common, and "GPU 0" for numbers.
pub(super) fn short_names<'a>(names: impl Iterator<Item = &'a str>) -> BTreeMap<String, String> {
    let names: Vec<&str> = names.collect();
    let is_pci = |name: &&str| name.starts_with("0000:") || name.starts_with("00000000:");
    let are_pci = names.iter().all(is_pci);
    let short = |name: &str| match name.split_once(':') {
        Some((_, rest)) if are_pci => rest.to_owned(),
        _ if name.starts_with(|first: char| first.is_ascii_digit()) && !is_pci(&name) => {
            format!("GPU {name}")
        }
        _ => name.to_owned(),
    };
    names.iter().map(|name| ((*name).to_owned(), clean(&short(name), LONGEST_NAME))).collect()
}

/// Cuts and escapes a text of another program.
pub(super) fn clean(text: &str, most: usize) -> String {
    let cut: String = text.chars().take(most).collect();
    let is_cut = cut.len() < text.len();
    // Escaping lengthens it again.
    let shown: String = printable(&cut).chars().take(most).collect();
    if is_cut { format!("{shown}…") } else { shown }
}

/// Returns a size in three or four digits; `-` for nothing.
pub(super) fn size(bytes: Bytes) -> String {
    #[allow(clippy::cast_precision_loss)]
    let number = bytes.get() as f64;
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = number;
    for unit in units {
        if value < 999.5 || unit == "EiB" {
            return match value {
                0.0 => "-".to_owned(),
                _ if unit == "B" || value >= 99.95 => format!("{value:.0} {unit}"),
                _ => format!("{value:.1} {unit}"),
            };
        }
        value /= 1024.0;
    }
    String::new()
}

/// Returns a duration in two or three digits.
pub(super) fn span(seconds: f64) -> String {
    match seconds {
        s if !s.is_finite() || s < 0.0 => "-".to_owned(),
        s if s < 9.95 => format!("{s:.1} s"),
        s if s < 99.5 => format!("{s:.0} s"),
        s if s < 5_970.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.0} h", s / 3600.0),
        s if s < 8.64e8 => format!("{:.0} d", s / 86_400.0),
        _ => "years".to_owned(),
    }
}
