//! Decisions: distribution of free bytes to refills and growths, and the plan of the first want of each GPU.
//!
//! ```text
//! grow ─► enough is free ─► granted
//!           ├► waits for shrinks and refills under way ─► for victims, idle workers first ─► timeout: denied
//!           └► no holder could ever give enough: denied
//! ```
//!
//! Invariants: a want is planned completely or not at all, so that a waiter never holds memory; each GPU has at most one refill; all later
//! wants wait behind a GPU's first want.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use glake_units::Bytes;

use crate::arbiter::Arbiter;
use crate::commands::{Demand, victims_of};
use crate::gang::{Gang, Growth, Presence, Refill, Share, State};
use crate::gpu::Gpu;
use crate::interface::RETRY;
use crate::log::{Decision, Outcome};
use crate::overview::RequestKind;
use crate::{Action, Denied, GangId, GpuId, WorkerId};

impl Arbiter {
    /// Makes all decisions that the current state allows.
    pub(crate) fn decide(&mut self) {
        self.retry_at = None;
        self.grant_owed();
        self.plan_wants();
        self.restore_absent();
        self.shrink_excess();
        self.demote();
        // The checkpoint of a gang that has been idle long enough.
        if let Some((_, id)) = self.ledger.next_checkpoint().filter(|(at, _)| *at <= self.ledger.now) {
            let worker = self.ledger.gangs.get(&id).and_then(|gang| gang.members.keys().next().copied());
            self.ledger.set_presence(id, worker, Presence::Leaving);
            self.actions.extend(worker.map(|worker| Action::Checkpoint { worker }));
        }
    }

    /// Grants free bytes to the refills that are owed them.
    pub(crate) fn grant_owed(&mut self) {
        let now = self.ledger.now;
        for id in self.ledger.under_way.iter().copied().collect::<Vec<_>>() {
            let Some(Gang { state: State::Refilling(refill), .. }) = self.ledger.gangs.get(&id) else {
                continue;
            };
            let is_admitted = refill.admitted.is_some();
            if !is_admitted && !self.restore(id) {
                continue;
            }
            let Some(Gang { shares, .. }) = self.ledger.gangs.get(&id) else { continue };
            let owed: Vec<_> = shares.iter().map(|share| (share.key(), share.owed)).collect();
            let (mut came, mut missing) = (false, false);
            for (key, owed) in owed {
                let bytes = self.grant(id, key, owed);
                self.ledger.change(id, key, |share| {
                    share.owed = owed.saturating_sub(bytes);
                    share.granted = share.granted.saturating_add(bytes);
                });
                came |= !bytes.is_zero();
                missing |= bytes < owed;
            }
            if is_admitted {
                continue;
            }
            if !missing {
                self.admit(id);
            } else if let (true, Some(Gang { state: State::Refilling(refill), .. })) =
                (came, self.ledger.gangs.get_mut(&id))
            {
                refill.by = now + refill.patience;
            } else if self.ledger.has_exhausted_victims(id) {
                self.ask_further_victims(id);
            }
        }
        let next = self.pay_growths();
        self.retry_at = next.into_iter().chain(self.retry_at).min();
    }

    /// Plans the first want of each GPU.
    pub(crate) fn plan_wants(&mut self) {
        let (mut blocked, mut wants, mut behind) = (BTreeSet::new(), BinaryHeap::new(), None);
        for (id, gang) in
            self.ledger.under_way.iter().filter_map(|id| Some((*id, self.ledger.gangs.get(id)?)))
        {
            match (&gang.state, gang.want) {
                (State::Refilling(_), _) => blocked.extend(gang.shares.iter().map(|share| share.account.gpu)),
                // A request to the driver is under way, or was recent.
                (State::Resting, Some(_))
                    if gang.contexts.is_moving() || gang.contexts.restore_after > self.ledger.now => {}
                (State::Resting, _) => {
                    let order = gang.order(id, self.ledger.now, &self.ledger.settings);
                    // At that time the want moves ahead of others.
                    let until = order.filter(|(_, is_behind, ..)| *is_behind);
                    behind = until
                        .map(|(_, _, since, _)| since + self.ledger.settings.resume_after)
                        .into_iter()
                        .chain(behind)
                        .min();
                    wants.extend(order.map(Reverse));
                }
                _ => {}
            }
        }
        self.retry_at = self.retry_at.into_iter().chain(behind).min();
        while let Some(Reverse((Reverse(class), .., id))) = wants.pop() {
            let Some(gang) = self.ledger.gangs.get(&id) else { continue };
            let gpus = gang.needs_gpus();
            if !gang.is_complete() {
                self.deny_and_log(id, Denied::Incomplete, Some(RETRY));
            } else if gpus.is_empty() && gang.contexts.is_present() {
                self.admit(id);
            } else if blocked.is_disjoint(&gpus) {
                if self.plan_want(id, class, &gpus) {
                    let held = self.ledger.gangs.get(&id).into_iter().flat_map(|gang| &gang.shares);
                    blocked.extend(held.map(|share| share.account.gpu));
                } else if self.ledger.gangs.get(&id).is_some_and(|gang| gang.want.is_some()) {
                    blocked.extend(gpus);
                }
            } else {
                blocked.extend(gpus);
            }
        }
    }

    /// Plans a want completely and returns true; otherwise leaves it waiting, or denies it.
    pub(crate) fn plan_want(&mut self, id: GangId, class: i64, gpus: &BTreeSet<GpuId>) -> bool {
        let (mut takes, mut missing) = (Vec::new(), false);
        for &gpu in gpus {
            self.ledger.trim_room(id, gpu);
            let Some(gang) = self.ledger.gangs.get(&id) else { return false };
            let need = gang.wanted(gpu);
            let held = self.ledger.gpus.get(&gpu);
            let short = gang.short(gpu, held);
            if short.is_zero() {
                continue;
            }
            let found = self.ledger.choose(gpu, short, Some(class), Some(id));
            if found.short.is_zero() {
                takes.extend(found.takes);
                continue;
            }
            if self.ledger.reachable(gpu, id) < need {
                // Contexts and fixed memory of others may be gone at the next attempt; its own may not.
                let own = gang.on(gpu).map(Share::footprint).sum();
                let most = held.map_or(Bytes::ZERO, Gpu::most).saturating_sub(own);
                self.deny_and_log(id, Denied::TooLarge, (need <= most).then_some(RETRY));
                return false;
            }
            missing = true;
            self.retry_at = found.next.into_iter().chain(self.retry_at).min();
        }
        if missing {
            return false;
        }
        let Demand { victims, first, patience } = self.command_victims(&takes, Some(id));
        let now = self.ledger.now;
        let Some(gang) = self.ledger.gangs.get(&id) else { return false };
        let copied = gang.copied().0;
        let predicted = self.ledger.predicted_return(gang) + first;
        self.log_decision(id, victims_of(&takes), predicted, Outcome::UnderWay);
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return false };
        let starting = gang.members.iter().filter(|(_, member)| member.starting).map(|(worker, _)| *worker);
        let mut waits: BTreeSet<WorkerId> = starting.collect();
        for share in &mut gang.shares {
            share.owed = share.need();
            if !share.owed.is_zero() {
                waits.insert(share.worker);
            }
        }
        let (since, by) = (now, now + patience);
        let starts = gang.starting;
        let refill = Refill { victims, since, by, patience, waits, copied, starts, admitted: None };
        self.ledger.set_state(id, State::Refilling(refill));
        self.grant_owed();
        true
    }

    /// Shrinks idle workers of GPUs above their limit; no worker is parked for this.
    pub(crate) fn shrink_excess(&mut self) {
        for gpu in self.ledger.gpus.keys().copied().collect::<Vec<_>>() {
            let excess = self.ledger.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::excess);
            let mut moving = self.ledger.under_way.iter().filter_map(|id| self.ledger.gangs.get(id));
            if excess.is_zero() || moving.any(|gang| gang.is_counted_on() && gang.on(gpu).next().is_some()) {
                continue;
            }
            let found = self.ledger.choose(gpu, excess, None, None);
            self.retry_at = found.next.into_iter().chain(self.retry_at).min();
            self.command_victims(&found.takes, None);
        }
    }

    /// Asks further victims for a refill whose bytes are late: idle workers first, and any eligible one after the first victims' deadline.
    /// Without a victim left, the refill gives its grants back.
    pub(crate) fn ask_further_victims(&mut self, id: GangId) {
        let now = self.ledger.now;
        let Some(Gang { state: State::Refilling(refill), shares, profile, want, .. }) =
            self.ledger.gangs.get(&id)
        else {
            return;
        };
        let in_time = self.ledger.earliest_deadline(&refill.victims);
        let class = want.map(|want| want.class(profile.priority, now)).filter(|_| in_time.is_none());
        let patience = refill.patience;
        // No further victims are asked for a want past its deadline.
        let is_over = in_time.is_none() && want.is_some_and(|want| want.deadline <= now);
        if is_over || self.ledger.blocks_higher_class(id) {
            return self.return_grants(id, Outcome::Returned);
        }
        let mut owed: BTreeMap<GpuId, Bytes> = BTreeMap::new();
        for share in shares {
            let sum = owed.entry(share.account.gpu).or_default();
            *sum = sum.saturating_add(share.owed).saturating_add(share.absent_floor());
        }
        let mut takes = Vec::new();
        for (gpu, owed) in owed {
            let excess = self.ledger.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::excess);
            let short = if owed.is_zero() { owed } else { owed.saturating_add(excess) };
            let found = self.ledger.choose(gpu, short.saturating_sub(self.ledger.free(gpu)), class, Some(id));
            if !found.short.is_zero() {
                let Some(late) = in_time else { return self.return_grants(id, Outcome::Returned) };
                if let Some(Gang { state: State::Refilling(refill), .. }) = self.ledger.gangs.get_mut(&id) {
                    let again = found.next.filter(|next| *next > now).unwrap_or(now + patience);
                    refill.by = late.min(again).min(now + patience);
                }
                return;
            }
            takes.extend(found.takes);
        }
        // Other victims give the bytes.
        self.cancel_parks(id);
        let asked = self.command_victims(&takes, Some(id));
        if let Some(Gang { state: State::Refilling(refill), .. }) = self.ledger.gangs.get_mut(&id) {
            refill.victims.extend(asked.victims);
            (refill.by, refill.patience) = (now + asked.patience, asked.patience);
        }
    }
}

impl Arbiter {
    /// Accepts the request of a use that waits for `within`.
    pub(crate) fn grow(&mut self, worker: WorkerId, gpu: GpuId, bytes: Bytes, within: Duration) {
        let (since, by, late_at) = (self.ledger.now, self.ledger.now + within, self.ledger.now);
        let Some(&gang) = self.ledger.gang_of.get(&worker) else {
            let why = Denied::Incomplete;
            return self.actions.push(Action::DenyGrowth { worker, gpu, bytes, why });
        };
        self.ledger.add_share(gang, (worker, gpu));
        let (victims, patience) = (BTreeSet::new(), Duration::ZERO);
        let growth = Growth { gang, worker, gpu, bytes, since, by, victims, late_at, patience };
        if let Some(gang) = self.ledger.gangs.get_mut(&gang) {
            gang.growing += 1;
        }
        if self.ledger.gangs.get(&gang).is_some_and(|gang| gang.contexts.is_lost()) {
            self.deny_growth(&growth, Denied::Lost);
        } else {
            self.pay_growth(growth);
        }
    }

    /// Grants free bytes to growths and asks victims for the rest. Returns the time at which another victim becomes eligible.
    pub(crate) fn pay_growths(&mut self) -> Option<Duration> {
        let growths = std::mem::take(&mut self.ledger.growths).into_iter();
        growths.filter_map(|growth| self.pay_growth(growth)).min()
    }

    pub(crate) fn pay_growth(&mut self, growth: Growth) -> Option<Duration> {
        if self.ledger.absent.contains(&growth.gang) {
            self.ledger.growths.push(growth);
        } else if self.ledger.free_besides_restores(growth.gpu) >= growth.bytes {
            self.grant(growth.gang, (growth.worker, growth.gpu), growth.bytes);
            let waited = self.ledger.now.saturating_sub(growth.since);
            self.log.timings.waited(RequestKind::Growth, true, waited);
            self.end_growth(&growth);
        } else if self.ledger.is_impossible(&growth) {
            self.deny_growth(&growth, Denied::TooLarge);
        } else if self.ledger.expects_bytes(&growth) || self.ledger.is_starting(growth.gpu, growth.gang) {
            self.ledger.growths.push(growth);
        } else {
            return self.ask_victims_for(growth);
        }
        None
    }

    /// Asks victims for the missing bytes: only idle workers while earlier victims still have time.
    pub(crate) fn ask_victims_for(&mut self, mut growth: Growth) -> Option<Duration> {
        let Growth { gang, gpu, bytes, by, .. } = growth;
        let short = bytes.saturating_sub(self.ledger.free_besides_restores(gpu));
        let in_time = self.ledger.earliest_deadline(&growth.victims);
        let class = self.ledger.gangs.get(&gang).map(|gang| i64::from(gang.profile.priority));
        let found = self.ledger.choose(gpu, short, class.filter(|_| in_time.is_none()), Some(gang));
        let mut next = found.next.into_iter().chain(in_time).min();
        if found.short.is_zero() {
            // Other victims give the bytes.
            self.cancel_parks(gang);
            let asked = self.command_victims(&found.takes, Some(gang));
            growth.victims.extend(asked.victims);
            // Half of the request's time remains for further victims.
            growth.patience = asked.patience.min(by.saturating_sub(self.ledger.now) / 2);
            growth.late_at = self.ledger.now + growth.patience;
            next = None;
        }
        self.ledger.growths.push(growth);
        next
    }

    pub(crate) fn deny_growth(&mut self, growth: &Growth, why: Denied) {
        let Growth { gang, worker, gpu, bytes, since, .. } = *growth;
        self.actions.push(Action::DenyGrowth { worker, gpu, bytes, why });
        self.log.timings.waited(RequestKind::Growth, false, self.ledger.now.saturating_sub(since));
        // The loss of a worker is a decision of its own.
        if why != Denied::Lost {
            let (at, profile) = (self.ledger.now, self.ledger.gangs.get(&gang).map(|gang| &gang.profile));
            self.log.decided(Decision {
                at,
                gang,
                class: profile.map_or(0, |profile| profile.priority.into()),
                waited: at.saturating_sub(since),
                needed: vec![(gpu, bytes)],
                taken: Vec::new(),
                predicted: Duration::ZERO,
                outcome: Outcome::GrowthDenied(why),
            });
        }
        self.end_growth(growth);
    }

    pub(crate) fn end_growth(&mut self, growth: &Growth) {
        if let Some(gang) = self.ledger.gangs.get_mut(&growth.gang) {
            gang.growing -= 1;
        }
        self.cancel_parks(growth.gang);
    }
}
