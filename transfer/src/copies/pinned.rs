//! Copy of one range or of several large ranges between pinned memory and a GPU: native, or split over the links.
//!
//! Invariants:
//! - Every byte is enqueued, on a lane or on the user's stream, before the call returns success.
//! - A part that a lane does not accept takes the user's own stream instead, as does a part of a relay found lost.
//! - If a call returns an error, all that it enqueued is joined to the user's stream, or the error says that this failed.

use std::sync::Arc;
use std::time::Instant;

use glake_device::DeviceId;
use glake_device::owned::{DeviceSet, Span};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::copies::foreign::Staged;
use crate::copies::fork::{Fork, MOST_WAITING};
use crate::copies::handle::Parts;
use crate::copies::shared::{Route, Shared};
use crate::links::lane_set::{LaneSet, LaneSetState};
use crate::links::ledger::Path;
use crate::paths::{Ask, Direction, LEAST_STAGED, MANY_RELAYS, Share, Shares, Way, split};
use crate::traffic::prioritized::Prioritized;
use crate::{Priority, Result, UserStream};

/// Size from which a copy takes longer than its preparation on the host.
const LONG: Bytes = Bytes::mib(8);

/// Minimum size of a timed copy.
const TIMED: Bytes = Bytes::mib(16);

/// Ranges as pairs of destination and source.
type Ranges = SmallVec<[(Span, Span); 2]>;

/// Copy that may be split.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    /// Pairs of destination and source that form one copy.
    ranges: &'a [(&'a Span, &'a Span)],
    size: Bytes,
    /// Whether its duration says something about the links. Lists of regions run next to pinning, mapping and unmapping and do not.
    tells: bool,
    /// Whether its parts may start before earlier work of the stream.
    unordered: bool,
    on: UserStream,
    route: Route,
}

/// Copies of one engine between pinned memory and a GPU.
#[derive(Debug)]
pub(crate) struct PinnedCopies {
    pub(crate) shared: Arc<Shared>,
}

impl PinnedCopies {
    /// Enqueues a copy with its priority, over the lanes of its stream if available. Returns its parts if it was split.
    pub(crate) fn copy(&self, job: Job<'_>, priority: Priority) -> Result<Option<Parts>> {
        let mut prioritized = Some(self.shared.traffic.prioritize(
            priority,
            job.route.direction,
            job.size,
            self.shared.routes.most_links(),
        ));
        if self.shared.routes.may_split(job.route.target, job.size)
            && let Some(parts) = self.over_lane_set(job, &mut prioritized)?
        {
            return Ok(Some(parts));
        }
        self.shared.traffic.begin();
        // Barriers are of links, and their GPUs' streams wait for them.
        match prioritized.filter(|prioritized| !prioritized.is_alone() && job.on.device == job.route.target) {
            Some(prioritized) => self.native_by_priority(job, prioritized)?,
            None => job.ranges.iter().try_for_each(|(to, from)| self.shared.native.copy(to, from, job.on))?,
        }
        Ok(None)
    }

    /// Splits a copy over the lanes of its stream if available; then it also closes its barriers.
    fn over_lane_set<'a>(
        &'a self,
        job: Job<'_>,
        prioritized: &mut Option<Prioritized<'a>>,
    ) -> Result<Option<Parts>> {
        let split = self
            .shared
            .links
            .with(job.on.id, |lane_set, state| self.split(lane_set, state, job, prioritized));
        split.unwrap_or(Ok(None))
    }

    /// Copies over the target's own link, on the copy's own stream, with its priority.
    fn native_by_priority(&self, job: Job<'_>, mut prioritized: Prioritized<'_>) -> Result<()> {
        let (mut sent, own) = (Bytes::ZERO, self.shared.native.stream(job.on));
        // Two operations a slice.
        let (mut slices, most) = (0, MOST_WAITING / 2);
        let fits = prioritized.slice().get().saturating_mul(u64::from(most)) >= job.size.get();
        let begin = if fits { None } else { self.shared.marks.mark(job.on).ok() };
        let has_begun = || begin.as_ref().is_some_and(|begin| matches!(begin.is_passed(), Ok(true)));
        while sent < job.size && (slices < most || has_begun()) {
            let Some((to, from)) = job.within(sent, prioritized.slice()).next() else { break };
            slices += 1;
            let enqueued = prioritized.before(own).is_ok() && own.copy(&to, &from).is_ok();
            if !enqueued {
                break;
            }
            sent = sent.saturating_add(to.size());
        }
        prioritized.after(own);
        if !sent.is_zero() {
            self.shared.ledger.counters.native(sent);
        }
        let mut left = job.within(sent, Bytes::MAX);
        left.try_for_each(|(to, from)| self.shared.native.copy(&to, &from, job.on))?;
        prioritized.end(own);
        Ok(())
    }

    /// Splits a copy over the lanes of its stream; `None`, with nothing enqueued, if a native copy is better.
    fn split<'a>(
        &'a self,
        lane_set: &Arc<LaneSet>,
        state: &mut LaneSetState,
        job: Job<'_>,
        prioritized: &mut Option<Prioritized<'a>>,
    ) -> Result<Option<Parts>> {
        let relays = self.shared.links.relays();
        state.withdraw();
        // Of the other direction too: copies that are over say that they are when somebody looks, and beside others none is timed.
        let is_loaded = |direction| self.shared.ledger.is_loaded(direction);
        let may_be_timed = job.tells && job.size >= TIMED;
        let looks = is_loaded(job.route.direction)
            || (may_be_timed && Direction::BOTH.into_iter().any(is_loaded))
            || (relays.usable().iter().any(|relay| self.is_crossed(relay, state, job))
                && (job.size >= LONG || state.looks_around(Instant::now())));
        if looks {
            self.shared.links.lane_sets().refresh(lane_set);
        }
        let contenders = self.shared.traffic.contenders(job.route.target, job.route.direction);
        let gives_way = prioritized.as_ref().is_some_and(Prioritized::is_background);
        let (zero_staging, staged) = self.relays_of(lane_set, state, job, (contenders.rivals, gives_way));
        let graph = self.shared.routes.graph();
        let shares = split(
            &graph,
            &Ask {
                target: job.route.target,
                direction: job.route.direction,
                size: job.size,
                zero_staging,
                staged,
                load: &self.shared.ledger.load,
                expected: contenders.expected,
            },
        );
        let own_lane = job.on.device != job.route.target;
        let native = matches!(&shares[..], [share] if share.way == Way::Direct);
        if native && !contenders.rivals.is_empty() {
            self.shared.traffic.keep_apart(job.route.target, job.route.direction, shares.predicted());
        } else if job.tells && (!native || !zero_staging.union(staged).is_empty()) {
            self.shared.traffic.chosen(
                &graph,
                (job.on, job.route.target),
                job.route.direction,
                (job.size, !native),
            );
        }
        // Of a lane in the target's primary context the target's own work would wait for another GPU's stream.
        if native || (own_lane && !relays.ready().without(relays.fenced()).contains(job.route.target)) {
            state.give_rings(staged);
            return Ok(None);
        }
        let time = || self.shared.traffic.time(lane_set, state, &graph, (job.on, job.route.target), job.size);
        let begun = job.tells.then(time).flatten();
        let mark = if job.unordered { Ok(None) } else { Fork::mark(lane_set, job.on) };
        let event = match mark {
            Ok(event) if event.is_some() || job.unordered => event,
            outcome => {
                if outcome.is_ok() {
                    self.shared.links.want_fork_event(job.on.device);
                }
                state.give_rings(staged);
                return Ok(None);
            }
        };
        let mut fork = Fork::begin(&self.shared, lane_set, state, job.on, event);
        // One that others give way to looks anyway.
        if shares.len() > MANY_RELAYS && !prioritized.as_ref().is_some_and(Prioritized::is_foreground) {
            fork.look();
        }
        if let Some(prioritized) = prioritized.take() {
            fork.take(prioritized, shares.iter().map(|share| share.relay));
        }
        let mut left = self.spread(&mut fork, &shares, job);
        // The links are busy meanwhile: of a copy that takes longer than to ask, this costs nothing.
        if fork.state.is_due(Instant::now()) || job.size >= LONG {
            fork.poll();
        }
        let (forked, serial) = (fork.forked(), fork.state.serial);
        let dead = fork.join()?;
        if let Some(begun) = begun.filter(|_| dead.is_empty() && left.is_empty()) {
            begun.end(lane_set, state, (job.on, job.route.direction), &shares);
        }
        left.retain(|share| !dead.contains(share.relay));
        left.extend(shares.iter().filter(|share| dead.contains(share.relay)).copied());
        for share in left {
            self.redo(share, job)?;
        }
        state.give_rings(staged);
        self.shared.ledger.counters.split();
        tracing::debug!(
            target: "glake::transfer",
            size = %job.size, target = %job.route.target, direction = ?job.route.direction, paths = shares.len(),
            "a copy over several links"
        );
        relays.tell()?;
        let used = forked.without(dead);
        Ok(Some(Parts {
            relays: relays.clone(),
            lane_set: Arc::downgrade(lane_set),
            used,
            serial,
            shares: Some(shares),
        }))
    }

    /// Enqueues the shares. Returns the parts that must take the user's stream instead.
    fn spread(&self, fork: &mut Fork<'_>, shares: &Shares, job: Job<'_>) -> SmallVec<[Share; 8]> {
        let mut left: SmallVec<[Share; 8]> = SmallVec::new();
        let gives_way = fork.is_background();
        // A short copy to the GPU ends with the relays' parts, which begin later: they are issued first. From it that is no gain: on
        // H200s 1 MiB over two links took 26 us instead of 23.
        let own_first = job.size >= LONG || job.route.direction == Direction::FromGpu;
        let own = shares.iter().filter(|share| share.way == Way::Direct);
        let by_slots = |share: &Share| share.way == Way::Staged;
        let relayed = shares.iter().filter(|share| share.way == Way::ZeroStaging);
        if gives_way {
            left.extend(self.send_slices(fork, own.clone().chain(relayed).copied().collect(), job));
        } else {
            if own_first {
                left.extend(own.clone().filter_map(|share| self.send(fork, share, job)));
            }
            left.extend(relayed.filter_map(|share| self.send(fork, share, job)));
        }
        let staged = shares.iter().filter(|share| by_slots(share));
        let mut staged: SmallVec<[Staged; 8]> =
            staged.map(|share| Staged::new(job.path(share), *share, job.part(share))).collect();
        fork.stage(&mut staged);
        left.extend(staged.iter().filter_map(Staged::rest));
        if !own_first && !gives_way {
            left.extend(own.filter_map(|share| self.send(fork, share, job)));
        }
        left
    }

    /// Enqueues shares slice by slice in turns, so that all links start together. Returns the parts that were not enqueued.
    fn send_slices(
        &self,
        fork: &mut Fork<'_>,
        mut shares: SmallVec<[Share; 8]>,
        job: Job<'_>,
    ) -> SmallVec<[Share; 8]> {
        let largest = shares.iter().map(|share| share.size).max().unwrap_or(Bytes::ZERO);
        let (slice, mut left) = (fork.slice_for(largest), SmallVec::new());
        while !shares.is_empty() {
            shares.retain(|share| {
                let size = slice.min(share.size);
                let unsent =
                    self.send(fork, &Share { size, ..*share }, job).map_or(Bytes::ZERO, |left| left.size);
                let rest = share.behind(size.saturating_sub(unsent));
                if !unsent.is_zero() {
                    left.extend(rest);
                    return false;
                }
                *share = rest.unwrap_or(Share { size: Bytes::ZERO, ..*share });
                !share.size.is_zero()
            });
        }
        left
    }

    /// Enqueues a share with one copy per range. Returns the part that was not enqueued.
    fn send(&self, fork: &mut Fork<'_>, share: &Share, job: Job<'_>) -> Option<Share> {
        let mut sent = Bytes::ZERO;
        for (to, from) in job.part(share) {
            let enqueued = match share.way {
                Way::Direct if job.on.device == job.route.target => {
                    fork.send_own(job.path(share), &to, &from)
                }
                _ => fork.send(job.path(share), &to, &from),
            };
            if !enqueued {
                break;
            }
            sent = sent.saturating_add(to.size());
        }
        share.behind(sent)
    }

    /// Copies a part over the user's stream after its path failed, with one retry.
    fn redo(&self, share: Share, job: Job<'_>) -> Result<()> {
        self.shared.ledger.counters.retried(job.path(&share));
        job.part(&share).iter().try_for_each(|(to, from)| self.shared.native.copy_twice(to, from, job.on))
    }

    /// Returns whether a relay runs zero-staging copies in the other direction, which a copy here would have to wait for.
    fn is_crossed(&self, relay: DeviceId, state: &LaneSetState, job: Job<'_>) -> bool {
        let other = job.route.direction.other();
        self.shared.ledger.crossings.of(relay, other) > state.crossing(relay, other)
    }

    /// Returns the relays that can access the copy's memory directly, and others that have slots for it. A relay with zero-staging copies
    /// in the other direction uses slots, or is left out; if several of them have no slots, they are used without. Background copies ignore
    /// this: they may wait.
    fn relays_of(
        &self,
        lane_set: &Arc<LaneSet>,
        state: &mut LaneSetState,
        job: Job<'_>,
        (rivals, gives_way): (DeviceSet, bool),
    ) -> (DeviceSet, DeviceSet) {
        let others =
            self.shared.links.relays().usable().without(rivals).without(DeviceSet::of(job.route.target));
        let usable = others.without(state.broken());
        let (device, host) = job.reach();
        let readers = usable.intersection(host);
        // Memory of ours that is lent to them. The rest is the program's, or closed to some of them.
        let open = readers.intersection(device);
        let is_crossed = |relay: &DeviceId| !gives_way && self.is_crossed(*relay, state, job);
        let crossed: DeviceSet = open.iter().filter(is_crossed).collect();
        let zero_staging = open.without(crossed);
        let others = readers.without(zero_staging);
        if others.is_empty() || job.size < LEAST_STAGED {
            return (zero_staging, DeviceSet::EMPTY);
        }
        // Else the target's side would make its GPU's own work wait for another GPU's stream.
        let may_stage = job.on.device == job.route.target;
        let staged = if may_stage {
            self.with_slots(lane_set, state, job.route.target, others)
        } else {
            DeviceSet::EMPTY
        };
        // One relay alone is left to the other direction, which fills it: this one has the own link. To leave several out would cost more
        // than to wait for them.
        let left = if readers.len() > 1 { crossed.without(staged) } else { DeviceSet::EMPTY };
        (zero_staging.union(left), staged)
    }

    /// Returns those of `relays` that have free slots for a copy of a target's memory.
    fn with_slots(
        &self,
        lane_set: &Arc<LaneSet>,
        state: &mut LaneSetState,
        target: DeviceId,
        relays: DeviceSet,
    ) -> DeviceSet {
        let has_side = |relay: &DeviceId| lane_set.side(target, *relay).is_some();
        let candidates: DeviceSet = relays.iter().filter(has_side).collect();
        if candidates != relays {
            self.shared.resources.want(target);
        }
        let (mut staged, mut refreshed) = (DeviceSet::EMPTY, false);
        for relay in candidates.iter() {
            let mut has = state.take_ring(relay);
            if !has && !refreshed {
                // Slots come back when their work is seen done.
                refreshed = true;
                self.shared.links.lane_sets().refresh(lane_set);
                has = state.take_ring(relay);
            }
            if has {
                staged = staged.union(DeviceSet::of(relay));
            }
        }
        staged
    }
}

impl<'a> Job<'a> {
    /// Creates a job for one range between pinned memory and a GPU.
    pub(crate) fn one(range: &'a [(&'a Span, &'a Span); 1], on: UserStream, route: Route) -> Job<'a> {
        Job { ranges: range, size: range[0].0.size(), tells: true, unordered: false, on, route }
    }

    /// Creates a job for ranges of a region between pinned memory and one GPU, copied as one; `None` for any other ranges.
    pub(crate) fn list(
        ranges: &'a [(&'a Span, &'a Span)],
        on: UserStream,
        unordered: bool,
    ) -> Option<Job<'a>> {
        let between = |(to, from): &(&Span, &Span)| Route::pinned(to.kind(), from.kind());
        let route = between(ranges.first()?)?;
        let is_one = ranges.iter().all(|range| between(range) == Some(route));
        let size = ranges.iter().map(|(to, _)| to.size()).sum();
        is_one.then_some(Job { ranges, size, tells: false, unordered, on, route })
    }

    /// Returns the GPU and the size of the copy.
    pub(crate) fn asked(&self) -> (DeviceId, Bytes) {
        (self.route.target, self.size)
    }

    /// Returns the stream of the copy.
    pub(crate) fn on(&self) -> UserStream {
        self.on
    }

    /// Returns the ranges of a share.
    fn part(&self, share: &Share) -> Ranges {
        self.within(share.offset, share.size).collect()
    }

    /// Returns the ranges from `offset` on, at most `size` bytes in all.
    fn within(&self, offset: Bytes, size: Bytes) -> impl Iterator<Item = (Span, Span)> {
        let (mut skipped, mut left) = (offset, size);
        self.ranges.iter().filter_map(move |(to, from)| {
            let before = skipped.min(to.size());
            let taken = left.min(to.size().saturating_sub(before));
            (skipped, left) = (skipped.saturating_sub(before), left.saturating_sub(taken));
            if taken.is_zero() { None } else { to.part(before, taken).zip(from.part(before, taken)) }
        })
    }

    /// Returns the GPUs that can access all of the GPU's memory, and those that can access all of the host's.
    fn reach(&self) -> (DeviceSet, DeviceSet) {
        let all = |end: fn(&(&Span, &Span)) -> DeviceSet| {
            self.ranges.iter().map(end).fold(DeviceSet::ALL, DeviceSet::intersection)
        };
        let (to, from) = (all(|(to, _)| to.reach()), all(|(_, from)| from.reach()));
        match self.route.direction {
            Direction::ToGpu => (to, from),
            Direction::FromGpu => (from, to),
        }
    }

    fn path(&self, share: &Share) -> Path {
        self.route.path(share.relay, share.way)
    }
}
