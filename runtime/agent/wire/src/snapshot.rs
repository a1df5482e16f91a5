//! Snapshot of an agent's state: its GPUs, its workers, the open requests for memory and the latest decisions. `watch` sends one after the
//! other; `ps`, `explain` and `metrics` are made of the same one.
//!
//! ```text
//! Snapshot ─► parts: the head with its decisions, then lists that fit into frames ─► append ─► Snapshot
//! ```
//!
//! A list or a number that is absent is empty or 0. A snapshot has no value that an older client could misread: words of later releases
//! are read as `Unknown`.
//!
//! Sums: of a GPU, `used` is `unmanaged` plus the `used` of its workers, at the meter's last reading. `claimed` is `reclaiming` plus context,
//! lease and overrun of its workers.

use glake_units::Bytes;
use serde::{Deserialize, Serialize};

use crate::frame::{Envelope, FrameError, append_frame};
use crate::operator::{Answer, DecisionRow, PART, WorkerRow, cut, is_false, split};

/// Shortest interval of snapshots in milliseconds; shorter ones are raised to it.
pub const LEAST_INTERVAL_MS: u64 = 100;

/// State of an agent at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Snapshot {
    /// Number of the snapshot, which rises with each snapshot of the agent.
    pub number: u64,
    /// Number of snapshots that this client should have got since the one before, and did not, because it reads slowly.
    #[serde(skip_serializing_if = "is_default")]
    pub missed: u64,
    /// Release of the agent.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub agent: String,
    /// Process id of the agent.
    #[serde(skip_serializing_if = "is_default")]
    pub pid: u32,
    /// Seconds since the start of the agent.
    #[serde(skip_serializing_if = "is_default")]
    pub up_s: f64,
    /// Pinned host memory that copies of all workers take.
    #[serde(skip_serializing_if = "is_default")]
    pub hosted: Bytes,
    /// Limit of `hosted`. None: unlimited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_budget: Option<Bytes>,
    /// GPUs, in the meter's order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuRow>,
    /// Workers by name, also those of the agent's file that have not joined.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<WatchedWorker>,
    /// Open requests for memory, in the order in which they will be served.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<RequestRow>,
    /// Decisions that were made, or whose outcome changed, since this client's last snapshot, the oldest first. In the first snapshot: all
    /// that the agent remembers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<LoggedDecision>,
    /// Whether another part of the same snapshot follows.
    #[serde(skip_serializing_if = "is_false")]
    pub more: bool,
}

/// Memory of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GpuRow {
    /// PCI address, or the number of a simulated GPU.
    pub gpu: String,
    /// Memory of the GPU.
    pub total: Bytes,
    /// Memory in use at the meter's last reading, of workers and others. None: the meter has not answered yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Bytes>,
    /// Seconds since that reading. None: no reading yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_ago_s: Option<f64>,
    /// Memory that the driver and the GPU keep in addition to `used`.
    #[serde(skip_serializing_if = "is_default")]
    pub driver: Bytes,
    /// Part of `used` that belongs to no worker of this agent: other programs, and memory without a living process.
    #[serde(skip_serializing_if = "is_default")]
    pub unmanaged: Bytes,
    /// Other processes that the meter lists, the largest first, at most [`GpuRow::MOST_OTHERS`]. Their sum may be below `unmanaged`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<ProcessRow>,
    /// Memory that no worker gets, so that programs outside have some (`[node] reserve`).
    #[serde(skip_serializing_if = "is_default")]
    pub reserve: Bytes,
    /// Memory that all workers may have together, without the reserve, if other programs leave it to them.
    #[serde(skip_serializing_if = "is_default")]
    pub budget: Bytes,
    /// Memory that all workers may have together now: the budget, less what other programs had at the last decision.
    #[serde(skip_serializing_if = "is_default")]
    pub limit: Bytes,
    /// Memory that counts as that of workers: contexts, leases, overruns, and `reclaiming`.
    #[serde(skip_serializing_if = "is_default")]
    pub claimed: Bytes,
    /// Memory of dead workers that the driver has not freed yet.
    #[serde(skip_serializing_if = "is_default")]
    pub reclaiming: Bytes,
    /// Fraction of the last ten seconds in which refills used the GPU's link, 0 to 1.
    #[serde(skip_serializing_if = "is_default")]
    pub link_duty: f64,
}

impl GpuRow {
    /// Limit of the other processes of a GPU in a snapshot.
    pub const MOST_OTHERS: usize = 64;
}

/// Process on a GPU that is no worker of the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessRow {
    /// Process id, as the meter reports it: inside a container that of the host.
    pub pid: u32,
    /// Name of its command, which may contain anything. None: unknown, for example because it is in another pid namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Memory of the process on the GPU.
    pub used: Bytes,
}

/// State of a worker: its row of `ps`, its memory by place, and the operation under way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WatchedWorker {
    /// Row of `glake ps`.
    pub row: WorkerRow,
    /// Memory by GPU, in the order of names; empty for a worker that has not joined.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<WorkerGpuRow>,
    /// Operation under way with its memory. None: none is, or it has not joined.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operation: Option<OperationRow>,
}

/// Memory of a worker on one GPU, and evicted from it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerGpuRow {
    /// Name of the GPU.
    pub gpu: String,
    /// Memory of its process at the meter's last reading, context included. None: the meter has not answered, and `context` and `resident`
    /// say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used: Option<Bytes>,
    /// Memory of context, modules and libraries, which counts beside the lease; 0 while the worker is checkpointed.
    #[serde(skip_serializing_if = "is_default")]
    pub context: Bytes,
    /// Memory that it may hold beside its context.
    #[serde(skip_serializing_if = "is_default")]
    pub leased: Bytes,
    /// Memory beyond context and lease, as measured.
    #[serde(skip_serializing_if = "is_default")]
    pub overrun: Bytes,
    /// Memory of its pools.
    #[serde(skip_serializing_if = "is_default")]
    pub resident: Bytes,
    /// Part of `resident` that cannot be evicted.
    #[serde(skip_serializing_if = "is_default")]
    pub fixed: Bytes,
    /// Memory that could leave and come back without a copy.
    #[serde(skip_serializing_if = "is_default")]
    pub discardable: Bytes,
    /// Evicted memory, which is copied back before the next use: in host memory, but for the next two.
    #[serde(skip_serializing_if = "is_default")]
    pub evicted: Bytes,
    /// Part of `evicted` in files. None: the worker is of a release that does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_files: Option<Bytes>,
    /// Part of `evicted` on other GPUs. None: the worker is of a release that does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_peers: Option<Bytes>,
    /// Memory whose content was discarded, and that the next use needs again.
    #[serde(skip_serializing_if = "is_default")]
    pub discarded: Bytes,
    /// Pinned host memory of copies, of evicted and of resident memory.
    #[serde(skip_serializing_if = "is_default")]
    pub hosted: Bytes,
}

/// Kind of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OperationKind {
    /// Its uses are asked to stop at safe points, so that memory can leave.
    Parking,
    /// Its memory leaves.
    Shrinking,
    /// Its memory comes back.
    Refilling,
    /// It loads its memory.
    Starting,
    /// Copies move from host memory to files.
    Demoting,
    /// The driver takes its context off its GPUs.
    Checkpointing,
    /// The driver brings its context back.
    Restoring,
    /// Kind of a later release.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Operation under way with a worker's memory. Ranks of one launcher have it together: the sizes are those of all ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OperationRow {
    /// Kind of the operation.
    pub what: OperationKind,
    /// Worker whose request the memory leaves for. None: an operator's command, a GPU above its limit, or the worker's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whom: Option<String>,
    /// Seconds since its begin.
    pub since_s: f64,
    /// Seconds until its deadline. None: it has none, or has missed it and is still waited for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_s: Option<f64>,
    /// Size of the memory that it moves; 0: unknown.
    pub bytes: Bytes,
    /// Memory that has been granted, of a refill or a start.
    #[serde(skip_serializing_if = "is_default")]
    pub granted: Bytes,
    /// Memory that has moved so far: left of its GPUs, or come back.
    pub done: Bytes,
}

/// Kind of a request for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestKind {
    /// Uses wait for evicted memory.
    Refill,
    /// The worker loads its memory.
    Start,
    /// A use needs more memory than its lease.
    Growth,
    /// Kind of a later release.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Progress of a request for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestPhase {
    /// All memory is granted, and its bytes come back or are loaded.
    Filling,
    /// It is its turn: memory is granted as others give it.
    Granting,
    /// It waits for its turn, or for memory that may leave.
    Waiting,
    /// Phase of a later release.
    #[default]
    #[serde(other)]
    Unknown,
}

/// Open request for memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestRow {
    /// Name of the worker, without the number of a rank: ranks of one launcher ask together for evicted memory.
    pub worker: String,
    /// Kind of the request.
    pub kind: RequestKind,
    /// Progress of the request.
    pub phase: RequestPhase,
    /// Priority class: the worker's priority, raised by its wait. Higher ones are served first.
    pub class: i64,
    /// Seconds since the request.
    pub waited_s: f64,
    /// Seconds until its deadline. None: the operation has a deadline of its own (the worker's `operation`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_s: Option<f64>,
    /// Predicted seconds of the copies back once the memory is there; 0 for growth.
    #[serde(skip_serializing_if = "is_default")]
    pub predicted_s: f64,
    /// Memory by GPU.
    pub needs: Vec<NeedRow>,
    /// Workers that were asked for its memory and whose memory is leaving, without the numbers of ranks: the first
    /// [`RequestRow::MOST_GIVERS`] of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub givers: Vec<String>,
    /// Number of all such workers.
    #[serde(skip_serializing_if = "is_default")]
    pub giver_count: u32,
    /// Worker whose request comes first on one of the GPUs. None: none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub behind: Option<String>,
    /// Reason of the wait, for people.
    pub why: String,
}

impl RequestRow {
    /// Limit of the names in `givers`.
    pub const MOST_GIVERS: usize = 32;
}

/// Memory of one GPU that a request is for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NeedRow {
    /// Name of the GPU.
    pub gpu: String,
    /// Requested memory, granted memory included.
    pub bytes: Bytes,
    /// Memory granted so far.
    #[serde(skip_serializing_if = "is_default")]
    pub granted: Bytes,
}

/// Decision of the agent's log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LoggedDecision {
    /// Number of the decision since the agent's start. A later snapshot has the same decision again if its outcome has changed: the later
    /// one replaces the earlier one.
    pub number: u64,
    /// Row of `glake explain`.
    pub row: DecisionRow,
}

/// Longest name of a process in a snapshot, in characters.
const LONGEST_NAME: usize = 64;

impl Snapshot {
    /// Splits the snapshot so that each part fits into a frame: the head with decisions first, then the lists. Texts for people and names of
    /// processes are cut.
    pub fn parts(mut self) -> Vec<Snapshot> {
        let (number, more) = (self.number, self.more);
        let part = || Snapshot { number, ..Snapshot::default() };
        let decisions =
            std::mem::take(&mut self.decisions).into_iter().flat_map(|LoggedDecision { number, row }| {
                row.parts().into_iter().map(move |row| LoggedDecision { number, row })
            });
        self.gpus.iter_mut().for_each(GpuRow::cut);
        self.requests.iter_mut().for_each(RequestRow::cut);
        self.workers.iter_mut().for_each(|worker| worker.row.cut());
        let gpus = std::mem::take(&mut self.gpus).into_iter();
        let requests = std::mem::take(&mut self.requests).into_iter();
        let workers = std::mem::take(&mut self.workers).into_iter();
        let mut parts = vec![self];
        parts.extend(split(decisions, size_of_json).map(|decisions| Snapshot { decisions, ..part() }));
        parts.extend(split(gpus, size_of_json).map(|gpus| Snapshot { gpus, ..part() }));
        parts.extend(split(requests, size_of_json).map(|requests| Snapshot { requests, ..part() }));
        parts.extend(
            split(workers, WatchedWorker::longest_json).map(|workers| Snapshot { workers, ..part() }),
        );
        // A list without items has one part without items.
        let mut is_head = true;
        parts.retain(|of| std::mem::take(&mut is_head) || *of != part());
        let last = parts.len() - 1;
        parts.iter_mut().enumerate().for_each(|(at, part)| part.more = at < last || more);
        parts
    }

    /// Encodes the snapshot as frames, one behind the other.
    ///
    /// # Errors
    /// [`FrameError::Malformed`], for example of a value that JSON does not have.
    pub fn frames(self) -> Result<Vec<u8>, FrameError> {
        let parts = self.parts();
        // Most parts are not full.
        let mut bytes = Vec::with_capacity(parts.len() * PART / 2);
        for part in parts {
            append_frame(&mut bytes, &Envelope::unnumbered(Answer::Snapshot(part)))?;
        }
        Ok(bytes)
    }

    /// Appends the next part of the same snapshot. The snapshot is whole once `more` is false.
    pub fn append(&mut self, part: Snapshot) {
        let Snapshot {
            number: _,
            missed,
            agent,
            pid,
            up_s,
            hosted,
            host_budget,
            gpus,
            workers,
            requests,
            ..
        } = part;
        let (decisions, more) = (part.decisions, part.more);
        self.missed = self.missed.max(missed);
        if !agent.is_empty() {
            (self.agent, self.pid, self.up_s) = (agent, pid, up_s);
            (self.hosted, self.host_budget) = (hosted, host_budget);
        }
        self.gpus.extend(gpus);
        self.workers.extend(workers);
        self.requests.extend(requests);
        for decision in decisions {
            match self.decisions.last_mut() {
                Some(last) if decision.row.continues => last.row.taken.extend(decision.row.taken),
                _ => self.decisions.push(decision),
            }
        }
        self.more = more;
    }
}

impl GpuRow {
    fn cut(&mut self) {
        self.others.truncate(Self::MOST_OTHERS);
        for name in self.others.iter_mut().filter_map(|process| process.name.as_mut()) {
            *name = name.chars().take(LONGEST_NAME).collect();
        }
    }
}

impl RequestRow {
    fn cut(&mut self) {
        self.givers.truncate(Self::MOST_GIVERS);
        cut(&mut self.why);
    }
}

impl WatchedWorker {
    /// Returns an upper bound of the size of its JSON, without encoding it.
    fn longest_json(&self) -> usize {
        // Six bytes for each byte of a text that is escaped; twenty digits and a name for each number.
        const FIXED: usize = 1024;
        const GPU: usize = 640;
        let WorkerRow { worker, tenant, gpus, state, note, .. } = &self.row;
        let whom = self.operation.as_ref().and_then(|operation| operation.whom.as_ref());
        let texts = [worker, tenant, state].into_iter().chain(note).chain(whom).chain(gpus);
        let texts = texts.chain(self.gpus.iter().map(|of| &of.gpu)).map(|text| 6 * text.len() + 3);
        FIXED + texts.sum::<usize>() + self.gpus.len() * GPU
    }
}

/// Returns the size of a value's JSON in a list.
fn size_of_json(of: &impl Serialize) -> usize {
    serde_json::to_string(of).map_or(PART, |json| json.len() + 1)
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::operator::VictimRow;
    use crate::{Frames, frame};

    fn text() -> impl Strategy<Value = String> {
        prop_oneof![
            prop::collection::vec(any::<char>(), 0..80).prop_map(String::from_iter),
            (0..9_000_usize).prop_map(|length| "\u{1}".repeat(length)),
        ]
    }

    fn bytes() -> impl Strategy<Value = Bytes> {
        any::<u64>().prop_map(Bytes::new)
    }

    fn worker() -> impl Strategy<Value = WatchedWorker> {
        let gpu = ("[0-9a-f:.]{1,12}", prop::collection::vec(bytes(), 11), any::<bool>()).prop_map(
            |(gpu, sizes, says)| WorkerGpuRow {
                gpu,
                used: says.then_some(sizes[0]),
                context: sizes[1],
                leased: sizes[2],
                overrun: sizes[3],
                resident: sizes[4],
                fixed: sizes[5],
                discardable: sizes[6],
                evicted: sizes[7],
                in_files: says.then_some(sizes[8]),
                in_peers: says.then_some(sizes[9]),
                discarded: sizes[10],
                hosted: sizes[0],
            },
        );
        let operation = (text(), bytes(), any::<u32>()).prop_map(|(whom, bytes, seconds)| OperationRow {
            what: OperationKind::Checkpointing,
            whom: Some(whom.chars().take(80).collect()),
            since_s: f64::from(seconds) / 7.0,
            left_s: Some(1.0 / f64::from(seconds.max(1))),
            bytes,
            granted: bytes,
            done: bytes,
        });
        let row = (text(), text(), prop::option::of(text()), bytes(), any::<u32>()).prop_map(
            |(worker, tenant, note, bytes, number)| WorkerRow {
                worker: worker.chars().take(80).collect(),
                pid: number,
                tenant,
                gpus: vec!["0000:3b:00.0".to_owned(); number as usize % 17],
                state: "checkpointing".to_owned(),
                leased: bytes,
                resident: bytes,
                evicted: bytes,
                idle_s: Some(f64::from(number) / 3.0),
                predicted_wake_s: f64::from(number) / 9.0,
                note,
            },
        );
        (row, prop::collection::vec(gpu, 0..17), prop::option::of(operation))
            .prop_map(|(row, gpus, operation)| WatchedWorker { row, gpus, operation })
    }

    fn snapshot() -> impl Strategy<Value = Snapshot> {
        let process = (any::<u32>(), prop::option::of(text()), bytes())
            .prop_map(|(pid, name, used)| ProcessRow { pid, name, used });
        let gpu = (prop::collection::vec(process, 0..80), bytes()).prop_map(|(others, total)| GpuRow {
            gpu: "0".to_owned(),
            total,
            others,
            ..GpuRow::default()
        });
        let request = (text(), prop::collection::vec(text(), 0..40)).prop_map(|(why, givers)| RequestRow {
            worker: "chat".to_owned(),
            givers: givers.iter().map(|giver| giver.chars().take(80).collect()).collect(),
            why,
            ..RequestRow::default()
        });
        let victim =
            text().prop_map(|why| VictimRow { why: why.chars().take(80).collect(), ..VictimRow::default() });
        let decision = (any::<u64>(), prop::collection::vec(victim, 0..300)).prop_map(|(number, taken)| {
            LoggedDecision { number, row: DecisionRow { taken, ..DecisionRow::default() } }
        });
        let lists = (
            prop::collection::vec(gpu, 0..4),
            prop::collection::vec(request, 0..20),
            prop::collection::vec(worker(), 0..60),
            prop::collection::vec(decision, 0..8),
        );
        (lists, any::<u64>(), any::<bool>()).prop_map(
            |((gpus, requests, workers, decisions), missed, more)| Snapshot {
                number: 7,
                missed,
                agent: "0.1.0".to_owned(),
                gpus,
                workers,
                requests,
                decisions,
                more,
                ..Snapshot::default()
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]

        #[test]
        fn parts_fit_into_frames_and_make_the_snapshot_again(whole in snapshot()) {
            let mut frames = Frames::default();
            frames.push(&whole.clone().frames().unwrap());
            let mut heard: Option<Snapshot> = None;
            while let Some(Envelope { message: Answer::Snapshot(part), .. }) = frames.take::<Answer>().unwrap() {
                match &mut heard {
                    Some(before) => {
                        prop_assert!(before.more);
                        before.append(part);
                    }
                    None => heard = Some(part),
                }
            }
            let cut = |mut of: Snapshot| {
                of.gpus.iter_mut().for_each(GpuRow::cut);
                of.requests.iter_mut().for_each(RequestRow::cut);
                of.workers.iter_mut().for_each(|worker| worker.row.cut());
                of
            };
            let mut expected = cut(whole);
            // Numbers lose at most the last digit in JSON.
            let mut heard = heard.unwrap();
            for of in [&mut expected, &mut heard] {
                of.workers.iter_mut().for_each(|worker| {
                    (worker.row.idle_s, worker.row.predicted_wake_s) = (None, 0.0);
                    worker.operation.iter_mut().for_each(|of| (of.since_s, of.left_s) = (0.0, None));
                });
            }
            prop_assert_eq!(heard, expected);
        }

        #[test]
        fn the_bound_of_a_workers_json_holds(worker in worker()) {
            prop_assert!(serde_json::to_string(&worker).unwrap().len() < worker.longest_json());
        }

        #[test]
        fn no_snapshot_of_another_release_panics(json in "[{}\\[\\]\",:a-z0-9_]{0,200}") {
            let _ = serde_json::from_str::<Snapshot>(&json);
        }
    }

    /// A million garbled snapshots with `GLAKE_SOAK`.
    #[test]
    fn soak_a_garbled_snapshot_is_an_error_or_a_snapshot() {
        let count = if std::env::var_os("GLAKE_SOAK").is_some() { 1_000_000 } else { 3_000 };
        let row = WorkerRow { worker: "chat".to_owned(), gpus: vec!["0".to_owned()], ..WorkerRow::default() };
        let gpu = WorkerGpuRow { gpu: "0".to_owned(), used: Some(Bytes::gib(1)), ..WorkerGpuRow::default() };
        let operation = Some(OperationRow { what: OperationKind::Shrinking, ..OperationRow::default() });
        let needs = vec![NeedRow { gpu: "0".to_owned(), bytes: Bytes::gib(2), granted: Bytes::gib(1) }];
        let whole = Snapshot {
            gpus: vec![GpuRow { others: vec![ProcessRow::default()], ..GpuRow::default() }],
            workers: vec![WatchedWorker { row, gpus: vec![gpu], operation }],
            requests: vec![RequestRow { needs, givers: vec!["a".to_owned()], ..RequestRow::default() }],
            decisions: vec![LoggedDecision::default()],
            ..Snapshot::default()
        };
        let sound = frame(&Envelope::unnumbered(Answer::Snapshot(whole))).unwrap();
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state % below as u64).unwrap()
        };
        for _ in 0..count {
            let mut json = sound[4..].to_vec();
            for _ in 0..1 + random(4) {
                let (from, to) = (random(json.len()), random(json.len()));
                match random(4) {
                    0 => json[from] = b"\"{}[]:,0e-\\x"[random(12)],
                    1 => json.swap(from, to),
                    2 => drop(json.remove(from)),
                    _ => {
                        let run = json[from..].iter().take(random(40)).copied().collect::<Vec<_>>();
                        json.splice(to..to, run);
                    }
                }
            }
            let mut frames = Frames::default();
            frames.push(&u32::try_from(json.len()).unwrap().to_le_bytes());
            frames.push(&json);
            let Ok(Some(Envelope { message: Answer::Snapshot(part), .. })) = frames.take::<Answer>() else {
                continue;
            };
            let mut before = Snapshot::default();
            before.append(part);
            assert!(before.workers.len() + before.gpus.len() + before.requests.len() < json.len());
        }
    }

    #[test]
    fn words_and_fields_of_later_releases_are_passed_over() {
        let json = r#"{"op":"snapshot","v":1,"seq":0,"ack":0,"number":3,"colour":"red","workers":[{"row":{"worker":"a"},
            "operation":{"what":"dancing","done":4,"steps":[1]}}],"requests":[{"worker":"a","kind":"x","phase":"y"}]}"#;
        let mut frames = Frames::default();
        frames.push(&u32::try_from(json.len()).unwrap().to_le_bytes());
        frames.push(json.as_bytes());
        let Answer::Snapshot(heard) = frames.take::<Answer>().unwrap().unwrap().message else {
            panic!("{json}")
        };
        let operation = heard.workers[0].operation.clone().unwrap();
        assert_eq!((operation.what, operation.done), (OperationKind::Unknown, Bytes::new(4)));
        assert_eq!(
            (heard.requests[0].kind, heard.requests[0].phase),
            (RequestKind::Unknown, RequestPhase::Unknown)
        );
    }
}
