//! The scene without an agent: processes by their counters pages, and GPUs by a meter if there is one.

use glake_meter::GpuMemory;
use glake_units::Bytes;
use glake_wire::{Counters, GpuCounters};

use super::scene::{Gpu, Kind, LONGEST_NAME, Owner, Part, Row, Scene, clean, listed, order, short_names};

/// Age of the last change until which a process counts as working.
const WORKING_S: f64 = 1.5;

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
