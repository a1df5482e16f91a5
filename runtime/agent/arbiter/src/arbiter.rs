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

use crate::gang::{Gang, Growth, State};
use crate::gpu::Gpu;
use crate::interface::RETRY;
use crate::ledger::Ledger;
use crate::log::{Log, LoggedDecision, Outcome, Timings};
use crate::{Action, Denied, Event, GangId, GpuId, Profile, Settings, UseState, WorkerId};

/// Arbiter of the memory of a server's GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Arbiter {
    pub(crate) ledger: Ledger,
    pub(crate) actions: Vec<Action>,
    pub(crate) log: Log,
    /// Time at which a victim becomes eligible that was not at the last step.
    pub(crate) retry_at: Option<Duration>,
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
        Arbiter { ledger: Ledger::new(settings), actions: Vec::new(), log: Log::default(), retry_at: None }
    }

    /// Applies an event at `now` and returns the actions to carry out, in order. An earlier `now` than before counts as no time passed.
    pub fn step(&mut self, event: Event, now: Duration) -> Vec<Action> {
        self.ledger.now = self.ledger.now.max(now);
        self.apply(event);
        self.expire();
        self.decide();
        std::mem::take(&mut self.actions)
    }

    /// Returns the time at which the next [`Event::Tick`] is due if no other event arrives earlier; `None` if nothing is under way.
    pub fn next_deadline(&self) -> Option<Duration> {
        let gangs = self.ledger.under_way.iter().filter_map(|id| self.ledger.gangs.get(id)?.late_at());
        let late = |growth: &Growth| growth.by.min(growth.late_at);
        let growths = self.ledger.growths.iter().filter(|growth| growth.late_at > self.ledger.now).map(late);
        let growths = growths.chain(self.ledger.growths.iter().map(|growth| growth.by));
        let meters = self.ledger.gpus.values().filter_map(Gpu::measure_at);
        gangs.chain(growths).chain(meters).chain(self.retry_at).chain(self.ledger.contexts_due_at()).min()
    }

    /// Replaces the settings. They apply from the next step on.
    pub fn set_settings(&mut self, settings: Settings) {
        self.ledger.settings = settings;
    }

    /// Replaces the scheduling attributes of a worker's gang. They apply from the next step on.
    pub fn set_profile(&mut self, worker: WorkerId, profile: Profile) {
        if let Some((_, gang)) = self.ledger.gang_mut(worker) {
            gang.profile = profile;
        }
    }

    /// Returns the latest decisions, the oldest first.
    pub fn decisions(&self) -> impl Iterator<Item = &LoggedDecision> {
        self.log.decisions()
    }

    /// Returns the durations of waits and operations so far.
    pub fn timings(&self) -> &Timings {
        &self.log.timings
    }

    /// Returns the accounted memory of each worker on each GPU.
    pub fn footprints(&self) -> impl Iterator<Item = Footprint> {
        self.ledger.gangs.values().flat_map(|gang| &gang.shares).map(|share| Footprint {
            worker: share.worker,
            gpu: share.account.gpu,
            floor: share.floor().saturating_add(share.overrun),
            lease: share.account.lease,
        })
    }

    /// Returns the memory of a GPU that belongs to living workers and to workers that died recently.
    pub fn claimed(&self, gpu: GpuId) -> Bytes {
        self.ledger.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::claimed)
    }

    /// Returns the memory of a GPU that all workers together may have.
    pub fn limit(&self, gpu: GpuId) -> Bytes {
        self.ledger.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::limit)
    }

    /// Returns the name of a worker's current state, as `glake ps` prints it.
    pub fn state(&self, worker: WorkerId) -> Option<&'static str> {
        self.ledger.gang(worker).map(Gang::state_name)
    }

    /// Returns whether a worker has missed the deadline of a shrink that can still end.
    pub fn is_late(&self, worker: WorkerId) -> bool {
        self.ledger.gang(worker).is_some_and(|gang| matches!(gang.state, State::Shrinking { by: None, .. }))
    }

    /// Returns whether a want or a growth is open.
    pub fn is_anybody_waiting(&self) -> bool {
        self.waiting() > 0 || !self.ledger.growths.is_empty()
    }

    /// Returns the number of open wants.
    pub fn waiting(&self) -> usize {
        self.ledger.gangs.values().filter(|gang| gang.want.is_some()).count()
    }

    /// Returns the fraction of the last ten seconds in which refills used a GPU's link.
    pub fn link_duty(&self, gpu: GpuId) -> f64 {
        self.ledger.duties.get(&gpu).map_or(0.0, |duty| f64::from(duty.thousandths(self.ledger.now)) / 1000.0)
    }

    /// Handles missed deadlines of commands, wants and growths.
    pub(crate) fn expire(&mut self) {
        let now = self.ledger.now;
        let late = self.ledger.under_way.iter().copied();
        let late =
            late.filter(|id| self.ledger.gangs.get(id).and_then(Gang::late_at).is_some_and(|at| at <= now));
        for id in late.collect::<Vec<_>>() {
            self.expire_gang(id);
        }
        let (late, open): (Vec<_>, _) =
            std::mem::take(&mut self.ledger.growths).into_iter().partition(|growth| growth.by <= now);
        self.ledger.growths = open;
        for growth in late {
            self.deny_growth(&growth, Denied::Deadline);
        }
        for (&gpu, held) in &mut self.ledger.gpus {
            if held.measure_due(now) {
                self.actions.push(Action::Measure { gpu });
            }
        }
    }

    pub(crate) fn expire_gang(&mut self, id: GangId) {
        let now = self.ledger.now;
        let settings = &self.ledger.settings;
        let (short, long, longest) = (settings.least_quantum, settings.distrust, settings.longest_park());
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        if gang.demoting.is_some_and(|by| by <= now) {
            gang.demoting = None;
            self.distrust(id, long);
        }
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        match &mut gang.state {
            // An operator's time says nothing about the worker.
            State::Parking { by, whom: None, .. } if *by <= now => self.unpark(id),
            State::Parking { since, by, .. } if *by <= now => {
                let waited = now.saturating_sub(*since);
                gang.predictions.saw_park(waited, longest);
                // Uses without safe points end by themselves: the worker has complied.
                let is_late = gang.activity != UseState::Running;
                gang.distrust.back_off(now, waited);
                self.unpark(id);
                if is_late {
                    self.distrust(id, short);
                }
            }
            State::Shrinking { by, .. } if by.is_some_and(|by| by <= now) => {
                *by = None;
                self.distrust(id, long);
            }
            State::Refilling(refill) if refill.by <= now && refill.admitted.is_some() => {
                self.abandon_refill(id)
            }
            State::Refilling(refill) if refill.by <= now && gang.contexts.is_moving() => {
                // Only the driver is late here, so do not strike the gang.
                self.return_grants(id, Outcome::NotRestored);
            }
            State::Refilling(refill) if refill.by <= now => self.ask_further_victims(id),
            _ => {}
        }
        let Some(gang) = self.ledger.gangs.get(&id) else { return };
        let refilling = matches!(gang.state, State::Refilling(_));
        if gang.want.is_some_and(|want| want.deadline <= now) && !refilling {
            let least = self.ledger.shortest_wait(id).max(RETRY);
            self.deny_and_log(id, Denied::Deadline, Some(least));
        }
        self.ledger.update_under_way(id);
    }
}
