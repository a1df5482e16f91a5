//! Core of the agent, without sockets: it turns messages of workers and meter readings into events of the arbiter, and the arbiter's
//! actions into messages.
//!
//! Callers pass the current time. The core never waits and never reads a clock or a file.
//!
//! Invariants: a worker gets messages only after it has joined this agent. Each message of a worker reaches the arbiter once, and each
//! decision reaches the worker once, however often their connection is lost.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use glake_arbiter::node::NodeFile;
use glake_arbiter::{Account, Action, Arbiter, Decision, Denied, Event, GpuId, Joined, Settings, WorkerId};
use glake_units::Bytes;
use glake_wire::{
    Activity, FrameError, Hello, Holder, Holding, Occupancy, Peer, Received, ToAgent, ToWorker, Welcome,
};

use crate::contexts::DriverRequests;
use crate::metrics::Counts;
use crate::roster::{Refusal, Roster, Worker, activity_of};
use crate::snapshot::Reading;
use crate::{DriverAction, Entry, Identity, JournalRecord};

/// Limit of unacknowledged messages to a worker; beyond it, the agent closes the connection until the next hello.
const MOST_UNACKNOWLEDGED: usize = 1024;

/// Time to wait for a worker without a connection, and for a sign of life from a worker that must refill.
const UNHEARD: Duration = Duration::from_secs(10);
/// Limit of the holders named to a worker whose growth is denied.
const MOST_HOLDERS: usize = 8;

/// State of the agent: arbiter, workers, and what must be sent, measured or recorded.
#[derive(Debug)]
pub struct Agent {
    pub(crate) arbiter: Arbiter,
    pub(crate) roster: Roster,
    pub(crate) now: Duration,
    epoch: u64,
    /// Memory of each GPU.
    pub(crate) totals: Vec<Bytes>,
    /// Last reading of each GPU's meter, for snapshots.
    pub(crate) readings: BTreeMap<GpuId, Reading>,
    /// Workers with messages to send.
    outbound: BTreeSet<WorkerId>,
    pub(crate) to_measure: BTreeSet<GpuId>,
    /// GPUs to measure again, with the time of the reading.
    pub(crate) again: BTreeMap<GpuId, Duration>,
    /// Journal entries that were not taken yet, for the next agent.
    pub(crate) entries: Vec<Entry>,
    pub(crate) requests: DriverRequests,
    pub(crate) counts: Counts,
}

/// Returns the arbiter's settings of a file.
fn settings(file: &NodeFile) -> Settings {
    let mut settings = Settings::default();
    settings.link = file.node.link().unwrap_or(settings.link);
    settings.checkpoint_after = file.node.checkpoint_after();
    settings.host_budget = file.node.host_budget.unwrap_or(settings.host_budget);
    settings
}

/// Reason for closing the connection of a joined worker.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionError {
    /// A message is missing.
    #[error("message {seq} came without the one before it")]
    Gap {
        /// Sequence number of the message that arrived instead.
        seq: u64,
    },
    /// The worker does not read its messages.
    #[error("{MOST_UNACKNOWLEDGED} messages to it are not acknowledged")]
    Deaf,
    /// The worker sent a second hello.
    #[error("a second hello")]
    SecondHello,
    /// The worker left or died.
    #[error("it is no worker any more")]
    Unknown,
    /// The bytes are no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Status page of a worker, read at a known time of its process's clock.
#[derive(Clone, Copy, Debug)]
pub struct PageReading {
    /// Activity record of the page.
    pub activity: Activity,
    /// Idle time at that moment.
    pub idle_for: Duration,
}

impl Agent {
    /// Creates an agent of these GPUs with their total memory, without workers.
    pub fn new(file: NodeFile, gpus: Vec<(String, Bytes)>, epoch: u64) -> Self {
        let mut agent = Agent {
            arbiter: Arbiter::new(settings(&file)),
            roster: Roster::new(file, gpus.iter().map(|(name, _)| name.clone()).collect()),
            now: Duration::ZERO,
            epoch,
            totals: Vec::new(),
            readings: BTreeMap::new(),
            outbound: BTreeSet::new(),
            to_measure: BTreeSet::new(),
            again: BTreeMap::new(),
            entries: Vec::new(),
            requests: DriverRequests::default(),
            counts: Counts::default(),
        };
        agent.totals = gpus.into_iter().map(|(_, total)| total).collect();
        agent.set_capacities();
        agent
    }

    fn set_capacities(&mut self) {
        for (gpu, total) in (0..).map(GpuId).zip(self.totals.clone()) {
            let node = &self.roster.file().node;
            let budget = node.budget.unwrap_or(total).min(total);
            let reserve = node.reserve_of(budget);
            let (budget, total) = (budget.saturating_sub(reserve), total.saturating_sub(reserve));
            self.step(Event::Capacity { gpu, budget, total });
            self.to_measure.insert(gpu);
        }
    }

    /// Replaces the file that describes the server and its workers. All of `[node]` and the scheduling attributes of joined workers apply
    /// at once.
    pub(crate) fn set_file(&mut self, file: NodeFile, now: Duration) {
        self.now = now;
        self.arbiter.set_settings(settings(&file));
        let workers = self.roster.workers().map(|(id, worker)| (id, worker.who, worker.name.clone()));
        let workers: Vec<_> = workers.map(|known| (self.roster.accounts(known.0), known)).collect();
        self.roster.set_file(file);
        for (before, (id, who, name)) in workers {
            let profile = self.roster.profile(who, &name);
            self.arbiter.set_profile(id, profile);
            // The floor of a worker without a measured one is the file's.
            let accounts = self.roster.accounts(id);
            if accounts != before {
                self.step(Event::Changed { worker: id, accounts });
            }
        }
        self.set_capacities();
    }

    /// Adds a living worker that the journal of the previous agent names.
    pub fn expect(&mut self, who: Identity, told: &JournalRecord, now: Duration) -> WorkerId {
        self.now = now;
        let hello = Hello {
            name: told.name.clone(),
            gang: told.gang.clone(),
            ranks: told.ranks,
            holdings: told.leases.iter().map(|(gpu, lease)| held(gpu, *lease)).collect(),
            ..Hello::default()
        };
        let id = self.roster.add(who, &hello, true);
        self.lost(id, now);
        self.join(id, false, true);
        if told.away {
            self.is_away_again(id);
        }
        id
    }

    /// Handles the hello at the beginning of a worker's connection.
    ///
    /// # Errors
    /// [`Refusal`]: the worker is told the reason and runs without the agent.
    pub fn hello(
        &mut self,
        who: Identity,
        hello: Hello,
        now: Duration,
    ) -> Result<(WorkerId, Welcome), Refusal> {
        self.now = now;
        let known = self.roster.check(who, &hello)?;
        let id = match known.and_then(|id| Some((id, self.roster.get_mut(id)?))) {
            // The same conversation continues over a new connection.
            Some((id, worker)) if !worker.is_silent && hello.epoch == worker.epoch => {
                worker.conversation.resume(hello.received);
                worker.lost_since = None;
                id
            }
            known => {
                // The worker left unnoticed and returned: only its new report counts.
                if let Some(id) = known.filter(|(_, worker)| !worker.is_silent).map(|(id, _)| id) {
                    self.leave(id);
                }
                let id = self.roster.add(who, &hello, false);
                self.epoch += 1;
                if let Some(worker) = self.roster.get_mut(id) {
                    worker.epoch = self.epoch;
                }
                self.join(id, hello.starting, false);
                if self.requests.strays.contains_key(&who.peer) {
                    self.is_away_again(id);
                }
                if hello.wants {
                    self.step(Event::Want { worker: id, deadline: self.deadline(id, None) });
                }
                id
            }
        };
        self.outbound.insert(id);
        let received = self.roster.get(id).map_or(0, |worker| worker.conversation.received());
        let wait = hello.starting && self.roster.size_of(id).is_some();
        let epoch = self.roster.get(id).map_or(0, |worker| worker.epoch);
        Ok((id, Welcome { epoch, received, worker: id.0, wait }))
    }

    pub(crate) fn join(&mut self, id: WorkerId, starting: bool, is_silent: bool) {
        let Some(worker) = self.roster.get_mut(id) else { return };
        worker.starts_since = starting.then_some(self.now);
        let Some(worker) = self.roster.get(id) else { return };
        let (who, name, gang, ranks) = (worker.who, worker.name.clone(), worker.gang, worker.ranks);
        let activity = activity_of(worker.activity);
        let mut accounts = self.roster.accounts(id);
        let (size, gpus) = self.roster.size_of(id).filter(|_| starting).unwrap_or_default();
        let known = gpus.into_iter().filter(|gpu| self.roster.gpus().any(|(known, _)| known == *gpu));
        let start: Vec<_> = known.map(|gpu| (gpu, size)).collect();
        for &(gpu, _) in &start {
            if accounts.iter().all(|account| account.gpu != gpu) {
                let floor = worker.floor(gpu, self.roster.file().node.floor());
                accounts.push(Account::nothing(gpu, floor));
            }
        }
        self.to_measure.extend(accounts.iter().map(|account| account.gpu));
        let profile = self.roster.profile(who, &name);
        // A worker of unknown size requests memory as it grows.
        let is_start = !start.is_empty();
        let joined = Joined { worker: id, gang, ranks, activity, start, profile, accounts };
        if let Some(worker) = self.roster.get(id) {
            self.entries.push(Entry::Joined(self.journalled(id, worker)));
        }
        self.step(if is_silent { Event::Expected(joined) } else { Event::Joined(joined) });
        if is_start && !is_silent {
            self.step(Event::Want { worker: id, deadline: None });
        }
    }

    /// Handles a frame of a worker.
    ///
    /// # Errors
    /// [`ConnectionError`]: the caller closes the connection; no message is lost.
    pub fn hear(
        &mut self,
        id: WorkerId,
        seq: u64,
        ack: u64,
        message: ToAgent,
        now: Duration,
    ) -> Result<(), ConnectionError> {
        self.now = now;
        let worker = self.roster.get_mut(id).ok_or(ConnectionError::Unknown)?;
        if matches!(message, ToAgent::Hello(_)) {
            return Err(ConnectionError::SecondHello);
        }
        let received = worker.conversation.receive(seq, ack);
        if worker.conversation.unacknowledged() == 0 {
            worker.asked_since = None;
        }
        match received {
            Received::Gap => return Err(ConnectionError::Gap { seq }),
            Received::Repeated => return Ok(()),
            Received::New => {}
        }
        // Send at least an acknowledgement.
        self.outbound.insert(id);
        self.apply(id, message);
        Ok(())
    }

    /// Handles the status page of a worker.
    pub fn saw(&mut self, id: WorkerId, seen: Option<PageReading>, now: Duration) {
        self.now = now;
        let page = seen.map(|seen| seen.activity);
        if self.roster.get(id).is_none_or(|worker| worker.activity == page) {
            return;
        }
        // Most pages only say that a use has begun or ended.
        let is_counted = self.roster.get(id).is_some_and(|worker| worker.counts_differ(page));
        let before = if is_counted { self.roster.accounts(id) } else { Vec::new() };
        let Some(worker) = self.roster.get_mut(id) else { return };
        let known = std::mem::replace(&mut worker.activity, page);
        worker.idle_since =
            seen.filter(|seen| seen.activity.uses == 0).map(|seen| now.saturating_sub(seen.idle_for));
        let is_making = known.zip(page).is_some_and(|(before, after)| before.made != after.made);
        if is_making && matches!(self.arbiter.state(id), Some("refilling")) {
            self.step(Event::Progress { worker: id });
        }
        let accounts = if is_counted { self.roster.accounts(id) } else { Vec::new() };
        if accounts != before {
            self.step(Event::Changed { worker: id, accounts });
        }
        let told = |page: Option<Activity>| (activity_of(page), page.map(|page| page.idle_since_ns));
        if told(known) != told(page) {
            let idle_for = seen.map_or(Duration::ZERO, |seen| seen.idle_for);
            self.step(Event::Activity { worker: id, activity: activity_of(page), idle_for });
        }
    }

    /// Returns the workers whose pages to read before memory is taken: workers with a lease, and workers that had memory at the last
    /// reading of their page, which would otherwise be compared with a newer lease.
    pub fn watched(&self) -> BTreeSet<WorkerId> {
        let leased = self.arbiter.footprints().filter(|of| !of.lease.is_zero()).map(|of| of.worker);
        let had =
            |worker: &Worker| worker.activity.is_some_and(|page| page.made.iter().any(|made| *made > 0));
        leased.chain(self.roster.workers().filter(|(_, worker)| had(worker)).map(|(id, _)| id)).collect()
    }

    /// Returns whether a want or a growth is open.
    pub fn is_anybody_waiting(&self) -> bool {
        self.arbiter.is_anybody_waiting()
    }

    /// Records that a worker's connection is closed.
    pub fn lost(&mut self, id: WorkerId, now: Duration) {
        if let Some(worker) = self.roster.get_mut(id) {
            worker.lost_since = Some(now);
        }
    }

    /// Returns workers that have been silent for so long that they run without an agent by now: a running worker reconnects every two
    /// seconds. Each is returned once.
    pub fn take_unheard(&mut self, now: Duration) -> Vec<(WorkerId, Peer)> {
        let unheard: Vec<(WorkerId, Peer)> = self
            .roster
            .workers()
            .filter(|(_, worker)| worker.lost_since.is_some_and(|since| since + UNHEARD <= now))
            .map(|(id, worker)| (id, worker.who.peer))
            .collect();
        // Check a stopped process again later.
        unheard.iter().for_each(|(id, _)| self.lost(*id, now));
        unheard
    }

    /// Removes a worker that runs without the agent; the meter counts its memory as unmanaged. The worker may join anew.
    pub fn give_up(&mut self, id: WorkerId, now: Duration) {
        self.now = now;
        tracing::info!(target: "glake::agent", worker = %self.name(id), "a worker has not reconnected: it runs without the agent");
        self.counts.given_up += 1;
        self.leave(id);
    }

    /// Records the death of a process. Returns its number and name if it was a worker.
    pub fn died(&mut self, peer: Peer, now: Duration) -> Option<(WorkerId, String)> {
        self.now = now;
        let left = self.roster.of(peer).map(|id| (id, self.name(id)));
        if let Some((id, _)) = left {
            self.leave(id);
        }
        self.forget_stray(peer);
        left
    }

    pub(crate) fn leave(&mut self, id: WorkerId) {
        let Some(worker) = self.roster.remove(id) else { return };
        let gpus = worker.holdings.iter().filter_map(|held| self.roster.gpu(&held.gpu));
        let gpus: Vec<GpuId> = gpus.collect();
        self.to_measure.extend(gpus);
        self.outbound.remove(&id);
        Reading::disown(&mut self.readings, &worker);
        self.leaves(&worker);
        self.step(Event::Died { worker: id });
        let victims = |of: &Decision| of.taken.iter().map(|victim| victim.gang).collect::<Vec<_>>();
        let logged = self.arbiter.decisions().flat_map(|of| victims(of).into_iter().chain([of.gang]));
        self.roster.forget_ended(&logged.collect());
    }

    /// Handles the passage of time.
    pub fn tick(&mut self, now: Duration) {
        self.now = now;
        let due = self.again.extract_if(.., |_, at| *at <= now).map(|(gpu, _)| gpu);
        self.to_measure.extend(due);
        self.note_unanswered();
        self.step(Event::Tick);
    }

    /// Reports a failure to operators that wait for a worker that does not respond, for example a stopped process.
    fn note_unanswered(&mut self) {
        for (id, worker) in self.roster.workers_mut() {
            if worker.asked_since.is_none_or(|since| self.now < since + UNHEARD) {
                continue;
            }
            // A worker under restore cannot respond yet.
            let may_hear = matches!(self.arbiter.state(id), Some("resident" | "asleep"));
            worker.asked_since = (!may_hear).then_some(self.now);
            if may_hear {
                worker.failed = Some(format!(
                    "it has not answered within {} s: it may be stopped, and refills once it goes on",
                    UNHEARD.as_secs()
                ));
            }
        }
    }

    /// Returns the time at which [`Agent::tick`] is due; `None` while nothing is under way.
    pub fn next_deadline(&self) -> Option<Duration> {
        let unheard = self
            .roster
            .workers()
            .flat_map(|(_, worker)| [worker.lost_since, worker.asked_since])
            .filter_map(|since| Some(since? + UNHEARD));
        self.arbiter.next_deadline().into_iter().chain(self.again.values().copied()).chain(unheard).min()
    }

    /// Returns the next frame for a worker.
    ///
    /// # Errors
    /// [`ConnectionError`]: the caller closes the connection.
    pub fn frame(&mut self, id: WorkerId) -> Result<Option<Vec<u8>>, ConnectionError> {
        let worker = self.roster.get_mut(id).ok_or(ConnectionError::Unknown)?;
        if worker.conversation.unacknowledged() > MOST_UNACKNOWLEDGED {
            return Err(ConnectionError::Deaf);
        }
        loop {
            match worker.conversation.next(ToWorker::Ack) {
                Err(error @ FrameError::TooLong { .. }) => {
                    tracing::warn!(target: "glake::agent", worker = worker.name, %error, "a message to a worker could not be encoded");
                }
                frame => return Ok(frame?),
            }
        }
    }

    /// Takes the set of workers with messages to send.
    pub fn take_outbound(&mut self) -> BTreeSet<WorkerId> {
        std::mem::take(&mut self.outbound)
    }

    /// Takes the GPUs whose meter must be read.
    pub fn take_measures(&mut self) -> Vec<(GpuId, String)> {
        let gpus = std::mem::take(&mut self.to_measure);
        gpus.into_iter().map(|gpu| (gpu, self.roster.gpu_name(gpu).to_owned())).collect()
    }

    /// Takes the entries that must be in the journal before any message is sent.
    pub fn take_entries(&mut self) -> Vec<Entry> {
        std::mem::take(&mut self.entries)
    }

    /// Returns the complete content of the journal.
    pub fn journal(&self) -> Vec<JournalRecord> {
        let workers = self.roster.workers().map(|(id, worker)| self.journalled(id, worker));
        workers.chain(self.requests.strays.values().cloned()).collect()
    }

    fn journalled(&self, id: WorkerId, worker: &Worker) -> JournalRecord {
        let footprints = self.arbiter.footprints().filter(|of| of.worker == id);
        let mut leases: Vec<(String, Bytes)> =
            footprints.map(|of| (self.roster.gpu_name(of.gpu).to_owned(), of.lease)).collect();
        // The arbiter does not know a worker that is about to join.
        if leases.is_empty() {
            leases = worker.holdings.iter().map(|held| (held.gpu.clone(), held.lease)).collect();
        }
        let (name, gang, ranks) = (worker.name.clone(), worker.gang_name.clone(), worker.ranks);
        let away = worker.is_away;
        JournalRecord { name, peer: worker.who.peer, uid: worker.who.uid, gang, ranks, leases, away }
    }

    pub(crate) fn note_lease(&mut self, id: WorkerId, gpu: GpuId) {
        let Some(worker) = self.roster.get(id) else { return };
        let lease = self.arbiter.footprints().find(|of| of.worker == id && of.gpu == gpu).map(|of| of.lease);
        let (peer, gpu) = (worker.who.peer, self.roster.gpu_name(gpu).to_owned());
        self.entries.push(Entry::Lease { peer, gpu, bytes: lease.unwrap_or_default() });
    }

    pub(crate) fn say(&mut self, id: WorkerId, message: ToWorker) {
        let Some(worker) = self.roster.get_mut(id).filter(|worker| !worker.is_silent) else { return };
        worker.conversation.push(message);
        self.outbound.insert(id);
    }

    pub(crate) fn step(&mut self, event: Event) {
        tracing::trace!(target: "glake::agent", ?event, "arbiter received an event");
        let actions = self.arbiter.step(event, self.now);
        for (at, action) in actions.iter().enumerate() {
            tracing::trace!(target: "glake::agent", ?action, "arbiter decided on an action");
            let shrinks = |of: &Action| matches!(of, Action::Shrink { .. });
            let more = shrinks(action)
                && actions[at + 1..].iter().any(|next| shrinks(next) && next.worker() == action.worker());
            self.act(action, more);
        }
    }

    pub(crate) fn act(&mut self, action: &Action, more: bool) {
        self.counts.decided(action);
        match *action {
            Action::Measure { gpu } => {
                self.to_measure.insert(gpu);
            }
            Action::Checkpoint { worker } => self.ask_driver(worker, DriverAction::Checkpoint),
            Action::Restore { worker } => self.ask_driver(worker, DriverAction::Restore),
            Action::Shrink { worker, .. } => {
                if let Some(worker) = self.roster.get_mut(worker) {
                    worker.shrinks += 1;
                }
            }
            Action::StopCountingOn { worker, until } => {
                let late = "it did not answer in time".to_owned();
                // The worker's own report is more specific.
                let why = self.roster.get_mut(worker).map(|worker| worker.failed.get_or_insert(late).clone());
                let (name, now) = (self.name(worker), self.now);
                tracing::warn!(target: "glake::agent", worker = %name, why, for_s = (until.saturating_sub(now)).as_secs_f64(), "a worker missed a deadline: it is no victim for a while, and its lease counts as used");
            }
            // The worker wants again after a denial for now.
            Action::Deny { worker, why, retry_after: None } => {
                if let Some(worker) = self.roster.get_mut(worker) {
                    worker.failed = Some(denial(why).to_owned());
                }
            }
            Action::Grant { worker, gpu, .. } => {
                self.note_lease(worker, gpu);
                let name = self.roster.gpu_name(gpu).to_owned();
                // The grant may be for a GPU that the worker has not reported yet.
                if let Some(worker) = self.roster.get_mut(worker)
                    && !worker.holdings.iter().any(|held| held.gpu == name)
                {
                    worker.holdings.push(held(&name, Bytes::ZERO));
                }
            }
            _ => {}
        }
        if let (Some(id), Some(message)) = (action.worker(), self.message(action, more)) {
            self.say(id, message);
        }
    }

    /// Converts an action into a message; `None` if the worker needs none. `more`: another shrink of the same command follows.
    fn message(&self, action: &Action, more: bool) -> Option<ToWorker> {
        let name = |gpu: GpuId| self.roster.gpu_name(gpu).to_owned();
        let within_ms = |by: Duration| millis(by.saturating_sub(self.now));
        Some(match *action {
            Action::Grant { gpu, bytes, .. } => ToWorker::Grant { gpu: name(gpu), bytes },
            Action::Admit { .. } => ToWorker::Admit,
            Action::Park { by, .. } => ToWorker::Park { within_ms: within_ms(by) },
            Action::Unpark { .. } => ToWorker::Unpark,
            Action::Shrink { gpu, bytes, tier, by, .. } => ToWorker::Shrink {
                gpu: name(gpu),
                bytes,
                tier: tier.map(name),
                within_ms: within_ms(by),
                more,
            },
            Action::Demote { bytes, .. } => ToWorker::Demote { bytes },
            Action::Deny { worker, why, retry_after } => {
                let held =
                    self.roster.get(worker).map(|worker| worker.holdings.as_slice()).unwrap_or_default();
                let occupancy = |held: &Holding| {
                    let gpu = self.roster.gpu(&held.gpu)?;
                    let (budget, holders) = (self.arbiter.limit(gpu), self.holders(gpu));
                    Some(Occupancy { gpu: held.gpu.clone(), budget, holders })
                };
                let gpus = held.iter().filter_map(occupancy).collect();
                ToWorker::Deny { why, retry_after_ms: retry_after.map(millis), gpus }
            }
            Action::DenyGrowth { gpu, bytes, why, .. } => ToWorker::DenyGrowth {
                gpu: name(gpu),
                bytes,
                holders: self.holders(gpu),
                budget: self.arbiter.limit(gpu),
                why: Some(why),
            },
            Action::StopCountingOn { .. }
            | Action::Measure { .. }
            | Action::Checkpoint { .. }
            | Action::Restore { .. } => return None,
        })
    }

    /// Returns the holders of a GPU, the largest lease first.
    fn holders(&self, gpu: GpuId) -> Vec<Holder> {
        let of_gpu = self.arbiter.footprints().filter(|of| of.gpu == gpu && !of.lease.is_zero());
        let mut holders: Vec<_> =
            of_gpu.map(|of| Holder { name: self.name(of.worker), lease: of.lease }).collect();
        holders.sort_by_key(|holder| std::cmp::Reverse(holder.lease));
        holders.truncate(MOST_HOLDERS);
        holders
    }

    /// Returns the numbers and names of all GPUs.
    pub fn gpus(&self) -> Vec<(GpuId, String)> {
        self.roster.gpus().map(|(gpu, name)| (gpu, name.to_owned())).collect()
    }

    /// Returns the GPUs of a worker and of the other ranks of its gang, because memory is planned for all of them together.
    pub fn gpus_of(&self, id: WorkerId) -> Vec<(GpuId, String)> {
        let gang = self.roster.get(id).map(|worker| worker.gang);
        let ranks = self.roster.workers().filter(|(_, worker)| Some(worker.gang) == gang);
        let gpus: BTreeSet<&str> =
            ranks.flat_map(|(_, worker)| &worker.holdings).map(|held| held.gpu.as_str()).collect();
        gpus.into_iter().filter_map(|gpu| Some((self.roster.gpu(gpu)?, gpu.to_owned()))).collect()
    }

    /// Returns the name of a worker.
    pub fn name(&self, id: WorkerId) -> String {
        self.roster.get(id).map_or_else(|| format!("worker {id}"), |worker| worker.name.clone())
    }
}

/// Returns the display text of a reason.
pub(crate) fn denial(why: Denied) -> &'static str {
    match why {
        Denied::TooLarge => "denied: it needs more than its GPU could ever give",
        Denied::Deadline => "denied: its deadline would have passed",
        Denied::Incomplete => "denied: not all ranks of it are there",
        Denied::Lost => "denied: the driver does not restore its process: end it, and start it again",
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn held(gpu: &str, lease: Bytes) -> Holding {
    Holding { gpu: gpu.to_owned(), lease, ..Holding::default() }
}
