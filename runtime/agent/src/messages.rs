//! Conversion of workers' messages into events of the arbiter.

use std::time::Duration;

use glake_arbiter::{Account, Event, Task, WorkerId};
use glake_wire::{Holding, ToAgent, ToWorker};

use crate::Agent;

impl Agent {
    /// Passes a worker's message to the arbiter.
    pub(crate) fn apply(&mut self, worker: WorkerId, message: ToAgent) {
        let gpu_of = |agent: &Agent, gpu: &str| agent.roster.gpu(gpu);
        match message {
            ToAgent::Want { deadline_ms } => {
                let deadline = self.deadline(worker, deadline_ms.map(Duration::from_millis));
                self.step(Event::Want { worker, deadline });
            }
            ToAgent::Cancel => self.step(Event::Cancelled { worker }),
            ToAgent::Grow { gpu, bytes, within_ms } => {
                let within = Duration::from_millis(within_ms);
                match gpu_of(self, &gpu) {
                    Some(gpu) => self.step(Event::Grow { worker, gpu, bytes, within }),
                    None => self.say(worker, ToWorker::DenyGrowth { gpu, bytes, holders: Vec::new() }),
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
                let is_last = self.has_answered_shrinks(worker);
                let accounts = self.hold(worker, holdings, Ok(()));
                self.step(match is_last {
                    true => Event::Shrunk { worker, accounts },
                    false => Event::Changed { worker, accounts },
                });
            }
            ToAgent::Refilled { holdings } => {
                let accounts = self.hold(worker, holdings, Ok(()));
                // Its first use has been prepared: from then on its context is as large as it gets.
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
                    "shrink" => self.has_answered_shrinks(worker).then_some(Task::Shrink),
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

    /// Counts the answer to one of the shrinks of a command. Returns whether it was the last, of which the arbiter is told.
    fn has_answered_shrinks(&mut self, id: WorkerId) -> bool {
        let Some(worker) = self.roster.get_mut(id) else { return true };
        worker.shrinks = worker.shrinks.saturating_sub(1);
        worker.shrinks == 0
    }

    /// Records the holdings after a command, and its failure.
    fn hold(&mut self, id: WorkerId, told: Vec<Holding>, outcome: Result<(), String>) -> Vec<Account> {
        if let Some(worker) = self.roster.get_mut(id) {
            worker.failed = outcome.err();
        }
        self.hold_still(id, told)
    }

    fn hold_still(&mut self, id: WorkerId, told: Vec<Holding>) -> Vec<Account> {
        // Of GPUs that are here, each once.
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
