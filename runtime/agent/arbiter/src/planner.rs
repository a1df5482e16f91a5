//! What is done with free bytes, and whose turn it is.
//!
//! Invariants: a want is planned wholly or not at all, so that nobody who waits holds anything; each GPU has one refill
//! at most; whoever comes after a GPU's first want waits behind it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use glake_units::Bytes;

use crate::away::{short, wanted};
use crate::gang::{Gang, Refill, Share, State};
use crate::ledger::Gpu;
use crate::log::Outcome;
use crate::server::{AGAIN, Asked, Server};
use crate::victims::Take;
use crate::want::Order;
use crate::{Denied, GangId, GpuId, WorkerId};

/// Decides over a server once.
pub(crate) struct Planner<'a> {
    pub(crate) server: &'a mut Server,
    /// When somebody can be chosen who cannot be now.
    pub(crate) retry_at: Option<Duration>,
}

impl Planner<'_> {
    pub(crate) fn decide(&mut self) {
        self.pay();
        self.plan();
        self.server.bring_back();
        self.lower();
        self.server.demote();
        self.server.put_away();
    }

    /// Free bytes go to who is owed them.
    fn pay(&mut self) {
        let now = self.server.now;
        for id in self.server.under_way.iter().copied().collect::<Vec<_>>() {
            let Some(Gang { state: State::Refilling(refill), .. }) = self.server.gangs.get(&id) else {
                continue;
            };
            let is_admitted = refill.admitted.is_some();
            if !is_admitted && !self.server.restore(id) {
                continue;
            }
            let Some(Gang { shares, .. }) = self.server.gangs.get(&id) else { continue };
            let owed: Vec<_> = shares.iter().map(|share| (share.key(), share.owed)).collect();
            let (mut came, mut missing) = (false, false);
            for (key, owed) in owed {
                let bytes = self.server.grant(id, key, owed);
                self.server.change(id, key, |share| {
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
                self.server.admit(id);
            } else if let (true, Some(Gang { state: State::Refilling(refill), .. })) =
                (came, self.server.gangs.get_mut(&id))
            {
                refill.by = now + refill.patience;
            } else if self.has_nobody_left(id) {
                self.look_elsewhere(id);
            }
        }
        let next = self.server.pay_growths();
        self.retry_at = next.into_iter().chain(self.retry_at).min();
    }

    /// Whether all victims of a refill have done what they can, and no dead worker's memory is on its way.
    fn has_nobody_left(&self, id: GangId) -> bool {
        let Some(Gang { state: State::Refilling(refill), shares, .. }) = self.server.gangs.get(&id) else {
            return false;
        };
        let mut gpus = shares.iter().filter_map(|share| self.server.gpus.get(&share.holding.gpu));
        let is_dying = gpus.any(|gpu| gpu.measure_at().is_some());
        !refill.victims.is_empty() && !is_dying && self.server.in_time(&refill.victims).is_none()
    }

    /// Plans each GPU's first want.
    fn plan(&mut self) {
        let server = &self.server;
        let (mut blocked, mut wants, mut behind) = (BTreeSet::new(), BinaryHeap::new(), None);
        for (id, gang) in server.under_way.iter().filter_map(|id| Some((*id, server.gangs.get(id)?))) {
            match (&gang.state, gang.want) {
                (State::Refilling(_), _) => blocked.extend(gang.shares.iter().map(|share| share.holding.gpu)),
                // The driver is asked, or was a moment ago.
                (State::Resting, Some(_))
                    if gang.away.is_moving() || gang.away.restore_after > server.now => {}
                (State::Resting, _) => {
                    let order = gang.order(id, server.now, &server.settings);
                    // It comes before others then.
                    let until = order.filter(|(_, is_behind, ..)| *is_behind);
                    behind = until
                        .map(|(_, _, since, _)| since + server.settings.resume_after)
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
            let Some(gang) = self.server.gangs.get(&id) else { continue };
            let gpus = gang.needs_gpus();
            if !gang.is_complete() {
                self.server.refuse(id, Denied::Incomplete, Some(AGAIN));
            } else if gpus.is_empty() && gang.away.is_present() {
                self.server.admit(id);
            } else if blocked.is_disjoint(&gpus) {
                if self.plan_want(id, class, &gpus) {
                    let held = self.server.gangs.get(&id).into_iter().flat_map(|gang| &gang.shares);
                    blocked.extend(held.map(|share| share.holding.gpu));
                } else if self.server.gangs.get(&id).is_some_and(|gang| gang.want.is_some()) {
                    blocked.extend(gpus);
                }
            } else {
                blocked.extend(gpus);
            }
        }
    }

    /// Plans a want wholly, or not at all: then it waits on, or was denied.
    fn plan_want(&mut self, id: GangId, class: i64, gpus: &BTreeSet<GpuId>) -> bool {
        let (mut takes, mut missing) = (Vec::new(), false);
        for &gpu in gpus {
            self.server.do_without_room(id, gpu);
            let Some(gang) = self.server.gangs.get(&id) else { return false };
            let need = wanted(gang, gpu);
            let held = self.server.gpus.get(&gpu);
            let short = short(gang, gpu, held);
            if short.is_zero() {
                continue;
            }
            let found = self.server.choose(gpu, short, Some(class), Some(id));
            if found.short.is_zero() {
                takes.extend(found.takes);
                continue;
            }
            if self.server.reachable(gpu, id) < need {
                // Others' contexts, and what of them is fixed, may be gone when it asks again; its own may not.
                let own = gang.on(gpu).map(Share::footprint).sum();
                let most = held.map_or(Bytes::ZERO, Gpu::most).saturating_sub(own);
                self.server.refuse(id, Denied::TooLarge, (need <= most).then_some(AGAIN));
                return false;
            }
            missing = true;
            self.retry_at = found.next.into_iter().chain(self.retry_at).min();
        }
        if missing {
            return false;
        }
        self.begin(id, &takes);
        true
    }

    fn begin(&mut self, id: GangId, takes: &[Take]) {
        let Asked { victims, first, patience } = self.server.take(takes, Some(id));
        let now = self.server.now;
        let Some(gang) = self.server.gangs.get(&id) else { return };
        let copied = gang.copied().0;
        let predicted = self.server.wake(gang) + first;
        self.server.decided(id, Server::taken(takes), predicted, Outcome::UnderWay);
        let Some(gang) = self.server.gangs.get_mut(&id) else { return };
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
        self.server.set_state(id, State::Refilling(refill));
        self.pay();
    }

    /// Where there is more than a GPU's limit, idle workers give some back; nobody is parked for it.
    fn lower(&mut self) {
        for gpu in self.server.gpus.keys().copied().collect::<Vec<_>>() {
            let excess = self.server.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::excess);
            let mut moving = self.server.under_way.iter().filter_map(|id| self.server.gangs.get(id));
            if excess.is_zero() || moving.any(|gang| gang.is_counted_on() && gang.on(gpu).next().is_some()) {
                continue;
            }
            let found = self.server.choose(gpu, excess, None, None);
            self.retry_at = found.next.into_iter().chain(self.retry_at).min();
            self.server.take(&found.takes, None);
        }
    }

    /// A refill's bytes are late: idle workers are asked for them too; once its victims have had their time, whoever may be. It
    /// gives back what it has where nobody is left.
    pub(crate) fn look_elsewhere(&mut self, id: GangId) {
        let now = self.server.now;
        let Some(Gang { state: State::Refilling(refill), shares, profile, want, .. }) =
            self.server.gangs.get(&id)
        else {
            return;
        };
        let in_time = self.server.in_time(&refill.victims);
        let class = want.map(|want| want.class(profile.priority, now)).filter(|_| in_time.is_none());
        let patience = refill.patience;
        // Nobody is asked anew for a want whose time is over.
        let is_over = in_time.is_none() && want.is_some_and(|want| want.deadline <= now);
        if is_over || self.is_overtaken(id) {
            return self.server.give_back(id, Outcome::Returned);
        }
        let mut owed: BTreeMap<GpuId, Bytes> = BTreeMap::new();
        for share in shares {
            let sum = owed.entry(share.holding.gpu).or_default();
            *sum = sum.saturating_add(share.owed).saturating_add(share.absent_floor());
        }
        let mut takes = Vec::new();
        for (gpu, owed) in owed {
            let excess = self.server.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::excess);
            let short = if owed.is_zero() { owed } else { owed.saturating_add(excess) };
            let found = self.server.choose(gpu, short.saturating_sub(self.server.free(gpu)), class, Some(id));
            if !found.short.is_zero() {
                let Some(late) = in_time else { return self.server.give_back(id, Outcome::Returned) };
                if let Some(Gang { state: State::Refilling(refill), .. }) = self.server.gangs.get_mut(&id) {
                    let again = found.next.filter(|next| *next > now).unwrap_or(now + patience);
                    refill.by = late.min(again).min(now + patience);
                }
                return;
            }
            takes.extend(found.takes);
        }
        // Others give it.
        self.server.call_off(id);
        let asked = self.server.take(&takes, Some(id));
        if let Some(Gang { state: State::Refilling(refill), .. }) = self.server.gangs.get_mut(&id) {
            refill.victims.extend(asked.victims);
            (refill.by, refill.patience) = (now + asked.patience, asked.patience);
        }
    }

    /// Whether a refill whose bytes are late keeps a want of a higher class waiting.
    fn is_overtaken(&self, id: GangId) -> bool {
        let (now, settings) = (self.server.now, &self.server.settings);
        let order = |id: GangId| self.server.gangs.get(&id).and_then(|gang| gang.order(id, now, settings));
        let Some(gang) = self.server.gangs.get(&id) else { return false };
        let gpus: BTreeSet<GpuId> = gang.shares.iter().map(|share| share.holding.gpu).collect();
        let class = |order: Option<Order>| order.map(|(Reverse(class), ..)| class);
        self.server.under_way.iter().filter(|other| **other != id).any(|&other| {
            let waits = self.server.gangs.get(&other).filter(|gang| gang.is_resting());
            waits.is_some_and(|gang| !gang.needs_gpus().is_disjoint(&gpus))
                && class(order(other)) > class(order(id))
        })
    }
}
