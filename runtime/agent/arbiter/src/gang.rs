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

use crate::away::Away;
use crate::predictions::Predictions;
use crate::want::{Order, Want};
use crate::{Activity, GangId, GpuId, Holding, Joined, Profile, Settings, WorkerId};

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
    pub(crate) activity: Activity,
    pub(crate) silent: bool,
    /// Whether a member is still starting.
    pub(crate) starting: bool,
    pub(crate) growing: u32,
    pub(crate) demoting: Option<Duration>,
    pub(crate) demote_after: Duration,
    pub(crate) distrust: Distrust,
    pub(crate) predictions: Predictions,
    pub(crate) away: Away,
}

/// Process of a gang.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Member {
    pub(crate) activity: Activity,
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
    pub(crate) holding: Holding,
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
        Member { activity: Activity::Idle, idle_since: now, wants: false, silent: false, starting: false }
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
        self.floor().saturating_add(self.holding.lease).saturating_add(self.overrun)
    }

    /// Returns the accounted floor; 0 if checkpointed.
    pub(crate) fn floor(&self) -> Bytes {
        if self.is_checkpointed { Bytes::ZERO } else { self.holding.floor }
    }

    pub(crate) fn evictable(&self) -> Bytes {
        self.holding.lease.saturating_sub(self.holding.fixed)
    }

    /// Returns the memory that a use or a start needs beyond the lease, so that evicted and resident memory fit together. Reports may be
    /// older than the latest eviction, hence the sum.
    pub(crate) fn need(&self) -> Bytes {
        let missing = self.holding.evicted.saturating_add(self.holding.room);
        let all = if missing.is_zero() { missing } else { missing.saturating_add(self.holding.resident) };
        all.max(self.start).saturating_sub(self.holding.lease)
    }

    /// Returns the room to grow that is not leased yet; 0 if no memory must return.
    pub(crate) fn growth(&self) -> Bytes {
        let missing = self.holding.evicted.saturating_add(self.holding.room);
        if missing.is_zero() {
            return missing;
        }
        let all = missing.saturating_add(self.holding.resident).saturating_add(self.holding.growth);
        all.saturating_sub(self.holding.lease).min(self.holding.growth)
    }

    /// Returns the memory that can leave without a copy while no use runs: unused lease and discardable memory.
    pub(crate) fn uncopied(&self) -> Bytes {
        let unused = self.holding.lease.saturating_sub(self.holding.resident);
        unused.saturating_add(self.holding.discardable).min(self.evictable())
    }

    pub(crate) fn key(&self) -> ShareKey {
        (self.worker, self.holding.gpu)
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
            activity: Activity::Idle,
            silent: false,
            growing: 0,
            demoting: None,
            demote_after: Duration::ZERO,
            distrust: Distrust::default(),
            predictions: Predictions::default(),
            away: Away::new(now),
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

    /// Returns whether an operation with a deadline is under way.
    pub(crate) fn is_counted_on(&self) -> bool {
        !matches!(self.state, State::Resting | State::Shrinking { by: None, .. })
    }

    /// Recomputes the gang's activity and flags after a change of its members.
    pub(crate) fn sum_up(&mut self) {
        let before = self.activity;
        let any = |activity| self.members.values().any(|member| member.activity == activity);
        let most = [Activity::Capturing, Activity::Running, Activity::Busy].into_iter().find(|one| any(*one));
        self.activity = most.unwrap_or_default();
        if self.activity == Activity::Idle {
            let last = self.members.values().map(|member| member.idle_since).max();
            self.idle_since = last.unwrap_or(self.idle_since);
            // Parked uses are idle too, and so are those of a worker that was refilled a moment ago.
            if before != Activity::Idle && self.is_resting() && !self.is_parked {
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

    /// Ends the start of a member; from now on its reported holdings define its need.
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
        self.shares.iter().map(|share| share.holding.hosted).sum()
    }

    pub(crate) fn evictable_on(&self, gpu: GpuId) -> Bytes {
        self.on(gpu).map(Share::evictable).sum()
    }

    pub(crate) fn on(&self, gpu: GpuId) -> impl Iterator<Item = &Share> {
        self.shares.iter().filter(move |share| share.holding.gpu == gpu)
    }

    pub(crate) fn share(&self, key: ShareKey) -> Option<&Share> {
        self.shares.iter().find(|share| share.key() == key)
    }

    /// Returns the GPUs on which the gang needs memory; all of its GPUs if it starts or is absent.
    pub(crate) fn needs_gpus(&self) -> BTreeSet<GpuId> {
        let all = self.starting || !self.away.is_present();
        let needs = self.shares.iter().filter(|share| all || !share.need().is_zero());
        needs.map(|share| share.holding.gpu).collect()
    }

    /// Returns the bytes over the busiest link for a return of the evicted memory, and of all memory.
    pub(crate) fn copied(&self) -> (Bytes, Bytes) {
        let evicted = self.shares.iter().map(|share| share.holding.evicted).max().unwrap_or_default();
        let whole = |share: &Share| {
            share.evictable().saturating_sub(share.holding.discardable).saturating_add(share.holding.evicted)
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
}
