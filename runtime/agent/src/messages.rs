//! Inputs of the agent's core: messages of workers become events of the arbiter, and meter readings are compared with their reports.

use std::collections::BTreeMap;
use std::time::Duration;

use glake_arbiter::{Account, Event, GpuId, Task, WorkerId};
use glake_meter::GpuMemory;
use glake_units::Bytes;
use glake_wire::{Denied, Holding, Peer, ToAgent, ToWorker};

use crate::Agent;
use crate::roster::Worker;

impl Agent {
    /// Passes a worker's message to the arbiter.
    pub(crate) fn apply(&mut self, worker: WorkerId, message: ToAgent) {
        let gpu_of = |agent: &Agent, gpu: &str| agent.roster.gpu(gpu);
        match message {
            ToAgent::Want { deadline_ms } => {
                let deadline = self.deadline(worker, deadline_ms.map(Duration::from_millis));
                self.step(Event::Want { worker, deadline });
            }
            ToAgent::Cancel => self.step(Event::Cancel { worker }),
            ToAgent::Grow { gpu, bytes, within_ms } => {
                let within = Duration::from_millis(within_ms);
                match gpu_of(self, &gpu) {
                    Some(gpu) => self.step(Event::Grow { worker, gpu, bytes, within }),
                    None => {
                        let (holders, budget, why) = (Vec::new(), Bytes::ZERO, Some(Denied::TooLarge));
                        self.say(worker, ToWorker::DenyGrowth { gpu, bytes, holders, budget, why });
                    }
                }
            }
            ToAgent::Returned { gpu, bytes } => {
                let held = self.roster.get_mut(worker).map(|worker| &mut worker.holdings);
                let held = held.into_iter().flatten().find(|held| held.gpu == gpu);
                if let Some(held) = held {
                    held.resident = held.resident.saturating_sub(bytes);
                    held.lease = held.lease.saturating_sub(bytes);
                }
                if let Some(gpu) = gpu_of(self, &gpu) {
                    self.step(Event::Returned { worker, gpu, bytes });
                    self.note_lease(worker, gpu);
                }
            }
            ToAgent::Parked => self.step(Event::Parked { worker }),
            ToAgent::Shrunk { holdings } => {
                let is_last = self.roster.get_mut(worker).is_none_or(Worker::has_answered_shrinks);
                let accounts = self.hold(worker, holdings, Ok(()));
                if is_last {
                    // Parked uses may have their memory back before an operator looks.
                    let stayed = self.removable(worker);
                    self.roster.get_mut(worker).into_iter().for_each(|of| of.stayed = Some(stayed));
                }
                self.step(match is_last {
                    true => Event::Shrunk { worker, accounts },
                    false => Event::Changed { worker, accounts },
                });
            }
            ToAgent::Refilled { holdings } => {
                let accounts = self.hold(worker, holdings, Ok(()));
                // The first use has been prepared, and the context has reached its final size.
                let mut known = self.roster.get_mut(worker);
                if let Some(worker) = &mut known {
                    worker.starts_since = None;
                }
                if known.is_some_and(|worker| !std::mem::replace(&mut worker.was_refilled, true)) {
                    self.to_measure.extend(accounts.iter().map(|account| account.gpu));
                }
                self.step(Event::Refilled { worker, accounts });
            }
            ToAgent::Failed { what, why, holdings } => {
                self.counts.failed(&what);
                let task = match what.as_str() {
                    "park" => Some(Task::Park),
                    "shrink" => {
                        let worker = self.roster.get_mut(worker);
                        worker.is_none_or(Worker::has_answered_shrinks).then_some(Task::Shrink)
                    }
                    "refill" => Some(Task::Refill),
                    _ => None,
                };
                let why = format!("{what}: {why}");
                let accounts = self.hold(worker, holdings, Err(why));
                self.step(match task {
                    Some(what) => Event::Failed { worker, what, accounts },
                    None => Event::Changed { worker, accounts },
                });
            }
            ToAgent::Changed { holdings } => {
                let accounts = self.hold_still(worker, holdings);
                self.step(Event::Changed { worker, accounts });
            }
            ToAgent::Bye => self.leave(worker),
            ToAgent::Hello(_) | ToAgent::Ack | ToAgent::Unknown => {}
        }
    }

    /// Records the holdings after a command, and its failure.
    fn hold(&mut self, id: WorkerId, told: Vec<Holding>, outcome: Result<(), String>) -> Vec<Account> {
        if let Some(worker) = self.roster.get_mut(id) {
            worker.failed = outcome.err();
        }
        self.hold_still(id, told)
    }

    fn hold_still(&mut self, id: WorkerId, told: Vec<Holding>) -> Vec<Account> {
        // Keeps one holding for each known GPU.
        let mut known: Vec<Holding> = Vec::new();
        for held in told {
            if self.roster.gpu(&held.gpu).is_some() && known.iter().all(|other| other.gpu != held.gpu) {
                known.push(held);
            }
        }
        let Some(worker) = self.roster.get_mut(id) else { return Vec::new() };
        worker.holdings = known;
        self.roster.accounts(id)
    }

    /// Returns the smaller of the worker's own and the file's longest wait.
    pub(crate) fn deadline(&self, id: WorkerId, said: Option<Duration>) -> Option<Duration> {
        let told = self.roster.get(id).and_then(|worker| self.roster.told(&worker.name)?.deadline_s);
        let told = told.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        said.into_iter().chain(told).min()
    }
}

/// Difference up to which a floor counts as unchanged.
const FLOOR_TOLERANCE: Bytes = Bytes::mib(1);
/// Delay of the second reading that confirms a changed floor.
const CONFIRM_AFTER: Duration = Duration::from_millis(50);

impl Agent {
    /// Returns the memory of a GPU in each worker's pools, by its status page.
    pub fn made(&self, gpu: GpuId) -> BTreeMap<WorkerId, Bytes> {
        let name = self.roster.gpu_name(gpu);
        self.roster.workers().filter_map(|(id, worker)| Some((id, worker.made(name)?))).collect()
    }

    /// Takes a reading of the meter that began at `begun`. `before`: the workers' pools at that time, by their pages.
    pub fn measured(
        &mut self,
        gpu: GpuId,
        begun: Duration,
        memory: &GpuMemory,
        before: &BTreeMap<WorkerId, Bytes>,
        now: Duration,
    ) {
        self.metered(&[(gpu, memory)], now);
        let name = self.roster.gpu_name(gpu).to_owned();
        let users =
            self.roster.workers().filter(|(_, worker)| worker.holdings.iter().any(|held| held.gpu == name));
        let users: Vec<(WorkerId, Peer, Option<Bytes>, bool)> =
            users.map(|(id, worker)| (id, worker.who.peer, worker.made(&name), worker.is_silent)).collect();
        let mut physical = Vec::new();
        for (id, peer, made, is_silent) in users {
            let used = memory.of_process(peer.pid);
            if is_silent {
                let made = self.count_silent(id, gpu, &name, used);
                // All of an unlisted worker's lease may be in use.
                physical.extend((!used.is_zero()).then_some((id, made)));
            } else if let Some(made) = made {
                // Memory of uncertain ownership counts as unmanaged, so that it is not granted.
                physical.push((id, made.min(before.get(&id).copied().unwrap_or_default())));
                // An unlisted process runs in another pid namespace.
                let is_away = self.roster.get(id).is_some_and(|worker| worker.is_away);
                if !used.is_zero() && !is_away {
                    self.set_floor(id, gpu, used.saturating_sub(made));
                }
            }
        }
        self.step(Event::Measured { gpu, begun, used: memory.used, physical });
    }

    /// Sets the floor of a worker once two readings agree, because the meter and the page are not read simultaneously.
    fn set_floor(&mut self, id: WorkerId, gpu: GpuId, floor: Bytes) {
        let unmeasured = self.roster.file().node.floor();
        let Some(worker) = self.roster.get_mut(id) else { return };
        let same = |known: Bytes| known.max(floor).saturating_sub(known.min(floor)) < FLOOR_TOLERANCE;
        if same(worker.floor(gpu, unmeasured)) {
            worker.seen_floors.remove(&gpu);
            return;
        }
        if !worker.seen_floors.insert(gpu, floor).is_some_and(same) {
            self.again.entry(gpu).or_insert(self.now + CONFIRM_AFTER);
            return;
        }
        worker.seen_floors.remove(&gpu);
        worker.floors.insert(gpu, floor);
        let accounts = self.roster.accounts(id);
        self.step(Event::Changed { worker: id, accounts });
    }

    /// Raises the lease of a silent worker to its measured memory, because its last grants may be missing in the journal. Returns the
    /// memory in its pools.
    fn count_silent(&mut self, id: WorkerId, gpu: GpuId, name: &str, used: Bytes) -> Bytes {
        let floor = self.roster.file().node.floor();
        let Some(worker) = self.roster.get_mut(id) else { return Bytes::ZERO };
        let made = used.saturating_sub(worker.floor(gpu, floor));
        let held = worker.holdings.iter_mut().find(|held| held.gpu == name);
        if let Some(held) = held.filter(|held| held.lease < made) {
            held.lease = made;
            self.join(id, false, true);
        }
        made
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // also in the functions that tests call
mod tests {
    use glake_arbiter::node::NodeFile;
    use glake_meter::ProcessMemory;
    use glake_wire::{Hello, Holding, Peer, ToAgent};

    use super::*;
    use crate::{Identity, JournalRecord};

    fn who(pid: u32) -> Identity {
        Identity { peer: Peer { pid, start: 1 }, uid: 0 }
    }

    /// After a full disk, the journal may know less than a worker was granted: until its hello, the meter's reading counts.
    #[test]
    fn a_silent_worker_counts_at_least_with_its_measured_memory() {
        let (gib, mib, at) = (Bytes::gib, Bytes::mib, Duration::from_secs);
        let file =
            NodeFile::parse("[node]\nbudget = \"40GiB\"\nreserve = \"0B\"\nfloor = \"640MiB\"\n").unwrap();
        let mut agent = Agent::new(file, vec![("0".to_owned(), gib(80))], 1);
        let told = JournalRecord {
            name: "silent".to_owned(),
            peer: who(100).peer,
            ranks: 1,
            leases: vec![("0".to_owned(), gib(5))],
            ..JournalRecord::default()
        };
        agent.expect(who(100), &told, at(0));
        let has = gib(20).saturating_add(mib(640));
        let memory = GpuMemory {
            total: gib(80),
            used: has,
            reserved: Bytes::ZERO,
            processes: vec![ProcessMemory { pid: 100, used: has }],
        };
        for second in 1..4 {
            agent.measured(GpuId(0), at(second), &memory, &BTreeMap::new(), at(second));
        }
        let silent = agent.snapshot().workers[0].row.leased;
        // Another worker wants 30 GiB of the budget of 40 GiB.
        let held = Holding { gpu: "0".to_owned(), evicted: gib(30), ..Holding::default() };
        let hello = Hello { name: "other".to_owned(), ranks: 1, holdings: vec![held], ..Hello::default() };
        let (id, _) = agent.hello(who(200), hello, at(4)).unwrap();
        agent.hear(id, 1, 0, ToAgent::Want { deadline_ms: Some(30_000) }, at(4)).unwrap();
        let granted = agent.snapshot().workers.iter().find(|of| of.row.worker == "other").unwrap().row.leased;
        assert!(
            silent >= gib(20) && granted.saturating_add(has) <= gib(40),
            "the silent one has {has} and counts with {silent}; the other one was granted {granted} of a budget of 40 GiB"
        );
    }

    /// A worker that left while no agent was running joins the next agent under another name.
    #[test]
    fn a_worker_may_rename_itself_while_no_agent_runs() {
        let mut agent = Agent::new(NodeFile::parse("").unwrap(), vec![("0".to_owned(), Bytes::gib(80))], 1);
        let told = JournalRecord {
            name: "before".to_owned(),
            peer: who(100).peer,
            ranks: 1,
            ..JournalRecord::default()
        };
        agent.expect(who(100), &told, Duration::ZERO);
        let hello = Hello { name: "after".to_owned(), peer: who(100).peer, ranks: 1, ..Hello::default() };
        let joined = agent.hello(who(100), hello, Duration::from_secs(1));
        assert!(joined.is_ok(), "{}", joined.unwrap_err());
    }

    /// The agent restarts while a worker loads: memory granted but not created yet must not hide unmanaged memory.
    #[test]
    fn unused_lease_of_a_silent_worker_does_not_hide_unmanaged_memory() {
        let (gib, mib, at) = (Bytes::gib, Bytes::mib, Duration::from_secs);
        let file = NodeFile::parse("[node]\nreserve = \"0B\"\nfloor = \"640MiB\"\n").unwrap();
        let mut agent = Agent::new(file, vec![("0".to_owned(), gib(80))], 1);
        let told = JournalRecord {
            name: "loading".to_owned(),
            peer: who(100).peer,
            ranks: 1,
            leases: vec![("0".to_owned(), gib(40))],
            ..JournalRecord::default()
        };
        agent.expect(who(100), &told, at(0));
        // The worker has created 2 GiB of 40; an unmanaged program has 30 GiB.
        let made = gib(2).saturating_add(mib(640));
        let memory = GpuMemory {
            total: gib(80),
            used: made.saturating_add(gib(30)),
            reserved: Bytes::ZERO,
            processes: vec![
                ProcessMemory { pid: 100, used: made },
                ProcessMemory { pid: 999, used: gib(30) },
            ],
        };
        for second in 1..4 {
            agent.measured(GpuId(0), at(second), &memory, &BTreeMap::new(), at(second));
        }
        let held = Holding { gpu: "0".to_owned(), evicted: gib(30), ..Holding::default() };
        let hello = Hello { name: "other".to_owned(), ranks: 1, holdings: vec![held], ..Hello::default() };
        let (id, _) = agent.hello(who(200), hello, at(4)).unwrap();
        agent.hear(id, 1, 0, ToAgent::Want { deadline_ms: Some(30_000) }, at(4)).unwrap();
        let granted = agent.snapshot().workers.iter().find(|of| of.row.worker == "other").unwrap().row.leased;
        let all = gib(30 + 40).saturating_add(mib(2 * 640)).saturating_add(granted);
        assert!(all <= gib(80), "granted {granted}: {all} of a GPU of 80 GiB may be in use");
    }
}
