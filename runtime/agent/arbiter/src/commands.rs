//! Commands to workers: grants, parks, shrinks and refusals, and the end of a refill.
//!
//! Invariants: leases rise only by [`Arbiter::grant`]; each command has a deadline.

use std::collections::BTreeSet;
use std::time::Duration;

use glake_units::Bytes;

use crate::arbiter::Arbiter;
use crate::gang::{Distrust, Gang, Refill, Share, ShareKey, State};
use crate::gpu::Gpu;
use crate::log::{Decision, Outcome, Victim};
use crate::overview::RequestKind;
use crate::predictions::over;
use crate::victims::Take;
use crate::{Action, Denied, GangId, GpuId, Tier, UseState, WorkerId};

/// Granularity in which a victim reports returned memory.
const CREDIT: Bytes = Bytes::mib(512);
/// Timeout of moving copies from host memory to files.
pub(crate) const DEMOTION: Duration = Duration::from_secs(30);

/// Victims of a request that got a command.
#[derive(Debug)]
pub(crate) struct Demand {
    pub(crate) victims: BTreeSet<GangId>,
    /// Predicted time until the first bytes come.
    pub(crate) first: Duration,
    /// Time after which further victims are asked for the first bytes.
    pub(crate) patience: Duration,
}

impl Arbiter {
    /// Grants free memory up to `bytes` to a lease and returns the amount.
    pub(crate) fn grant(&mut self, id: GangId, (worker, gpu): ShareKey, bytes: Bytes) -> Bytes {
        let bytes = bytes.min(self.ledger.free(gpu));
        if !bytes.is_zero() {
            self.ledger.change(id, (worker, gpu), |share| {
                share.account.lease = share.account.lease.saturating_add(bytes);
            });
            self.actions.push(Action::Grant { worker, gpu, bytes });
        }
        bytes
    }

    /// Sends commands to the chosen victims of a request of `whom`.
    pub(crate) fn command_victims(&mut self, takes: &[Take], whom: Option<GangId>) -> Demand {
        let victims: BTreeSet<GangId> = takes.iter().map(|take| take.gang).collect();
        let (mut first, mut patience) = (Duration::ZERO, self.ledger.settings.least_late);
        for &victim in &victims {
            let takes: Vec<_> = takes
                .iter()
                .filter(|take| take.gang == victim)
                .map(|take| (take.share, take.bytes))
                .collect();
            let Some(gang) = self.ledger.gangs.get(&victim) else { continue };
            let dirty = takes.iter().filter_map(|(key, _)| gang.share(*key)).map(|share| share.account.dirty);
            let credit = gang.predictions.shrink(
                CREDIT,
                dirty.max().unwrap_or_default().min(CREDIT),
                self.ledger.settings.link,
            );
            let park = if gang.activity == UseState::Idle { Duration::ZERO } else { gang.predictions.park() };
            let least =
                if gang.predictions.has_shrunk() { Duration::ZERO } else { self.ledger.settings.first_late };
            first = first.max(credit + park);
            patience = patience.max(self.ledger.timeout(first)).max(least);
            if gang.activity == UseState::Idle {
                self.shrink(victim, &takes);
            } else {
                self.park(victim, takes, whom);
            }
        }
        Demand { victims, first, patience }
    }

    /// Parks the uses of a gang at safe points. Uses without safe points run to their end while new ones wait, at most as long as the
    /// gang's uses may pause.
    pub(crate) fn park(&mut self, id: GangId, takes: Vec<(ShareKey, Bytes)>, whom: Option<GangId>) {
        let Some(gang) = self.ledger.gangs.get(&id) else { return };
        let longest = match gang.activity {
            UseState::Running => {
                gang.profile.max_pause.unwrap_or(Duration::MAX).min(self.ledger.settings.drain)
            }
            _ => self
                .ledger
                .timeout(gang.predictions.park())
                .max(self.ledger.settings.first_late)
                .min(self.ledger.settings.drain),
        };
        self.park_within(id, takes, whom, longest);
    }

    /// Parks the uses of a gang, which have until `longest` from now.
    pub(crate) fn park_within(
        &mut self,
        id: GangId,
        takes: Vec<(ShareKey, Bytes)>,
        whom: Option<GangId>,
        longest: Duration,
    ) {
        let Some(gang) = self.ledger.gangs.get(&id) else { return };
        let by = self.ledger.now + longest.max(self.ledger.settings.least_late);
        let waits: BTreeSet<WorkerId> = gang.members.keys().copied().collect();
        self.actions.extend(waits.iter().map(|&worker| Action::Park { worker, by }));
        self.ledger.set_state(id, State::Parking { waits, since: self.ledger.now, by, takes, whom });
    }

    pub(crate) fn unpark(&mut self, id: GangId) {
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        gang.is_parked = false;
        self.actions.extend(gang.members.keys().map(|&worker| Action::Unpark { worker }));
        self.ledger.set_state(id, State::Resting);
    }

    /// Cancels parks for a request of `whom` that has ended or gets its bytes elsewhere.
    pub(crate) fn cancel_parks(&mut self, whom: GangId) {
        let parks = |id: &GangId| {
            let state = self.ledger.gangs.get(id).map(|gang| &gang.state);
            matches!(state, Some(State::Parking { whom: Some(of), .. }) if *of == whom)
        };
        for id in self.ledger.under_way.iter().copied().filter(parks).collect::<Vec<_>>() {
            self.unpark(id);
        }
    }

    pub(crate) fn shrink(&mut self, id: GangId, takes: &[(ShareKey, Bytes)]) {
        let (mut waits, mut shrinks, mut leaving, mut dirty) =
            (BTreeSet::new(), Vec::new(), Bytes::ZERO, Bytes::ZERO);
        let Some(gang) = self.ledger.gangs.get(&id) else { return };
        for &(key, bytes) in takes {
            let Some(share) = gang.share(key) else { continue };
            let bytes = bytes.min(share.evictable());
            if !bytes.is_zero() {
                waits.insert(key.0);
                let copies = share.account.dirty.saturating_add(share.account.unknown).min(bytes);
                shrinks.push((key, bytes, copies));
                leaving = leaving.saturating_add(bytes);
                dirty = dirty.saturating_add(share.account.dirty.min(bytes));
            }
        }
        if shrinks.is_empty() {
            return self.unpark(id);
        }
        let by = self.ledger.now
            + self.ledger.timeout(gang.predictions.shrink(leaving, dirty, self.ledger.settings.link))
            + self.ledger.settings.drain;
        let mut hosting = Bytes::ZERO;
        for ((worker, gpu), bytes, copies) in shrinks {
            let tier = self.tier(id, (worker, gpu), copies, hosting);
            if tier == Tier::Host {
                hosting = hosting.saturating_add(copies);
            }
            self.actions.push(Action::Shrink { worker, gpu, bytes, tier, by });
        }
        self.ledger.set_state(
            id,
            State::Shrinking {
                waits,
                since: self.ledger.now,
                by: Some(by),
                leaving,
                returned: Bytes::ZERO,
                dirty,
                hosting,
            },
        );
    }

    /// Returns the destination of evicted copies: an idle GPU with much room, else host memory, else files. `hosting`: copies of the same
    /// command already assigned to host memory.
    pub(crate) fn tier(
        &mut self,
        id: GangId,
        (worker, from): ShareKey,
        copies: Bytes,
        hosting: Bytes,
    ) -> Tier {
        let wanted: BTreeSet<GpuId> = self
            .ledger
            .under_way
            .iter()
            .filter_map(|id| self.ledger.gangs.get(id))
            .filter(|gang| gang.want.is_some() || matches!(gang.state, State::Refilling(_)))
            .flat_map(|gang| gang.shares.iter().map(|share| share.account.gpu))
            .collect();
        let roomy = |(gpu, held): (&GpuId, &Gpu)| {
            let spare = Bytes::new(held.limit().get() / 4);
            (*gpu != from && !wanted.contains(gpu) && held.free() >= copies.saturating_add(spare))
                .then_some(*gpu)
        };
        if self.ledger.settings.peers
            && !copies.is_zero()
            && let Some(peer) = self.ledger.gpus.iter().find_map(roomy)
        {
            self.ledger.add_share(id, (worker, peer));
            self.grant(id, (worker, peer), copies);
            return Tier::Peer(peer);
        }
        let hosted = self.ledger.hosted().saturating_add(self.ledger.hosting()).saturating_add(hosting);
        if !copies.is_zero() && hosted.saturating_add(copies) > part(self.ledger.settings.host_budget, 90) {
            Tier::File
        } else {
            Tier::Host
        }
    }

    /// Moves host memory above the high-water mark to files while no worker waits, starting with the worker idle the longest.
    pub(crate) fn demote(&mut self) {
        let hosted = self.ledger.hosted();
        if hosted <= part(self.ledger.settings.host_budget, 90) || !self.ledger.under_way.is_empty() {
            return;
        }
        let excess = hosted.saturating_sub(part(self.ledger.settings.host_budget, 80));
        let asleep = self.ledger.gangs.iter().filter(|(_, gang)| {
            !gang.is_resident()
                && gang.contexts.is_present()
                && gang.distrust.until <= self.ledger.now
                && gang.demote_after <= self.ledger.now
        });
        let shares =
            asleep.flat_map(|(id, gang)| gang.shares.iter().map(move |share| (gang.idle_since, *id, share)));
        let longest = shares
            .filter(|(.., share)| !share.account.hosted.is_zero())
            .min_by_key(|(idle, id, _)| (*idle, *id));
        let Some((_, id, share)) = longest else { return };
        let (worker, bytes) = (share.worker, share.account.hosted.min(excess));
        self.actions.push(Action::Demote { worker, bytes });
        if let Some(gang) = self.ledger.gangs.get_mut(&id) {
            gang.demoting = Some(self.ledger.now + DEMOTION);
        }
        self.ledger.update_under_way(id);
    }

    /// Raises the bytes owed to a refill whose worker needs more than planned, for example after its own shrink.
    pub(crate) fn owe_growth_of_need(&mut self, worker: WorkerId) {
        let now = self.ledger.now;
        let Some((id, gang)) =
            self.ledger.gang_of.get(&worker).and_then(|id| Some((*id, self.ledger.gangs.get(id)?)))
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
            .map(|share| share.account.gpu)
            .collect();
        for gpu in gpus {
            self.ledger.trim_room(id, gpu);
        }
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        let State::Refilling(refill) = &mut gang.state else { return };
        let mut more = Vec::new();
        let is_planned = |share: &Share| !share.owed.saturating_add(share.granted).is_zero();
        for share in gang.shares.iter_mut().filter(|share| share.worker == worker && is_planned(share)) {
            let grown = share.need().saturating_sub(share.owed);
            share.owed = share.owed.saturating_add(grown);
            more.push((share.account.gpu, grown));
        }
        // Before the admission, late bytes are requested from other victims anyway.
        if refill.admitted.is_none() {
            return;
        }
        let class = Some(i64::from(gang.profile.priority));
        for (gpu, grown) in more.into_iter().filter(|(_, grown)| !grown.is_zero()) {
            let found = self.ledger.choose(gpu, grown.saturating_sub(self.ledger.free(gpu)), class, Some(id));
            let asked = self.command_victims(&found.takes, Some(id));
            if let Some(Gang { state: State::Refilling(refill), .. }) = self.ledger.gangs.get_mut(&id) {
                refill.victims.extend(asked.victims);
                refill.by = refill.by.max(now + asked.patience);
            }
        }
    }

    /// Admits a want whose bytes are all granted.
    pub(crate) fn admit(&mut self, id: GangId) {
        // Room to grow beyond the want's memory, if no other worker waits for free bytes.
        let Some(gang) = self.ledger.gangs.get(&id) else { return };
        for (key, growth) in gang.shares.iter().map(|share| (share.key(), share.growth())).collect::<Vec<_>>()
        {
            let waits = |(other, gang): (&GangId, &Gang)| {
                *other != id && gang.want.is_some() && gang.on(key.1).next().is_some()
            };
            let grows = self.ledger.growths.iter().any(|growth| growth.gpu == key.1);
            if !grows && !self.ledger.gangs.iter().any(waits) {
                self.grant(id, key, growth.min(self.ledger.free_besides_restores(key.1)));
            }
        }
        self.cancel_parks(id);
        let now = self.ledger.now;
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        if let Some(want) = gang.want.take() {
            self.log.timings.waited(RequestKind::Refill, true, now.saturating_sub(want.since));
        }
        if gang.is_resting() {
            gang.is_parked = false;
        }
        for (&worker, member) in &mut gang.members {
            member.wants = false;
            self.actions.push(Action::Admit { worker });
        }
        let (predictions, late, least) =
            (gang.predictions, self.ledger.settings.late, self.ledger.settings.least_late);
        if let State::Refilling(refill) = &mut gang.state {
            let predicted = predictions.refill(refill.copied, self.ledger.settings.link);
            let start = if refill.starts { self.ledger.settings.start } else { Duration::from_secs(1) };
            refill.patience = predicted.saturating_mul(late).max(least) + start;
            refill.by = self.ledger.now + refill.patience;
            refill.admitted = Some(self.ledger.now);
        }
        self.ledger.update_under_way(id);
        self.finish_refill(id);
    }

    /// Ends an admitted refill once all its workers have reported.
    pub(crate) fn finish_refill(&mut self, id: GangId) {
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        let State::Refilling(Refill { waits, admitted: Some(admitted), copied, since, starts, .. }) =
            &gang.state
        else {
            return;
        };
        if !waits.is_empty() {
            return;
        }
        let took = self.ledger.now.saturating_sub(*since);
        // A refill that waited for victims tells nothing about the link.
        if !starts && admitted == since {
            gang.predictions.saw_refill(*copied, self.ledger.settings.link, took);
        }
        self.log.timings.switched(if *starts { "start" } else { "refill" }, took);
        let busy = over(*copied, self.ledger.settings.link);
        let gpus: BTreeSet<GpuId> = gang
            .shares
            .iter()
            .filter(|share| !share.granted.is_zero())
            .map(|share| share.account.gpu)
            .collect();
        for gpu in gpus {
            self.ledger.duties.entry(gpu).or_default().add(self.ledger.now, busy);
        }
        gang.distrust = Distrust::default();
        gang.is_parked = false;
        self.log.ended(id, Outcome::Refilled(took));
        self.ledger.end_refill(id);
    }

    /// Ends a refill without further bytes: the gang returns its grants, and its want, if still open, waits again.
    pub(crate) fn return_grants(&mut self, id: GangId, outcome: Outcome) {
        let Some(gang) = self.ledger.gangs.get(&id) else { return };
        let granted = gang.shares.iter().map(|share| (share.key(), share.granted));
        let granted: Vec<_> = granted.filter(|(_, bytes)| !bytes.is_zero()).collect();
        self.cancel_parks(id);
        self.log.ended(id, outcome);
        self.ledger.end_refill(id);
        if !granted.is_empty() {
            self.shrink(id, &granted);
        }
    }

    /// Abandons a refill that missed its deadline.
    pub(crate) fn abandon_refill(&mut self, id: GangId) {
        self.log.ended(id, Outcome::Late);
        if let Some(gang) = self.ledger.gangs.get_mut(&id) {
            gang.end_starts();
        }
        self.ledger.end_refill(id);
        self.distrust(id, self.ledger.settings.distrust);
    }

    pub(crate) fn distrust(&mut self, id: GangId, length: Duration) {
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        gang.distrust.strike(self.ledger.now, length);
        let until = gang.distrust.until;
        self.actions.extend(gang.members.keys().map(|&worker| Action::StopCountingOn { worker, until }));
    }

    pub(crate) fn deny(&mut self, id: GangId, why: Denied, retry_after: Option<Duration>) {
        let now = self.ledger.now;
        let Some(gang) = self.ledger.gangs.get_mut(&id) else { return };
        if let Some(want) = gang.want.take() {
            self.log.timings.waited(RequestKind::Refill, false, now.saturating_sub(want.since));
        }
        gang.contexts.rests_since = now;
        if retry_after.is_none() {
            gang.begin_anew();
        }
        for (&worker, member) in gang.members.iter_mut().filter(|(_, member)| member.wants) {
            member.wants = false;
            self.actions.push(Action::Deny { worker, why, retry_after });
        }
        self.ledger.update_under_way(id);
    }

    /// Denies a want and logs the decision.
    pub(crate) fn deny_and_log(&mut self, id: GangId, why: Denied, retry_after: Option<Duration>) {
        self.log_decision(id, Vec::new(), retry_after.unwrap_or_default(), Outcome::Denied(why));
        self.deny(id, why, retry_after);
    }

    /// Logs a decision on a want.
    pub(crate) fn log_decision(
        &mut self,
        id: GangId,
        taken: Vec<Victim>,
        predicted: Duration,
        outcome: Outcome,
    ) {
        let at = self.ledger.now;
        let Some((gang, want)) = self.ledger.gangs.get(&id).and_then(|gang| Some((gang, gang.want?))) else {
            return;
        };
        let needed = gang.shares.iter().map(|share| (share.account.gpu, share.need())).collect();
        let (class, waited) = (want.class(gang.profile.priority, at), at.saturating_sub(want.since));
        self.log.decided(Decision { at, gang: id, class, waited, needed, taken, predicted, outcome });
    }
}

/// Returns the part of `bytes` in percent.
fn part(bytes: Bytes, percent: u64) -> Bytes {
    Bytes::new(bytes.get() / 100 * percent)
}

/// Returns the victims of a decision, for the log.
pub(crate) fn victims_of(takes: &[Take]) -> Vec<Victim> {
    let victim =
        |take: &Take| Victim { gang: take.gang, gpu: take.share.1, bytes: take.bytes, why: take.why };
    takes.iter().map(victim).collect()
}
