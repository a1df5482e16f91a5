//! The scene of an agent: workers, their requests for memory in the order of service, and decisions in words.

use std::collections::BTreeMap;

use glake_units::Bytes;
use glake_wire::{
    DecisionRow, GpuRow, OperationKind, OperationRow, RequestKind, RequestPhase, RequestRow, Snapshot,
    WatchedWorker,
};

use super::scene::{
    Event, Gpu, Kind, LONGEST_NAME, LONGEST_SENTENCE, Owner, Part, Row, Scene, Waiter, clean, listed, order,
    short_names, size, span,
};

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
        why: match (is_served, reason.is_empty()) {
            (true, true) => "its memory is coming back".to_owned(),
            (true, false) => reason,
            (false, _) => format!("{got}{whom}{reason}"),
        },
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
    let of_others: Bytes = row.taken.iter().map(|taken| taken.bytes).sum();
    let free = row.needed.saturating_sub(of_others);
    if !taken.is_empty() && !free.is_zero() {
        taken.push(format!("{} of free memory", size(free)));
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
