//! A gang: what it holds, what is under way with it, and whether it can be counted on.
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

/// Workers that run or do not run as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Gang {
    pub(crate) ranks: u32,
    pub(crate) profile: Profile,
    pub(crate) members: BTreeMap<WorkerId, Member>,
    pub(crate) shares: Vec<Share>,
    pub(crate) state: State,
    pub(crate) want: Option<Want>,
    /// Its uses were parked for others, and wait for its next refill.
    pub(crate) is_parked: bool,
    /// How often they were, since it was idle.
    pub(crate) parks: u32,
    /// When it last was refilled, or joined.
    pub(crate) resident_since: Duration,
    pub(crate) idle_since: Duration,
    /// The most that a member does, and whether one is silent.
    pub(crate) activity: Activity,
    pub(crate) silent: bool,
    /// A member's start is not over.
    pub(crate) starting: bool,
    pub(crate) growing: u32,
    pub(crate) demoting: Option<Duration>,
    pub(crate) demote_after: Duration,
    pub(crate) distrust: Distrust,
    pub(crate) predictions: Predictions,
    pub(crate) away: Away,
}

/// A process of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Member {
    pub(crate) activity: Activity,
    pub(crate) idle_since: Duration,
    /// It has a want open, and is to be answered.
    pub(crate) wants: bool,
    /// A journal names it, and it has not joined.
    pub(crate) silent: bool,
    /// It loads what it will hold: it says when that is over.
    pub(crate) starting: bool,
}

/// What one process has of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Share {
    pub(crate) worker: WorkerId,
    pub(crate) holding: Holding,
    /// Lease that its worker's start needs; 0, unless it starts.
    pub(crate) start: Bytes,
    /// What the meter saw beyond floor and lease.
    pub(crate) overrun: Bytes,
    /// By the refill that is under way: what it has not been granted, and what it has.
    pub(crate) owed: Bytes,
    pub(crate) granted: Bytes,
    /// Its worker is in the driver's checkpoint: the floor does not count.
    pub(crate) is_checkpointed: bool,
}

/// A share of a gang.
pub(crate) type ShareKey = (WorkerId, GpuId);

/// What is under way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum State {
    /// Nothing.
    Resting,
    /// Its uses are to wait at safe points, or to end, so that `takes` can leave for a request of `whom`; the operator's
    /// without one.
    Parking {
        waits: BTreeSet<WorkerId>,
        since: Duration,
        by: Duration,
        takes: Vec<(ShareKey, Bytes)>,
        whom: Option<GangId>,
    },
    /// Bytes leave. Without a time: it was late, and is waited for without counting on it.
    Shrinking {
        waits: BTreeSet<WorkerId>,
        since: Duration,
        by: Option<Duration>,
        leaving: Bytes,
        dirty: Bytes,
        /// The most that goes to host memory.
        hosting: Bytes,
    },
    /// Bytes come.
    Refilling(Refill),
}

/// A want that was planned. Its GPUs are its own until it is over.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Refill {
    pub(crate) victims: BTreeSet<GangId>,
    pub(crate) since: Duration,
    /// When the next bytes are late; when all are granted, the end.
    pub(crate) by: Duration,
    /// How long the next bytes may take.
    pub(crate) patience: Duration,
    /// Whose refill is not over.
    pub(crate) waits: BTreeSet<WorkerId>,
    /// What the slowest link carries.
    pub(crate) copied: Bytes,
    /// A member starts: how long it takes says nothing of the link.
    pub(crate) starts: bool,
    /// When all was granted.
    pub(crate) admitted: Option<Duration>,
}

/// How often a command was not answered in time, and until when nothing is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Distrust {
    pub(crate) until: Duration,
    strikes: u32,
}

impl Member {
    /// One that joined now, and has done nothing.
    pub(crate) fn new(now: Duration) -> Self {
        Member { activity: Activity::Idle, idle_since: now, wants: false, silent: false, starting: false }
    }
}

impl Distrust {
    /// Its uses waited in vain for so long: they are left alone for as long at least, doubled each time up to 8 times.
    pub(crate) fn back_off(&mut self, now: Duration, waited: Duration) {
        self.until = self.until.max(now + waited * (1 << self.strikes.min(3)));
        self.strikes += 1;
    }

    /// Doubled each time, up to 64 times.
    pub(crate) fn strike(&mut self, now: Duration, length: Duration) {
        self.until = self.until.max(now + length * (1 << self.strikes.min(6)));
        self.strikes += 1;
    }
}

impl Share {
    /// What counts of it.
    pub(crate) fn footprint(&self) -> Bytes {
        self.floor().saturating_add(self.holding.lease).saturating_add(self.overrun)
    }

    /// What counts of its floor.
    pub(crate) fn floor(&self) -> Bytes {
        if self.is_checkpointed { Bytes::ZERO } else { self.holding.floor }
    }

    pub(crate) fn evictable(&self) -> Bytes {
        self.holding.lease.saturating_sub(self.holding.fixed)
    }

    /// What a use or a start needs beyond the lease: that what is evicted and what is resident fit together. Which of it is where may
    /// be another already when it is heard.
    pub(crate) fn need(&self) -> Bytes {
        let missing = self.holding.evicted.saturating_add(self.holding.room);
        let all = if missing.is_zero() { missing } else { missing.saturating_add(self.holding.resident) };
        all.max(self.start).saturating_sub(self.holding.lease)
    }

    /// Room to grow that is not leased, beside what a use needs; none where nothing comes back.
    pub(crate) fn growth(&self) -> Bytes {
        let missing = self.holding.evicted.saturating_add(self.holding.room);
        if missing.is_zero() {
            return missing;
        }
        let all = missing.saturating_add(self.holding.resident).saturating_add(self.holding.growth);
        all.saturating_sub(self.holding.lease).min(self.holding.growth)
    }

    /// What could leave without a copy, while no use runs: what is leased and not made, and what is discardable.
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

    /// Whether all ranks have joined.
    pub(crate) fn is_complete(&self) -> bool {
        !self.silent && self.members.len() >= usize::try_from(self.ranks).unwrap_or(usize::MAX)
    }

    /// Whether nothing is evicted.
    pub(crate) fn is_resident(&self) -> bool {
        self.shares.iter().all(|share| share.need().is_zero())
    }

    pub(crate) fn is_resting(&self) -> bool {
        matches!(self.state, State::Resting)
    }

    /// Whether something is under way with it that has to end in time.
    pub(crate) fn is_counted_on(&self) -> bool {
        !matches!(self.state, State::Resting | State::Shrinking { by: None, .. })
    }

    /// After what its members do, or who they are, became something else.
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

    /// Its uses wait no more, and not because their memory came back.
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

    /// Ends the start of a member: from then on what it says of its holdings is what it needs.
    pub(crate) fn end_start(&mut self, worker: WorkerId) {
        if let Some(member) = self.members.get_mut(&worker) {
            member.starting = false;
        }
        for share in self.shares.iter_mut().filter(|share| share.worker == worker) {
            share.start = Bytes::ZERO;
        }
        self.starting = self.members.values().any(|member| member.starting);
    }

    /// Its place among wants, if it has one.
    pub(crate) fn order(&self, id: GangId, now: Duration, settings: &Settings) -> Option<Order> {
        let want = self.want?;
        let is_behind = self.is_parked && now < want.since + settings.resume_after;
        Some((Reverse(want.class(self.profile.priority, now)), is_behind, want.since, id))
    }

    /// Whether time alone may change something.
    pub(crate) fn is_under_way(&self) -> bool {
        self.want.is_some() || self.demoting.is_some() || !self.is_resting()
    }

    /// Host memory that its copies take.
    pub(crate) fn hosted(&self) -> Bytes {
        self.shares.iter().map(|share| share.holding.hosted).sum()
    }

    pub(crate) fn on(&self, gpu: GpuId) -> impl Iterator<Item = &Share> {
        self.shares.iter().filter(move |share| share.holding.gpu == gpu)
    }

    pub(crate) fn share(&self, key: ShareKey) -> Option<&Share> {
        self.shares.iter().find(|share| share.key() == key)
    }

    /// Where it needs memory; where it is, if it starts.
    pub(crate) fn needs_gpus(&self) -> BTreeSet<GpuId> {
        let all = self.starting || !self.away.is_present();
        let needs = self.shares.iter().filter(|share| all || !share.need().is_zero());
        needs.map(|share| share.holding.gpu).collect()
    }

    /// What a link carries when it comes back as it is, and when all of it is resident.
    pub(crate) fn copied(&self) -> (Bytes, Bytes) {
        let evicted = self.shares.iter().map(|share| share.holding.evicted).max().unwrap_or_default();
        let whole = |share: &Share| {
            share.evictable().saturating_sub(share.holding.discardable).saturating_add(share.holding.evicted)
        };
        (evicted, self.shares.iter().map(whole).max().unwrap_or_default())
    }

    /// When something under way is late, or a want is.
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
