//! Snapshot of the agent's state, the one source of what operators see: workers with their rows of `ps`, GPUs by the meter's last reading
//! and by the arbiter's accounts, open requests, and decisions.
//!
//! It is made of the roster and an [`Overview`] of the arbiter in one pass over each, because watchers get ten of them a second.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use glake_arbiter::{
    GangId, GpuId, Operation, OperationTask, Outcome, Overview, Pending, Request, RequestKind, ShareAccount,
    UseState, Why, WorkerAccount, WorkerId,
};
use glake_meter::GpuMemory;
use glake_units::Bytes;
use glake_wire::{
    DecisionRow, Denied, GpuRow, Holding, LoggedDecision, NeedRow, OperationKind, OperationRow, ProcessRow,
    RequestPhase, RequestRow, Snapshot, VictimRow, WatchedWorker, WorkerGpuRow, WorkerRow,
};

use crate::Agent;
use crate::roster::{Worker, activity_of, base};

/// Last reading of a GPU's meter. The part of each worker is the worker's.
#[derive(Debug)]
pub(crate) struct Reading {
    at: Duration,
    used: Bytes,
    /// Memory reserved by the driver.
    driver: Bytes,
    unmanaged: Bytes,
    /// Listed processes that are no workers, the largest first.
    others: Vec<ProcessRow>,
}

impl Reading {
    /// Counts the memory of a leaving worker as unmanaged.
    pub(crate) fn disown(readings: &mut BTreeMap<GpuId, Reading>, worker: &Worker) {
        for (gpu, used) in &worker.used {
            if let Some(read) = readings.get_mut(gpu) {
                read.unmanaged = read.unmanaged.saturating_add(*used);
            }
        }
    }
}

impl Agent {
    /// Keeps readings of meters for snapshots. They have no effect on decisions.
    pub(crate) fn metered(&mut self, read: &[(GpuId, &GpuMemory)], now: Duration) {
        self.now = now;
        let unmeasured = self.roster.file().node.floor();
        let names: Vec<String> = read.iter().map(|(gpu, _)| self.roster.gpu_name(*gpu).to_owned()).collect();
        // Of each reading: listed processes that are no workers, as far as is known, and the sum of the workers.
        let listed = |memory: &GpuMemory| memory.processes.iter().map(|of| (of.pid, of.used)).collect();
        let mut found: Vec<(HashMap<u32, Bytes>, Bytes)> =
            read.iter().map(|(_, memory)| (listed(memory), Bytes::ZERO)).collect();
        for (_, worker) in self.roster.workers_mut() {
            let told = |name: &String| {
                worker.holdings.iter().find(|held| held.gpu == *name).map(|held| worker.resident(held))
            };
            let mut used: Vec<(GpuId, Bytes)> = Vec::new();
            for (((gpu, _), name), (listed, managed)) in read.iter().zip(&names).zip(&mut found) {
                // An unlisted process runs in another pid namespace, or has no context yet.
                let by_list = if listed.is_empty() { None } else { listed.remove(&worker.who.peer.pid) };
                let own = || {
                    let made = told(name)?;
                    let floor = if made.is_zero() { made } else { worker.floor(*gpu, unmeasured) };
                    Some(made.saturating_add(floor))
                };
                if let Some(bytes) = by_list.or_else(own) {
                    used.push((*gpu, bytes));
                    *managed = managed.saturating_add(bytes);
                }
            }
            worker.used.retain(|(gpu, _)| read.iter().all(|(read, _)| read != gpu));
            worker.used.append(&mut used);
        }
        for ((gpu, memory), (listed, managed)) in read.iter().zip(found) {
            let others = listed.into_iter().map(|(pid, used)| ProcessRow { pid, name: None, used });
            let mut others: Vec<ProcessRow> = others.collect();
            others.sort_by_key(|process| (std::cmp::Reverse(process.used), process.pid));
            others.truncate(GpuRow::MOST_OTHERS);
            let (used, driver, unmanaged) =
                (memory.used, memory.reserved, memory.used.saturating_sub(managed));
            self.readings.insert(*gpu, Reading { at: now, used, driver, unmanaged, others });
        }
    }

    /// Returns a snapshot of the joined workers, the GPUs and the open requests, without decisions.
    pub fn snapshot(&self) -> Snapshot {
        let overview = Overview::of(&self.arbiter);
        let (names, tenants) = (self.roster.gang_names(), self.roster.tenants());
        let picture = Picture { agent: self, overview: &overview, names, tenants };
        let mut workers: Vec<(WorkerId, &Worker)> = self.roster.workers().collect();
        workers.sort_by(|(_, a), (_, b)| a.name.cmp(&b.name));
        Snapshot {
            agent: env!("CARGO_PKG_VERSION").to_owned(),
            up_s: self.now.as_secs_f64(),
            hosted: overview.hosted,
            host_budget: self.roster.file().node.host_budget,
            gpus: self.roster.gpus().map(|(gpu, name)| picture.gpu(gpu, name)).collect(),
            workers: workers.into_iter().map(|(id, worker)| picture.worker(id, worker)).collect(),
            requests: overview.requests.iter().map(|request| picture.request(request)).collect(),
            ..Snapshot::default()
        }
    }

    /// Returns the logged decisions that were made or changed after change number `after` of the log, the oldest first, and the number of
    /// the last change.
    pub fn decisions(&self, after: u64) -> (Vec<LoggedDecision>, u64) {
        let last = self.arbiter.decisions().map(|of| of.changed).max().unwrap_or(after);
        if last <= after {
            return (Vec::new(), after);
        }
        let names = self.roster.gang_names();
        let taken = |victim: &glake_arbiter::Victim| VictimRow {
            worker: named(&names, victim.gang),
            gpu: self.roster.gpu_name(victim.gpu).to_owned(),
            bytes: victim.bytes,
            why: why(victim.why).to_owned(),
        };
        let row = |of: &glake_arbiter::LoggedDecision| LoggedDecision {
            number: of.number,
            row: DecisionRow {
                ago_s: self.now.saturating_sub(of.at).as_secs_f64(),
                worker: named(&names, of.gang),
                class: of.class,
                waited_s: of.waited.as_secs_f64(),
                needed: of.needed.iter().map(|(_, bytes)| *bytes).sum(),
                taken: of.taken.iter().map(taken).collect(),
                predicted_s: of.predicted.as_secs_f64(),
                real_s: real(of.outcome).map(|took| took.as_secs_f64()),
                outcome: outcome(of.outcome),
                continues: false,
            },
        };
        (self.arbiter.decisions().filter(|of| of.changed > after).map(row).collect(), last)
    }
}

/// Parts of the agent that a snapshot is made of.
struct Picture<'a> {
    agent: &'a Agent,
    overview: &'a Overview,
    names: HashMap<GangId, &'a str>,
    tenants: HashMap<&'a str, &'a str>,
}

impl Picture<'_> {
    fn name(&self, gang: GangId) -> String {
        named(&self.names, gang)
    }

    fn gpu(&self, gpu: GpuId, name: &str) -> GpuRow {
        let Agent { now, roster, .. } = self.agent;
        let account = self.overview.gpus.get(&gpu).copied().unwrap_or_default();
        let total = self.agent.totals.get(usize::from(gpu.0)).copied().unwrap_or_default();
        let budget = roster.file().node.budget.unwrap_or(total).min(total);
        let read = self.agent.readings.get(&gpu);
        GpuRow {
            gpu: name.to_owned(),
            total,
            used: read.map(|read| read.used),
            read_ago_s: read.map(|read| now.saturating_sub(read.at).as_secs_f64()),
            driver: read.map_or(Bytes::ZERO, |read| read.driver),
            unmanaged: read.map_or(Bytes::ZERO, |read| read.unmanaged),
            others: read.map(|read| read.others.clone()).unwrap_or_default(),
            reserve: roster.file().node.reserve_of(budget),
            budget: account.budget,
            limit: account.limit,
            claimed: account.claimed,
            reclaiming: account.reclaiming,
            link_duty: account.link_duty,
        }
    }

    fn worker(&self, id: WorkerId, worker: &Worker) -> WatchedWorker {
        let account = self.overview.workers.get(&id);
        let operation = self.overview.operations.get(&worker.gang);
        WatchedWorker {
            row: self.row(account, worker),
            gpus: self.worker_gpus(account.map(|of| of.shares.as_slice()).unwrap_or_default(), worker),
            operation: operation.map(|operation| self.operation(worker.gang, operation)),
        }
    }

    fn row(&self, account: Option<&WorkerAccount>, worker: &Worker) -> WorkerRow {
        let now = self.agent.now;
        let tenant = self.tenants.get(base(&worker.name));
        let resident = worker.all_resident();
        let is_busy = activity_of(worker.activity) != UseState::Idle;
        let state = match account.map_or("gone", |of| of.state) {
            "resident" if worker.activity.is_none() => "resident",
            // No use has begun, and it has not said that it has loaded: its memory may be in use.
            "resident" if worker.activity.is_some_and(|page| page.begun == 0 && !page.captures) => {
                if resident.is_zero() { "joined" } else { "loaded" }
            }
            "resident" if is_busy => "busy",
            "resident" => "idle",
            other => other,
        };
        let idle = worker.idle_since.filter(|_| !is_busy).map(|since| now.saturating_sub(since));
        WorkerRow {
            worker: worker.name.clone(),
            pid: worker.who.peer.pid,
            tenant: tenant.map_or_else(|| format!("uid {}", worker.who.uid), |tenant| (*tenant).to_owned()),
            gpus: worker.holdings.iter().map(|held| held.gpu.clone()).collect(),
            state: state.to_owned(),
            leased: account.into_iter().flat_map(|of| &of.shares).map(|of| of.lease).sum(),
            resident,
            evicted: worker.holdings.iter().map(|held| held.evicted).sum(),
            idle_s: idle.map(|idle| idle.as_secs_f64()),
            predicted_wake_s: account.map_or(0.0, |of| of.wake.as_secs_f64()),
            note: None,
        }
    }

    /// Returns the memory of a worker on each GPU where it has a share, says that it holds some, or is listed by the meter.
    fn worker_gpus(&self, shares: &[ShareAccount], worker: &Worker) -> Vec<WorkerGpuRow> {
        let Agent { roster, readings, .. } = self.agent;
        let row = |(gpu, name): (GpuId, &str)| {
            let share = shares.iter().find(|share| share.gpu == gpu);
            let used = worker.used.iter().find(|(of, _)| *of == gpu).map(|(_, used)| *used);
            let held = worker.holdings.iter().find(|held| held.gpu == name);
            if share.is_none() && held.is_none() && used.is_none() {
                return None;
            }
            let told = |of: fn(&Holding) -> Bytes| held.map(of).unwrap_or_default();
            Some(WorkerGpuRow {
                gpu: name.to_owned(),
                used: used.or(readings.get(&gpu).map(|_| Bytes::ZERO)),
                context: share.map(|share| share.floor).unwrap_or_default(),
                leased: share.map(|share| share.lease).unwrap_or_default(),
                overrun: share.map(|share| share.overrun).unwrap_or_default(),
                resident: held.map(|held| worker.resident(held)).unwrap_or_default(),
                fixed: told(|held| held.fixed),
                discardable: told(|held| held.discardable),
                evicted: told(|held| held.evicted),
                in_files: held.and_then(|held| held.in_files),
                in_peers: held.and_then(|held| held.in_peers),
                discarded: told(|held| held.room),
                hosted: told(|held| held.hosted),
            })
        };
        roster.gpus().filter_map(row).collect()
    }

    fn operation(&self, gang: GangId, of: &Operation) -> OperationRow {
        let now = self.agent.now;
        let (granted, done) = match of.task {
            OperationTask::Refill | OperationTask::Start => (of.done, self.refilled(gang).min(of.done)),
            _ => (Bytes::ZERO, of.done),
        };
        OperationRow {
            what: match of.task {
                OperationTask::Park => OperationKind::Parking,
                OperationTask::Shrink => OperationKind::Shrinking,
                OperationTask::Refill => OperationKind::Refilling,
                OperationTask::Start => OperationKind::Starting,
                OperationTask::Demote => OperationKind::Demoting,
                OperationTask::Checkpoint => OperationKind::Checkpointing,
                OperationTask::Restore => OperationKind::Restoring,
            },
            whom: of.whom.map(|whom| self.name(whom)),
            since_s: now.saturating_sub(of.since).as_secs_f64(),
            left_s: of.by.map(|by| by.saturating_sub(now).as_secs_f64()),
            bytes: of.bytes,
            granted,
            done,
        }
    }

    /// Returns the memory that ranks of a gang have made, by their pages, since they reported their holdings.
    fn refilled(&self, gang: GangId) -> Bytes {
        let ranks = self.agent.roster.workers_of(gang);
        let made = ranks.flat_map(|worker| {
            worker.holdings.iter().map(|held| worker.resident(held).saturating_sub(held.resident))
        });
        made.fold(Bytes::ZERO, Bytes::saturating_add)
    }

    fn request(&self, of: &Request) -> RequestRow {
        let now = self.agent.now;
        let gpu = |gpu: &GpuId| self.agent.roster.gpu_name(*gpu).to_owned();
        let needs = of.needs.iter();
        let behind = match of.pending {
            Pending::Behind(other) | Pending::Start(other) => Some(self.name(other)),
            _ => None,
        };
        let givers = of.givers.iter().take(RequestRow::MOST_GIVERS).map(|giver| self.name(*giver));
        let givers: Vec<String> = givers.collect();
        RequestRow {
            worker: self.name(of.gang),
            kind: match of.kind {
                RequestKind::Refill => glake_wire::RequestKind::Refill,
                RequestKind::Start => glake_wire::RequestKind::Start,
                RequestKind::Growth => glake_wire::RequestKind::Growth,
            },
            phase: match of.pending {
                Pending::Copies => RequestPhase::Filling,
                _ if of.is_served => RequestPhase::Granting,
                _ => RequestPhase::Waiting,
            },
            class: of.class,
            waited_s: now.saturating_sub(of.since).as_secs_f64(),
            left_s: of.by.map(|by| by.saturating_sub(now).as_secs_f64()),
            predicted_s: of.predicted.as_secs_f64(),
            needs: needs
                .map(|(id, (bytes, granted))| NeedRow { gpu: gpu(id), bytes: *bytes, granted: *granted })
                .collect(),
            giver_count: u32::try_from(of.givers.len()).unwrap_or(u32::MAX),
            why: self.why(of, &givers, behind.as_deref().unwrap_or_default()),
            givers,
            behind,
        }
    }

    /// Returns the reason of a request's wait, for people.
    fn why(&self, of: &Request, givers: &[String], behind: &str) -> String {
        let parks = |giver: &GangId| {
            let operation = self.overview.operations.get(giver);
            operation.is_some_and(|operation| operation.task == OperationTask::Park)
        };
        match of.pending {
            Pending::Copies if of.kind == RequestKind::Start => "it loads its memory".to_owned(),
            Pending::Copies => "its memory comes back".to_owned(),
            Pending::Victims => {
                let named = match (givers, of.givers.len()) {
                    ([one], 1) => one.clone(),
                    ([first, second], 2) => format!("{first} and {second}"),
                    ([first, ..], all) => format!("{first} and {} more", all - 1),
                    ([], all) => format!("{all} workers"),
                };
                match of.givers.iter().any(parks) {
                    true => format!("the uses of {named} have to end, or to stop at a safe point"),
                    false => format!("memory of {named} leaves for it"),
                }
            }
            Pending::FreeMemory => {
                "memory of ended processes or of other programs has to become free".to_owned()
            }
            Pending::Behind(_) => format!("{behind} comes first on its GPU"),
            Pending::Start(_) => format!("{behind} starts on its GPU, and no memory leaves meanwhile"),
            Pending::OwnShrink => "its own memory is still leaving".to_owned(),
            Pending::Restore => "the driver has to restore its process".to_owned(),
            Pending::Eligible => {
                "no worker may give memory now: others use theirs, or have just got it".to_owned()
            }
        }
    }
}

fn named(names: &HashMap<GangId, &str>, gang: GangId) -> String {
    names.get(&gang).map_or_else(|| format!("worker {gang}"), |name| (*name).to_owned())
}

fn why(why: Why) -> &'static str {
    match why {
        Why::Discardable => "idle, and nothing is copied",
        Why::Idle => "idle",
        Why::Quantum => "busy for its quantum, and parked",
    }
}

fn real(outcome: Outcome) -> Option<Duration> {
    match outcome {
        Outcome::Refilled(took) => Some(took),
        _ => None,
    }
}

fn outcome(outcome: Outcome) -> String {
    match outcome {
        Outcome::UnderWay => "under way",
        Outcome::Refilled(_) => "refilled",
        Outcome::Returned => "nothing came in time: given back, and waiting again",
        Outcome::NotRestored => "the driver did not restore it: waiting again",
        Outcome::Checkpointed => "idle for long: checkpointed",
        Outcome::Lost => "failed: the driver does not restore it: end it, and start it again",
        Outcome::Kept => "idle for long, and could not be checkpointed",
        Outcome::Late => "it did not end in time",
        Outcome::Denied(why) => crate::agent::denial(why),
        Outcome::GrowthDenied(Denied::TooLarge) => "growth denied: all that others could give is not enough",
        Outcome::GrowthDenied(Denied::Deadline) => "growth denied: not enough came within its time",
        Outcome::GrowthDenied(why) => crate::agent::denial(why),
        Outcome::Died => "it died",
    }
    .to_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // also in the functions that tests call
mod tests {
    use glake_arbiter::node::NodeFile;
    use glake_meter::ProcessMemory;
    use glake_wire::{Activity, Hello, Peer, ToAgent};
    use proptest::prelude::*;

    use super::*;
    use crate::{Identity, PageReading};

    /// Message of a worker, or a change that the agent sees, with numbers for sizes.
    #[derive(Clone, Debug)]
    enum Op {
        Join { worker: u32, gpu: u8, sizes: [u64; 3], starting: bool, gang: bool },
        Say(u32, u8, u64, u64),
        Page { worker: u32, made: u64, uses: u64, begun: u64 },
        Shrink(u32),
        Die(u32),
        Meter { gpu: u8, stranger: u64, is_listed: bool, is_decided: bool },
        Pass(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        let (who, gpu, size) = (|| 1..8_u32, || 0..2_u8, || prop_oneof![Just(0), 1..9_000_u64]);
        prop_oneof![
            4 => (who(), gpu(), [size(), size(), size()], any::<bool>(), any::<bool>())
                .prop_map(|(worker, gpu, sizes, starting, gang)| Op::Join { worker, gpu, sizes, starting, gang }),
            14 => (who(), 0..10_u8, size(), size()).prop_map(|(who, what, first, second)| Op::Say(who, what, first, second)),
            3 => (who(), size(), 0..3_u64, 0..4_u64)
                .prop_map(|(worker, made, uses, begun)| Op::Page { worker, made, uses, begun }),
            1 => who().prop_map(Op::Shrink),
            1 => who().prop_map(Op::Die),
            4 => (gpu(), size(), any::<bool>(), any::<bool>())
                .prop_map(|(gpu, stranger, is_listed, is_decided)| Op::Meter { gpu, stranger, is_listed, is_decided }),
            3 => (0..40_000_u64).prop_map(Op::Pass),
        ]
    }

    struct World {
        agent: Agent,
        now: Duration,
        /// Number of the last message of each worker.
        said: BTreeMap<WorkerId, u64>,
    }

    fn who(worker: u32) -> Identity {
        Identity { peer: Peer { pid: worker, start: 1 }, uid: 0 }
    }

    fn holding(gpu: u8, [lease, resident, evicted]: [u64; 3]) -> Holding {
        let [lease, resident, evicted] = [lease, resident, evicted].map(Bytes::mib);
        let (gpu, device) = (gpu.to_string(), gpu.into());
        Holding { gpu, device, lease, resident, evicted, hosted: evicted, ..Holding::default() }
    }

    impl World {
        fn new() -> World {
            let file = "[node]\nbudget = \"20GiB\"\nfloor = \"500MiB\"\nhost_budget = \"30GiB\"\n\
                [[worker]]\nname = \"w1\"\nweights = \"6GiB\"\nkv = \"1GiB\"\ntenant = \"red\"\n";
            let gpus = ["0", "1"].map(|gpu| (gpu.to_owned(), Bytes::gib(24))).to_vec();
            World {
                agent: Agent::new(NodeFile::parse(file).unwrap(), gpus, 1),
                now: Duration::ZERO,
                said: BTreeMap::new(),
            }
        }

        fn say(&mut self, id: WorkerId, message: ToAgent) {
            let seq = self.said.entry(id).or_default();
            *seq += 1;
            self.agent.hear(id, *seq, 0, message, self.now).unwrap();
        }

        fn apply(&mut self, op: Op) {
            let now = self.now;
            let of = |agent: &Agent, worker: u32| agent.roster.of(who(worker).peer);
            match op {
                Op::Join { worker, gpu, sizes, starting, gang } => {
                    let gang = gang.then(|| "ranks".to_owned());
                    let ranks = if gang.is_some() { 2 } else { 1 };
                    let holdings = vec![holding(gpu, sizes)];
                    let name = format!("w{worker}");
                    let hello = Hello { name, gang, ranks, starting, holdings, ..Hello::default() };
                    if let Ok((id, _)) = self.agent.hello(who(worker), hello, now) {
                        self.said.insert(id, 0);
                    }
                }
                Op::Say(worker, what, first, second) => {
                    let Some(id) = of(&self.agent, worker) else { return };
                    let (gpu, bytes) = ((second % 2).to_string(), Bytes::mib(first));
                    let holdings = vec![holding(u8::from(second % 2 == 1), [0, first, second])];
                    self.say(
                        id,
                        match what {
                            0 | 1 => ToAgent::Want { deadline_ms: Some(second * 10) },
                            2 => ToAgent::Cancel,
                            3 => ToAgent::Grow { gpu, bytes, within_ms: second },
                            4 | 5 => ToAgent::Returned { gpu, bytes },
                            6 => ToAgent::Parked,
                            7 => ToAgent::Shrunk { holdings },
                            8 => ToAgent::Refilled { holdings },
                            _ => ToAgent::Changed { holdings },
                        },
                    );
                }
                Op::Page { worker, made, uses, begun } => {
                    let Some(id) = of(&self.agent, worker) else { return };
                    let mut activity = Activity { uses, begun, parks: true, ..Activity::default() };
                    activity.made[0] = Bytes::mib(made).get();
                    self.agent.saw(id, Some(PageReading { activity, idle_for: Duration::ZERO }), now);
                }
                Op::Shrink(worker) => {
                    let Some(id) = of(&self.agent, worker) else { return };
                    self.agent.ask_to_shrink(id, Duration::from_secs(5), now);
                }
                Op::Die(worker) => _ = self.agent.died(who(worker).peer, now),
                Op::Meter { gpu, stranger, is_listed, is_decided } => {
                    self.meter(gpu, stranger, is_listed, is_decided);
                }
                Op::Pass(millis) => {
                    self.now += Duration::from_millis(millis);
                    self.agent.tick(self.now);
                }
            }
        }

        /// Reads a meter that knows of each worker with memory on the GPU, and of a stranger.
        fn meter(&mut self, gpu: u8, stranger: u64, is_listed: bool, is_decided: bool) {
            let (name, id) = (gpu.to_string(), GpuId(gpu.into()));
            let has = |worker: &&Worker| {
                worker.holdings.iter().any(|held| held.gpu == name && !worker.resident(held).is_zero())
            };
            let workers = self.agent.roster.workers().map(|(_, worker)| worker).filter(has);
            let own = workers.map(|worker| {
                let made = worker
                    .holdings
                    .iter()
                    .filter(|held| held.gpu == name)
                    .map(|held| worker.resident(held))
                    .sum();
                ProcessMemory {
                    pid: worker.who.peer.pid,
                    used: worker.floor(id, Bytes::mib(500)).saturating_add(made),
                }
            });
            let mut processes: Vec<_> =
                own.chain([ProcessMemory { pid: 99, used: Bytes::mib(stranger) }]).collect();
            let used: Bytes = processes.iter().map(|process| process.used).sum();
            if !is_listed {
                processes.clear();
            }
            let memory = GpuMemory { total: Bytes::gib(24), used, reserved: Bytes::mib(300), processes };
            match is_decided {
                true => self.agent.measured(id, self.now, &memory, &self.agent.made(id), self.now),
                false => self.agent.metered(&[(id, &memory)], self.now),
            }
            // Each byte has an owner; without a list, the stranger's has none.
            let snapshot = self.agent.snapshot();
            let row = &snapshot.gpus[usize::from(gpu)];
            let of_workers = snapshot.workers.iter().flat_map(|of| &of.gpus).filter(|of| of.gpu == name);
            let sum: Bytes = of_workers.filter_map(|of| of.used).sum();
            assert_eq!(
                (row.used, row.read_ago_s),
                (Some(sum.saturating_add(row.unmanaged)), Some(0.0)),
                "{snapshot:#?}"
            );
            assert_eq!(row.unmanaged, Bytes::mib(stranger), "{snapshot:#?}");
            assert_eq!(
                row.others.iter().map(|of| of.used).sum::<Bytes>(),
                if is_listed { row.unmanaged } else { Bytes::ZERO }
            );
        }

        /// Compares a snapshot with the arbiter's ledger and with its own parts.
        fn check(&self) {
            let snapshot = self.agent.snapshot();
            for (gpu, row) in self.agent.roster.gpus().map(|(gpu, _)| gpu).zip(&snapshot.gpus) {
                let of_gpu = snapshot.workers.iter().flat_map(|of| &of.gpus).filter(|of| of.gpu == row.gpu);
                let sum: Bytes =
                    of_gpu.map(|of| of.context.saturating_add(of.leased).saturating_add(of.overrun)).sum();
                assert_eq!(sum.saturating_add(row.reclaiming), row.claimed, "{snapshot:#?}");
                assert_eq!(
                    (row.claimed, row.limit),
                    (self.agent.arbiter.claimed(gpu), self.agent.arbiter.limit(gpu))
                );
                assert_eq!(row.budget, Bytes::gib(20).saturating_sub(row.reserve));
                // Whoever has joined or left since the reading.
                let of_gpu = snapshot.workers.iter().flat_map(|of| &of.gpus).filter(|of| of.gpu == row.gpu);
                let used: Bytes = of_gpu.filter_map(|of| of.used).sum();
                assert!(
                    row.used.is_none_or(|all| all == used.saturating_add(row.unmanaged)),
                    "{snapshot:#?}"
                );
            }
            for WatchedWorker { row, gpus, operation } in &snapshot.workers {
                let sum = |of: fn(&WorkerGpuRow) -> Bytes| gpus.iter().map(of).sum::<Bytes>();
                let sums = (sum(|of| of.leased), sum(|of| of.resident), sum(|of| of.evicted));
                assert_eq!((row.leased, row.resident, row.evicted), sums, "{row:?}");
                let is_within =
                    |of: &OperationRow| of.done <= of.granted.max(of.bytes) && of.granted <= of.bytes;
                assert!(operation.as_ref().is_none_or(is_within), "{operation:?}");
            }
            let requests = Overview::of(&self.agent.arbiter).requests;
            assert_eq!(snapshot.requests.len(), requests.len());
            assert!(!self.agent.is_anybody_waiting() || !requests.is_empty());
            for (row, request) in snapshot.requests.iter().zip(&requests) {
                let sum = |of: fn(&NeedRow) -> Bytes| row.needs.iter().map(of).sum::<Bytes>();
                let needs = request.needs.values();
                let sums = needs.fold((Bytes::ZERO, Bytes::ZERO), |(all, granted), need| {
                    (all.saturating_add(need.0), granted.saturating_add(need.1))
                });
                assert_eq!((sum(|of| of.bytes), sum(|of| of.granted)), sums, "{row:?}");
                assert!(!row.why.is_empty() && !row.worker.is_empty());
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 50, failure_persistence: None, ..ProptestConfig::default() })]

        /// 10,000 events.
        #[test]
        fn sums_of_every_snapshot_equal_the_ledger(ops in prop::collection::vec(op(), 200)) {
            let mut world = World::new();
            for op in ops {
                world.apply(op);
                world.check();
            }
        }
    }

    #[test]
    fn a_changed_outcome_is_told_again_with_the_same_number() {
        let mut world = World::new();
        for worker in [1, 2] {
            world.apply(Op::Join { worker, gpu: 0, sizes: [0, 0, 4000], starting: false, gang: false });
        }
        let id = world.agent.roster.of(who(1).peer).unwrap();
        world.say(id, ToAgent::Want { deadline_ms: None });
        let (told, seen) = world.agent.decisions(0);
        assert_eq!((told.len(), told[0].number, told[0].row.outcome.as_str()), (1, 1, "under way"));
        assert_eq!(world.agent.decisions(seen), (Vec::new(), seen));
        world.say(id, ToAgent::Refilled { holdings: vec![holding(0, [4000, 4000, 0])] });
        let (again, later) = world.agent.decisions(seen);
        assert_eq!((again.len(), again[0].number, again[0].row.outcome.as_str()), (1, 1, "refilled"));
        // Denials of the same growth are one decision.
        for _ in 0..3 {
            world.say(id, ToAgent::Grow { gpu: "0".to_owned(), bytes: Bytes::gib(50), within_ms: 10 });
        }
        let (denied, _) = world.agent.decisions(later);
        assert_eq!(denied.iter().map(|of| of.number).collect::<Vec<_>>(), [2]);
    }
}
