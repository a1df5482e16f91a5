//! Workers whose contexts the driver checkpoints: what it is asked about whom, and what came of it.
//!
//! The agent has no driver: a command that lives for a moment asks it. That it will be asked is in the journal before
//! the command is started, and until the process is known to run again; so the agent after a crash has every process
//! restored that may be locked, whichever moment the one before died at. Asks are numbered: an answer to one that is not
//! the last about its process says nothing of what that is now.

use std::collections::BTreeMap;
use std::time::Duration;

use glake_arbiter::{Contexts, Event, WorkerId};
use glake_wire::{Holding, Peer};

use crate::roster::Worker;
use crate::{Agent, Entry, Journalled};

/// What the driver is to be asked about a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverAsk {
    /// Which.
    pub peer: Peer,
    /// What it is called.
    pub name: String,
    /// To checkpoint it, or to restore it.
    pub action: DriverAction,
    /// Which ask it is.
    pub number: u64,
}

/// What the driver is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverAction {
    /// It is locked, and leaves its GPUs.
    Checkpoint,
    /// It comes back, whatever it is.
    Restore,
}

/// What the driver is asked.
#[derive(Debug, Default)]
pub(crate) struct Asks {
    /// And was not yet.
    pending: Vec<DriverAsk>,
    /// How many there were.
    count: u64,
    /// Which is the last about a process, until that is known to run.
    last: BTreeMap<Peer, u64>,
}

impl Agent {
    /// What the driver is to be asked, since this was asked last: once the journal is written.
    pub fn take_driver_asks(&mut self) -> Vec<DriverAsk> {
        std::mem::take(&mut self.asks.pending)
    }

    pub(crate) fn ask_driver(&mut self, id: WorkerId, action: DriverAction) {
        let Some(worker) = self.roster.get_mut(id) else { return };
        let peer = worker.who.peer;
        let name = worker.name.clone();
        if action == DriverAction::Checkpoint {
            self.set_away(id, true);
        }
        let ask = self.number(peer, name, action);
        self.asks.pending.push(ask);
    }

    /// The last ask about a process from now on.
    fn number(&mut self, peer: Peer, name: String, action: DriverAction) -> DriverAsk {
        self.asks.count += 1;
        let number = self.asks.count;
        self.asks.last.insert(peer, number);
        DriverAsk { peer, name, action, number }
    }

    /// Whether nothing was asked about its process since.
    pub fn is_last(&self, ask: &DriverAsk) -> bool {
        self.asks.last.get(&ask.peer) == Some(&ask.number)
    }

    /// Whether the driver may have locked a worker, and the journal says so.
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

    /// What came of it. Says whether that process is to be restored once more, though it is no worker any more.
    pub fn contexts(&mut self, ask: &DriverAsk, contexts: Contexts, now: Duration) -> bool {
        self.now = now;
        if !self.is_last(ask) {
            return false;
        }
        let peer = ask.peer;
        let is_present = contexts == Contexts::Present;
        // Nothing is asked any more about one that is lost.
        let is_over = is_present || contexts == Contexts::Lost;
        if is_over {
            self.asks.last.remove(&peer);
        }
        let Some(id) = self.roster.of(peer) else {
            if is_over && self.strays.remove(&peer).is_some() {
                self.entries.push(Entry::Gone(peer));
            }
            return self.strays.contains_key(&peer);
        };
        self.set_away(id, !is_present);
        self.to_measure.extend(self.gpus_of(id).into_iter().map(|(gpu, _)| gpu));
        self.step(Event::Contexts { worker: id, contexts });
        false
    }

    /// A journal, or a conversation before, knows that the driver was asked about a worker.
    pub(crate) fn is_away_again(&mut self, id: WorkerId) {
        let Some(worker) = self.roster.get_mut(id) else { return };
        worker.is_away = true;
        let peer = worker.who.peer;
        self.strays.remove(&peer);
        self.asks.pending.retain(|ask| ask.peer != peer);
        self.entries.push(Entry::Away { peer, away: true });
        self.step(Event::Contexts { worker: id, contexts: Contexts::Unknown });
    }

    /// A worker is none any more. Its process is restored all the same, and is in the journal until it has been.
    pub(crate) fn leaves(&mut self, worker: &Worker) {
        let peer = worker.who.peer;
        if !worker.is_away {
            return self.entries.push(Entry::Gone(peer));
        }
        let leases = worker.holdings.iter().map(|held: &Holding| (held.gpu.clone(), held.lease)).collect();
        let (name, uid) = (worker.name.clone(), worker.who.uid);
        let stray = Journalled {
            name: name.clone(),
            peer,
            uid,
            ranks: 1,
            leases,
            away: true,
            ..Journalled::default()
        };
        self.strays.insert(peer, stray);
        let ask = self.number(peer, name, DriverAction::Restore);
        self.asks.pending.push(ask);
    }

    /// A process that is none any more, or was not one, has died: nothing is left to restore.
    pub(crate) fn forget_stray(&mut self, peer: Peer) {
        self.asks.last.remove(&peer);
        if self.strays.remove(&peer).is_some() {
            self.asks.pending.retain(|ask| ask.peer != peer);
            self.entries.push(Entry::Gone(peer));
        }
    }

    /// Whom the driver may have locked and may restore, and what each is called.
    pub fn away(&self) -> Vec<(Peer, String)> {
        let is_lost = |id: WorkerId| self.arbiter.state(id) == Some("failed");
        let workers = self.roster.workers().filter(|(id, worker)| worker.is_away && !is_lost(*id));
        let workers = workers.map(|(_, worker)| (worker.who.peer, worker.name.clone()));
        let strays = self.strays.values().map(|stray| (stray.peer, stray.name.clone()));
        workers.chain(strays).collect()
    }

    /// Asks for the restore of all of them.
    pub fn restores(&mut self) -> Vec<DriverAsk> {
        self.away().into_iter().map(|(peer, name)| self.number(peer, name, DriverAction::Restore)).collect()
    }
}
