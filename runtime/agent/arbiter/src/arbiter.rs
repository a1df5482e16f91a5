//! State machine of the arbiter: events in, actions out.
//!
//! Invariants, which the tests check at each step: floors, leases and the memory of dead workers stay within a GPU's limit, or do not grow;
//! every want ends granted, denied or cancelled; every command has a deadline; a gang is in at most one plan.
//!
//! A step applies the event, handles missed deadlines, and then decides. Free bytes go to the refill under way on their GPU first, then to
//! growths. Next, the first want of each GPU is planned completely or not at all; its victims give bytes back piece by piece. Later wants
//! of that GPU wait behind the first.

use std::time::Duration;

use glake_units::Bytes;

use crate::away::Presence;
use crate::gang::{Gang, Member, State};
use crate::growth::Growth;
use crate::ledger::Gpu;
use crate::log::{Decision, Outcome};
use crate::planner::Planner;
use crate::predictions::over;
use crate::server::{AGAIN, Server};
use crate::want::Want;
use crate::{Action, Activity, Denied, Event, GangId, GpuId, Holding, Joined, Settings, WorkerId};

/// Unreported memory beyond a lease after which the arbiter stops counting on a worker.
const SLACK: Bytes = Bytes::mib(64);

/// Upper bound of the speedup of a refill over several links, relative to the configured link rate.
const FASTEST: u32 = 4;

/// Interval before the next demotion of a gang that did not carry out the last one.
const DEMOTE_AGAIN: Duration = Duration::from_secs(60);

/// Arbiter of the memory of a server's GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Arbiter {
    pub(crate) server: Server,
    /// Time at which a victim becomes eligible that was not at the last step.
    retry_at: Option<Duration>,
}

/// Accounted memory of a worker on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    pub worker: WorkerId,
    pub gpu: GpuId,
    /// Memory that never leaves the GPU: context, modules, libraries, and overruns.
    pub floor: Bytes,
    /// Memory that the worker may hold beyond the floor.
    pub lease: Bytes,
}

impl Arbiter {
    /// Creates an arbiter without GPUs and workers.
    pub fn new(settings: Settings) -> Self {
        Arbiter { server: Server::new(settings), retry_at: None }
    }

    /// Applies an event at `now` and returns the actions to carry out, in order. An earlier `now` than before counts as no time passed.
    pub fn step(&mut self, event: Event, now: Duration) -> Vec<Action> {
        self.server.now = self.server.now.max(now);
        self.apply(event);
        self.expire();
        self.decide();
        std::mem::take(&mut self.server.actions)
    }

    /// Returns the time at which the next [`Event::Tick`] is due if no other event arrives earlier; `None` if nothing is under way.
    pub fn next_deadline(&self) -> Option<Duration> {
        let server = &self.server;
        let gangs = server.under_way.iter().filter_map(|id| server.gangs.get(id)?.late_at());
        let late = |growth: &Growth| growth.by.min(growth.late_at);
        let growths = server.growths.iter().filter(|growth| growth.late_at > server.now).map(late);
        let growths = growths.chain(server.growths.iter().map(|growth| growth.by));
        let meters = server.gpus.values().filter_map(Gpu::measure_at);
        gangs.chain(growths).chain(meters).chain(self.retry_at).chain(server.away_at()).min()
    }

    /// Returns the latest decisions, the oldest first.
    pub fn decisions(&self) -> impl Iterator<Item = &Decision> {
        self.server.log.decisions()
    }

    /// Returns the accounted memory of each worker on each GPU.
    pub fn footprints(&self) -> impl Iterator<Item = Footprint> {
        self.server.gangs.values().flat_map(|gang| &gang.shares).map(|share| Footprint {
            worker: share.worker,
            gpu: share.holding.gpu,
            floor: share.floor().saturating_add(share.overrun),
            lease: share.holding.lease,
        })
    }

    /// Returns the memory of a GPU that belongs to living workers and to workers that died recently.
    pub fn claimed(&self, gpu: GpuId) -> Bytes {
        self.server.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::claimed)
    }

    /// Returns the memory of a GPU that all workers together may have.
    pub fn limit(&self, gpu: GpuId) -> Bytes {
        self.server.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::limit)
    }

    /// Predicts the time until a worker's memory is back on its GPUs; 0 if all of it is resident.
    pub fn predicted_wake(&self, worker: WorkerId) -> Option<Duration> {
        let gang = self.gang(worker)?;
        let is_there = gang.is_resident() && gang.away.is_present();
        Some(if is_there { Duration::ZERO } else { self.server.wake(gang) })
    }

    /// Returns the name of a worker's current state, as `glake ps` prints it.
    pub fn state(&self, worker: WorkerId) -> Option<&'static str> {
        let gang = self.gang(worker)?;
        Some(match gang.state {
            _ if gang.away.presence == Presence::Leaving => "checkpointing",
            _ if gang.away.presence == Presence::Returning => "restoring",
            _ if gang.away.is_lost() => "failed",
            State::Resting if !gang.away.is_present() && gang.want.is_none() => "checkpointed",
            _ if gang.silent => "silent",
            State::Parking { .. } => "parking",
            State::Shrinking { .. } => "shrinking",
            State::Refilling(_) if gang.starting => "starting",
            State::Refilling(_) => "refilling",
            State::Resting if gang.want.is_some() => "waiting",
            State::Resting if gang.is_resident() => "resident",
            State::Resting => "asleep",
        })
    }

    /// Returns whether a worker has missed the deadline of a shrink that can still end.
    pub fn is_late(&self, worker: WorkerId) -> bool {
        self.gang(worker).is_some_and(|gang| matches!(gang.state, State::Shrinking { by: None, .. }))
    }

    /// Returns whether a want or a growth is open.
    pub fn is_anybody_waiting(&self) -> bool {
        self.waiting() > 0 || !self.server.growths.is_empty()
    }

    /// Returns the number of open wants.
    pub fn waiting(&self) -> usize {
        self.server.gangs.values().filter(|gang| gang.want.is_some()).count()
    }

    /// Returns the fraction of the last ten seconds in which refills used a GPU's link.
    pub fn link_duty(&self, gpu: GpuId) -> f64 {
        self.server.duties.get(&gpu).map_or(0.0, |duty| f64::from(duty.thousandths(self.server.now)) / 1000.0)
    }

    fn gang(&self, worker: WorkerId) -> Option<&Gang> {
        self.server.gangs.get(self.server.gang_of.get(&worker)?)
    }

    pub(crate) fn gang_mut(&mut self, worker: WorkerId) -> Option<(GangId, &mut Gang)> {
        let id = *self.server.gang_of.get(&worker)?;
        Some((id, self.server.gangs.get_mut(&id)?))
    }

    fn apply(&mut self, event: Event) {
        match event {
            Event::Capacity { gpu, budget, total } => {
                self.server.gpus.entry(gpu).or_default().set_capacity(budget, total);
            }
            Event::Measured { gpu, begun, used, physical } => self.measured(gpu, begun, used, &physical),
            Event::Expected(joined) => self.joined(joined, true),
            Event::Joined(joined) => self.joined(joined, false),
            Event::Changed { worker, holdings } => {
                let hosted = |arbiter: &Arbiter| arbiter.gang(worker).map(Gang::hosted);
                let before = hosted(self);
                self.server.hold(worker, &holdings);
                let (fell, now) = (hosted(self) < before, self.server.now);
                self.server.owe(worker);
                if let Some((id, gang)) = self.gang_mut(worker) {
                    if gang.demoting.take().is_some() && !fell {
                        // It cannot, for now.
                        gang.demote_after = now + DEMOTE_AGAIN;
                    }
                    self.server.note(id);
                }
            }
            Event::Activity { worker, activity, idle_for } => self.does(worker, activity, idle_for),
            Event::Want { worker, deadline } => self.wants(worker, deadline),
            Event::Cancelled { worker } => self.cancelled(worker),
            Event::Grow { worker, gpu, bytes, within } => self.server.grow(worker, gpu, bytes, within),
            Event::Progress { worker } => self.progresses(worker),
            Event::Parked { worker } => self.parked(worker),
            Event::Returned { worker, gpu, bytes } => {
                if let Some(&id) = self.server.gang_of.get(&worker) {
                    self.server.change(id, (worker, gpu), |share| {
                        let held = &mut share.holding;
                        (held.lease, held.resident) =
                            (held.lease.saturating_sub(bytes), held.resident.saturating_sub(bytes));
                    });
                    self.server.came(id, gpu);
                    self.server.goes_on(id);
                }
            }
            Event::Shrunk { worker, holdings } => {
                self.server.hold(worker, &holdings);
                self.shrunk(worker);
            }
            Event::Refilled { worker, holdings } => {
                self.server.hold(worker, &holdings);
                self.wants_nothing_elsewhere(worker, &holdings);
                self.refilled(worker);
            }
            Event::Failed { worker, what, holdings } => {
                self.server.hold(worker, &holdings);
                self.failed(worker, what);
            }
            Event::Contexts { worker, contexts } => self.contexts(worker, contexts),
            Event::Refill { worker } => self.operator_refills(worker),
            Event::Died { worker } => self.died(worker),
            Event::Shrink { worker } => self.operator_shrinks(worker),
            Event::Tick => {}
        }
    }

    fn joined(&mut self, joined: Joined, silent: bool) {
        let worker = joined.worker;
        let known =
            self.gang_mut(worker).map(|(id, gang)| (id, gang.members.get(&worker).is_some_and(|m| m.silent)));
        match known {
            // A journal knows less than whoever has joined.
            Some((_, false)) if silent => return,
            // It joined another gang than the journal says, or than before: that one lost a rank.
            Some((id, _)) if id != joined.gang => {
                self.server.uncount(worker);
                self.forget(worker, id);
            }
            // What it says counts, not the journal; and it may be in use since.
            Some((id, true)) => {
                let now = self.server.now;
                self.server.uncount(worker);
                if let Some(gang) = self.server.gangs.get_mut(&id) {
                    gang.resident_since = now;
                    gang.members.remove(&worker);
                }
            }
            _ => {}
        }
        let now = self.server.now;
        let gang = self.server.gangs.entry(joined.gang).or_insert_with(|| Gang::new(&joined, now));
        let old = gang.members.contains_key(&worker) && known.is_some_and(|(_, was_silent)| !was_silent);
        (gang.profile, gang.ranks) = (joined.profile, joined.ranks.max(1));
        gang.away.rests_since = now;
        let member = gang.members.entry(worker).or_insert_with(|| Member::new(now));
        (member.silent, member.starting, member.activity) =
            (silent, !joined.start.is_empty(), joined.activity);
        gang.sum_up();
        self.server.gang_of.insert(worker, joined.gang);
        for told in joined.holdings.into_iter().map(Holding::possible) {
            let key = (worker, told.gpu);
            let start = joined
                .start
                .iter()
                .find(|(gpu, _)| *gpu == told.gpu)
                .map(|(_, bytes)| Holding::at_most(*bytes));
            self.server.add_share(joined.gang, key);
            self.server.change(joined.gang, key, |share| {
                share.start = start.unwrap_or_default();
                // Grants that it has not seen yet are its own.
                let lease = if old { share.holding.lease.max(told.lease) } else { told.lease };
                share.holding = Holding { lease, ..told };
            });
        }
    }

    fn does(&mut self, worker: WorkerId, activity: Activity, idle_for: Duration) {
        let now = self.server.now;
        let Some((_, gang)) = self.gang_mut(worker) else { return };
        if let Some(member) = gang.members.get_mut(&worker) {
            (member.activity, member.idle_since) = (activity, now.saturating_sub(idle_for));
        }
        gang.sum_up();
    }

    fn measured(&mut self, gpu: GpuId, begun: Duration, used: Bytes, physical: &[(WorkerId, Bytes)]) {
        let mut living = Bytes::ZERO;
        let server = &mut self.server;
        let shares =
            server.gangs.iter().flat_map(|(id, gang)| gang.on(gpu).map(move |share| (*id, share.key())));
        for (id, key) in shares.collect::<Vec<_>>() {
            let told = physical.iter().find(|(worker, _)| *worker == key.0).map(|(_, bytes)| *bytes);
            let mut lied = false;
            server.change(id, key, |share| {
                let lease = share.holding.lease;
                if let Some(physical) = told.map(Holding::at_most) {
                    share.overrun = physical.saturating_sub(lease);
                    lied = share.overrun > SLACK.saturating_add(Bytes::new(lease.get() / 20));
                }
                let held = told.unwrap_or_else(|| lease.saturating_add(share.overrun));
                living = living.saturating_add(share.floor()).saturating_add(held);
            });
            let trusted = server.gangs.get(&id).is_some_and(|gang| gang.distrust.until <= server.now);
            if lied && trusted {
                server.distrust(id, server.settings.distrust);
            }
        }
        let now = server.now;
        server.gpus.entry(gpu).or_default().measured(begun, now, used.saturating_sub(living));
    }

    fn wants(&mut self, worker: WorkerId, deadline: Option<Duration>) {
        let (now, settings) = (self.server.now, self.server.settings.clone());
        let Some((id, gang)) = self.gang_mut(worker) else {
            return self.server.actions.push(Action::Deny {
                worker,
                why: Denied::Incomplete,
                retry_after: Some(AGAIN),
            });
        };
        // What it lacks since then is planned when this refill is over.
        let lacks_nothing = gang.shares.iter().all(|share| share.worker != worker || share.need().is_zero());
        if lacks_nothing && matches!(&gang.state, State::Refilling(refill) if refill.admitted.is_some()) {
            return self.server.actions.push(Action::Admit { worker });
        }
        let want = gang.want.get_or_insert_with(|| Want::new(now, deadline, &settings));
        let deadline = want.deadline;
        if let Some(member) = gang.members.get_mut(&worker) {
            member.wants = true;
        }
        let (complete, lost) = (gang.is_complete(), gang.away.is_lost());
        self.server.note(id);
        if lost {
            return self.server.refuse(id, Denied::Lost, None);
        }
        if !complete {
            return self.server.deny(id, Denied::Incomplete, Some(AGAIN));
        }
        let Some(gang) = self.server.gangs.get(&id) else { return };
        // Predictions may be wrong, and wants before it may end: only what no link could do is denied before its time.
        let fastest = over(gang.copied().0, self.server.settings.link) / FASTEST;
        if now + fastest > deadline && gang.is_resting() && !gang.is_resident() {
            let least = self.server.least_wait(id).max(AGAIN);
            self.server.refuse(id, Denied::Deadline, Some(least));
        }
    }

    /// Extends the deadline of a refill whose worker still makes progress.
    fn progresses(&mut self, worker: WorkerId) {
        let now = self.server.now;
        let Some((_, gang)) = self.gang_mut(worker) else { return };
        if let State::Refilling(refill) = &mut gang.state
            && refill.admitted.is_some()
        {
            refill.by = refill.by.max(now + refill.patience);
        }
    }

    fn cancelled(&mut self, worker: WorkerId) {
        let now = self.server.now;
        let Some((id, gang)) = self.gang_mut(worker) else { return };
        if let Some(member) = gang.members.get_mut(&worker) {
            member.wants = false;
        }
        if gang.members.values().all(|member| !member.wants) {
            (gang.want, gang.away.rests_since) = (None, now);
            gang.begin_anew();
        }
        self.server.note(id);
    }

    fn operator_shrinks(&mut self, worker: WorkerId) {
        let Some((id, gang)) = self.gang_mut(worker) else { return };
        if !gang.is_resting() || gang.silent || !gang.away.is_present() {
            return;
        }
        let takes: Vec<_> = gang.shares.iter().map(|share| (share.key(), share.evictable())).collect();
        if gang.activity == Activity::Idle {
            self.server.shrink(id, &takes)
        } else {
            self.server.park(id, takes, None)
        }
    }

    /// Handles missed deadlines of commands, wants and growths.
    fn expire(&mut self) {
        let now = self.server.now;
        let late = self.server.under_way.iter().copied();
        let late =
            late.filter(|id| self.server.gangs.get(id).and_then(Gang::late_at).is_some_and(|at| at <= now));
        for id in late.collect::<Vec<_>>() {
            self.expire_gang(id);
        }
        let server = &mut self.server;
        let (late, open): (Vec<_>, _) =
            std::mem::take(&mut server.growths).into_iter().partition(|growth| growth.by <= now);
        server.growths = open;
        for growth in late {
            server.deny_growth(&growth);
        }
        for (&gpu, held) in &mut server.gpus {
            if held.measure_due(now) {
                server.actions.push(Action::Measure { gpu });
            }
        }
    }

    fn expire_gang(&mut self, id: GangId) {
        let now = self.server.now;
        let settings = &self.server.settings;
        let (short, long, longest) = (settings.least_quantum, settings.distrust, settings.longest_park());
        let Some(gang) = self.server.gangs.get_mut(&id) else { return };
        if gang.demoting.is_some_and(|by| by <= now) {
            gang.demoting = None;
            self.server.distrust(id, long);
        }
        let Some(gang) = self.server.gangs.get_mut(&id) else { return };
        match &mut gang.state {
            State::Parking { since, by, .. } if *by <= now => {
                let waited = now.saturating_sub(*since);
                gang.predictions.saw_park(waited, longest);
                // Uses without safe points end when they do: it has done what it was asked to.
                let is_late = gang.activity != Activity::Running;
                gang.distrust.back_off(now, waited);
                self.server.unpark(id);
                if is_late {
                    self.server.distrust(id, short);
                }
            }
            State::Shrinking { by, .. } if by.is_some_and(|by| by <= now) => {
                *by = None;
                self.server.distrust(id, long);
            }
            State::Refilling(refill) if refill.by <= now && refill.admitted.is_some() => {
                self.server.give_up_on(id)
            }
            State::Refilling(refill) if refill.by <= now && gang.away.is_moving() => {
                // The driver is asked all the while, and nothing else of it.
                self.server.give_back(id, Outcome::NotRestored);
            }
            State::Refilling(refill) if refill.by <= now => {
                Planner { server: &mut self.server, retry_at: None }.look_elsewhere(id)
            }
            _ => {}
        }
        let Some(gang) = self.server.gangs.get(&id) else { return };
        let refilling = matches!(gang.state, State::Refilling(_));
        if gang.want.is_some_and(|want| want.deadline <= now) && !refilling {
            let least = self.server.least_wait(id).max(AGAIN);
            self.server.refuse(id, Denied::Deadline, Some(least));
        }
        self.server.note(id);
    }

    fn decide(&mut self) {
        let mut planner = Planner { server: &mut self.server, retry_at: None };
        planner.decide();
        self.retry_at = planner.retry_at;
    }
}
