//! Events: changes that workers, the meter and operators report to the arbiter.

use std::time::Duration;

use glake_units::Bytes;

use crate::arbiter::Arbiter;
use crate::gang::{Distrust, Gang, Member, Presence, State, Want};
use crate::interface::RETRY;
use crate::log::Outcome;
use crate::predictions::over;
use crate::{Account, Action, Denied, Event, GangId, GpuId, Joined, Task, UseState, WorkerId};

/// Unreported memory beyond a lease after which the arbiter stops counting on a worker.
const SLACK: Bytes = Bytes::mib(64);

/// Upper bound of the speedup of a refill over several links, relative to the configured link rate.
const FASTEST: u32 = 4;

/// Interval before the next demotion of a gang that did not carry out the last one.
const DEMOTE_AGAIN: Duration = Duration::from_secs(60);

impl Arbiter {
    pub(crate) fn apply(&mut self, event: Event) {
        match event {
            Event::Capacity { gpu, budget, total } => {
                self.ledger.gpus.entry(gpu).or_default().set_capacity(budget, total);
            }
            Event::Measured { gpu, begun, used, physical } => {
                self.handle_measured(gpu, begun, used, &physical)
            }
            Event::Expected(joined) => self.handle_join(joined, true),
            Event::Joined(joined) => self.handle_join(joined, false),
            Event::Changed { worker, accounts } => {
                let hosted = |arbiter: &Arbiter| arbiter.ledger.gang(worker).map(Gang::hosted);
                let before = hosted(self);
                self.ledger.update_accounts(worker, &accounts);
                let (fell, now) = (hosted(self) < before, self.ledger.now);
                self.owe_growth_of_need(worker);
                if let Some((id, gang)) = self.ledger.gang_mut(worker) {
                    if gang.demoting.take().is_some() && !fell {
                        // The gang cannot move copies at the moment.
                        gang.demote_after = now + DEMOTE_AGAIN;
                    }
                    self.ledger.update_under_way(id);
                }
            }
            Event::Activity { worker, activity, idle_for } => {
                self.ledger.set_activity(worker, activity, idle_for)
            }
            Event::Want { worker, deadline } => self.open_want(worker, deadline),
            Event::Cancel { worker } => self.ledger.cancel_want(worker),
            Event::Grow { worker, gpu, bytes, within } => self.grow(worker, gpu, bytes, within),
            Event::Progress { worker } => self.ledger.extend_refill(worker),
            Event::Parked { worker } => {
                if let Some(&id) = self.ledger.gang_of.get(&worker) {
                    self.remove_parking_rank(id, worker);
                }
            }
            Event::Returned { worker, gpu, bytes } => {
                if let Some(&id) = self.ledger.gang_of.get(&worker) {
                    self.ledger.change(id, (worker, gpu), |share| {
                        let held = &mut share.account;
                        (held.lease, held.resident) =
                            (held.lease.saturating_sub(bytes), held.resident.saturating_sub(bytes));
                    });
                    let gang = self.ledger.gangs.get_mut(&id);
                    if let Some(Gang { state: State::Shrinking { returned, .. }, .. }) = gang {
                        *returned = returned.saturating_add(bytes);
                    }
                    self.ledger.extend_growths(id, gpu);
                    self.ledger.extend_shrink(id);
                }
            }
            Event::Shrunk { worker, accounts } => {
                self.ledger.update_accounts(worker, &accounts);
                if let Some(took) = self.ledger.end_shrink(worker) {
                    self.log.timings.switched("shrink", took);
                }
            }
            Event::Refilled { worker, accounts } => {
                self.ledger.update_accounts(worker, &accounts);
                self.ledger.clear_unused_needs(worker, &accounts);
                self.handle_refilled(worker);
            }
            Event::Failed { worker, what, accounts } => {
                self.ledger.update_accounts(worker, &accounts);
                self.handle_failure(worker, what);
            }
            Event::Contexts { worker, contexts } => self.handle_contexts(worker, contexts),
            Event::Refill { worker } => self.ledger.request_restore(worker),
            Event::Died { worker } => self.remove_dead(worker),
            Event::Shrink { worker, within } => self.shrink_for_operator(worker, within),
            Event::Tick => {}
        }
    }

    pub(crate) fn handle_join(&mut self, joined: Joined, silent: bool) {
        let worker = joined.worker;
        let known = self
            .ledger
            .gang_mut(worker)
            .map(|(id, gang)| (id, gang.members.get(&worker).is_some_and(|m| m.silent)));
        match known {
            // A joined worker knows more than the journal.
            Some((_, false)) if silent => return,
            // The worker joined another gang than before or in the journal: the old gang lost a rank.
            Some((id, _)) if id != joined.gang => {
                self.ledger.uncount(worker);
                self.remove_rank(worker, id);
            }
            // The worker's report replaces the journal, and its memory may be in use since.
            Some((id, true)) => {
                let now = self.ledger.now;
                self.ledger.uncount(worker);
                if let Some(gang) = self.ledger.gangs.get_mut(&id) {
                    gang.resident_since = now;
                    gang.members.remove(&worker);
                }
            }
            _ => {}
        }
        let now = self.ledger.now;
        let gang = self.ledger.gangs.entry(joined.gang).or_insert_with(|| Gang::new(&joined, now));
        let old = gang.members.contains_key(&worker) && known.is_some_and(|(_, was_silent)| !was_silent);
        (gang.profile, gang.ranks) = (joined.profile, joined.ranks.max(1));
        gang.contexts.rests_since = now;
        let member = gang.members.entry(worker).or_insert_with(|| Member::new(now));
        (member.silent, member.starting, member.activity) =
            (silent, !joined.start.is_empty(), joined.activity);
        gang.sum_up();
        self.ledger.gang_of.insert(worker, joined.gang);
        self.ledger.joined_at.entry(worker).or_insert(now);
        for told in joined.accounts.into_iter().map(Account::possible) {
            let key = (worker, told.gpu);
            let start = joined
                .start
                .iter()
                .find(|(gpu, _)| *gpu == told.gpu)
                .map(|(_, bytes)| Account::at_most(*bytes));
            self.ledger.add_share(joined.gang, key);
            self.ledger.change(joined.gang, key, |share| {
                share.start = start.unwrap_or_default();
                // Grants in flight belong to the worker already.
                let lease = if old { share.account.lease.max(told.lease) } else { told.lease };
                share.account = Account { lease, ..told };
            });
        }
    }

    pub(crate) fn handle_measured(
        &mut self,
        gpu: GpuId,
        begun: Duration,
        used: Bytes,
        physical: &[(WorkerId, Bytes)],
    ) {
        let mut living = Bytes::ZERO;
        let shares =
            self.ledger.gangs.iter().flat_map(|(id, gang)| gang.on(gpu).map(move |share| (*id, share.key())));
        for (id, key) in shares.collect::<Vec<_>>() {
            let told = physical.iter().find(|(worker, _)| *worker == key.0).map(|(_, bytes)| *bytes);
            // The reading may not show a worker that joined meanwhile: subtracting it would hide other memory.
            let is_later = self.ledger.joined_at.get(&key.0).is_some_and(|joined| *joined > begun);
            let mut lied = false;
            self.ledger.change(id, key, |share| {
                let lease = share.account.lease;
                if let Some(physical) = told.map(Account::at_most) {
                    share.overrun = physical.saturating_sub(lease);
                    lied = share.overrun > SLACK.saturating_add(Bytes::new(lease.get() / 20));
                }
                let held = told.unwrap_or_else(|| lease.saturating_add(share.overrun));
                if !is_later {
                    living = living.saturating_add(share.floor()).saturating_add(held);
                }
            });
            let trusted =
                self.ledger.gangs.get(&id).is_some_and(|gang| gang.distrust.until <= self.ledger.now);
            if lied && trusted {
                self.distrust(id, self.ledger.settings.distrust);
            }
        }
        let now = self.ledger.now;
        self.ledger.gpus.entry(gpu).or_default().measured(begun, now, used.saturating_sub(living));
    }

    pub(crate) fn open_want(&mut self, worker: WorkerId, deadline: Option<Duration>) {
        let (now, settings) = (self.ledger.now, self.ledger.settings.clone());
        let Some((id, gang)) = self.ledger.gang_mut(worker) else {
            return self.actions.push(Action::Deny {
                worker,
                why: Denied::Incomplete,
                retry_after: Some(RETRY),
            });
        };
        // Needs that arose since are planned after this refill.
        let lacks_nothing = gang.shares.iter().all(|share| share.worker != worker || share.need().is_zero());
        if lacks_nothing && matches!(&gang.state, State::Refilling(refill) if refill.admitted.is_some()) {
            return self.actions.push(Action::Admit { worker });
        }
        let want = gang.want.get_or_insert_with(|| Want::new(now, deadline, &settings));
        let deadline = want.deadline;
        if let Some(member) = gang.members.get_mut(&worker) {
            member.wants = true;
        }
        let (complete, lost) = (gang.is_complete(), gang.contexts.is_lost());
        self.ledger.update_under_way(id);
        if lost {
            return self.deny_and_log(id, Denied::Lost, None);
        }
        if !complete {
            return self.deny(id, Denied::Incomplete, Some(RETRY));
        }
        let Some(gang) = self.ledger.gangs.get(&id) else { return };
        // Predictions may be wrong, and earlier wants may end: deny early only if no link is fast enough.
        let fastest = over(gang.copied().0, self.ledger.settings.link) / FASTEST;
        if now + fastest > deadline && gang.is_resting() && !gang.is_resident() {
            let least = self.ledger.shortest_wait(id).max(RETRY);
            self.deny_and_log(id, Denied::Deadline, Some(least));
        }
    }

    /// Shrinks a worker to nothing. Its uses get the operator's time to stop, whatever is predicted and whatever pause they allow others.
    pub(crate) fn shrink_for_operator(&mut self, worker: WorkerId, within: Duration) {
        let within = within.min(self.ledger.settings.drain);
        let Some((id, gang)) = self.ledger.gang_mut(worker) else { return };
        if !gang.is_resting() || gang.silent || !gang.contexts.is_present() {
            return;
        }
        let takes: Vec<_> = gang.shares.iter().map(|share| (share.key(), share.evictable())).collect();
        match gang.activity {
            UseState::Idle => self.shrink(id, &takes),
            _ => self.park_within(id, takes, None, within),
        }
    }

    /// Removes a rank that has parked or died from the ranks to wait for, and shrinks the gang after the last one.
    pub(crate) fn remove_parking_rank(&mut self, id: GangId, worker: WorkerId) {
        let (now, longest) = (self.ledger.now, self.ledger.settings.longest_park());
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        let State::Parking { waits, since, takes, .. } = &mut gang.state else { return };
        waits.remove(&worker);
        if waits.is_empty() {
            let (since, takes) = (*since, std::mem::take(takes));
            let took = now.saturating_sub(since);
            gang.predictions.saw_park(took, longest);
            self.log.timings.switched("park", took);
            gang.is_parked = true;
            gang.parks = gang.parks.saturating_add(1);
            self.shrink(id, &takes);
        }
    }

    pub(crate) fn handle_refilled(&mut self, worker: WorkerId) {
        let Some((id, gang)) = self.ledger.gang_mut(worker) else { return };
        gang.end_start(worker);
        // No further bytes are needed.
        for share in gang.shares.iter_mut().filter(|share| share.worker == worker) {
            share.owed = Bytes::ZERO;
        }
        match &mut gang.state {
            State::Refilling(refill) => {
                refill.waits.remove(&worker);
                self.finish_refill(id);
            }
            // A late refill has completed after all.
            State::Resting => (gang.distrust, gang.is_parked) = (Distrust::default(), false),
            _ => {}
        }
    }

    /// Records that a worker could not carry out a command. Does nothing if the arbiter no longer waits for that command.
    pub(crate) fn handle_failure(&mut self, worker: WorkerId, what: Task) {
        let short = self.ledger.settings.least_quantum;
        let Some((id, gang)) = self.ledger.gang_mut(worker) else { return };
        match (&gang.state, what) {
            // The operator asks again.
            (State::Parking { whom: None, .. }, Task::Park) => return self.unpark(id),
            (State::Parking { .. }, Task::Park) => self.unpark(id),
            (State::Shrinking { .. }, Task::Shrink) => _ = self.ledger.end_shrink(worker),
            (State::Refilling(refill), Task::Refill) if refill.waits.contains(&worker) => {
                match refill.admitted {
                    // This excludes the gang for longer.
                    Some(_) => return self.abandon_refill(id),
                    None => self.return_grants(id, Outcome::Returned),
                }
            }
            _ => return,
        }
        self.distrust(id, short);
    }

    pub(crate) fn remove_dead(&mut self, worker: WorkerId) {
        let Some(&id) = self.ledger.gang_of.get(&worker) else { return };
        let now = self.ledger.now;
        for (gpu, footprint) in self.ledger.remove_shares(worker) {
            self.ledger.gpus.entry(gpu).or_default().died(now, footprint);
        }
        self.ledger.joined_at.remove(&worker);
        self.remove_rank(worker, id);
    }

    /// Removes a rank from a gang, after its shares.
    pub(crate) fn remove_rank(&mut self, worker: WorkerId, id: GangId) {
        self.ledger.gang_of.remove(&worker);
        self.ledger.growths.retain(|growth| growth.worker != worker);
        let growing = self.ledger.growths.iter().filter(|growth| growth.gang == id).count();
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        gang.growing = u32::try_from(growing).unwrap_or(u32::MAX);
        gang.members.remove(&worker);
        gang.sum_up();
        if gang.members.is_empty() {
            self.ledger.gangs.remove(&id);
            self.cancel_parks(id);
            self.ledger.absent.remove(&id);
            self.log.ended(id, Outcome::Died);
            return self.ledger.update_under_way(id);
        }
        if gang.contexts.worker == Some(worker) {
            self.ledger.set_presence(id, None, Presence::Present);
        }
        if self.ledger.gangs.get(&id).is_some_and(|gang| gang.want.is_some()) {
            self.deny(id, Denied::Incomplete, Some(RETRY));
        }
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        match &mut gang.state {
            State::Resting => {}
            State::Parking { .. } => self.remove_parking_rank(id, worker),
            State::Shrinking { waits, .. } => {
                waits.remove(&worker);
                if waits.is_empty() {
                    self.ledger.set_state(id, State::Resting);
                }
            }
            State::Refilling(refill) if refill.admitted.is_none() => {
                self.return_grants(id, Outcome::Returned);
            }
            State::Refilling(refill) => {
                refill.waits.remove(&worker);
                self.finish_refill(id);
            }
        }
    }
}
