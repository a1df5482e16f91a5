//! Roster of the workers and GPUs, which the arbiter knows by number.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use glake_arbiter::node::NodeFile;
use glake_arbiter::{Account, GangId, GpuId, Profile, UseState, WorkerId};
use glake_units::Bytes;
use glake_wire::{Activity, Conversation, Hello, Holding, Peer, ToWorker};

use crate::Identity;

/// Reason why a worker may not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The name is invalid.
    #[error(
        "a worker called {name:?}: a name is 1 to 64 of A-Z a-z 0-9 . _ -, and for a rank / and its number"
    )]
    Name {
        /// Name in the hello.
        name: String,
    },
    /// Another process has that name.
    #[error(
        "a worker called {name:?} is here already, process {pid}: give this one another name (glake.join(name=…))"
    )]
    Taken {
        name: String,
        /// Process with the name.
        pid: u32,
    },
    /// The process has already joined under another name.
    #[error("process {pid} joined as {known:?} and now says {name:?}: it has to leave first (glake.leave())")]
    Twice {
        /// Id of the process.
        pid: u32,
        /// Name under which it joined.
        known: String,
        /// Name in the hello.
        name: String,
    },
    /// The worker uses a GPU that the agent does not manage.
    #[error("worker {name:?} uses GPU {gpu}, and this agent knows {}", .known.join(", "))]
    Gpu {
        /// Name of the worker.
        name: String,
        /// Name of the GPU.
        gpu: String,
        /// GPUs of the agent.
        known: Vec<String>,
    },
}

impl Refusal {
    /// Returns whether a later attempt can succeed, for example because the holder of the name is about to end.
    pub fn passes(&self) -> bool {
        matches!(self, Refusal::Taken { .. } | Refusal::Twice { .. })
    }
}

/// State of a worker outside the arbiter.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) who: Identity,
    pub(crate) name: String,
    pub(crate) gang: GangId,
    pub(crate) gang_name: Option<String>,
    pub(crate) ranks: u32,
    /// Holdings in the last report.
    pub(crate) holdings: Vec<Holding>,
    /// Measured memory beyond its pools.
    pub(crate) floors: BTreeMap<GpuId, Bytes>,
    /// Latest reading of a floor, if it differs from `floors`.
    pub(crate) seen_floors: BTreeMap<GpuId, Bytes>,
    /// Memory of its process on each GPU at the meter's last reading, for snapshots.
    pub(crate) used: Vec<(GpuId, Bytes)>,
    /// Whether a journal names the worker and it has not joined yet.
    pub(crate) is_silent: bool,
    pub(crate) was_refilled: bool,
    /// Begin of its start; `None` once the start is over.
    pub(crate) starts_since: Option<Duration>,
    /// Conversation with the worker.
    pub(crate) conversation: Conversation<ToWorker>,
    /// Latest status page, and the begin of the idle time; `None` if unknown.
    pub(crate) activity: Option<Activity>,
    pub(crate) idle_since: Option<Duration>,
    /// Unique number of this conversation.
    pub(crate) epoch: u64,
    /// Time since which it has no connection.
    pub(crate) lost_since: Option<Duration>,
    /// Time of a refill command that the worker has not acknowledged; `None` otherwise.
    pub(crate) asked_since: Option<Duration>,
    /// Number of unanswered shrinks.
    pub(crate) shrinks: u32,
    /// Whether the driver was asked to checkpoint it and it is not known to run since.
    pub(crate) is_away: bool,
    /// Failure of its last command or refill.
    pub(crate) failed: Option<String>,
    /// Memory that could have left and did not at the end of the last shrink; `None` while an operator's shrink has not ended.
    pub(crate) stayed: Option<Bytes>,
}

/// Workers and GPUs by number and name.
#[derive(Debug)]
pub(crate) struct Roster {
    file: NodeFile,
    gpus: Vec<String>,
    workers: BTreeMap<WorkerId, Worker>,
    by_peer: HashMap<Peer, WorkerId>,
    by_name: HashMap<String, WorkerId>,
    gangs: HashMap<(u32, String), GangId>,
    /// Names of ended gangs that a logged decision names.
    ended: HashMap<GangId, String>,
    tenants: HashMap<String, u32>,
    next: u64,
}

impl Worker {
    /// Returns the memory of context, modules and libraries on a GPU.
    pub(crate) fn floor(&self, gpu: GpuId, unmeasured: Bytes) -> Bytes {
        self.floors.get(&gpu).copied().unwrap_or(unmeasured)
    }

    /// Returns the memory of its pools on a GPU: the maximum of the page, which shows growth at once, and the report. A silent worker
    /// counts with its lease.
    pub(crate) fn resident(&self, told: &Holding) -> Bytes {
        let silent = if self.is_silent { told.lease } else { Bytes::ZERO };
        told.resident.max(self.made(&told.gpu).unwrap_or_default()).max(silent)
    }

    /// Counts the answer to one of the shrinks of a command. Returns whether it was the last, of which the arbiter is told.
    pub(crate) fn has_answered_shrinks(&mut self) -> bool {
        self.shrinks = self.shrinks.saturating_sub(1);
        self.shrinks == 0
    }

    /// Returns the memory of its pools on all GPUs.
    pub(crate) fn all_resident(&self) -> Bytes {
        self.holdings.iter().map(|told| self.resident(told)).sum()
    }

    /// Returns whether no use has begun since the report of the holdings. Without announced uses, a worker may use its memory at any time.
    pub(crate) fn is_as_told(&self, told: &Holding) -> bool {
        is_as_told(self.activity, told)
    }

    /// Returns whether its accounts may be others once `page` is its page.
    pub(crate) fn counts_differ(&self, page: Option<Activity>) -> bool {
        self.activity.map(|known| known.made) != page.map(|page| page.made)
            || self.holdings.iter().any(|told| is_as_told(self.activity, told) != is_as_told(page, told))
    }

    /// Returns the memory of its pools on a GPU by its page; `None` if unknown.
    pub(crate) fn made(&self, gpu: &str) -> Option<Bytes> {
        let device = self.holdings.iter().find(|holding| holding.gpu == gpu)?.device;
        let made = self.activity?.made;
        made.get(usize::try_from(device).ok()?).copied().map(Bytes::new)
    }
}

impl Roster {
    pub(crate) fn new(file: NodeFile, gpus: Vec<String>) -> Self {
        Roster {
            file,
            gpus,
            workers: BTreeMap::new(),
            by_peer: HashMap::new(),
            by_name: HashMap::new(),
            gangs: HashMap::new(),
            ended: HashMap::new(),
            tenants: HashMap::new(),
            next: 1,
        }
    }

    /// Checks that a worker may join. Returns its number if it is known.
    pub(crate) fn check(&self, who: Identity, hello: &Hello) -> Result<Option<WorkerId>, Refusal> {
        let name = hello.name.clone();
        if !is_name(&name) || hello.gang.as_ref().is_some_and(|gang| gang.len() > 256) {
            return Err(Refusal::Name { name });
        }
        if let Some(holding) = hello.holdings.iter().find(|holding| self.gpu(&holding.gpu).is_none()) {
            return Err(Refusal::Gpu { name, gpu: holding.gpu.clone(), known: self.gpus.clone() });
        }
        let known = self.by_peer.get(&who.peer).copied();
        if let Some(worker) = known.and_then(|id| self.workers.get(&id))
            && worker.name != name
            // A silent or disconnected worker may have left unnoticed.
            && !worker.is_silent
            && worker.lost_since.is_none()
        {
            return Err(Refusal::Twice { pid: who.peer.pid, known: worker.name.clone(), name });
        }
        match self.by_name.get(&name).filter(|id| Some(**id) != known) {
            Some(id) => Err(Refusal::Taken {
                name,
                pid: self.workers.get(id).map_or(0, |worker| worker.who.peer.pid),
            }),
            None => Ok(known),
        }
    }

    /// Adds a new worker, or replaces the state of a known one.
    pub(crate) fn add(&mut self, who: Identity, hello: &Hello, is_silent: bool) -> WorkerId {
        let known = self.by_peer.get(&who.peer).copied();
        let id = known.unwrap_or_else(|| WorkerId(self.take_number()));
        let gang = match &hello.gang {
            Some(gang) => {
                let key = (who.uid, gang.clone());
                let found = self.gangs.get(&key).copied();
                found.unwrap_or_else(|| {
                    let gang = GangId(self.take_number());
                    self.gangs.insert(key, gang);
                    gang
                })
            }
            None => GangId(id.0),
        };
        let before = self.workers.remove(&id).map(|worker| {
            self.by_name.remove(&worker.name);
            (worker.floors, worker.is_away, worker.used)
        });
        let (floors, is_away, used) = before.unwrap_or_default();
        self.workers.insert(
            id,
            Worker {
                who,
                name: hello.name.clone(),
                gang,
                gang_name: hello.gang.clone(),
                ranks: hello.ranks.max(1),
                holdings: hello.holdings.clone(),
                floors,
                seen_floors: BTreeMap::new(),
                used,
                is_silent,
                was_refilled: false,
                starts_since: None,
                conversation: Conversation::default(),
                activity: None,
                idle_since: None,
                epoch: 0,
                lost_since: None,
                asked_since: None,
                shrinks: 0,
                is_away,
                failed: None,
                stayed: None,
            },
        );
        self.by_peer.insert(who.peer, id);
        self.by_name.insert(hello.name.clone(), id);
        id
    }

    /// Returns the number of a process.
    pub(crate) fn of(&self, peer: Peer) -> Option<WorkerId> {
        self.by_peer.get(&peer).copied()
    }

    fn take_number(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    pub(crate) fn remove(&mut self, id: WorkerId) -> Option<Worker> {
        let worker = self.workers.remove(&id)?;
        self.by_peer.remove(&worker.who.peer);
        self.by_name.remove(&worker.name);
        if self.workers.values().all(|other| other.gang != worker.gang) {
            self.gangs.retain(|_, gang| *gang != worker.gang);
            self.ended.insert(worker.gang, base(&worker.name).to_owned());
        }
        Some(worker)
    }

    pub(crate) fn get(&self, id: WorkerId) -> Option<&Worker> {
        self.workers.get(&id)
    }

    pub(crate) fn get_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.workers.get_mut(&id)
    }

    pub(crate) fn workers_mut(&mut self) -> impl Iterator<Item = (WorkerId, &mut Worker)> {
        self.workers.iter_mut().map(|(id, worker)| (*id, worker))
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.workers.iter().map(|(id, worker)| (*id, worker))
    }

    pub(crate) fn named(&self, name: &str) -> Option<WorkerId> {
        self.by_name.get(name).copied()
    }

    /// Returns the display names of gangs, ended ones included: that of the only worker, or of ranks without their numbers.
    pub(crate) fn gang_names(&self) -> HashMap<GangId, &str> {
        let ended = self.ended.iter().map(|(gang, name)| (*gang, name.as_str()));
        ended.chain(self.workers.values().map(|worker| (worker.gang, base(&worker.name)))).collect()
    }

    /// Returns the workers of a gang.
    pub(crate) fn workers_of(&self, gang: GangId) -> impl Iterator<Item = &Worker> {
        self.workers.values().filter(move |worker| worker.gang == gang)
    }

    /// Forgets the names of ended gangs except those of `logged`.
    pub(crate) fn forget_ended(&mut self, logged: &BTreeSet<GangId>) {
        self.ended.retain(|gang, _| logged.contains(gang));
    }

    pub(crate) fn gpu(&self, name: &str) -> Option<GpuId> {
        let place = self.gpus.iter().position(|gpu| gpu == name)?;
        u16::try_from(place).ok().map(GpuId)
    }

    pub(crate) fn gpu_name(&self, gpu: GpuId) -> &str {
        self.gpus.get(usize::from(gpu.0)).map_or("", String::as_str)
    }

    pub(crate) fn gpus(&self) -> impl Iterator<Item = (GpuId, &str)> {
        let numbered = (0..).map(GpuId);
        numbered.zip(self.gpus.iter().map(String::as_str))
    }

    pub(crate) fn set_file(&mut self, file: NodeFile) {
        self.file = file;
    }

    pub(crate) fn file(&self) -> &NodeFile {
        &self.file
    }

    /// Converts a worker's holdings for the arbiter: its last report, updated by its page. Unknown state counts as the costlier one.
    /// Holdings on unknown GPUs are skipped.
    pub(crate) fn accounts(&self, id: WorkerId) -> Vec<Account> {
        let Some(worker) = self.get(id) else { return Vec::new() };
        let unmeasured = self.file.node.floor();
        let account = |told: &Holding| {
            let gpu = self.gpu(&told.gpu)?;
            // A worker with evicted memory is refilling, and reports only at the end how much is back.
            let is_whole = told.evicted.is_zero() && told.room.is_zero();
            let resident = if is_whole { worker.resident(told) } else { told.resident };
            let grown = resident.saturating_sub(told.resident);
            let unused = told.unused.unwrap_or(told.discardable);
            Some(Account {
                gpu,
                floor: worker.floor(gpu, unmeasured),
                lease: told.lease,
                resident,
                fixed: told.fixed,
                evicted: told.evicted,
                room: told.room,
                growth: told.growth,
                dirty: told.dirty.saturating_add(grown),
                discardable: told.discardable,
                unknown: if worker.is_as_told(told) { Bytes::ZERO } else { unused },
                hosted: told.hosted,
            })
        };
        worker.holdings.iter().filter_map(account).collect()
    }

    /// Returns the entry of the file for a worker's name.
    pub(crate) fn told(&self, name: &str) -> Option<&glake_arbiter::node::Worker> {
        self.file.workers.iter().find(|worker| worker.name == base(name))
    }

    /// Returns the full size per GPU of a worker in the file, and its GPUs: those of the file, or its actual ones if it uses none of these,
    /// for example because only some GPUs are visible to it.
    pub(crate) fn size_of(&self, id: WorkerId) -> Option<(Bytes, Vec<GpuId>)> {
        let worker = self.workers.get(&id)?;
        let told = self.told(&worker.name)?;
        let share = told.share();
        let of_file: Vec<GpuId> = told.gpus.iter().map(|gpu| GpuId(*gpu)).collect();
        let named: Vec<GpuId> = worker.holdings.iter().filter_map(|held| self.gpu(&held.gpu)).collect();
        let is_elsewhere = !named.is_empty() && named.iter().all(|gpu| !of_file.contains(gpu));
        (!share.is_zero()).then_some((share, if is_elsewhere { named } else { of_file }))
    }

    /// Returns the scheduling attributes of a worker: those of the file, or the defaults.
    pub(crate) fn profile(&mut self, who: Identity, name: &str) -> Profile {
        let (priority, preempt, max_pause, tenant) = match self.told(name) {
            Some(told) => (told.priority, told.preempt, told.max_pause(), told.tenant.clone()),
            None => Default::default(),
        };
        let tenant = if tenant.is_empty() { format!("uid {}", who.uid) } else { tenant };
        let next = u32::try_from(self.tenants.len()).unwrap_or(u32::MAX);
        Profile { priority, tenant: *self.tenants.entry(tenant).or_insert(next), preempt, max_pause }
    }

    /// Returns the tenants that the file names, by name of the worker.
    pub(crate) fn tenants(&self) -> HashMap<&str, &str> {
        let told = self.file.workers.iter().filter(|told| !told.tenant.is_empty());
        told.map(|told| (told.name.as_str(), told.tenant.as_str())).collect()
    }
}

fn is_as_told(page: Option<Activity>, told: &Holding) -> bool {
    page.is_some_and(|page| page.begun > 0 && page.uses == 0 && told.as_of == Some(page.begun))
}

/// Classifies a worker's activity. Without a page, or while loading, a worker may use its memory at any time; uses that never reached a
/// safe point end by themselves.
pub(crate) fn activity_of(page: Option<glake_wire::Activity>) -> UseState {
    let Some(page) = page else { return UseState::Capturing };
    match page {
        _ if page.captures || page.begun == 0 => UseState::Capturing,
        _ if page.uses == 0 => UseState::Idle,
        _ if page.parks => UseState::Busy,
        _ => UseState::Running,
    }
}

/// Removes the number from a rank's name.
pub(crate) fn base(name: &str) -> &str {
    name.split_once('/').map_or(name, |(base, _)| base)
}

fn is_name(name: &str) -> bool {
    let (base, rank) = name.split_once('/').unwrap_or((name, "0"));
    let allowed = |character: u8| character.is_ascii_alphanumeric() || b"._-".contains(&character);
    (1..=64).contains(&base.len())
        && base.bytes().all(allowed)
        && (1..=8).contains(&rank.len())
        && rank.bytes().all(|digit| digit.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_plain() {
        for name in ["llama-8b", "a", "job.1_x/17", &"n".repeat(64)] {
            assert!(is_name(name), "{name}");
        }
        for name in ["", "a b", "a/", "a/x", "/3", "a/1/2", "ä", "a\n", &"n".repeat(65)] {
            assert!(!is_name(name), "{name}");
        }
    }

    #[test]
    fn only_a_reported_idle_worker_counts_as_idle() {
        let page = glake_wire::Activity { begun: 1, ..glake_wire::Activity::default() };
        assert_eq!(activity_of(None), UseState::Capturing);
        assert_eq!(activity_of(Some(page)), UseState::Idle);
        assert_eq!(activity_of(Some(glake_wire::Activity { begun: 0, ..page })), UseState::Capturing);
        assert_eq!(activity_of(Some(glake_wire::Activity { uses: 2, ..page })), UseState::Running);
        assert_eq!(activity_of(Some(glake_wire::Activity { uses: 2, parks: true, ..page })), UseState::Busy);
        assert_eq!(activity_of(Some(glake_wire::Activity { captures: true, ..page })), UseState::Capturing);
    }
}
