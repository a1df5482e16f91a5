//! Simulated workers and a meter, and the invariants between them and the arbiter at each step.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use glake_units::Bytes;

use crate::{
    Account, Action, Arbiter, Contexts, Denied, Event, GangId, GpuId, Joined, Overview, Pending, Preempt,
    Profile, Request, RequestKind, Settings, Task, UseState, WorkerId,
};

pub(super) const FLOOR: Bytes = Bytes::mib(640);
/// Time that operators give the uses of a worker to stop.
pub(super) const DRAIN: Duration = Duration::from_secs(30);

/// Actual state of a worker, which the arbiter knows from events only.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Worker {
    pub(super) held: Vec<Account>,
    pub(super) activity: UseState,
    pub(super) gang: GangId,
    pub(super) ranks: u32,
    pub(super) profile: Profile,
    /// Commands not carried out yet.
    pub(super) queue: VecDeque<Action>,
    pub(super) waits: bool,
    /// Whether the worker is still starting.
    pub(super) starting: bool,
    pub(super) stopped: bool,
    pub(super) told: bool,
    /// Whether the contexts are in the checkpoint; `None` if the driver has not locked the process.
    pub(super) locked: Option<bool>,
    /// Pending request to the driver: true for a restore, false for a checkpoint.
    pub(super) asked: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) arbiter: Arbiter,
    pub(super) settings: Settings,
    pub(super) workers: BTreeMap<WorkerId, Worker>,
    pub(super) capacity: BTreeMap<GpuId, (Bytes, Bytes)>,
    /// Memory of dead workers that the meter still shows.
    pub(super) dead: BTreeMap<GpuId, Bytes>,
    pub(super) open: BTreeSet<WorkerId>,
    /// Open growths, with the end of their timeouts.
    pub(super) growths: Vec<(WorkerId, GpuId, Bytes, Duration)>,
    pub(super) now: Duration,
    /// Whether a worker exceeded its lease or joined with more than the GPU has.
    pub(super) liars: bool,
    /// Whether overviews are compared with the ledger at each step, which takes as long as the step.
    pub(super) checks_overviews: bool,
}

impl World {
    pub(super) fn new(settings: Settings, gpus: &[(u64, u64)]) -> Self {
        let arbiter = Arbiter::new(settings.clone());
        let capacity =
            (0..).map(GpuId).zip(gpus.iter().map(|(b, t)| (Bytes::gib(*b), Bytes::gib(*t)))).collect();
        let empty = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let mut world = World {
            arbiter,
            settings,
            workers: empty.0,
            capacity,
            dead: empty.1,
            open: empty.2,
            growths: Vec::new(),
            now: Duration::ZERO,
            liars: false,
            checks_overviews: false,
        };
        world.tell_capacity();
        world
    }

    pub(super) fn tell_capacity(&mut self) {
        for (gpu, (budget, total)) in self.capacity.clone() {
            self.tell(Event::Capacity { gpu, budget, total });
        }
    }

    /// Performs a step, delivers its actions to the workers and checks the invariants.
    pub(super) fn tell(&mut self, event: Event) -> Vec<Action> {
        let before: BTreeMap<_, _> =
            self.capacity.keys().map(|gpu| (*gpu, self.arbiter.claimed(*gpu))).collect();
        let raises =
            matches!(
                event,
                Event::Joined(_)
                    | Event::Expected(_)
                    | Event::Changed { .. }
                    | Event::Measured { .. }
                    | Event::Contexts { .. }
            ) || matches!(event, Event::Shrunk { .. } | Event::Refilled { .. } | Event::Failed { .. });
        match &event {
            Event::Want { worker, .. } => _ = self.open.insert(*worker),
            Event::Cancel { worker } => _ = self.open.remove(worker),
            Event::Died { worker } => {
                self.open.remove(worker);
                self.growths.retain(|growth| growth.0 != *worker);
            }
            Event::Grow { worker, gpu, bytes, within } => {
                self.growths.push((*worker, *gpu, *bytes, self.now + *within))
            }
            _ => {}
        }
        let asked = match event {
            Event::Want { deadline, .. } => deadline,
            _ => None,
        };
        let wants = self.arbiter.ledger.gangs.iter();
        let wants: BTreeMap<GangId, Duration> =
            wants.filter_map(|(id, gang)| Some((*id, gang.want?.deadline))).collect();
        // Reports of memory and time change no request.
        let is_order_kept = self.checks_overviews && matches!(event, Event::Tick | Event::Returned { .. });
        let asked_before = is_order_kept.then(|| {
            let mut then = self.arbiter.clone();
            then.ledger.now = then.ledger.now.max(self.now);
            Overview::of(&then).requests
        });
        let actions = self.arbiter.step(event, self.now);
        self.arbiter.check();
        if self.checks_overviews {
            self.arbiter.check_overview();
        }
        asked_before.into_iter().for_each(|before| self.is_served_in_order(&before));
        actions.iter().for_each(|action| self.is_answered_in_time(action, &wants, asked));
        for action in &actions {
            self.carry(action);
        }
        for (gpu, before) in before {
            let (claimed, limit) = (self.arbiter.claimed(gpu), self.arbiter.limit(gpu));
            let granted = actions.iter().any(|a| matches!(a, Action::Grant { gpu: g, .. } if *g == gpu));
            assert!(!granted || claimed <= limit, "granted beyond the limit: {claimed} of {limit}");
            assert!(raises || claimed <= limit.max(before), "{claimed} of {limit} after {before}");
        }
        let leased: BTreeMap<_, _> =
            self.arbiter.footprints().map(|f| ((f.worker, f.gpu), f.lease)).collect();
        for (id, worker) in self.workers.iter().filter(|(_, worker)| worker.told) {
            for held in &worker.held {
                let lease = leased.get(&(*id, held.gpu)).copied().unwrap_or_default();
                assert!(held.lease <= lease, "worker {id} may hold {} and {lease} counts", held.lease);
            }
        }
        let waiting = self.open.len();
        assert!(waiting == 0 || self.arbiter.next_deadline().is_some(), "{waiting} wait for ever");
        actions
    }

    /// Checks that a request is denied early only if waiting is useless.
    fn is_answered_in_time(
        &mut self,
        action: &Action,
        wants: &BTreeMap<GangId, Duration>,
        asked: Option<Duration>,
    ) {
        let ledger = &self.arbiter.ledger;
        let growth = |worker, gpu, bytes| {
            self.growths.iter().position(|of| (of.0, of.1, of.2) == (worker, gpu, bytes))
        };
        match *action {
            Action::DenyGrowth { worker, gpu, bytes, .. } => {
                let Some(at) = growth(worker, gpu, bytes) else { return };
                let (.., by) = self.growths.remove(at);
                let Some(gang) = ledger.gang_of.get(&worker) else { return };
                let is_hopeless =
                    ledger.reachable(gpu, *gang) < bytes || ledger.gangs[gang].contexts.is_lost();
                assert!(by <= self.now || is_hopeless, "{action:?} at {:?}, before {by:?}", self.now);
            }
            Action::Grant { worker, gpu, bytes } => {
                if let Some(at) = growth(worker, gpu, bytes) {
                    self.growths.remove(at);
                }
            }
            Action::Deny { worker, why: Denied::Deadline, .. } => {
                let by = ledger.gang_of.get(&worker).and_then(|gang| wants.get(gang));
                // No link refills 9 GiB sooner, and the worker may want again shortly before its deadline.
                let least = Duration::from_millis(100);
                let ends = by.copied().into_iter().chain(asked.map(|deadline| self.now + deadline));
                assert!(
                    ends.min().is_some_and(|end| end <= self.now + least),
                    "{action:?} at {:?}",
                    self.now
                );
            }
            _ => {}
        }
    }

    /// Checks that no want was served before an earlier one of the same GPU that waits still.
    fn is_served_in_order(&self, before: &[Request]) {
        let after = Overview::of(&self.arbiter).requests;
        let is_open = |request: &&Request| request.kind != RequestKind::Growth && !request.is_served;
        let now =
            |request: &Request| after.iter().find(|of| of.gang == request.gang && of.kind == request.kind);
        for (at, served) in before.iter().enumerate().filter(|(_, request)| is_open(request)) {
            if !now(served).is_some_and(|now| now.is_served) {
                continue;
            }
            let is_able =
                |request: &&Request| !matches!(request.pending, Pending::OwnShrink | Pending::Restore);
            let earlier = before[..at].iter().filter(is_open).filter(is_able);
            for waits in earlier.filter(|request| now(request).is_some_and(|now| is_open(&now))) {
                let both = waits.needs.keys().any(|gpu| served.needs.contains_key(gpu));
                assert!(!both, "{served:?} was served before {waits:?}");
            }
        }
    }

    fn carry(&mut self, action: &Action) {
        if let Action::Grant { worker, .. }
        | Action::Admit { worker }
        | Action::Park { worker, .. }
        | Action::Shrink { worker, .. }
        | Action::Demote { worker, .. } = action
        {
            let locked = self.workers.get(worker).and_then(|worker| worker.locked);
            assert_eq!(locked, None, "{action:?}");
        }
        if let Action::Checkpoint { worker: id } | Action::Restore { worker: id } = *action {
            let restores = matches!(action, Action::Restore { .. });
            let worker = self.workers.get_mut(&id).unwrap();
            assert_eq!(worker.asked.replace(restores), None, "{action:?} while the driver is asked");
            let nothing = worker.held.iter().all(|held| held.lease.is_zero());
            assert!(restores || nothing && !self.open.contains(&id), "{action:?} of {worker:?}");
            worker.locked.get_or_insert(false);
        }
        let late = |by: Duration| assert!(by > self.now, "{action:?} is late at once");
        match *action {
            Action::Grant { worker, gpu, bytes } => {
                if let Some(worker) = self.workers.get_mut(&worker) {
                    if worker.held.iter().all(|held| held.gpu != gpu) {
                        worker.held.push(Account::nothing(gpu, Bytes::ZERO));
                    }
                    let held = worker.held.iter_mut().find(|held| held.gpu == gpu).unwrap();
                    held.lease = held.lease.saturating_add(bytes);
                }
            }
            Action::Admit { worker } | Action::Deny { worker, .. } => _ = self.open.remove(&worker),
            Action::Park { worker, by } | Action::Shrink { worker, by, .. } => {
                late(by);
                self.workers.get_mut(&worker).unwrap().queue.push_back(action.clone());
            }
            _ => {}
        }
        if let Action::Admit { worker } = *action
            && let Some(worker) = self.workers.get_mut(&worker)
        {
            worker.queue.push_back(action.clone());
        }
    }

    pub(super) fn join(&mut self, id: u64, gang: u64, ranks: u32, profile: Profile, held: Vec<Account>) {
        self.join_as(id, gang, ranks, profile, held, false);
    }

    pub(super) fn join_as(
        &mut self,
        id: u64,
        gang: u64,
        ranks: u32,
        profile: Profile,
        held: Vec<Account>,
        starting: bool,
    ) {
        let worker = Worker {
            held,
            activity: UseState::Idle,
            gang: GangId(gang),
            ranks,
            profile,
            queue: VecDeque::new(),
            waits: false,
            starting,
            stopped: false,
            told: true,
            locked: None,
            asked: None,
        };
        self.workers.insert(WorkerId(id), worker);
        self.tell_joined(WorkerId(id), Event::Joined);
    }

    /// Joins a worker whose memory is completely evicted.
    pub(super) fn join_asleep(&mut self, id: u64, bytes: Bytes) {
        let held = Account { evicted: bytes, ..Account::nothing(GpuId(0), FLOOR) };
        self.join(id, id, 1, Profile { preempt: Preempt::Step, ..Profile::default() }, vec![held]);
    }

    pub(super) fn tell_joined(&mut self, id: WorkerId, event: impl Fn(Joined) -> Event) {
        let Some(worker) = self.workers.get(&id) else { return };
        let Worker { gang, ranks, profile, held, starting, activity, .. } = worker.clone();
        let size = |held: &Account| (held.gpu, held.resident.saturating_add(held.room));
        let start = held.iter().filter(|_| starting).map(size).collect();
        self.tell(event(Joined { worker: id, gang, ranks, activity, start, profile, accounts: held }));
        self.workers.get_mut(&id).unwrap().told = true;
    }

    pub(super) fn want(&mut self, id: WorkerId, deadline: Option<Duration>) {
        self.tell(Event::Want { worker: id, deadline });
    }

    pub(super) fn does(&mut self, id: WorkerId, activity: UseState) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        worker.activity = activity;
        self.tell(Event::Activity { worker: id, activity, idle_for: Duration::ZERO });
    }

    pub(super) fn die(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.remove(&id) else { return };
        for held in worker.held {
            let floor = if worker.locked == Some(true) { Bytes::ZERO } else { held.floor };
            let had = floor.saturating_add(held.resident);
            let dead = self.dead.entry(held.gpu).or_default();
            *dead = dead.saturating_add(had);
        }
        self.tell(Event::Died { worker: id });
    }

    /// Carries out the next command of a worker completely.
    pub(super) fn answer(&mut self, id: WorkerId) {
        let is_able = |worker: &&mut Worker| !worker.stopped && worker.locked.is_none();
        let Some(worker) = self.workers.get_mut(&id).filter(is_able) else { return };
        match worker.queue.pop_front() {
            Some(Action::Park { .. }) => {
                worker.activity = UseState::Idle;
                self.tell(Event::Activity { worker: id, activity: UseState::Idle, idle_for: Duration::ZERO });
                self.tell(Event::Parked { worker: id });
            }
            Some(Action::Shrink { gpu, bytes, .. }) => {
                let Some(held) = worker.held.iter_mut().find(|held| held.gpu == gpu) else { return };
                let bytes = bytes.min(held.lease.saturating_sub(held.fixed));
                // Unused lease leaves first.
                let unused = held.lease.saturating_sub(held.resident).min(bytes);
                let leaves = bytes.saturating_sub(unused);
                held.lease = held.lease.saturating_sub(bytes);
                held.resident = held.resident.saturating_sub(leaves);
                held.evicted = held.evicted.saturating_add(leaves);
                self.tell(Event::Returned { worker: id, gpu, bytes });
                // A single answer to all shrinks of a command.
                let more = self.workers.get(&id).and_then(|worker| worker.queue.front());
                if !matches!(more, Some(Action::Shrink { .. })) {
                    let accounts =
                        self.workers.get(&id).map(|worker| worker.held.clone()).unwrap_or_default();
                    self.tell(Event::Shrunk { worker: id, accounts });
                }
            }
            Some(Action::Admit { .. }) => {
                // A worker without a want sends no message.
                let wants = |held: &Account| !held.evicted.saturating_add(held.room).is_zero();
                if !std::mem::take(&mut worker.starting) && !worker.held.iter().any(wants) {
                    return;
                }
                for held in &mut worker.held {
                    let back = held.evicted.min(held.lease.saturating_sub(held.resident));
                    held.evicted = held.evicted.saturating_sub(back);
                    held.resident = held.resident.saturating_add(back);
                }
                let accounts = worker.held.clone();
                self.tell(Event::Refilled { worker: id, accounts });
            }
            _ => {}
        }
    }

    /// Completes a request to the driver; without an outcome, the contexts stay or their state is unknown.
    pub(super) fn drive(&mut self, id: WorkerId, outcome: Option<bool>) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        let Some(restores) = worker.asked.take() else { return };
        let out = match outcome {
            Some(done) => done != restores,
            None => worker.locked == Some(true),
        };
        let contexts = match (outcome, out) {
            (None, _) => Contexts::Unknown,
            (_, true) => Contexts::Checkpointed,
            (_, false) => Contexts::Present,
        };
        worker.locked = (contexts != Contexts::Present).then_some(out);
        self.tell(Event::Contexts { worker: id, contexts });
    }

    /// Fails a restore permanently.
    pub(super) fn lose(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else { return };
        if worker.asked == Some(true) {
            (worker.asked, worker.locked) = (None, Some(true));
            self.tell(Event::Contexts { worker: id, contexts: Contexts::Lost });
        }
    }

    pub(super) fn fail(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id).filter(|worker| !worker.stopped) else { return };
        let what = match worker.queue.pop_front() {
            Some(Action::Park { .. }) => Task::Park,
            Some(Action::Shrink { .. }) => Task::Shrink,
            Some(_) => Task::Refill,
            None => return,
        };
        let accounts = worker.held.clone();
        self.tell(Event::Failed { worker: id, what, accounts });
    }

    /// Reads the meter, which by then shows only half of the dead workers' memory.
    pub(super) fn measure(&mut self, gpu: GpuId) {
        let living = |worker: &Worker| {
            let floor = |held: &Account| if worker.locked == Some(true) { Bytes::ZERO } else { held.floor };
            let held = worker.held.iter().filter(|held| held.gpu == gpu);
            held.map(|held| floor(held).saturating_add(held.resident)).sum()
        };
        let dead = self.dead.entry(gpu).or_default();
        *dead = if *dead > Bytes::mib(100) { Bytes::new(dead.get() / 2) } else { Bytes::ZERO };
        let used = self.workers.values().map(living).sum::<Bytes>().saturating_add(*dead);
        let physical = |(id, worker): (&WorkerId, &Worker)| {
            let held = worker.held.iter().find(|held| held.gpu == gpu)?;
            worker.told.then_some((*id, held.resident))
        };
        let physical = self.workers.iter().filter_map(physical).collect();
        let begun = self.now;
        self.tell(Event::Measured { gpu, begun, used, physical });
    }

    /// Restarts the agent: some workers are in the journal, some have rejoined, some neither.
    pub(super) fn restart(&mut self, journal: impl Fn(u64) -> bool, back: impl Fn(u64) -> bool) {
        self.arbiter = Arbiter::new(self.settings.clone());
        self.open.clear();
        self.growths.clear();
        let ids: Vec<_> = self.workers.keys().copied().collect();
        self.workers.values_mut().for_each(|worker| (worker.queue.clear(), worker.told = false).0);
        self.tell_capacity();
        // Operations under way end without a message to the agent.
        for worker in self.workers.values_mut() {
            if let Some(restores) = worker.asked.take() {
                worker.locked = (!restores).then_some(true);
            }
        }
        // Checkpointed workers are in the journal.
        let locked = |world: &World, id: &WorkerId| world.workers[id].locked.is_some();
        for &id in ids.iter().filter(|id| journal(id.0) || locked(self, id)).collect::<Vec<_>>() {
            self.tell_joined(id, Event::Expected);
            if locked(self, &id) {
                self.tell(Event::Contexts { worker: id, contexts: Contexts::Unknown });
            }
        }
        for gpu in self.capacity.keys().copied().collect::<Vec<_>>() {
            self.measure(gpu);
        }
        for &id in ids.iter().filter(|id| back(id.0)).collect::<Vec<_>>() {
            self.tell_joined(id, Event::Joined);
            let activity = self.workers[&id].activity;
            self.tell(Event::Activity { worker: id, activity, idle_for: Duration::ZERO });
        }
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now += time;
        self.tell(Event::Tick);
    }

    /// Lets all workers be silent until every want has ended; only the meter answers.
    pub(super) fn silence(&mut self) {
        for _ in 0..100_000 {
            let Some(next) = self.arbiter.next_deadline().filter(|_| !self.open.is_empty()) else { break };
            self.now = self.now.max(next);
            let actions = self.tell(Event::Tick);
            for action in actions {
                if let Action::Measure { gpu } = action {
                    self.measure(gpu);
                }
            }
        }
        assert!(self.open.is_empty(), "{:?} wait at {:?}", self.open, self.now);
    }
}
