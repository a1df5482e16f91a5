//! Checkpoints of workers' contexts: requests to the driver and their results.
//!
//! The agent has no driver: a short-lived command calls it. The journal records each request before the command starts, until the process
//! is known to run again. After a crash, the next agent therefore restores every process that may be locked. Requests are numbered, and
//! only the answer to the latest request about a process describes its current state.

use std::collections::BTreeMap;
use std::time::Duration;

use glake_arbiter::{Contexts, Event, WorkerId};
use glake_wire::{Holding, Peer};

use crate::roster::Worker;
use crate::{Agent, Entry, JournalRecord};

/// Request to the driver about a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverRequest {
    pub peer: Peer,
    /// Name of the worker.
    pub name: String,
    /// To checkpoint it, or to restore it.
    pub action: DriverAction,
    /// Number of the request.
    pub number: u64,
}

/// Operation that the driver carries out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverAction {
    /// Lock the process and move its contexts off the GPUs.
    Checkpoint,
    /// Bring the process back from any state.
    Restore,
}

/// Requests to the driver.
#[derive(Debug, Default)]
pub(crate) struct DriverRequests {
    /// Requests that were not taken yet.
    pending: Vec<DriverRequest>,
    /// Number of requests so far.
    count: u64,
    /// Number of the latest request about each process, until the process is known to run.
    last: BTreeMap<Peer, u64>,
    /// Processes that left while the driver had them locked, until they are restored.
    pub(crate) strays: BTreeMap<Peer, JournalRecord>,
}

impl DriverRequests {
    /// Takes the pending requests. The caller writes the journal first.
    pub(crate) fn take(&mut self) -> Vec<DriverRequest> {
        std::mem::take(&mut self.pending)
    }

    fn push(&mut self, peer: Peer, name: String, action: DriverAction) {
        let request = self.number(peer, name, action);
        self.pending.push(request);
    }

    /// Numbers a request as the latest about its process.
    fn number(&mut self, peer: Peer, name: String, action: DriverAction) -> DriverRequest {
        self.count += 1;
        let number = self.count;
        self.last.insert(peer, number);
        DriverRequest { peer, name, action, number }
    }

    /// Returns whether the request is still the latest about its process.
    pub(crate) fn is_last(&self, request: &DriverRequest) -> bool {
        self.last.get(&request.peer) == Some(&request.number)
    }
}

impl Agent {
    pub(crate) fn ask_driver(&mut self, id: WorkerId, action: DriverAction) {
        let Some(worker) = self.roster.get_mut(id) else { return };
        let peer = worker.who.peer;
        let name = worker.name.clone();
        if action == DriverAction::Checkpoint {
            self.set_away(id, true);
        }
        self.requests.push(peer, name, action);
    }

    /// Returns whether the driver may have locked a worker and the journal says so.
    pub fn is_away(&self, peer: Peer) -> bool {
        self.roster.of(peer).and_then(|id| self.roster.get(id)).is_some_and(|worker| worker.is_away)
    }

    fn set_away(&mut self, id: WorkerId, away: bool) {
        let Some(worker) = self.roster.get_mut(id) else { return };
        if std::mem::replace(&mut worker.is_away, away) != away {
            let peer = worker.who.peer;
            self.entries.push(Entry::Away { peer, away });
        }
    }

    /// Handles the result of a request. Returns whether the process must be restored again although it is no worker any more.
    pub fn contexts(&mut self, ask: &DriverRequest, contexts: Contexts, now: Duration) -> bool {
        self.now = now;
        if !self.requests.is_last(ask) {
            return false;
        }
        let peer = ask.peer;
        let is_present = contexts == Contexts::Present;
        // No further requests follow for a lost process.
        let is_over = is_present || contexts == Contexts::Lost;
        if is_over {
            self.requests.last.remove(&peer);
        }
        let Some(id) = self.roster.of(peer) else {
            if is_over && self.requests.strays.remove(&peer).is_some() {
                self.entries.push(Entry::Gone(peer));
            }
            return self.requests.strays.contains_key(&peer);
        };
        self.set_away(id, !is_present);
        self.to_measure.extend(self.gpus_of(id).into_iter().map(|(gpu, _)| gpu));
        self.step(Event::Contexts { worker: id, contexts });
        false
    }

    /// Records that a journal or an earlier conversation reports a checkpoint request for the worker.
    pub(crate) fn is_away_again(&mut self, id: WorkerId) {
        let Some(worker) = self.roster.get_mut(id) else { return };
        worker.is_away = true;
        let peer = worker.who.peer;
        self.requests.strays.remove(&peer);
        self.requests.pending.retain(|ask| ask.peer != peer);
        self.entries.push(Entry::Away { peer, away: true });
        self.step(Event::Contexts { worker: id, contexts: Contexts::Unknown });
    }

    /// Keeps a leaving worker in the journal until its process is restored.
    pub(crate) fn leaves(&mut self, worker: &Worker) {
        let peer = worker.who.peer;
        if !worker.is_away {
            return self.entries.push(Entry::Gone(peer));
        }
        let leases = worker.holdings.iter().map(|held: &Holding| (held.gpu.clone(), held.lease)).collect();
        let (name, uid) = (worker.name.clone(), worker.who.uid);
        let stray = JournalRecord {
            name: name.clone(),
            peer,
            uid,
            ranks: 1,
            leases,
            away: true,
            ..JournalRecord::default()
        };
        self.requests.strays.insert(peer, stray);
        self.requests.push(peer, name, DriverAction::Restore);
    }

    /// Forgets a former worker's process that has died.
    pub(crate) fn forget_stray(&mut self, peer: Peer) {
        self.requests.last.remove(&peer);
        if self.requests.strays.remove(&peer).is_some() {
            self.requests.pending.retain(|ask| ask.peer != peer);
            self.entries.push(Entry::Gone(peer));
        }
    }

    /// Returns the processes that the driver may have locked and may restore, with their names.
    pub fn away(&self) -> Vec<(Peer, String)> {
        let is_lost = |id: WorkerId| self.arbiter.state(id) == Some("failed");
        let workers = self.roster.workers().filter(|(id, worker)| worker.is_away && !is_lost(*id));
        let workers = workers.map(|(_, worker)| (worker.who.peer, worker.name.clone()));
        let strays = self.requests.strays.values().map(|stray| (stray.peer, stray.name.clone()));
        workers.chain(strays).collect()
    }

    /// Requests the restore of all locked processes.
    pub fn restores(&mut self) -> Vec<DriverRequest> {
        let away = self.away().into_iter();
        away.map(|(peer, name)| self.requests.number(peer, name, DriverAction::Restore)).collect()
    }
}
