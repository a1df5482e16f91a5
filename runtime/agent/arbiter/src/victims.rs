//! Choice of victims, as a pure function.
//!
//! First, memory of idle workers that can leave without a copy. Then idle workers, ordered by: tenant above its share, low priority, least
//! to copy, longest idle. Then busy workers that may be parked, if the request's class is not lower and they have been resident for a
//! quantum: workers with safe points before those whose uses must end, the longest resident first. Never a gang that starts, refills,
//! shrinks, grows, captures or is excluded, and never fixed memory.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use glake_units::Bytes;
use serde::Serialize;

use crate::gang::{Gang, Share, ShareKey};
use crate::interface::RETRY;
use crate::{GangId, GpuId, Preempt, Settings, UseState};

/// Reason for the choice of a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Why {
    /// The bytes can leave without a copy, or were leased and never used, and the worker is idle.
    Discardable,
    /// The worker is idle.
    Idle,
    /// The worker can be parked and has been resident for its quantum.
    Quantum,
}

/// Bytes of a share that must leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Take {
    pub(crate) gang: GangId,
    pub(crate) share: ShareKey,
    pub(crate) bytes: Bytes,
    pub(crate) why: Why,
}

/// Inputs of a choice: the request, the gangs and the time.
pub(crate) struct Chooser<'a> {
    pub(crate) gangs: &'a BTreeMap<GangId, Gang>,
    pub(crate) settings: &'a Settings,
    pub(crate) now: Duration,
    pub(crate) gpu: GpuId,
    pub(crate) limit: Bytes,
    /// Class of the request; `None` rules out parking.
    pub(crate) class: Option<i64>,
    pub(crate) whom: Option<GangId>,
}

/// Chosen victims and the remainder.
pub(crate) struct Choice {
    pub(crate) takes: Vec<Take>,
    /// Bytes still missing after all choices.
    pub(crate) short: Bytes,
    /// Time of the next choice if no event arrives earlier.
    pub(crate) next: Option<Duration>,
}

/// Min-heap entry of a candidate: rank, gang and share.
type Ranked<R> = Reverse<(R, GangId, ShareKey)>;

impl Chooser<'_> {
    /// Chooses victims for `short` bytes, or all candidates if they have less.
    pub(crate) fn choose(&self, short: Bytes) -> Choice {
        let mut choice = Choice { takes: Vec::new(), short, next: None };
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
                    choice.again(gang.distrust.until);
                    continue;
                }
                match gang.activity {
                    UseState::Idle => idle.push((gang, id, share)),
                    UseState::Busy | UseState::Running => busy.push((gang, id, share)),
                    UseState::Capturing => {}
                }
            }
        }
        let equal = self.limit.get() / (tenants.len() as u64).max(1);
        let (mut ranked, mut discardable) = (Vec::new(), Vec::new());
        for (gang, id, share) in idle {
            // A worker refilled just now may not have reported its uses yet.
            let settled = gang.resident_since + self.settings.least_quantum;
            if gang.idle_since <= gang.resident_since && settled > self.now {
                choice.again(settled);
                continue;
            }
            let under = tenants.get(&gang.profile.tenant).is_none_or(|held| held.get() <= equal);
            let rank = (under, gang.profile.priority, !share.account.dirty.is_zero(), gang.idle_since);
            ranked.push(Reverse((rank, id, share.key())));
            if self.settings.partial && !share.uncopied().is_zero() {
                discardable.push(Reverse((rank, id, share.key())));
            }
        }
        self.take(&mut choice, discardable, Why::Discardable, Share::uncopied);
        self.take(&mut choice, ranked, Why::Idle, Share::evictable);
        if choice.short.is_zero() {
            return choice;
        }
        let (mut ranked, waiting) = (Vec::new(), self.waiting_in_turn());
        for (gang, id, share) in busy.into_iter().filter(|(gang, ..)| self.may_park(gang)) {
            let over = gang.resident_since + self.turn(gang, waiting);
            if over > self.now {
                choice.again(over);
            } else if self.is_too_long(gang) {
                // The requester's class rises with time.
                choice.again(self.now + RETRY);
            } else {
                let rank = (gang.activity == UseState::Running, gang.resident_since);
                ranked.push(Reverse((rank, id, share.key())));
            }
        }
        self.take(&mut choice, ranked, Why::Quantum, Share::evictable);
        choice
    }

    /// Takes from candidates in ascending order until the request is covered.
    fn take<R: Ord>(
        &self,
        choice: &mut Choice,
        from: Vec<Ranked<R>>,
        why: Why,
        of: impl Fn(&Share) -> Bytes,
    ) {
        let mut from = BinaryHeap::from(from);
        while let Some(Reverse((_, id, key))) = if choice.short.is_zero() { None } else { from.pop() } {
            if let Some(share) = self.gangs.get(&id).and_then(|gang| gang.share(key)) {
                choice.take(id, key, of(share), why, self.settings.partial);
            }
        }
    }

    fn may_ask(&self, id: GangId, gang: &Gang) -> bool {
        Some(id) != self.whom
            && gang.is_resting()
            && !gang.starting
            && !gang.silent
            && gang.contexts.is_present()
            && gang.growing == 0
            && gang.profile.preempt.min(self.settings.preempt) != Preempt::Never
    }

    fn may_park(&self, gang: &Gang) -> bool {
        let step = gang.profile.preempt.min(self.settings.preempt) == Preempt::Step;
        step && self.class.is_some_and(|class| i64::from(gang.profile.priority) <= class)
    }

    /// Returns whether parking would exceed the gang's longest pause. A request of a higher class overrides this; waiting raises the class,
    /// so that no request waits forever.
    fn is_too_long(&self, gang: &Gang) -> bool {
        let is_higher = self.class.is_some_and(|class| i64::from(gang.profile.priority) < class);
        !is_higher && gang.profile.max_pause.is_some_and(|most| self.pause(gang) > most)
    }

    /// Predicts the pause of a gang's uses: parking, copying its memory out, the refill or start and the quantum of the requester, and
    /// copying its own memory back.
    fn pause(&self, gang: &Gang) -> Duration {
        let link = self.settings.link;
        // Newer wants may go first during this time.
        let behind = if self.waiting().count() > 1 { self.settings.resume_after } else { Duration::ZERO };
        let turn = |whom: &Gang| {
            let start = if whom.starting { self.settings.start } else { Duration::ZERO };
            whom.predictions.refill(whom.copied().0, link) + start + self.quantum(whom) + behind
        };
        let turn = self.whom.and_then(|whom| self.gangs.get(&whom)).map_or(Duration::ZERO, turn);
        let largest = gang.on(self.gpu).map(|share| (share.evictable(), share.account.dirty)).max();
        let (leaving, dirty) = largest.unwrap_or_default();
        let (park, shrink) = (gang.predictions.park(), gang.predictions.shrink(leaving, dirty, link));
        park + shrink + turn + gang.predictions.refill(gang.copied().1, link)
    }

    /// Returns the gangs that wait for this GPU.
    fn waiting(&self) -> impl Iterator<Item = &Gang> {
        let waits =
            |gang: &&Gang| gang.want.is_some() && gang.is_resting() && gang.on(self.gpu).next().is_some();
        self.gangs.values().filter(waits)
    }

    /// Returns the number of waiters if all of them were parked and have no longest pause; `None` if a waiter needs a first token or a
    /// short pause.
    fn waiting_in_turn(&self) -> Option<u32> {
        let waiting = self.waiting().try_fold(0_u32, |count, gang| {
            (gang.is_parked && gang.profile.max_pause.is_none()).then_some(count + 1)
        })?;
        self.class.map(|_| waiting.max(1))
    }

    /// Returns the time that a worker runs before it is parked for the request. If the requester was parked too, a quick change helps no
    /// first token: turns grow with each park, by half a quantum if no other gang waits.
    fn turn(&self, gang: &Gang, waiting_in_turn: Option<u32>) -> Duration {
        let quantum = self.quantum(gang);
        let longer =
            |waiting: u32| quantum * gang.parks.min(self.settings.longest_turn) / waiting.saturating_mul(2);
        quantum + waiting_in_turn.map_or(Duration::ZERO, longer)
    }

    /// Returns the minimum time for which a worker keeps its memory. It does not depend on the utilization of the link: longer quanta keep
    /// first tokens waiting, while the GPU computes for other workers during a refill.
    fn quantum(&self, gang: &Gang) -> Duration {
        let refill = gang.predictions.refill(gang.copied().1, self.settings.link);
        self.settings.least_quantum.max(refill * self.settings.quantum_refills)
    }
}

impl Choice {
    fn again(&mut self, at: Duration) {
        self.next = Some(self.next.map_or(at, |next| next.min(at)));
    }

    /// Takes the needed bytes of a share, or all of it, including earlier takes.
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
