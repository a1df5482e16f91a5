//! Whose memory leaves. Pure.
//!
//! From what could leave without a copy of idle workers; then from idle workers, in the order of: the tenant has more
//! than its share, low priority, nothing to copy, longest idle. Then from busy ones that may be parked, if whoever asks is
//! of no lower class and they have been resident for a quantum: those that meet safe points, then those whose uses have
//! to end, the longest resident first. Never from who starts, refills, shrinks, grows, captures or is not counted on;
//! never what is fixed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use glake_units::Bytes;
use serde::Serialize;

use crate::duty::LinkDuty;
use crate::gang::{Gang, Share, ShareKey};
use crate::server::AGAIN;
use crate::{Activity, GangId, GpuId, Preempt, Settings};

/// Why of these bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Why {
    /// They can leave without a copy, or were leased and never made, and nobody uses them.
    Discardable,
    /// Nobody uses them.
    Idle,
    /// Their worker can be parked, and has been resident for its quantum.
    Quantum,
}

/// Bytes of a share of a gang that are to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Take {
    pub(crate) gang: GangId,
    pub(crate) share: ShareKey,
    pub(crate) bytes: Bytes,
    pub(crate) why: Why,
}

/// Who asks, and when.
pub(crate) struct Chooser<'a> {
    pub(crate) gangs: &'a BTreeMap<GangId, Gang>,
    pub(crate) settings: &'a Settings,
    pub(crate) duty: &'a LinkDuty,
    pub(crate) now: Duration,
    pub(crate) gpu: GpuId,
    pub(crate) limit: Bytes,
    /// The class of the request; without one nobody is parked.
    pub(crate) class: Option<i64>,
    pub(crate) whom: Option<GangId>,
}

/// What was found.
pub(crate) struct Found {
    pub(crate) takes: Vec<Take>,
    /// What is still missing.
    pub(crate) short: Bytes,
    /// When there may be more, if nobody says anything before.
    pub(crate) next: Option<Duration>,
}

/// An order of victims, the least first, and whose share it is of.
type Ranked<R> = Reverse<(R, GangId, ShareKey)>;

impl Chooser<'_> {
    /// Victims for `short` bytes, or as many as there are.
    pub(crate) fn choose(&self, short: Bytes) -> Found {
        let mut found = Found { takes: Vec::new(), short, next: None };
        let (mut idle, mut busy) = (Vec::new(), Vec::new());
        let mut tenants: BTreeMap<u32, Bytes> = BTreeMap::new();
        for (&id, gang) in self.gangs {
            for share in gang.on(self.gpu) {
                let sum = tenants.entry(gang.profile.tenant).or_default();
                *sum = sum.saturating_add(share.footprint());
                if share.evictable().is_zero() || !self.may_ask(id, gang) {
                    continue;
                }
                if gang.distrust.until > self.now {
                    found.again(gang.distrust.until);
                    continue;
                }
                match gang.activity {
                    Activity::Idle => idle.push((gang, id, share)),
                    Activity::Busy | Activity::Running => busy.push((gang, id, share)),
                    Activity::Capturing => {}
                }
            }
        }
        let equal = self.limit.get() / (tenants.len() as u64).max(1);
        let (mut ranked, mut discardable) = (Vec::new(), Vec::new());
        for (gang, id, share) in idle {
            // Who was refilled just now may not have said yet that it runs.
            let settled = gang.resident_since + self.settings.least_quantum;
            if gang.idle_since <= gang.resident_since && settled > self.now {
                found.again(settled);
                continue;
            }
            let under = tenants.get(&gang.profile.tenant).is_none_or(|held| held.get() <= equal);
            let rank = (under, gang.profile.priority, !share.holding.dirty.is_zero(), gang.idle_since);
            ranked.push(Reverse((rank, id, share.key())));
            if self.settings.partial && !share.uncopied().is_zero() {
                discardable.push(Reverse((rank, id, share.key())));
            }
        }
        self.take(&mut found, discardable, Why::Discardable, Share::uncopied);
        self.take(&mut found, ranked, Why::Idle, Share::evictable);
        if found.short.is_zero() {
            return found;
        }
        let (mut ranked, waiting) = (Vec::new(), self.waiting_in_turn());
        for (gang, id, share) in busy.into_iter().filter(|(gang, ..)| self.may_park(gang)) {
            let over = gang.resident_since + self.turn(gang, waiting);
            if over > self.now {
                found.again(over);
            } else if self.is_too_long(gang) {
                // Whoever asks is of a higher class by and by.
                found.again(self.now + AGAIN);
            } else {
                let rank = (gang.activity == Activity::Running, gang.resident_since);
                ranked.push(Reverse((rank, id, share.key())));
            }
        }
        self.take(&mut found, ranked, Why::Quantum, Share::evictable);
        found
    }

    /// The least first, until it is enough.
    fn take<R: Ord>(&self, found: &mut Found, from: Vec<Ranked<R>>, why: Why, of: impl Fn(&Share) -> Bytes) {
        let mut from = BinaryHeap::from(from);
        while let Some(Reverse((_, id, key))) = if found.short.is_zero() { None } else { from.pop() } {
            if let Some(share) = self.gangs.get(&id).and_then(|gang| gang.share(key)) {
                found.take(id, key, of(share), why, self.settings.partial);
            }
        }
    }

    fn may_ask(&self, id: GangId, gang: &Gang) -> bool {
        Some(id) != self.whom
            && gang.is_resting()
            && !gang.starting
            && !gang.silent
            && gang.away.is_present()
            && gang.growing == 0
            && gang.profile.preempt.min(self.settings.preempt) != Preempt::Never
    }

    fn may_park(&self, gang: &Gang) -> bool {
        let step = gang.profile.preempt.min(self.settings.preempt) == Preempt::Step;
        step && self.class.is_some_and(|class| i64::from(gang.profile.priority) <= class)
    }

    /// Whether the uses of a gang would be parked for longer than they may. That counts until whoever asks is of a higher class, as it
    /// is once it has waited for long: so it waits for nobody for ever.
    fn is_too_long(&self, gang: &Gang) -> bool {
        let is_higher = self.class.is_some_and(|class| i64::from(gang.profile.priority) < class);
        !is_higher && gang.profile.max_pause.is_some_and(|most| self.pause(gang) > most)
    }

    /// How long the uses of a gang would be parked: until the last of them is, while its memory is copied out, whoever asks is
    /// refilled or starts, and has its quantum, and until its own memory is copied back.
    fn pause(&self, gang: &Gang) -> Duration {
        let link = self.settings.link;
        // Newer wants may go first for so long.
        let behind = if self.waiting().count() > 1 { self.settings.resume_after } else { Duration::ZERO };
        let turn = |whom: &Gang| {
            let start = if whom.starting { self.settings.start } else { Duration::ZERO };
            whom.predictions.refill(whom.copied().0, link) + start + self.quantum(whom) + behind
        };
        let turn = self.whom.and_then(|whom| self.gangs.get(&whom)).map_or(Duration::ZERO, turn);
        let largest = gang.on(self.gpu).map(|share| (share.evictable(), share.holding.dirty)).max();
        let (leaving, dirty) = largest.unwrap_or_default();
        let (park, shrink) = (gang.predictions.park(), gang.predictions.shrink(leaving, dirty, link));
        park + shrink + turn + gang.predictions.refill(gang.copied().1, link)
    }

    /// Who waits for this GPU.
    fn waiting(&self) -> impl Iterator<Item = &Gang> {
        let waits =
            |gang: &&Gang| gang.want.is_some() && gang.is_resting() && gang.on(self.gpu).next().is_some();
        self.gangs.values().filter(waits)
    }

    /// How many wait for this GPU, if all of them were parked, and may pause: else somebody waits for a first token, or has waited
    /// for as long as it may.
    fn waiting_in_turn(&self) -> Option<u32> {
        let waiting = self.waiting().try_fold(0_u32, |count, gang| {
            (gang.is_parked && gang.profile.max_pause.is_none()).then_some(count + 1)
        })?;
        self.class.map(|_| waiting.max(1))
    }

    /// How long a worker runs before it is parked for who asks. Where that one was parked too, a quick change helps no first
    /// token: turns get longer with each park of a use, by half a quantum if nobody else waits.
    fn turn(&self, gang: &Gang, waiting_in_turn: Option<u32>) -> Duration {
        let quantum = self.quantum(gang);
        let longer =
            |waiting: u32| quantum * gang.parks.min(self.settings.longest_turn) / waiting.saturating_mul(2);
        quantum + waiting_in_turn.map_or(Duration::ZERO, longer)
    }

    /// How long a worker has its memory at least once it runs.
    fn quantum(&self, gang: &Gang) -> Duration {
        let refill = gang.predictions.refill(gang.copied().1, self.settings.link);
        let quantum = self.settings.least_quantum.max(refill * self.settings.quantum_refills);
        self.duty.stretched(self.now, quantum)
    }
}

impl Found {
    fn again(&mut self, at: Duration) {
        self.next = Some(self.next.map_or(at, |next| next.min(at)));
    }

    /// So much of a share as is needed, or all; what was taken of it before counts.
    fn take(&mut self, gang: GangId, share: ShareKey, of: Bytes, why: Why, partial: bool) {
        let before = self.takes.iter_mut().find(|take| take.gang == gang && take.share == share);
        let had = before.as_ref().map_or(Bytes::ZERO, |take| take.bytes);
        let more = of.saturating_sub(had);
        let more = if partial { more.min(self.short) } else { more };
        if more.is_zero() {
            return;
        }
        self.short = self.short.saturating_sub(more);
        match before {
            Some(take) => (take.bytes, take.why) = (had.saturating_add(more), why),
            None => self.takes.push(Take { gang, share, bytes: more, why }),
        }
    }
}
