//! Ledger of a server: the memory of each gang on each GPU, and the operations under way.
//!
//! Invariants: a gang has one state; refills never share a GPU; leases fall only by reports of returned memory.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use glake_units::Bytes;

use crate::gang::{Distrust, Gang, Growth, Order, Presence, Share, ShareKey, State};
use crate::gpu::{Gpu, LinkDuty};
use crate::victims::{Choice, Chooser};
use crate::{Account, GangId, GpuId, Preempt, Settings, UseState, WorkerId};

/// State of the server that decisions depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Ledger {
    pub(crate) settings: Settings,
    pub(crate) gangs: BTreeMap<GangId, Gang>,
    pub(crate) gang_of: BTreeMap<WorkerId, GangId>,
    /// Time of each worker's first join.
    pub(crate) joined_at: BTreeMap<WorkerId, Duration>,
    pub(crate) gpus: BTreeMap<GpuId, Gpu>,
    pub(crate) duties: BTreeMap<GpuId, LinkDuty>,
    /// Gangs that the passage of time can change.
    pub(crate) under_way: BTreeSet<GangId>,
    /// Gangs whose contexts are not on their GPUs, or may not be.
    pub(crate) absent: BTreeSet<GangId>,
    pub(crate) growths: Vec<Growth>,
    pub(crate) now: Duration,
}

impl Ledger {
    pub(crate) fn new(settings: Settings) -> Self {
        Ledger {
            settings,
            gangs: BTreeMap::new(),
            gang_of: BTreeMap::new(),
            joined_at: BTreeMap::new(),
            gpus: BTreeMap::new(),
            duties: BTreeMap::new(),
            under_way: BTreeSet::new(),
            absent: BTreeSet::new(),
            growths: Vec::new(),
            now: Duration::ZERO,
        }
    }

    pub(crate) fn free(&self, gpu: GpuId) -> Bytes {
        self.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::free)
    }

    pub(crate) fn gang(&self, worker: WorkerId) -> Option<&Gang> {
        self.gangs.get(self.gang_of.get(&worker)?)
    }

    pub(crate) fn gang_mut(&mut self, worker: WorkerId) -> Option<(GangId, &mut Gang)> {
        let id = *self.gang_of.get(&worker)?;
        Some((id, self.gangs.get_mut(&id)?))
    }

    /// Updates the index of gangs under way after a change of state or want.
    pub(crate) fn update_under_way(&mut self, id: GangId) {
        if self.gangs.get(&id).is_some_and(Gang::is_under_way) {
            self.under_way.insert(id);
        } else {
            self.under_way.remove(&id);
        }
    }

    pub(crate) fn set_state(&mut self, id: GangId, state: State) {
        if let Some(gang) = self.gangs.get_mut(&id) {
            gang.state = state;
            gang.contexts.rests_since = self.now;
        }
        self.update_under_way(id);
    }

    /// Ends a refill, successful or not.
    pub(crate) fn end_refill(&mut self, id: GangId) {
        if let Some(gang) = self.gangs.get_mut(&id) {
            gang.shares.iter_mut().for_each(|share| (share.owed, share.granted) = (Bytes::ZERO, Bytes::ZERO));
            gang.resident_since = self.now;
        }
        self.set_state(id, State::Resting);
    }

    /// Changes a worker's share of a GPU, and the GPU's sum with it.
    pub(crate) fn change(&mut self, id: GangId, key: ShareKey, change: impl FnOnce(&mut Share)) {
        let Some(gang) = self.gangs.get_mut(&id) else { return };
        let Some(share) = gang.shares.iter_mut().find(|share| share.key() == key) else { return };
        let gpu = self.gpus.entry(key.1).or_default();
        gpu.counted = gpu.counted.saturating_sub(share.footprint());
        change(share);
        gpu.counted = gpu.counted.saturating_add(share.footprint());
    }

    /// Replaces a worker's accounts by its report, except for leases, which the arbiter decides.
    pub(crate) fn update_accounts(&mut self, worker: WorkerId, accounts: &[Account]) {
        let Some(&id) = self.gang_of.get(&worker) else { return };
        for told in accounts {
            self.add_share(id, (worker, told.gpu));
            self.change(id, (worker, told.gpu), |share| {
                share.account = Account { lease: share.account.lease, ..told.clone().possible() };
            });
        }
    }

    pub(crate) fn add_share(&mut self, id: GangId, (worker, gpu): ShareKey) {
        let Some(gang) = self.gangs.get_mut(&id).filter(|gang| gang.share((worker, gpu)).is_none()) else {
            return;
        };
        let zero = Bytes::ZERO;
        let account = Account::nothing(gpu, zero);
        let is_checkpointed = gang.contexts.is_out(worker);
        gang.shares.push(Share {
            worker,
            account,
            start: zero,
            overrun: zero,
            owed: zero,
            granted: zero,
            is_checkpointed,
        });
        gang.shares.sort_by_key(Share::key);
    }

    /// Removes a worker's shares and returns their accounted memory by GPU.
    pub(crate) fn remove_shares(&mut self, worker: WorkerId) -> Vec<(GpuId, Bytes)> {
        let Some(gang) = self.gang_of.get(&worker).and_then(|id| self.gangs.get_mut(id)) else {
            return Vec::new();
        };
        let gone = gang.shares.iter().filter(|share| share.worker == worker);
        let gone = gone.map(|share| (share.account.gpu, share.footprint())).collect();
        gang.shares.retain(|share| share.worker != worker);
        gone
    }

    /// Removes the shares of a living worker and their accounted memory, before a new account.
    pub(crate) fn uncount(&mut self, worker: WorkerId) {
        for (gpu, footprint) in self.remove_shares(worker) {
            let gpu = self.gpus.entry(gpu).or_default();
            gpu.counted = gpu.counted.saturating_sub(footprint);
        }
    }

    pub(crate) fn hosted(&self) -> Bytes {
        if self.settings.host_budget == Bytes::MAX {
            return Bytes::ZERO;
        }
        self.gangs.values().flat_map(|gang| &gang.shares).map(|share| share.account.hosted).sum()
    }

    /// Returns the copies in flight to host memory that workers do not report yet; the whole budget while a silent worker may have copies.
    pub(crate) fn hosting(&self) -> Bytes {
        if self.settings.host_budget == Bytes::MAX {
            return Bytes::ZERO;
        }
        let copies = self.gangs.values().map(|gang| match gang.state {
            _ if gang.silent => self.settings.host_budget,
            State::Shrinking { hosting, .. } => hosting,
            _ => Bytes::ZERO,
        });
        copies.fold(Bytes::ZERO, Bytes::saturating_add)
    }

    /// Returns the largest memory that a GPU could ever free for a gang: all except floors and fixed memory.
    pub(crate) fn reachable(&self, gpu: GpuId, id: GangId) -> Bytes {
        let stays = |other: GangId, gang: &Gang, share: &Share| {
            let fixed = other == id || gang.profile.preempt.min(self.settings.preempt) == Preempt::Never;
            share.footprint().saturating_sub(if fixed { Bytes::ZERO } else { share.evictable() })
        };
        let gangs = self.gangs.iter();
        let others =
            gangs.flat_map(|(other, gang)| gang.on(gpu).map(move |share| stays(*other, gang, share)));
        self.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::limit).saturating_sub(others.sum())
    }

    /// Reduces the requested room of a gang to the reachable memory of the GPU.
    pub(crate) fn trim_room(&mut self, id: GangId, gpu: GpuId) {
        let Some(gang) = self.gangs.get(&id) else { return };
        let mut over = gang.wanted(gpu).saturating_sub(self.reachable(gpu, id));
        // Without this room the want still does not fit.
        if gang.on(gpu).map(|share| share.account.room).sum::<Bytes>() < over {
            return;
        }
        for key in gang.on(gpu).map(Share::key).collect::<Vec<_>>() {
            self.change(id, key, |share| {
                let less = share.account.room.min(over);
                share.account.room = share.account.room.saturating_sub(less);
                over = over.saturating_sub(less);
            });
        }
    }

    /// Returns the free memory of a GPU beyond the needs of refills that wait for a restore.
    pub(crate) fn free_besides_restores(&self, gpu: GpuId) -> Bytes {
        let restored = self.absent.iter().filter_map(|id| self.gangs.get(id));
        let refills = restored.filter(|gang| matches!(gang.state, State::Refilling(_)));
        let owed = |share: &Share| share.owed.saturating_add(share.absent_floor());
        self.free(gpu).saturating_sub(refills.flat_map(|gang| gang.on(gpu)).map(owed).sum())
    }

    pub(crate) fn set_activity(&mut self, worker: WorkerId, activity: UseState, idle_for: Duration) {
        let now = self.now;
        let Some((_, gang)) = self.gang_mut(worker) else { return };
        if let Some(member) = gang.members.get_mut(&worker) {
            (member.activity, member.idle_since) = (activity, now.saturating_sub(idle_for));
        }
        gang.sum_up();
    }

    /// Extends the deadline of a refill whose worker still makes progress.
    pub(crate) fn extend_refill(&mut self, worker: WorkerId) {
        let now = self.now;
        let Some((_, gang)) = self.gang_mut(worker) else { return };
        if let State::Refilling(refill) = &mut gang.state
            && refill.admitted.is_some()
        {
            refill.by = refill.by.max(now + refill.patience);
        }
    }

    pub(crate) fn cancel_want(&mut self, worker: WorkerId) {
        let now = self.now;
        let Some((id, gang)) = self.gang_mut(worker) else { return };
        if let Some(member) = gang.members.get_mut(&worker) {
            member.wants = false;
        }
        if gang.members.values().all(|member| !member.wants) {
            (gang.want, gang.contexts.rests_since) = (None, now);
            gang.begin_anew();
        }
        self.update_under_way(id);
    }

    /// Records the answer of a worker to a shrink. Returns the duration of the shrink if it was the last of its gang.
    pub(crate) fn end_shrink(&mut self, worker: WorkerId) -> Option<Duration> {
        let (now, link) = (self.now, self.settings.link);
        let (id, gang) = self.gang_mut(worker)?;
        let State::Shrinking { waits, since, leaving, dirty, .. } = &mut gang.state else { return None };
        waits.remove(&worker);
        if !waits.is_empty() {
            return None;
        }
        let (took, leaving, dirty) = (now.saturating_sub(*since), *leaving, *dirty);
        gang.predictions.saw_shrink(leaving, dirty, link, took);
        gang.distrust = Distrust::default();
        self.set_state(id, State::Resting);
        Some(took)
    }

    /// Clears the needs of a worker on GPUs missing from `named`, once it is resident and has given their leases back: its start reserved
    /// them but never used them.
    pub(crate) fn clear_unused_needs(&mut self, worker: WorkerId, named: &[Account]) {
        let Some((_, gang)) = self.gang_mut(worker) else { return };
        let is_named = |share: &Share| named.iter().any(|held| held.gpu == share.account.gpu);
        for share in gang.shares.iter_mut().filter(|share| share.worker == worker && !is_named(share)) {
            if share.account.lease.is_zero() {
                (share.account.evicted, share.account.room) = (Bytes::ZERO, Bytes::ZERO);
            }
        }
    }

    /// Sets the location of a gang's contexts and adjusts the accounted floors.
    pub(crate) fn set_presence(&mut self, id: GangId, worker: Option<WorkerId>, presence: Presence) {
        let Some(gang) = self.gangs.get_mut(&id) else { return };
        (gang.contexts.presence, gang.contexts.since) = (presence, self.now);
        gang.contexts.worker = worker.filter(|_| presence != Presence::Present);
        if presence == Presence::Present {
            (gang.contexts.restore_after, gang.contexts.misses) = (self.now, 0);
        }
        let away = gang.contexts;
        let keys: Vec<_> = gang.shares.iter().map(Share::key).collect();
        for key in keys {
            self.change(id, key, |share| share.is_checkpointed = away.is_out(key.0));
        }
        if away.is_present() {
            self.absent.remove(&id)
        } else {
            self.absent.insert(id)
        };
        self.update_under_way(id);
    }

    pub(crate) fn request_restore(&mut self, worker: WorkerId) {
        let id = self.gang_of.get(&worker);
        let Some(gang) = id.and_then(|id| self.gangs.get_mut(id)) else { return };
        if let Presence::Checkpointed { returns } = &mut gang.contexts.presence {
            *returns = true;
            gang.contexts.restore_after = gang.contexts.restore_after.min(self.now);
        }
    }

    /// Returns the next gang to checkpoint and its time. Only one checkpoint runs at a time.
    pub(crate) fn next_checkpoint(&self) -> Option<(Duration, GangId)> {
        let after = self.settings.checkpoint_after?;
        let is_leaving =
            |id: &GangId| self.gangs.get(id).is_some_and(|gang| gang.contexts.presence == Presence::Leaving);
        if self.absent.iter().any(is_leaving) {
            return None;
        }
        self.gangs.iter().filter_map(|(id, gang)| Some((gang.leaves_at(after)?, *id))).min()
    }

    /// Returns the earliest time of a restore or checkpoint without another event.
    pub(crate) fn contexts_due_at(&self) -> Option<Duration> {
        let gangs = self.absent.iter().filter_map(|id| self.gangs.get(id));
        let may_move = |gang: &&Gang| !gang.contexts.is_moving() && !gang.contexts.is_lost();
        let waits = |gang: &&Gang| may_move(gang) && (gang.is_to_return() || gang.want.is_some());
        let restores =
            gangs.filter(waits).map(|gang| gang.contexts.restore_after).filter(|at| *at > self.now);
        restores.chain(self.next_checkpoint().map(|(at, _)| at)).min()
    }

    /// Returns the predicted time for a gang's return once there is room.
    pub(crate) fn predicted_return(&self, gang: &Gang) -> Duration {
        let restore = if gang.contexts.is_present() { Duration::ZERO } else { self.settings.restore };
        restore + gang.predictions.refill(gang.copied().0, self.settings.link)
    }

    /// Returns the predicted time until a gang's memory is back; 0 if all of it is resident.
    pub(crate) fn predicted_wake(&self, gang: &Gang) -> Duration {
        let is_there = gang.is_resident() && gang.contexts.is_present();
        if is_there { Duration::ZERO } else { self.predicted_return(gang) }
    }

    /// Returns the timeout of an operation with a predicted duration.
    pub(crate) fn timeout(&self, predicted: Duration) -> Duration {
        predicted.saturating_mul(self.settings.late).max(self.settings.least_late)
    }

    /// Extends the deadline of a shrink whose bytes come, by the time that running uses may need to end.
    pub(crate) fn extend_shrink(&mut self, id: GangId) {
        let by = self.now + self.settings.drain;
        if let Some(Gang { state: State::Shrinking { by: Some(late), .. }, .. }) = self.gangs.get_mut(&id) {
            *late = by.max(*late);
        }
    }

    /// Returns the earliest deadline among `victims` that have not missed theirs.
    pub(crate) fn earliest_deadline(&self, victims: &BTreeSet<GangId>) -> Option<Duration> {
        let by = |id: &GangId| match self.gangs.get(id)?.state {
            State::Parking { by, .. } | State::Shrinking { by: Some(by), .. } => Some(by),
            _ => None,
        };
        victims.iter().filter_map(by).filter(|by| *by > self.now).min()
    }

    /// Returns a lower bound of the time until a want is satisfied, including earlier wants.
    pub(crate) fn shortest_wait(&self, id: GangId) -> Duration {
        let order = |id, gang: &Gang| gang.order(id, self.now, &self.settings);
        let Some((gang, own)) = self.gangs.get(&id).and_then(|gang| Some((gang, order(id, gang)?))) else {
            return Duration::ZERO;
        };
        let gpus = gang.needs_gpus();
        let refill = |gang: &Gang| self.predicted_return(gang);
        let before = self.under_way.iter().filter_map(|other| {
            let gang = self.gangs.get(other)?;
            let first = order(*other, gang)? < own;
            (first && gang.is_resting() && !gang.needs_gpus().is_disjoint(&gpus)).then(|| refill(gang))
        });
        before.sum::<Duration>() + refill(gang)
    }

    /// Chooses victims on a GPU.
    pub(crate) fn choose(
        &self,
        gpu: GpuId,
        short: Bytes,
        class: Option<i64>,
        whom: Option<GangId>,
    ) -> Choice {
        Chooser {
            gangs: &self.gangs,
            settings: &self.settings,
            now: self.now,
            gpu,
            limit: self.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::limit),
            class,
            whom,
        }
        .choose(short)
    }

    /// Returns whether all victims of a refill have given what they can, and no dead worker's memory is being reclaimed.
    pub(crate) fn has_exhausted_victims(&self, id: GangId) -> bool {
        let Some(Gang { state: State::Refilling(refill), shares, .. }) = self.gangs.get(&id) else {
            return false;
        };
        let mut gpus = shares.iter().filter_map(|share| self.gpus.get(&share.account.gpu));
        let is_dying = gpus.any(|gpu| gpu.measure_at().is_some());
        !refill.victims.is_empty() && !is_dying && self.earliest_deadline(&refill.victims).is_none()
    }

    /// Returns whether a refill with late bytes blocks a want of a higher class.
    pub(crate) fn blocks_higher_class(&self, id: GangId) -> bool {
        let (now, settings) = (self.now, &self.settings);
        let order = |id: GangId| self.gangs.get(&id).and_then(|gang| gang.order(id, now, settings));
        let Some(gang) = self.gangs.get(&id) else { return false };
        let gpus: BTreeSet<GpuId> = gang.shares.iter().map(|share| share.account.gpu).collect();
        let class = |order: Option<Order>| order.map(|(Reverse(class), ..)| class);
        self.under_way.iter().filter(|other| **other != id).any(|&other| {
            let waits = self.gangs.get(&other).filter(|gang| gang.is_resting());
            waits.is_some_and(|gang| !gang.needs_gpus().is_disjoint(&gpus))
                && class(order(other)) > class(order(id))
        })
    }

    /// Returns whether a refill that waits for bytes is under way on a GPU.
    pub(crate) fn is_refilling(&self, gpu: GpuId) -> bool {
        let refills = |gang: &Gang| {
            matches!(&gang.state, State::Refilling(refill) if refill.admitted.is_none())
                && gang.on(gpu).next().is_some()
        };
        self.under_way.iter().filter_map(|id| self.gangs.get(id)).any(refills)
    }

    /// Returns whether another gang's start is under way on a GPU; no memory leaves during a start.
    pub(crate) fn is_starting(&self, gpu: GpuId, asker: GangId) -> bool {
        let starts = |gang: &Gang| {
            matches!(gang.state, State::Refilling(_)) && gang.starting && gang.on(gpu).next().is_some()
        };
        let others = self.under_way.iter().filter(|id| **id != asker);
        others.filter_map(|id| self.gangs.get(id)).any(starts)
    }

    /// Returns whether waiting is useless: all other workers together could not give enough, and no unmanaged memory is in the way.
    pub(crate) fn is_impossible(&self, growth: &Growth) -> bool {
        let is_curtailed = self.gpus.get(&growth.gpu).is_some_and(Gpu::is_curtailed);
        !is_curtailed && self.reachable(growth.gpu, growth.gang) < growth.bytes
    }

    /// Returns whether usable bytes are on their way: from a shrink, a dead worker, or a refill with victims.
    pub(crate) fn expects_bytes(&self, growth: &Growth) -> bool {
        let gives = |gang: &Gang| {
            matches!(gang.state, State::Parking { .. } | State::Shrinking { by: Some(_), .. })
                && gang.on(growth.gpu).next().is_some()
        };
        let died = self.gpus.get(&growth.gpu).is_some_and(|gpu| gpu.measure_at().is_some());
        let leaves = died || self.under_way.iter().filter_map(|id| self.gangs.get(id)).any(gives);
        self.now < growth.late_at && leaves || !growth.victims.is_empty() && self.is_refilling(growth.gpu)
    }

    /// Extends the time of growths that wait for a gang whose bytes just came.
    pub(crate) fn extend_growths(&mut self, id: GangId, gpu: GpuId) {
        let now = self.now;
        let growths = self.growths.iter_mut();
        for growth in growths.filter(|growth| growth.gpu == gpu && growth.victims.contains(&id)) {
            growth.late_at = now + growth.patience;
        }
    }
}
