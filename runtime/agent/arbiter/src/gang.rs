//! Gang of workers: its memory, the operation under way, and its reliability.
//!
//! ```text
//!           ┌──────────── Refilling ◄─── planned ───┐          resident: nothing evicted
//!           ▼                 │ late: returns       │          asleep: something is
//! Silent ► Resting ───────────┴──────────► Shrinking ─► Resting (asleep)
//!           └► Parking ── all parked ──────────▲
//! ```

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use glake_units::Bytes;

use crate::gpu::Gpu;
use crate::interface::RETRY;
use crate::predictions::Predictions;
use crate::{Account, GangId, GpuId, Joined, Profile, Settings, UseState, WorkerId};

/// Minimum free memory beyond the floor before a restore; `MARGIN_PART` sets a larger margin for large floors.
const MARGIN: Bytes = Bytes::mib(64);
const MARGIN_PART: u64 = 20;
/// Upper bound of the interval between attempts to restore a worker, which doubles with each failure.
const SELDOM: Duration = Duration::from_secs(30);

/// Workers that run together or not at all.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Gang {
    pub(crate) ranks: u32,
    pub(crate) profile: Profile,
    pub(crate) members: BTreeMap<WorkerId, Member>,
    pub(crate) shares: Vec<Share>,
    pub(crate) state: State,
    pub(crate) want: Option<Want>,
    /// Whether its uses were parked for others and wait for the next refill.
    pub(crate) is_parked: bool,
    /// Number of parks since the gang was idle.
    pub(crate) parks: u32,
    /// Time of the last refill or join.
    pub(crate) resident_since: Duration,
    pub(crate) idle_since: Duration,
    /// Highest activity among members, and whether a member is silent.
    pub(crate) activity: UseState,
    pub(crate) silent: bool,
    /// Whether a member is still starting.
    pub(crate) starting: bool,
    pub(crate) growing: u32,
    pub(crate) demoting: Option<Duration>,
    pub(crate) demote_after: Duration,
    pub(crate) distrust: Distrust,
    pub(crate) predictions: Predictions,
    pub(crate) contexts: ContextState,
}

/// Process of a gang.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Member {
    pub(crate) activity: UseState,
    pub(crate) idle_since: Duration,
    /// Whether the member has an open want that must be answered.
    pub(crate) wants: bool,
    /// Whether a journal names the member although it has not joined yet.
    pub(crate) silent: bool,
    /// Whether the member still loads its initial memory; it reports the end of the start.
    pub(crate) starting: bool,
}

/// Memory of one process on one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Share {
    pub(crate) worker: WorkerId,
    pub(crate) account: Account,
    /// Lease that the worker's start needs; 0 unless it starts.
    pub(crate) start: Bytes,
    /// Memory beyond floor and lease, as measured.
    pub(crate) overrun: Bytes,
    /// Bytes of the current refill that are not granted yet, and granted bytes.
    pub(crate) owed: Bytes,
    pub(crate) granted: Bytes,
    /// Whether the worker is in the driver's checkpoint, so that the floor does not count.
    pub(crate) is_checkpointed: bool,
}

/// Key of a share within a gang.
pub(crate) type ShareKey = (WorkerId, GpuId);

/// Operation under way with a gang.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// No operation is under way.
    Resting,
    /// Uses are asked to wait at safe points, or to end, so that `takes` can leave for a request of `whom` (the operator if `None`).
    Parking {
        waits: BTreeSet<WorkerId>,
        since: Duration,
        by: Duration,
        takes: Vec<(ShareKey, Bytes)>,
        whom: Option<GangId>,
    },
    /// Bytes are leaving. `by`: deadline; `None` once it is missed, and the arbiter still waits without counting on the gang.
    Shrinking {
        waits: BTreeSet<WorkerId>,
        since: Duration,
        by: Option<Duration>,
        leaving: Bytes,
        /// Memory that has been returned since.
        returned: Bytes,
        dirty: Bytes,
        /// Upper bound of the bytes that go to host memory.
        hosting: Bytes,
    },
    /// Bytes are coming back.
    Refilling(Refill),
}

/// Refill of a planned want. No other refill uses its GPUs until it ends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Refill {
    pub(crate) victims: BTreeSet<GangId>,
    pub(crate) since: Duration,
    /// Deadline of the next bytes, or of the end once all bytes are granted.
    pub(crate) by: Duration,
    /// Longest time until the next bytes.
    pub(crate) patience: Duration,
    /// Workers whose refill is not over.
    pub(crate) waits: BTreeSet<WorkerId>,
    /// Bytes over the busiest link.
    pub(crate) copied: Bytes,
    /// Whether a member starts; the duration then tells nothing about the link.
    pub(crate) starts: bool,
    /// Time at which all bytes were granted.
    pub(crate) admitted: Option<Duration>,
}

/// Number of missed deadlines, and the end of the exclusion from commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Distrust {
    pub(crate) until: Duration,
    strikes: u32,
}

impl Member {
    /// Creates an idle member that joins now.
    pub(crate) fn new(now: Duration) -> Self {
        Member { activity: UseState::Idle, idle_since: now, wants: false, silent: false, starting: false }
    }
}

impl Distrust {
    /// Excludes a gang whose uses were parked in vain for `waited`, for at least that long; doubles each time, up to 8 times.
    pub(crate) fn back_off(&mut self, now: Duration, waited: Duration) {
        self.until = self.until.max(now + waited * (1 << self.strikes.min(3)));
        self.strikes += 1;
    }

    /// Excludes a gang for `length`, which doubles each time, up to 64 times.
    pub(crate) fn strike(&mut self, now: Duration, length: Duration) {
        self.until = self.until.max(now + length * (1 << self.strikes.min(6)));
        self.strikes += 1;
    }
}

impl Share {
    /// Returns the accounted memory: floor, lease and overrun.
    pub(crate) fn footprint(&self) -> Bytes {
        self.floor().saturating_add(self.account.lease).saturating_add(self.overrun)
    }

    /// Returns the accounted floor; 0 if checkpointed.
    pub(crate) fn floor(&self) -> Bytes {
        if self.is_checkpointed { Bytes::ZERO } else { self.account.floor }
    }

    pub(crate) fn evictable(&self) -> Bytes {
        self.account.lease.saturating_sub(self.account.fixed)
    }

    /// Returns the memory that a use or a start needs beyond the lease, so that evicted and resident memory fit together. Reports may be
    /// older than the latest eviction, hence the sum.
    pub(crate) fn need(&self) -> Bytes {
        let missing = self.account.evicted.saturating_add(self.account.room);
        let all = if missing.is_zero() { missing } else { missing.saturating_add(self.account.resident) };
        all.max(self.start).saturating_sub(self.account.lease)
    }

    /// Returns the room to grow that is not leased yet; 0 if no memory must return.
    pub(crate) fn growth(&self) -> Bytes {
        let missing = self.account.evicted.saturating_add(self.account.room);
        if missing.is_zero() {
            return missing;
        }
        let all = missing.saturating_add(self.account.resident).saturating_add(self.account.growth);
        all.saturating_sub(self.account.lease).min(self.account.growth)
    }

    /// Returns the memory that can leave without a copy while no use runs: unused lease and discardable memory.
    pub(crate) fn uncopied(&self) -> Bytes {
        let unused = self.account.lease.saturating_sub(self.account.resident);
        unused.saturating_add(self.account.discardable).min(self.evictable())
    }

    pub(crate) fn key(&self) -> ShareKey {
        (self.worker, self.account.gpu)
    }

    /// Returns the floor that must be free again before the worker is restored.
    pub(crate) fn absent_floor(&self) -> Bytes {
        if self.is_checkpointed { self.account.floor } else { Bytes::ZERO }
    }

    /// Returns the margin beyond the absent floor that must be free until the restore ends.
    pub(crate) fn margin(&self) -> Bytes {
        let floor = self.absent_floor();
        if floor.is_zero() { floor } else { MARGIN.max(Bytes::new(floor.get() / MARGIN_PART)) }
    }
}

impl Gang {
    pub(crate) fn new(joined: &Joined, now: Duration) -> Self {
        Gang {
            ranks: joined.ranks.max(1),
            profile: joined.profile.clone(),
            members: BTreeMap::new(),
            shares: Vec::new(),
            state: State::Resting,
            want: None,
            starting: false,
            is_parked: false,
            parks: 0,
            resident_since: now,
            idle_since: now,
            activity: UseState::Idle,
            silent: false,
            growing: 0,
            demoting: None,
            demote_after: Duration::ZERO,
            distrust: Distrust::default(),
            predictions: Predictions::default(),
            contexts: ContextState::new(now),
        }
    }

    /// Returns whether all ranks have joined.
    pub(crate) fn is_complete(&self) -> bool {
        !self.silent && self.members.len() >= usize::try_from(self.ranks).unwrap_or(usize::MAX)
    }

    /// Returns whether no memory is evicted.
    pub(crate) fn is_resident(&self) -> bool {
        self.shares.iter().all(|share| share.need().is_zero())
    }

    pub(crate) fn is_resting(&self) -> bool {
        matches!(self.state, State::Resting)
    }

    /// Returns the name of the current state, as `glake ps` prints it.
    pub(crate) fn state_name(&self) -> &'static str {
        match self.state {
            _ if self.contexts.presence == Presence::Leaving => "checkpointing",
            _ if self.contexts.presence == Presence::Returning => "restoring",
            _ if self.contexts.is_lost() => "failed",
            State::Resting if !self.contexts.is_present() && self.want.is_none() => "checkpointed",
            _ if self.silent => "silent",
            State::Parking { .. } => "parking",
            State::Shrinking { .. } => "shrinking",
            State::Refilling(_) if self.starting => "starting",
            State::Refilling(_) => "refilling",
            State::Resting if self.want.is_some() => "waiting",
            State::Resting if self.is_resident() => "resident",
            State::Resting => "asleep",
        }
    }

    /// Returns whether an operation with a deadline is under way.
    pub(crate) fn is_counted_on(&self) -> bool {
        !matches!(self.state, State::Resting | State::Shrinking { by: None, .. })
    }

    /// Recomputes the gang's activity and flags after a change of its members.
    pub(crate) fn sum_up(&mut self) {
        let before = self.activity;
        let any = |activity| self.members.values().any(|member| member.activity == activity);
        let most = [UseState::Capturing, UseState::Running, UseState::Busy].into_iter().find(|one| any(*one));
        self.activity = most.unwrap_or_default();
        if self.activity == UseState::Idle {
            let last = self.members.values().map(|member| member.idle_since).max();
            self.idle_since = last.unwrap_or(self.idle_since);
            // Parked uses, and uses right after a refill, are idle too.
            if before != UseState::Idle && self.is_resting() && !self.is_parked {
                self.parks = 0;
            }
        }
        self.silent = self.members.values().any(|member| member.silent);
        self.starting = self.members.values().any(|member| member.starting);
    }

    /// Resets the park state: uses no longer wait, although their memory did not return.
    pub(crate) fn begin_anew(&mut self) {
        (self.is_parked, self.parks) = (false, 0);
    }

    /// Ends the starts of all members.
    pub(crate) fn end_starts(&mut self) {
        self.members
            .keys()
            .copied()
            .collect::<Vec<_>>()
            .into_iter()
            .for_each(|worker| self.end_start(worker));
    }

    /// Ends the start of a member; from now on its reported accounts define its need.
    pub(crate) fn end_start(&mut self, worker: WorkerId) {
        if let Some(member) = self.members.get_mut(&worker) {
            member.starting = false;
        }
        for share in self.shares.iter_mut().filter(|share| share.worker == worker) {
            share.start = Bytes::ZERO;
        }
        self.starting = self.members.values().any(|member| member.starting);
    }

    /// Returns the place of the gang among wants, if it has one.
    pub(crate) fn order(&self, id: GangId, now: Duration, settings: &Settings) -> Option<Order> {
        let want = self.want?;
        let is_behind = self.is_parked && now < want.since + settings.resume_after;
        Some((Reverse(want.class(self.profile.priority, now)), is_behind, want.since, id))
    }

    /// Returns whether the passage of time can change the gang's state.
    pub(crate) fn is_under_way(&self) -> bool {
        self.want.is_some() || self.demoting.is_some() || !self.is_resting()
    }

    /// Returns the host memory that the gang's copies occupy.
    pub(crate) fn hosted(&self) -> Bytes {
        self.shares.iter().map(|share| share.account.hosted).sum()
    }

    pub(crate) fn on(&self, gpu: GpuId) -> impl Iterator<Item = &Share> {
        self.shares.iter().filter(move |share| share.account.gpu == gpu)
    }

    pub(crate) fn share(&self, key: ShareKey) -> Option<&Share> {
        self.shares.iter().find(|share| share.key() == key)
    }

    /// Returns the GPUs on which the gang needs memory; all of its GPUs if it starts or is absent.
    pub(crate) fn needs_gpus(&self) -> BTreeSet<GpuId> {
        let all = self.starting || !self.contexts.is_present();
        let needs = self.shares.iter().filter(|share| all || !share.need().is_zero());
        needs.map(|share| share.account.gpu).collect()
    }

    /// Returns the bytes over the busiest link for a return of the evicted memory, and of all memory.
    pub(crate) fn copied(&self) -> (Bytes, Bytes) {
        let evicted = self.shares.iter().map(|share| share.account.evicted).max().unwrap_or_default();
        let whole = |share: &Share| {
            share.evictable().saturating_sub(share.account.discardable).saturating_add(share.account.evicted)
        };
        (evicted, self.shares.iter().map(whole).max().unwrap_or_default())
    }

    /// Returns the next deadline of the operation under way or of the want.
    pub(crate) fn late_at(&self) -> Option<Duration> {
        let state = match &self.state {
            State::Resting => None,
            State::Parking { by, .. } => Some(*by),
            State::Shrinking { by, .. } => *by,
            State::Refilling(refill) => Some(refill.by),
        };
        let want = self.want.filter(|_| !matches!(self.state, State::Refilling(_))).map(|want| want.deadline);
        [state, want, self.demoting].into_iter().flatten().min()
    }

    /// Returns the memory of a GPU that must be free to restore the gang; 0 if it is present.
    pub(crate) fn room_to_restore(&self, gpu: GpuId) -> Bytes {
        self.on(gpu).map(|share| share.absent_floor().saturating_add(share.margin())).sum()
    }

    /// Returns the memory of a GPU that the gang's want needs, including absent floors.
    pub(crate) fn wanted(&self, gpu: GpuId) -> Bytes {
        let needs: Bytes = self.on(gpu).map(|share| share.need().saturating_add(share.absent_floor())).sum();
        needs.max(self.room_to_restore(gpu))
    }

    /// Returns the missing memory of a GPU for the gang's want.
    pub(crate) fn short(&self, gpu: GpuId, held: Option<&Gpu>) -> Bytes {
        let excess = held.map_or(Bytes::ZERO, Gpu::excess);
        self.wanted(gpu).saturating_add(excess).saturating_sub(held.map_or(Bytes::ZERO, Gpu::free))
    }

    /// Returns whether the gang must return although none of its uses waits for evicted memory.
    pub(crate) fn is_to_return(&self) -> bool {
        self.contexts.returns() || self.growing > 0
    }

    /// Returns the time at which the gang may be checkpointed; `None` while its state rules that out.
    pub(crate) fn leaves_at(&self, after: Duration) -> Option<Duration> {
        let holds_nothing = |share: &Share| {
            let held = &share.account;
            share.overrun.is_zero()
                && [held.lease, held.resident, held.fixed].iter().all(|bytes| bytes.is_zero())
        };
        let is_asleep = self.is_resting() && self.want.is_none() && !self.is_resident();
        let is_alone = self.ranks == 1 && self.members.len() == 1 && !self.silent && !self.starting;
        let is_quiet = self.activity == UseState::Idle && self.growing == 0 && self.demoting.is_none();
        let leaves = self.contexts.is_present()
            && is_asleep
            && is_alone
            && is_quiet
            && !self.shares.is_empty()
            && self.shares.iter().all(holds_nothing);
        let at = (self.contexts.rests_since + after).max(self.contexts.stays_until).max(self.distrust.until);
        leaves.then_some(at)
    }
}

/// Location of a gang's contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Presence {
    /// The contexts are on their GPUs.
    #[default]
    Present,
    /// A checkpoint is under way.
    Leaving,
    /// In the driver's checkpoint. `returns`: restore it even without a want.
    Checkpointed { returns: bool },
    /// An earlier agent's checkpoint or restore was interrupted, so the driver must be asked.
    Unknown,
    /// A restore is under way.
    Returning,
    /// In the driver's checkpoint without a way to restore it.
    Lost,
}

/// Checkpoint state of a gang.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct ContextState {
    pub(crate) presence: Presence,
    /// Worker whose contexts left; the gang may get another rank meanwhile.
    pub(crate) worker: Option<WorkerId>,
    /// Time of the last change of `presence`.
    pub(crate) since: Duration,
    /// Time since which the gang rests.
    pub(crate) rests_since: Duration,
    /// Earliest time of the next checkpoint after a failed one.
    pub(crate) stays_until: Duration,
    pub(crate) refusals: u32,
    /// Earliest time of the next restore after a failed one.
    pub(crate) restore_after: Duration,
    pub(crate) misses: u32,
}

impl ContextState {
    pub(crate) fn new(now: Duration) -> Self {
        ContextState { rests_since: now, ..ContextState::default() }
    }

    pub(crate) fn is_present(self) -> bool {
        self.presence == Presence::Present
    }

    /// Returns whether the driver has checkpointed the worker completely, so that its floors do not count.
    pub(crate) fn is_checkpointed(self) -> bool {
        matches!(self.presence, Presence::Checkpointed { .. } | Presence::Lost)
    }

    /// Returns whether the driver can never restore the worker.
    pub(crate) fn is_lost(self) -> bool {
        self.presence == Presence::Lost
    }

    /// Returns whether a checkpoint or a restore is under way.
    pub(crate) fn is_moving(self) -> bool {
        matches!(self.presence, Presence::Leaving | Presence::Returning)
    }

    /// Records a failed checkpoint and doubles the time until the next attempt.
    pub(crate) fn refused(&mut self, now: Duration, length: Duration) {
        self.stays_until = now + length * (1 << self.refusals.min(6));
        self.refusals += 1;
    }

    /// Records a failed restore and doubles the time until the next attempt.
    pub(crate) fn missed(&mut self, now: Duration) {
        self.restore_after = now + SELDOM.min(RETRY * (1 << self.misses.min(6)));
        self.misses += 1;
    }

    /// Returns whether the floor of this worker does not count at the moment.
    pub(crate) fn is_out(self, worker: WorkerId) -> bool {
        self.is_checkpointed() && self.worker == Some(worker)
    }

    /// Returns whether the gang must return even without a want.
    pub(crate) fn returns(self) -> bool {
        matches!(self.presence, Presence::Checkpointed { returns: true } | Presence::Unknown)
    }
}

/// Order of wants, the smallest first: highest class, then gangs that were not parked or waited long, then age.
pub(crate) type Order = (Reverse<i64>, bool, Duration, GangId);

/// Want of a gang whose uses wait for its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Want {
    pub(crate) since: Duration,
    pub(crate) deadline: Duration,
}

impl Want {
    /// Returns the class: the worker's priority plus one per quarter of the deadline waited (at most a minute), which prevents starvation.
    pub(crate) fn class(&self, priority: i32, now: Duration) -> i64 {
        let quarter = (self.deadline - self.since).min(Duration::from_secs(60)).as_millis().max(4) / 4;
        let waited = now.saturating_sub(self.since).as_millis();
        i64::from(priority) + i64::try_from(waited / quarter).unwrap_or(i64::MAX / 2)
    }

    pub(crate) fn new(now: Duration, deadline: Option<Duration>, settings: &Settings) -> Self {
        Want {
            since: now,
            deadline: now + deadline.unwrap_or(settings.longest_wait).min(settings.longest_wait),
        }
    }
}

/// Growth request of a use, with its own timeout.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Growth {
    pub(crate) gang: GangId,
    pub(crate) worker: WorkerId,
    pub(crate) gpu: GpuId,
    pub(crate) bytes: Bytes,
    pub(crate) since: Duration,
    /// End of the request's own time.
    pub(crate) by: Duration,
    /// Gangs that were asked for the bytes; none, where its gang is absent.
    pub(crate) victims: BTreeSet<GangId>,
    /// Time after which other gangs are asked too.
    pub(crate) late_at: Duration,
    /// Longest time between two parts of the bytes.
    pub(crate) patience: Duration,
}
