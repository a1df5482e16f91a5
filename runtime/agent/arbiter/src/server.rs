//! State of the server and the commands that change it.
//!
//! Invariants: a gang has one state; refills never share a GPU; leases rise only by [`Server::grant`], and fall only by reports of returned
//! memory; each command has a deadline.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use glake_units::Bytes;

use crate::away::wanted;
use crate::duty::LinkDuty;
use crate::gang::{Gang, Refill, Share, ShareKey, State};
use crate::growth::Growth;
use crate::ledger::Gpu;
use crate::log::{Decision, Log, Outcome, Taken};
use crate::predictions::over;
use crate::victims::{Chooser, Found, Take};
use crate::{Action, Activity, Denied, GangId, GpuId, Holding, Preempt, Settings, Tier, WorkerId};

/// Granularity in which a victim reports returned memory.
const CREDIT: Bytes = Bytes::mib(512);
/// Retry interval of a want whose gang is incomplete, or whose memory is held by unmanaged processes.
pub(crate) const AGAIN: Duration = Duration::from_secs(1);
/// Timeout of moving copies from host memory to files.
const DEMOTION: Duration = Duration::from_secs(30);

/// Victims of a request that got a command.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) victims: BTreeSet<GangId>,
    /// Predicted time until the first bytes come.
    pub(crate) first: Duration,
    /// Time after which further victims are asked for the first bytes.
    pub(crate) patience: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Server {
    pub(crate) settings: Settings,
    pub(crate) gangs: BTreeMap<GangId, Gang>,
    pub(crate) gang_of: BTreeMap<WorkerId, GangId>,
    pub(crate) gpus: BTreeMap<GpuId, Gpu>,
    pub(crate) duties: BTreeMap<GpuId, LinkDuty>,
    /// Gangs that the passage of time can change.
    pub(crate) under_way: BTreeSet<GangId>,
    /// Gangs whose contexts are not on their GPUs, or may not be.
    pub(crate) absent: BTreeSet<GangId>,
    pub(crate) growths: Vec<Growth>,
    pub(crate) now: Duration,
    pub(crate) actions: Vec<Action>,
    pub(crate) log: Log,
}

impl Server {
    pub(crate) fn new(settings: Settings) -> Self {
        Server {
            settings,
            gangs: BTreeMap::new(),
            gang_of: BTreeMap::new(),
            gpus: BTreeMap::new(),
            duties: BTreeMap::new(),
            under_way: BTreeSet::new(),
            absent: BTreeSet::new(),
            growths: Vec::new(),
            now: Duration::ZERO,
            actions: Vec::new(),
            log: Log::default(),
        }
    }

    pub(crate) fn free(&self, gpu: GpuId) -> Bytes {
        self.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::free)
    }

    /// Updates the index of gangs under way after a change of state or want.
    pub(crate) fn note(&mut self, id: GangId) {
        if self.gangs.get(&id).is_some_and(Gang::is_under_way) {
            self.under_way.insert(id);
        } else {
            self.under_way.remove(&id);
        }
    }

    pub(crate) fn set_state(&mut self, id: GangId, state: State) {
        if let Some(gang) = self.gangs.get_mut(&id) {
            gang.state = state;
            gang.away.rests_since = self.now;
        }
        self.note(id);
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

    /// Replaces a worker's holdings by its report, except for leases, which the arbiter decides.
    pub(crate) fn hold(&mut self, worker: WorkerId, holdings: &[Holding]) {
        let Some(&id) = self.gang_of.get(&worker) else { return };
        for told in holdings {
            self.add_share(id, (worker, told.gpu));
            self.change(id, (worker, told.gpu), |share| {
                share.holding = Holding { lease: share.holding.lease, ..told.clone().possible() };
            });
        }
    }

    /// Raises the bytes owed to a refill whose worker needs more than planned, for example after its own shrink.
    pub(crate) fn owe(&mut self, worker: WorkerId) {
        let now = self.now;
        let Some((id, gang)) = self.gang_of.get(&worker).and_then(|id| Some((*id, self.gangs.get(id)?)))
        else {
            return;
        };
        if !matches!(&gang.state, State::Refilling(refill) if refill.waits.contains(&worker)) {
            return;
        }
        let gpus: Vec<GpuId> = gang
            .shares
            .iter()
            .filter(|share| share.worker == worker)
            .map(|share| share.holding.gpu)
            .collect();
        for gpu in gpus {
            self.do_without_room(id, gpu);
        }
        let Some(gang) = self.gangs.get_mut(&id) else { return };
        let State::Refilling(refill) = &mut gang.state else { return };
        let mut more = Vec::new();
        let is_planned = |share: &Share| !share.owed.saturating_add(share.granted).is_zero();
        for share in gang.shares.iter_mut().filter(|share| share.worker == worker && is_planned(share)) {
            let grown = share.need().saturating_sub(share.owed);
            share.owed = share.owed.saturating_add(grown);
            more.push((share.holding.gpu, grown));
        }
        // Before it was admitted, what is late is looked for elsewhere.
        if refill.admitted.is_none() {
            return;
        }
        let class = Some(i64::from(gang.profile.priority));
        for (gpu, grown) in more.into_iter().filter(|(_, grown)| !grown.is_zero()) {
            let found = self.choose(gpu, grown.saturating_sub(self.free(gpu)), class, Some(id));
            let asked = self.take(&found.takes, Some(id));
            if let Some(Gang { state: State::Refilling(refill), .. }) = self.gangs.get_mut(&id) {
                refill.victims.extend(asked.victims);
                refill.by = refill.by.max(now + asked.patience);
            }
        }
    }

    pub(crate) fn add_share(&mut self, id: GangId, (worker, gpu): ShareKey) {
        let Some(gang) = self.gangs.get_mut(&id).filter(|gang| gang.share((worker, gpu)).is_none()) else {
            return;
        };
        let zero = Bytes::ZERO;
        let holding = Holding::nothing(gpu, zero);
        let is_checkpointed = gang.away.is_out(worker);
        gang.shares.push(Share {
            worker,
            holding,
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
        let gone = gone.map(|share| (share.holding.gpu, share.footprint())).collect();
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

    /// Grants free memory up to `bytes` to a lease and returns the amount.
    pub(crate) fn grant(&mut self, id: GangId, (worker, gpu): ShareKey, bytes: Bytes) -> Bytes {
        let bytes = bytes.min(self.free(gpu));
        if !bytes.is_zero() {
            self.change(id, (worker, gpu), |share| {
                share.holding.lease = share.holding.lease.saturating_add(bytes);
            });
            self.actions.push(Action::Grant { worker, gpu, bytes });
        }
        bytes
    }

    /// Chooses victims on a GPU.
    pub(crate) fn choose(&self, gpu: GpuId, short: Bytes, class: Option<i64>, whom: Option<GangId>) -> Found {
        let idle = LinkDuty::default();
        Chooser {
            gangs: &self.gangs,
            settings: &self.settings,
            duty: self.duties.get(&gpu).unwrap_or(&idle),
            now: self.now,
            gpu,
            limit: self.gpus.get(&gpu).map_or(Bytes::ZERO, Gpu::limit),
            class,
            whom,
        }
        .choose(short)
    }

    /// Sends commands to the chosen victims of a request of `whom`.
    pub(crate) fn take(&mut self, takes: &[Take], whom: Option<GangId>) -> Asked {
        let victims: BTreeSet<GangId> = takes.iter().map(|take| take.gang).collect();
        let (mut first, mut patience) = (Duration::ZERO, self.settings.least_late);
        for &victim in &victims {
            let takes: Vec<_> = takes
                .iter()
                .filter(|take| take.gang == victim)
                .map(|take| (take.share, take.bytes))
                .collect();
            let Some(gang) = self.gangs.get(&victim) else { continue };
            let dirty = takes.iter().filter_map(|(key, _)| gang.share(*key)).map(|share| share.holding.dirty);
            let credit = gang.predictions.shrink(
                CREDIT,
                dirty.max().unwrap_or_default().min(CREDIT),
                self.settings.link,
            );
            let park = if gang.activity == Activity::Idle { Duration::ZERO } else { gang.predictions.park() };
            let least = if gang.predictions.has_shrunk() { Duration::ZERO } else { self.settings.first_late };
            first = first.max(credit + park);
            patience = patience.max(self.late(first)).max(least);
            if gang.activity == Activity::Idle {
                self.shrink(victim, &takes);
            } else {
                self.park(victim, takes, whom);
            }
        }
        Asked { victims, first, patience }
    }

    /// Returns the timeout of an operation with a predicted duration.
    pub(crate) fn late(&self, predicted: Duration) -> Duration {
        predicted.saturating_mul(self.settings.late).max(self.settings.least_late)
    }

    /// Parks the uses of a gang at safe points. Uses without safe points run to their end while new ones wait, at most as long as the
    /// gang's uses may pause.
    pub(crate) fn park(&mut self, id: GangId, takes: Vec<(ShareKey, Bytes)>, whom: Option<GangId>) {
        let Some(gang) = self.gangs.get(&id) else { return };
        let longest = match gang.activity {
            Activity::Running => gang.profile.max_pause.unwrap_or(Duration::MAX).min(self.settings.drain),
            _ => self.late(gang.predictions.park()).max(self.settings.first_late).min(self.settings.drain),
        };
        let by = self.now + longest.max(self.settings.least_late);
        let waits: BTreeSet<WorkerId> = gang.members.keys().copied().collect();
        self.actions.extend(waits.iter().map(|&worker| Action::Park { worker, by }));
        self.set_state(id, State::Parking { waits, since: self.now, by, takes, whom });
    }

    /// Cancels parks for a request of `whom` that has ended or gets its bytes elsewhere.
    pub(crate) fn call_off(&mut self, whom: GangId) {
        let parks = |id: &GangId| {
            let state = self.gangs.get(id).map(|gang| &gang.state);
            matches!(state, Some(State::Parking { whom: Some(of), .. }) if *of == whom)
        };
        for id in self.under_way.iter().copied().filter(parks).collect::<Vec<_>>() {
            self.unpark(id);
        }
    }

    /// Extends the deadline of a shrink whose bytes come, by the time that running uses may need to end.
    pub(crate) fn goes_on(&mut self, id: GangId) {
        let by = self.now + self.settings.drain;
        if let Some(Gang { state: State::Shrinking { by: Some(late), .. }, .. }) = self.gangs.get_mut(&id) {
            *late = by.max(*late);
        }
    }

    /// Returns the earliest deadline among `victims` that have not missed theirs.
    pub(crate) fn in_time(&self, victims: &BTreeSet<GangId>) -> Option<Duration> {
        let by = |id: &GangId| match self.gangs.get(id)?.state {
            State::Parking { by, .. } | State::Shrinking { by: Some(by), .. } => Some(by),
            _ => None,
        };
        victims.iter().filter_map(by).filter(|by| *by > self.now).min()
    }

    pub(crate) fn unpark(&mut self, id: GangId) {
        let Some(gang) = self.gangs.get_mut(&id) else { return };
        gang.is_parked = false;
        self.actions.extend(gang.members.keys().map(|&worker| Action::Unpark { worker }));
        self.set_state(id, State::Resting);
    }

    pub(crate) fn shrink(&mut self, id: GangId, takes: &[(ShareKey, Bytes)]) {
        let (mut waits, mut shrinks, mut leaving, mut dirty) =
            (BTreeSet::new(), Vec::new(), Bytes::ZERO, Bytes::ZERO);
        let Some(gang) = self.gangs.get(&id) else { return };
        for &(key, bytes) in takes {
            let Some(share) = gang.share(key) else { continue };
            let bytes = bytes.min(share.evictable());
            if !bytes.is_zero() {
                waits.insert(key.0);
                let copies = share.holding.dirty.saturating_add(share.holding.unknown).min(bytes);
                shrinks.push((key, bytes, copies));
                leaving = leaving.saturating_add(bytes);
                dirty = dirty.saturating_add(share.holding.dirty.min(bytes));
            }
        }
        if shrinks.is_empty() {
            return self.unpark(id);
        }
        let by = self.now
            + self.late(gang.predictions.shrink(leaving, dirty, self.settings.link))
            + self.settings.drain;
        let mut hosting = Bytes::ZERO;
        for ((worker, gpu), bytes, copies) in shrinks {
            let tier = self.tier(id, (worker, gpu), copies, hosting);
            if tier == Tier::Host {
                hosting = hosting.saturating_add(copies);
            }
            self.actions.push(Action::Shrink { worker, gpu, bytes, tier, by });
        }
        self.set_state(
            id,
            State::Shrinking { waits, since: self.now, by: Some(by), leaving, dirty, hosting },
        );
    }

    /// Returns the destination of evicted copies: an idle GPU with much room, else host memory, else files. `hosting`: copies of the same
    /// command already assigned to host memory.
    fn tier(&mut self, id: GangId, (worker, from): ShareKey, copies: Bytes, hosting: Bytes) -> Tier {
        let wanted: BTreeSet<GpuId> = self
            .under_way
            .iter()
            .filter_map(|id| self.gangs.get(id))
            .filter(|gang| gang.want.is_some() || matches!(gang.state, State::Refilling(_)))
            .flat_map(|gang| gang.shares.iter().map(|share| share.holding.gpu))
            .collect();
        let roomy = |(gpu, held): (&GpuId, &Gpu)| {
            let spare = Bytes::new(held.limit().get() / 4);
            (*gpu != from && !wanted.contains(gpu) && held.free() >= copies.saturating_add(spare))
                .then_some(*gpu)
        };
        if self.settings.peers
            && !copies.is_zero()
            && let Some(peer) = self.gpus.iter().find_map(roomy)
        {
            self.add_share(id, (worker, peer));
            self.grant(id, (worker, peer), copies);
            return Tier::Peer(peer);
        }
        let hosted = self.hosted().saturating_add(self.hosting()).saturating_add(hosting);
        if !copies.is_zero() && hosted.saturating_add(copies) > part(self.settings.host_budget, 90) {
            Tier::File
        } else {
            Tier::Host
        }
    }

    fn hosted(&self) -> Bytes {
        if self.settings.host_budget == Bytes::MAX {
            return Bytes::ZERO;
        }
        self.gangs.values().flat_map(|gang| &gang.shares).map(|share| share.holding.hosted).sum()
    }

    /// Returns the copies in flight to host memory that workers do not report yet; the whole budget while a silent worker may have copies.
    fn hosting(&self) -> Bytes {
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

    /// Moves host memory above the high-water mark to files while no worker waits, starting with the worker idle the longest.
    pub(crate) fn demote(&mut self) {
        let hosted = self.hosted();
        if hosted <= part(self.settings.host_budget, 90) || !self.under_way.is_empty() {
            return;
        }
        let excess = hosted.saturating_sub(part(self.settings.host_budget, 80));
        let asleep = self.gangs.iter().filter(|(_, gang)| {
            !gang.is_resident()
                && gang.away.is_present()
                && gang.distrust.until <= self.now
                && gang.demote_after <= self.now
        });
        let shares =
            asleep.flat_map(|(id, gang)| gang.shares.iter().map(move |share| (gang.idle_since, *id, share)));
        let longest = shares
            .filter(|(.., share)| !share.holding.hosted.is_zero())
            .min_by_key(|(idle, id, _)| (*idle, *id));
        let Some((_, id, share)) = longest else { return };
        let (worker, bytes) = (share.worker, share.holding.hosted.min(excess));
        self.actions.push(Action::Demote { worker, bytes });
        if let Some(gang) = self.gangs.get_mut(&id) {
            gang.demoting = Some(self.now + DEMOTION);
        }
        self.note(id);
    }

    /// Grants room to grow beyond a want's memory, if no other worker waits for free bytes.
    fn grant_growth(&mut self, id: GangId) {
        let Some(gang) = self.gangs.get(&id) else { return };
        for (key, growth) in gang.shares.iter().map(|share| (share.key(), share.growth())).collect::<Vec<_>>()
        {
            let waits = |(other, gang): (&GangId, &Gang)| {
                *other != id && gang.want.is_some() && gang.on(key.1).next().is_some()
            };
            let grows = self.growths.iter().any(|growth| growth.gpu == key.1);
            if !grows && !self.gangs.iter().any(waits) {
                self.grant(id, key, growth.min(self.free_beside_restores(key.1)));
            }
        }
    }

    /// Admits a want whose bytes are all granted.
    pub(crate) fn admit(&mut self, id: GangId) {
        self.grant_growth(id);
        self.call_off(id);
        let Some(gang) = self.gangs.get_mut(&id) else { return };
        gang.want = None;
        if gang.is_resting() {
            gang.is_parked = false;
        }
        for (&worker, member) in &mut gang.members {
            member.wants = false;
            self.actions.push(Action::Admit { worker });
        }
        let (predictions, late, least) = (gang.predictions, self.settings.late, self.settings.least_late);
        if let State::Refilling(refill) = &mut gang.state {
            let predicted = predictions.refill(refill.copied, self.settings.link);
            let start = if refill.starts { self.settings.start } else { Duration::from_secs(1) };
            refill.patience = predicted.saturating_mul(late).max(least) + start;
            refill.by = self.now + refill.patience;
            refill.admitted = Some(self.now);
        }
        self.note(id);
        self.finish_refill(id);
    }

    /// Ends an admitted refill once all its workers have reported.
    pub(crate) fn finish_refill(&mut self, id: GangId) {
        let Some(gang) = self.gangs.get_mut(&id) else { return };
        let State::Refilling(Refill { waits, admitted: Some(admitted), copied, since, starts, .. }) =
            &gang.state
        else {
            return;
        };
        if !waits.is_empty() {
            return;
        }
        let took = self.now.saturating_sub(*since);
        // One that waited for victims says nothing of the link.
        if !starts && admitted == since {
            gang.predictions.saw_refill(*copied, self.settings.link, took);
        }
        let busy = over(*copied, self.settings.link);
        let gpus: BTreeSet<GpuId> = gang
            .shares
            .iter()
            .filter(|share| !share.granted.is_zero())
            .map(|share| share.holding.gpu)
            .collect();
        for gpu in gpus {
            self.duties.entry(gpu).or_default().add(self.now, busy);
        }
        gang.distrust = crate::gang::Distrust::default();
        gang.is_parked = false;
        self.log.ended(id, Outcome::Refilled(took));
        self.rest(id);
    }

    /// Ends a refill, successful or not.
    fn rest(&mut self, id: GangId) {
        if let Some(gang) = self.gangs.get_mut(&id) {
            gang.shares.iter_mut().for_each(|share| (share.owed, share.granted) = (Bytes::ZERO, Bytes::ZERO));
            gang.resident_since = self.now;
        }
        self.set_state(id, State::Resting);
    }

    /// Ends a refill without further bytes: the gang returns its grants, and its want, if still open, waits again.
    pub(crate) fn give_back(&mut self, id: GangId, outcome: Outcome) {
        let Some(gang) = self.gangs.get(&id) else { return };
        let granted = gang.shares.iter().map(|share| (share.key(), share.granted));
        let granted: Vec<_> = granted.filter(|(_, bytes)| !bytes.is_zero()).collect();
        self.call_off(id);
        self.log.ended(id, outcome);
        self.rest(id);
        if !granted.is_empty() {
            self.shrink(id, &granted);
        }
    }

    /// Abandons a refill that missed its deadline.
    pub(crate) fn give_up_on(&mut self, id: GangId) {
        self.log.ended(id, Outcome::Late);
        if let Some(gang) = self.gangs.get_mut(&id) {
            gang.end_starts();
        }
        self.rest(id);
        self.distrust(id, self.settings.distrust);
    }

    pub(crate) fn distrust(&mut self, id: GangId, length: Duration) {
        let Some(gang) = self.gangs.get_mut(&id) else { return };
        gang.distrust.strike(self.now, length);
        let until = gang.distrust.until;
        self.actions.extend(gang.members.keys().map(|&worker| Action::StopCountingOn { worker, until }));
    }

    pub(crate) fn deny(&mut self, id: GangId, why: Denied, retry_after: Option<Duration>) {
        let Some(gang) = self.gangs.get_mut(&id) else { return };
        (gang.want, gang.away.rests_since) = (None, self.now);
        if retry_after.is_none() {
            gang.begin_anew();
        }
        for (&worker, member) in gang.members.iter_mut().filter(|(_, member)| member.wants) {
            member.wants = false;
            self.actions.push(Action::Deny { worker, why, retry_after });
        }
        self.note(id);
    }

    /// Denies a want and logs the decision.
    pub(crate) fn refuse(&mut self, id: GangId, why: Denied, retry_after: Option<Duration>) {
        self.decided(id, Vec::new(), retry_after.unwrap_or_default(), Outcome::Denied(why));
        self.deny(id, why, retry_after);
    }

    /// Logs a decision on a want.
    pub(crate) fn decided(&mut self, id: GangId, taken: Vec<Taken>, predicted: Duration, outcome: Outcome) {
        let at = self.now;
        let Some((gang, want)) = self.gangs.get(&id).and_then(|gang| Some((gang, gang.want?))) else {
            return;
        };
        let needed = gang.shares.iter().map(|share| (share.holding.gpu, share.need())).collect();
        let (class, waited) = (want.class(gang.profile.priority, at), at.saturating_sub(want.since));
        self.log.decided(Decision { at, gang: id, class, waited, needed, taken, predicted, outcome });
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
    pub(crate) fn do_without_room(&mut self, id: GangId, gpu: GpuId) {
        let Some(gang) = self.gangs.get(&id) else { return };
        let mut over = wanted(gang, gpu).saturating_sub(self.reachable(gpu, id));
        // Else it cannot be helped.
        if gang.on(gpu).map(|share| share.holding.room).sum::<Bytes>() < over {
            return;
        }
        for key in gang.on(gpu).map(Share::key).collect::<Vec<_>>() {
            self.change(id, key, |share| {
                let less = share.holding.room.min(over);
                share.holding.room = share.holding.room.saturating_sub(less);
                over = over.saturating_sub(less);
            });
        }
    }

    /// Returns a lower bound of the time until a want is satisfied, including earlier wants.
    pub(crate) fn least_wait(&self, id: GangId) -> Duration {
        let order = |id, gang: &Gang| gang.order(id, self.now, &self.settings);
        let Some((gang, own)) = self.gangs.get(&id).and_then(|gang| Some((gang, order(id, gang)?))) else {
            return Duration::ZERO;
        };
        let gpus = gang.needs_gpus();
        let refill = |gang: &Gang| self.wake(gang);
        let before = self.under_way.iter().filter_map(|other| {
            let gang = self.gangs.get(other)?;
            let first = order(*other, gang)? < own;
            (first && gang.is_resting() && !gang.needs_gpus().is_disjoint(&gpus)).then(|| refill(gang))
        });
        before.sum::<Duration>() + refill(gang)
    }

    /// Returns the predicted time for a gang's return once there is room.
    pub(crate) fn wake(&self, gang: &Gang) -> Duration {
        let restore = if gang.away.is_present() { Duration::ZERO } else { self.settings.restore };
        restore + gang.predictions.refill(gang.copied().0, self.settings.link)
    }

    pub(crate) fn taken(takes: &[Take]) -> Vec<Taken> {
        let taken =
            |take: &Take| Taken { gang: take.gang, gpu: take.share.1, bytes: take.bytes, why: take.why };
        takes.iter().map(taken).collect()
    }
}

fn part(bytes: Bytes, percent: u64) -> Bytes {
    Bytes::new(bytes.get() / 100 * percent)
}
