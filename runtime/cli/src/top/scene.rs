//! The contents of a frame, without their arrangement: made of an agent's snapshot, or of counters pages and a meter alone.
//!
//! ```text
//! Snapshot (agent) ─┐
//!                   ├► Scene: GPUs with their parts, rows, queue, events ─► draw
//! Reading (pages) ──┘
//! ```
//!
//! Invariants: of each GPU, the parts add up to the used memory, unless single readings are older than others; then none is hidden. Names of
//! other programs are escaped and cut here.

use std::collections::BTreeMap;

use glake_meter::GpuMemory;
use glake_units::{Bytes, printable};
use glake_wire::{
    Counters, DecisionRow, GpuCounters, GpuRow, OperationKind, OperationRow, RequestKind, RequestPhase,
    RequestRow, Snapshot, WatchedWorker,
};

/// Longest name of a worker or process, in characters.
const LONGEST_NAME: usize = 64;
/// Longest sentence of an agent, in characters.
const LONGEST_SENTENCE: usize = 300;
/// Age of the last change until which a process counts as working.
const WORKING_S: f64 = 1.5;

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

/// Counters of processes, read without an agent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reading {
    /// Processes with a page.
    pub processes: Vec<Process>,
    /// Device of the meter, as pages name it.
    pub backend: String,
    /// GPUs of the meter; empty without one.
    pub gpus: Vec<(String, GpuMemory)>,
    /// Present time, in nanoseconds of the monotonic clock.
    pub now_ns: u64,
}

/// Process with a counters page.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Process {
    /// Process id in the reader's namespace.
    pub pid: u32,
    /// Number of its page: a program may have several.
    pub page: u64,
    /// Its command line.
    pub command: String,
    /// Its counters.
    pub counters: Counters,
}

impl Scene {
    /// Makes a scene of an agent's snapshot; `decisions` are all that the client remembers, the oldest first,
    /// with the seconds since they were received, and `waste` is the free memory
    /// in the pools of processes whose pages can be read.
    pub fn from_snapshot<'a>(
        snapshot: &Snapshot,
        decisions: impl DoubleEndedIterator<Item = (f64, &'a DecisionRow)>,
        waste: &BTreeMap<u32, Bytes>,
    ) -> Scene {
        let mut rows: Vec<Row> = snapshot.workers.iter().map(worker_row).collect();
        for row in rows.iter_mut().filter(|row| !row.on_gpu.is_zero()) {
            row.waste = waste.get(&row.pid).map(|waste| (*waste).min(row.on_gpu));
        }
        let short = short_names(snapshot.gpus.iter().map(|gpu| gpu.gpu.as_str()));
        let name = |gpu: &str| short.get(gpu).cloned().unwrap_or_else(|| clean(gpu, LONGEST_NAME));
        let names = |of: &WatchedWorker| -> (String, String) {
            (of.row.worker.clone(), listed(of.row.gpus.iter().map(|gpu| name(gpu))))
        };
        let places: BTreeMap<String, String> = snapshot.workers.iter().map(names).collect();
        for row in &mut rows {
            row.gpus = places.get(&row.key).cloned().unwrap_or_default();
        }
        let queue = snapshot.requests.iter().map(|request| waiter(request, &name)).collect();
        let gpus =
            snapshot.gpus.iter().map(|gpu| watched_gpu(gpu, &snapshot.workers, name(&gpu.gpu))).collect();
        rows.sort_by(order);
        Scene {
            source: format!(
                "agent {} (process {}), up {}",
                clean(&snapshot.agent, 20),
                snapshot.pid,
                span(snapshot.up_s)
            ),
            is_agent: true,
            gpus,
            rows,
            queue,
            events: decisions.rev().map(|(since, row)| event(since, row)).collect(),
        }
    }

    /// Makes a scene of the pages of processes.
    pub fn from_pages<'a>(reading: &'a Reading) -> Scene {
        let keys: Vec<String> = reading.processes.iter().map(key).collect();
        let mut rows: Vec<Row> = reading
            .processes
            .iter()
            .zip(&keys)
            .map(|(process, key)| process_row(process, key, reading.now_ns))
            .collect();
        let metered = |(gpu, memory): &'a (String, GpuMemory)| PagedGpu {
            name: gpu.clone(),
            meter: Some(memory),
            holders: Vec::new(),
        };
        let mut gpus: Vec<PagedGpu<'a>> = reading.gpus.iter().map(metered).collect();
        for (at, process) in reading.processes.iter().enumerate() {
            for counters in &process.counters.gpus {
                let name = gpu_name(process, counters, &reading.backend);
                let place = gpus.iter().position(|known| known.name == name).unwrap_or_else(|| {
                    gpus.push(PagedGpu { name, meter: None, holders: Vec::new() });
                    gpus.len() - 1
                });
                gpus[place].holders.push((at, counters));
            }
        }
        let short = short_names(gpus.iter().map(|gpu| gpu.name.as_str()));
        let mut shown = Vec::with_capacity(gpus.len());
        for gpu in &gpus {
            let held = gpu.held(reading);
            for (&(at, _), held) in gpu.holders.iter().zip(&held) {
                rows[at].on_gpu = rows[at].on_gpu.saturating_add(*held);
            }
            shown.push(gpu.shown(&held, &keys, short.get(&gpu.name).cloned().unwrap_or_default()));
        }
        for (row, process) in rows.iter_mut().zip(&reading.processes) {
            let names = process.counters.gpus.iter().map(|gpu| gpu_name(process, gpu, &reading.backend));
            row.gpus = listed(names.map(|name| short.get(&name).cloned().unwrap_or_default()));
        }
        rows.sort_by(order);
        Scene {
            source: "no agent: processes' own counters".to_owned(),
            gpus: shown,
            rows,
            ..Scene::default()
        }
    }
}

/// GPU without an agent: the meter's reading, and the counters of the processes that have memory there, with their places in the reading.
struct PagedGpu<'a> {
    name: String,
    meter: Option<&'a GpuMemory>,
    holders: Vec<(usize, &'a GpuCounters)>,
}

impl PagedGpu<'_> {
    /// Returns the memory of each holder, contexts included if the meter lists them.
    fn held(&self, reading: &Reading) -> Vec<Bytes> {
        let pid = |at: usize| reading.processes[at].pid;
        let held = |&(at, counters): &(usize, &GpuCounters)| {
            let own = counters.reserved.saturating_add(counters.relays);
            // The meter knows one process where a program has several pages.
            let pages = self.holders.iter().filter(|(other, _)| pid(*other) == pid(at)).count();
            let measured = self.meter.filter(|_| pages == 1);
            own.max(measured.map_or(Bytes::ZERO, |meter| meter.of_process(pid(at))))
        };
        self.holders.iter().map(held).collect()
    }

    fn shown(&self, held: &[Bytes], keys: &[String], name: String) -> Gpu {
        let of_rows: Bytes = held.iter().copied().sum();
        let used = self.meter.map_or(of_rows, |meter| meter.used);
        let driver = self.meter.map_or(Bytes::ZERO, |meter| meter.reserved);
        let told = self.holders.iter().map(|(_, counters)| counters.total).max().unwrap_or_default();
        let mut parts = Vec::new();
        for ((at, counters), held) in self.holders.iter().zip(held) {
            let waste = waste_of(counters);
            parts.push(Part { owner: Owner::Row(keys[*at].clone()), bytes: held.saturating_sub(waste) });
            parts.push(Part { owner: Owner::Waste(keys[*at].clone()), bytes: waste });
        }
        parts.push(Part { owner: Owner::Others, bytes: used.saturating_sub(of_rows) });
        parts.push(Part { owner: Owner::Driver, bytes: driver });
        parts.retain(|part| !part.bytes.is_zero());
        Gpu {
            name,
            total: self.meter.map_or(told, |meter| meter.total),
            used: used.saturating_add(driver),
            parts,
            kept: Bytes::ZERO,
        }
    }
}

/// Returns a list of at most two names, and the number of the others.
fn listed(names: impl Iterator<Item = String>) -> String {
    let names: Vec<String> = names.collect();
    match names.len() {
        0..=2 => names.join(" "),
        many => format!("{} {} +{}", names[0], names[1], many - 2),
    }
}

fn order(one: &Row, other: &Row) -> std::cmp::Ordering {
    one.kind.cmp(&other.kind).then(other.on_gpu.cmp(&one.on_gpu)).then_with(|| one.key.cmp(&other.key))
}

/// Returns the free memory in a pool.
pub fn waste_of(counters: &GpuCounters) -> Bytes {
    let parts = [counters.waste_hard, counters.waste_soft, counters.waste_stream];
    parts.into_iter().sum::<Bytes>().min(counters.reserved)
}

/// Returns a key that no other process has.
fn key(process: &Process) -> String {
    format!("{}/{}", process.pid, process.page)
}

fn process_row(process: &Process, key: &str, now_ns: u64) -> Row {
    let gpus = &process.counters.gpus;
    let sum = |of: fn(&GpuCounters) -> Bytes| gpus.iter().map(of).sum::<Bytes>();
    let evicted = sum(GpuCounters::evicted).saturating_add(sum(|gpu| gpu.discarded));
    let reserved = sum(|gpu| gpu.reserved);
    #[allow(clippy::cast_precision_loss)]
    let quiet_s = now_ns.saturating_sub(process.counters.changed_ns) as f64 / 1e9;
    let is_working = quiet_s < WORKING_S;
    let (kind, state) = match (evicted.is_zero(), reserved.is_zero()) {
        (false, true) => (Kind::Asleep, "asleep"),
        (false, false) if is_working => (Kind::Busy, "partly asleep"),
        (false, false) => (Kind::Idle, "partly asleep"),
        (true, _) if is_working => (Kind::Busy, "active"),
        (true, true) => (Kind::Idle, "no memory"),
        (true, false) => (Kind::Idle, "quiet"),
    };
    Row {
        key: key.to_owned(),
        name: clean(label(&process.command), LONGEST_NAME),
        label: clean(label(&process.command), LONGEST_NAME),
        pid: process.pid,
        kind,
        state: state.to_owned(),
        waste: Some(gpus.iter().map(waste_of).sum()),
        in_host: sum(|gpu| gpu.evicted_host),
        in_files: sum(|gpu| gpu.evicted_files),
        in_peers: sum(|gpu| gpu.evicted_peers),
        idle_s: (!is_working).then_some(quiet_s),
        ..Row::default()
    }
}

/// Returns the name by which people know a command: that of the program, or of the script that an interpreter runs.
fn label(command: &str) -> &str {
    fn base(path: &str) -> &str {
        path.rsplit('/').next().unwrap_or(path)
    }
    let mut words = command.split_whitespace();
    let name = base(words.next().unwrap_or_default());
    let script = name.starts_with("python").then(|| words.find(|word| !word.starts_with('-'))).flatten();
    script.map_or(name, base)
}

/// Returns the name of a process's GPU: that of the meter, or one that no other GPU has.
fn gpu_name(process: &Process, counters: &GpuCounters, meter: &str) -> String {
    let backend = &process.counters.backend;
    let folder = |of: &str| of.split_once('@').map(|(_, folder)| folder.to_owned());
    let is_metered = backend == meter || (folder(backend).is_some() && folder(backend) == folder(meter));
    match backend.as_str() {
        _ if is_metered => counters.gpu.clone(),
        "cuda" => counters.gpu.clone(),
        // Other processes that name the same folder share these simulated GPUs; without one each process has its own.
        _ => match folder(backend) {
            Some(folder) => format!("{} @{folder}", counters.gpu),
            None => format!("{} in {}", counters.gpu, process.pid),
        },
    }
}

fn worker_row(worker: &WatchedWorker) -> Row {
    let WatchedWorker { row, gpus, operation } = worker;
    let evicted: Bytes = gpus.iter().map(|gpu| gpu.evicted).sum();
    let in_files: Bytes = gpus.iter().filter_map(|gpu| gpu.in_files).sum();
    let in_peers: Bytes = gpus.iter().filter_map(|gpu| gpu.in_peers).sum();
    let on_gpu = gpus.iter().map(held).sum();
    let (kind, mut state) = state(&row.state, operation.as_ref());
    if state == "asleep" && !row.resident.is_zero() {
        "partly asleep".clone_into(&mut state);
    }
    let is_away = !row.evicted.is_zero() || matches!(kind, Kind::Asleep | Kind::Waits);
    let has_joined = row.pid != 0 && !matches!(kind, Kind::Absent | Kind::Troubled);
    let note = row.note.as_deref().map(|note| clean(note, LONGEST_SENTENCE));
    Row {
        key: row.worker.clone(),
        name: clean(&row.worker, LONGEST_NAME),
        label: clean(&row.worker, LONGEST_NAME),
        pid: row.pid,
        kind,
        state: match note {
            Some(note) if matches!(kind, Kind::Absent | Kind::Troubled) => format!("{state}: {note}"),
            _ => state,
        },
        gpus: String::new(),
        on_gpu,
        waste: None,
        in_host: evicted.saturating_sub(in_files).saturating_sub(in_peers),
        in_files,
        in_peers,
        wake_s: is_away.then_some(row.predicted_wake_s),
        idle_s: row.idle_s,
        may_sleep: has_joined && !row.resident.is_zero(),
        may_wake: has_joined && is_away,
    }
}

/// Returns the memory of a worker on a GPU.
fn held(gpu: &glake_wire::WorkerGpuRow) -> Bytes {
    gpu.used.unwrap_or_else(|| gpu.context.saturating_add(gpu.resident))
}

/// Returns the state of a worker for people who have not read the manual.
fn state(word: &str, operation: Option<&OperationRow>) -> (Kind, String) {
    let done = operation.map(|operation| {
        let whom = operation.whom.as_ref().map(|whom| format!(" for {}", clean(whom, 24)));
        let share = (!operation.bytes.is_zero())
            .then(|| format!(" {:.0} %", 100.0 * operation.done.fraction_of(operation.bytes).min(1.0)));
        (whom.unwrap_or_default(), share.unwrap_or_default())
    });
    let (whom, share) = done.unwrap_or_default();
    let kind = operation.map(|operation| operation.what);
    let (kind, words) = match (kind, word) {
        (Some(OperationKind::Parking), _) | (_, "parking") => (Kind::Moves, format!("asked to pause{whom}")),
        (Some(OperationKind::Shrinking), _) | (_, "shrinking") => {
            (Kind::Moves, format!("falls asleep{whom}{share}"))
        }
        (Some(OperationKind::Refilling), _) | (_, "refilling") => (Kind::Moves, format!("wakes up{share}")),
        (Some(OperationKind::Starting), _) | (_, "starting") => (Kind::Moves, format!("loads{share}")),
        (Some(OperationKind::Checkpointing), _) | (_, "checkpointing") => {
            (Kind::Moves, format!("leaves its GPUs{share}"))
        }
        (Some(OperationKind::Restoring), _) | (_, "restoring") => (Kind::Moves, format!("comes back{share}")),
        (Some(OperationKind::Demoting), "asleep") => (Kind::Asleep, format!("asleep, to files{share}")),
        (_, "busy") => (Kind::Busy, "busy".to_owned()),
        (_, "loaded") => (Kind::Busy, "loaded, not used yet".to_owned()),
        (_, "waiting") => (Kind::Waits, "waits for memory".to_owned()),
        (_, "idle") => (Kind::Idle, "idle".to_owned()),
        (_, "resident") => (Kind::Idle, "on its GPUs".to_owned()),
        (_, "joined") => (Kind::Idle, "no memory yet".to_owned()),
        (_, "asleep") => (Kind::Asleep, "asleep".to_owned()),
        (_, "checkpointed") => (Kind::Asleep, "asleep, off its GPUs".to_owned()),
        (_, "silent") => (Kind::Absent, "not heard of yet".to_owned()),
        (_, "failed") => (Kind::Troubled, "lost: restart it".to_owned()),
        (_, "ended") => (Kind::Troubled, word.to_owned()),
        (_, "queued" | "running" | "stopping" | "stopped") => (Kind::Absent, word.to_owned()),
        (_, other) => (Kind::Idle, clean(other, 24)),
    };
    (kind, words)
}

fn watched_gpu(gpu: &GpuRow, workers: &[WatchedWorker], name: String) -> Gpu {
    let mut parts: Vec<Part> = Vec::new();
    for worker in workers {
        let own = worker.gpus.iter().filter(|of| of.gpu == gpu.gpu);
        let bytes = own.map(held).sum();
        parts.push(Part { owner: Owner::Row(worker.row.worker.clone()), bytes });
    }
    let of_workers: Bytes = parts.iter().map(|part| part.bytes).sum();
    parts.push(Part { owner: Owner::Others, bytes: gpu.unmanaged });
    parts.push(Part { owner: Owner::Driver, bytes: gpu.driver });
    parts.retain(|part| !part.bytes.is_zero());
    let used = gpu.used.unwrap_or_else(|| of_workers.saturating_add(gpu.unmanaged));
    let used = used.saturating_add(gpu.driver);
    let free = gpu.total.saturating_sub(used);
    let kept = match gpu.budget.is_zero() {
        true => Bytes::ZERO,
        false => free.saturating_sub(gpu.limit.saturating_sub(of_workers)),
    };
    Gpu { name, total: gpu.total, used, parts, kept }
}

fn waiter(request: &RequestRow, gpu_name: &dyn Fn(&str) -> String) -> Waiter {
    let needs = request.needs.iter().map(|need| need.bytes).sum();
    let granted: Bytes = request.needs.iter().map(|need| need.granted).sum();
    let named = |gpu: String| if gpu.starts_with("GPU ") { gpu } else { format!("GPU {gpu}") };
    let gpus: Vec<String> = request.needs.iter().map(|need| named(gpu_name(&need.gpu))).collect();
    let on = match gpus.as_slice() {
        [] => String::new(),
        [one] => format!(" on {one}"),
        [first, rest @ ..] => format!(" on {first} and {} more", rest.len()),
    };
    let purpose = match request.kind {
        RequestKind::Refill => " to wake up",
        RequestKind::Start => " to load",
        RequestKind::Growth => " more to go on",
        RequestKind::Unknown => "",
    };
    let is_served = request.phase == RequestPhase::Filling;
    let what = format!("needs {}{purpose}{on}, waits {}", size(needs), span(request.waited_s));
    let got = match granted.is_zero() {
        true => String::new(),
        false => format!("has {} of it; ", size(granted)),
    };
    let givers: Vec<String> = request.givers.iter().take(3).map(|giver| clean(giver, 24)).collect();
    let more = usize::try_from(request.giver_count).unwrap_or(0).saturating_sub(givers.len());
    let reason = clean(&request.why, LONGEST_SENTENCE);
    let is_named = |name: &String| reason.contains(name.as_str());
    let whom = match (givers.is_empty(), more, &request.behind) {
        // The reason names them.
        (false, 0, _) if givers.iter().all(is_named) => String::new(),
        (true, _, Some(behind)) if reason.contains(behind.as_str()) => String::new(),
        (false, 0, _) => format!("waits for {}: ", givers.join(", ")),
        (false, more, _) => format!("waits for {} and {more} more: ", givers.join(", ")),
        (true, _, Some(behind)) => format!("waits behind {}: ", clean(behind, 24)),
        (true, _, None) => String::new(),
    };
    Waiter {
        name: clean(&request.worker, LONGEST_NAME),
        is_served,
        needs,
        granted,
        what,
        why: format!("{got}{whom}{reason}"),
    }
}

fn event(since: f64, row: &DecisionRow) -> Event {
    let mut taken: Vec<String> = row
        .taken
        .iter()
        .take(4)
        .map(|taken| {
            format!("{} of {} ({})", size(taken.bytes), clean(&taken.worker, 24), clean(&taken.why, 40))
        })
        .collect();
    match row.taken.len().saturating_sub(taken.len()) {
        0 => {}
        more => taken.push(format!("more of {more} others")),
    }
    let what = match taken.split_last() {
        None => format!("{} of free memory", size(row.needed)),
        Some((only, [])) => only.clone(),
        Some((last, first)) => format!("{} and {last}", first.join(", ")),
    };
    let worker = clean(&row.worker, LONGEST_NAME);
    let text = match (row.outcome.as_str(), row.real_s) {
        ("refilled", Some(real)) => {
            format!("{worker} got {what} in {}, predicted {}", span(real), span(row.predicted_s))
        }
        ("refilled", None) => format!("{worker} got {what}"),
        ("under way", _) => format!("{worker} gets {what}"),
        (outcome, _) => {
            let needed =
                if row.needed.is_zero() { String::new() } else { format!(" ({})", size(row.needed)) };
            format!("{worker}: {}{needed}", clean(outcome, LONGEST_SENTENCE))
        }
    };
    Event { ago_s: row.ago_s + since, text }
}

/// Returns names of GPUs for people: PCI addresses without the part that all have in common, and "GPU 0" for numbers.
fn short_names<'a>(names: impl Iterator<Item = &'a str>) -> BTreeMap<String, String> {
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
