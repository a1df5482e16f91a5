//! One copy between pinned memory and a GPU: native, or split over the links.
//!
//! Invariants:
//! - Every byte is enqueued, on a lane or on the user's stream, before the call returns without an error.
//! - A part that a lane did not take goes over the user's own stream instead, and so does one whose relay is found lost.
//! - Where a call returns an error, all that it had enqueued is joined to the user's stream, or the error says that it
//!   could not be.

use std::sync::Arc;
use std::time::Instant;

use glake_device::owned::{self, DeviceSet, Span};
use glake_device::{CaptureState, DeviceId};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::engine::counters::Path;
use crate::engine::endpoints::Endpoints;
use crate::engine::fork::{Fork, MOST_WAITING};
use crate::engine::parts::Parts;
use crate::kinds::foreign::Staged;
use crate::links::lane_set::{LaneSet, LaneSetState};
use crate::paths::{Ask, Direction, MANY_RELAYS, Share, Shares, Way, split};
use crate::schedule::barriers::Barriers;
use crate::schedule::prioritized::Prioritized;
use crate::schedule::urgent_calls::UrgentCall;
use crate::{CopyHandle, CopyOptions, Engine, Priority, UserStream};
use crate::{Result, TransferError};

/// A copy from this size on takes longer than what the host does for it.
const LONG: Bytes = Bytes::mib(8);

/// A copy that may be split.
#[derive(Clone, Copy)]
struct Job<'a> {
    to: &'a Span,
    from: &'a Span,
    on: UserStream,
    target: DeviceId,
    direction: Direction,
}

impl Engine {
    /// Enqueues a copy on a stream of the program.
    ///
    /// # Errors
    /// [`TransferError::Lost`] of earlier copies, once: this one may not have been enqueued. The driver's answer where it
    /// was not, or not wholly, enqueued.
    pub fn copy(&self, to: &Span, from: &Span, on: UserStream, options: CopyOptions) -> Result<CopyHandle> {
        let parts = self.enqueue(to, from, on, options.priority);
        let memory = [to.device(), from.device()].into_iter().flatten().collect();
        let parts = self.covered(parts, memory, on)?;
        self.handle(on, options, parts)
    }

    /// Epochs cover what was enqueued on a stream of the program; also of what failed, of which a part may be enqueued.
    pub(crate) fn covered<T>(&self, enqueued: Result<T>, memory: DeviceSet, on: UserStream) -> Result<T> {
        let told = self.epochs.enqueued_on(memory, (on.device, on.raw));
        let enqueued = enqueued?;
        told?;
        Ok(enqueued)
    }

    /// What a copy that was enqueued on a stream just now is waited for by.
    pub(crate) fn handle(
        &self,
        on: UserStream,
        options: CopyOptions,
        parts: Option<Parts>,
    ) -> Result<CopyHandle> {
        if options.waited {
            match self.marks.mark(on).or_else(|_| self.marks.mark(on)) {
                Ok(mark) => return Ok(CopyHandle::marked(mark, parts)),
                Err(TransferError::Driver(error)) if !error.is_sticky() => {
                    tracing::debug!(target: "glake::transfer", %error, "a handle waits for its whole stream");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(CopyHandle::unmarked(&self.driver, on, parts))
    }

    /// Enqueues a copy; its parts, if it was split.
    pub(crate) fn enqueue(
        &self,
        to: &Span,
        from: &Span,
        on: UserStream,
        priority: Priority,
    ) -> Result<Option<Parts>> {
        let ends = Endpoints::of(to, from)?;
        self.relays.tell()?;
        self.look_around();
        if let Endpoints::HostAndGpu { target, direction, pinned: false } = ends
            && self.copy_pageable(
                to,
                from,
                on,
                Path { target, relay: target, direction, way: Way::Direct },
                priority,
            )?
        {
            self.drift.begin();
            return Ok(None);
        }
        let _call = self.urgent_call(priority);
        if let Endpoints::HostAndGpu { target, direction, pinned: true } = ends
            && (self.may_split(target, to.size()) || self.minds_others(priority))
        {
            // An answer that says nothing is no permission.
            match self.driver.capture_state(on.device, on.raw) {
                Ok(CaptureState::None) => {
                    return self.by_priority(Job { to, from, on, target, direction }, priority);
                }
                Ok(CaptureState::Active(capture))
                    if self.options.graphs && self.may_split(target, to.size()) =>
                {
                    let path = Path { target, relay: target, direction, way: Way::Direct };
                    if self.copy_captured(to, from, on, path, capture)? {
                        return Ok(None);
                    }
                }
                Ok(CaptureState::Active(_) | CaptureState::Invalidated) | Err(_) => {}
            }
        }
        self.native(to, from, on)?;
        Ok(None)
    }

    /// A copy is about to be enqueued that background ones give way to.
    pub(crate) fn urgent_call(&self, priority: Priority) -> Option<UrgentCall<'_>> {
        let barriers = self.barriers.get().filter(|_| priority != Priority::Background);
        barriers.and_then(Barriers::urgent_call)
    }

    /// What the priority of a copy that is about to be enqueued makes of it.
    pub(crate) fn prioritized(
        &self,
        priority: Priority,
        direction: Direction,
        size: Bytes,
    ) -> Prioritized<'_> {
        // Where GPUs are shared the target is one of these.
        let links = self.relays.usable().len() + u32::from(!self.options.shared_gpus);
        Prioritized::of(self.barriers.get(), priority, direction, size, links)
    }

    /// Whether copies of a priority have to do with others' that may be under way.
    fn minds_others(&self, priority: Priority) -> bool {
        let barriers = self.barriers.get();
        barriers.is_some_and(|barriers| priority == Priority::Background || barriers.is_needed())
    }

    /// A copy that may give way or be given way to: over the lanes of its stream, if they can be had.
    fn by_priority(&self, job: Job<'_>, priority: Priority) -> Result<Option<Parts>> {
        let mut prioritized = Some(self.prioritized(priority, job.direction, job.to.size()));
        if self.may_split(job.target, job.to.size())
            && let Some(parts) = self.over_lane_set(job, &mut prioritized)?
        {
            return Ok(Some(parts));
        }
        self.drift.begin();
        // Barriers are of links, and their GPUs' streams wait for them.
        match prioritized.filter(|prioritized| !prioritized.is_alone() && job.on.device == job.target) {
            Some(prioritized) => self.native_by_priority(job, prioritized)?,
            None => self.native(job.to, job.from, job.on)?,
        }
        Ok(None)
    }

    /// Splits a copy over the lanes of its stream, if they can be had; then its barriers are shut too.
    fn over_lane_set<'a>(
        &'a self,
        job: Job<'_>,
        prioritized: &mut Option<Prioritized<'a>>,
    ) -> Result<Option<Parts>> {
        match self
            .lane_sets
            .with(self, job.on.id, |lane_set, state| self.split(lane_set, state, job, prioritized))
        {
            Some(split) => split,
            None => {
                self.want_lane_set();
                Ok(None)
            }
        }
    }

    /// A copy over the target's own link, on its own stream.
    fn native_by_priority(&self, job: Job<'_>, mut prioritized: Prioritized<'_>) -> Result<()> {
        let (mut sent, own) = (Bytes::ZERO, job.on.of_driver(&*self.driver));
        // Two operations a slice.
        let most = Bytes::new(prioritized.slice().get().saturating_mul(u64::from(MOST_WAITING / 2)));
        let begin = if job.to.size() > most { self.marks.mark(job.on).ok() } else { None };
        let has_begun = || begin.as_ref().is_some_and(|begin| matches!(begin.is_passed(), Ok(true)));
        while sent < job.to.size() && (sent < most || has_begun()) {
            let size = prioritized.slice().min(job.to.size().saturating_sub(sent));
            let (Some(to), Some(from)) = (job.to.part(sent, size), job.from.part(sent, size)) else { break };
            let enqueued = prioritized.before(own).is_ok() && own.copy(&to, &from).is_ok();
            if !enqueued {
                break;
            }
            sent = sent.saturating_add(size);
        }
        prioritized.after(own);
        if !sent.is_zero() {
            self.counters.native(sent);
        }
        let left = job.to.size().saturating_sub(sent);
        if let (false, Some(to), Some(from)) =
            (left.is_zero(), job.to.part(sent, left), job.from.part(sent, left))
        {
            self.native(&to, &from, job.on)?;
        }
        prioritized.end(own);
        Ok(())
    }

    /// One copy of the driver's on the user's stream.
    pub(crate) fn native(&self, to: &Span, from: &Span, on: UserStream) -> Result<()> {
        owned::copy(&*self.driver, on.device, on.raw, to, from)?;
        self.counters.native(to.size());
        Ok(())
    }

    /// One copy of the driver's, at the second attempt if need be.
    pub(crate) fn native_twice(&self, to: &Span, from: &Span, on: UserStream) -> Result<()> {
        let enqueue = || owned::copy(&*self.driver, on.device, on.raw, to, from);
        match enqueue() {
            Err(error) if !error.is_sticky() => Ok(enqueue()?),
            outcome => Ok(outcome?),
        }
    }

    /// Whether a copy of this size can be worth more than one path. Takes no lock and asks no driver.
    pub(crate) fn may_split(&self, target: DeviceId, size: Bytes) -> bool {
        size >= self.floor() && !self.relays.usable().without(DeviceSet::of(target)).is_empty()
    }

    /// Splits a copy over the lanes of its stream; `None`, and nothing done, where a native copy is better.
    fn split<'a>(
        &'a self,
        lane_set: &Arc<LaneSet>,
        state: &mut LaneSetState,
        job: Job<'_>,
        prioritized: &mut Option<Prioritized<'a>>,
    ) -> Result<Option<Parts>> {
        state.withdraw(self);
        if self.is_loaded(job.direction) {
            self.lane_sets.refresh(self, lane_set);
        }
        let contenders = self.contention.of(job.target, job.direction, &self.load, self.devices);
        let (zero_staging, staged) = self.relays_of(lane_set, state, job, contenders.rivals);
        let graph = self.graph();
        let shares = split(
            &graph,
            &Ask {
                target: job.target,
                direction: job.direction,
                size: job.to.size(),
                zero_staging,
                staged,
                load: &self.load,
                expected: contenders.expected,
            },
        );
        let own_lane = job.on.device != job.target;
        let native = matches!(&shares[..], [share] if share.way == Way::Direct);
        if native && !contenders.rivals.is_empty() {
            self.contention.keep_apart(job.target, job.direction, shares.predicted());
        }
        // Of a lane in the target's primary context the target's own work would wait for another GPU's stream.
        if native || (own_lane && !self.relays.ready().without(self.relays.fenced()).contains(job.target)) {
            state.give_rings(self, staged);
            return Ok(None);
        }
        let others = self.time(lane_set, state, &graph, (job.on, job.target), job.to.size());
        let event = match Fork::mark(lane_set, job.on) {
            Ok(Some(event)) => event,
            outcome => {
                if outcome.is_ok() {
                    self.worker.fork_event(job.on.device);
                }
                state.give_rings(self, staged);
                return Ok(None);
            }
        };
        let mut fork = Fork::begin(self, lane_set, state, job.on, event);
        // One that others give way to looks anyway.
        if shares.len() > MANY_RELAYS && !prioritized.as_ref().is_some_and(Prioritized::is_foreground) {
            fork.look();
        }
        if let Some(prioritized) = prioritized.take() {
            fork.take(prioritized, shares.iter().map(|share| share.relay));
        }
        let mut left = self.spread(&mut fork, &shares, job);
        // The links are busy meanwhile: of a copy that takes longer than to ask, this costs nothing.
        if fork.state.is_due(Instant::now()) || job.to.size() >= LONG {
            fork.poll();
        }
        let (forked, serial) = (fork.forked(), fork.state.serial);
        let dead = fork.join()?;
        if let Some(others) = others.filter(|_| dead.is_empty() && left.is_empty()) {
            self.timed(lane_set, state, (job.on, job.direction), &shares, (graph, others));
        }
        left.retain(|share| !dead.contains(share.relay));
        left.extend(shares.iter().filter(|share| dead.contains(share.relay)).copied());
        for share in left {
            self.redo(share, job)?;
        }
        state.give_rings(self, staged);
        self.counters.split();
        tracing::debug!(
            target: "glake::transfer",
            size = %job.to.size(), target = %job.target, direction = ?job.direction, paths = shares.len(),
            "a copy over several links"
        );
        self.relays.tell()?;
        let used = forked.without(dead);
        Ok(Some(Parts {
            relays: self.relays.clone(),
            lane_set: Arc::downgrade(lane_set),
            used,
            serial,
            shares: Some(shares),
        }))
    }

    /// Enqueues the shares; those, or what is left of them, that must go over the user's stream after all.
    fn spread(&self, fork: &mut Fork<'_>, shares: &Shares, job: Job<'_>) -> SmallVec<[Share; 8]> {
        let mut left: SmallVec<[Share; 8]> = SmallVec::new();
        let gives_way = fork.is_background();
        // A short copy to the GPU ends with the relays' parts, which begin later: they are issued first. From it that is no gain: on
        // H200s 1 MiB over two links took 26 us instead of 23.
        let own_first = job.to.size() >= LONG || job.direction == Direction::FromGpu;
        let own = shares.iter().filter(|share| share.way == Way::Direct);
        let by_slots = |share: &Share| share.way == Way::Staged;
        let relayed = shares.iter().filter(|share| share.way == Way::ZeroStaging);
        if gives_way {
            left.extend(self.send_slices(fork, own.clone().chain(relayed).copied().collect(), job));
        } else {
            if own_first {
                left.extend(own.clone().filter(|share| !self.send(fork, share, job)).copied());
            }
            left.extend(relayed.filter(|share| !self.send(fork, share, job)).copied());
        }
        let mut staged: SmallVec<[Staged; 8]> = SmallVec::new();
        for share in shares.iter().filter(|share| by_slots(share)) {
            let Some((to, from)) = job.part(share) else { continue };
            staged.push(Staged { path: job.path(share), to, from, offset: share.offset, sent: Bytes::ZERO });
        }
        fork.stage(&mut staged);
        left.extend(staged.iter().filter_map(Staged::rest));
        if !own_first && !gives_way {
            left.extend(own.filter(|share| !self.send(fork, share, job)).copied());
        }
        left
    }

    /// Enqueues shares slice by slice, in turns, so that all links get under way at once. What was not enqueued.
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
                if !self.send(fork, &Share { size, ..*share }, job) {
                    left.push(*share);
                    return false;
                }
                share.offset = share.offset.saturating_add(size);
                share.size = share.size.saturating_sub(size);
                !share.size.is_zero()
            });
        }
        left
    }

    /// Enqueues a share in one copy.
    fn send(&self, fork: &mut Fork<'_>, share: &Share, job: Job<'_>) -> bool {
        let Some((to, from)) = job.part(share) else { return false };
        match share.way {
            Way::Direct if job.on.device == job.target => fork.send_own(job.path(share), &to, &from),
            _ => fork.send(job.path(share), &to, &from),
        }
    }

    /// A part that went no other way: over the user's stream, at the second attempt if need be.
    fn redo(&self, share: Share, job: Job<'_>) -> Result<()> {
        self.counters.retried(job.path(&share));
        let Some((to, from)) = job.part(&share) else { return Ok(()) };
        self.native_twice(&to, &from, job.on)
    }

    /// Whether any link has bytes of other copies in flight.
    pub(crate) fn is_loaded(&self, direction: Direction) -> bool {
        (0_u32..).map(DeviceId).take(self.devices).any(|link| !self.load.link(link, direction).is_zero())
    }

    /// The relays that may touch the memory of a copy directly; or else those that have slots for it.
    fn relays_of(
        &self,
        lane_set: &Arc<LaneSet>,
        state: &mut LaneSetState,
        job: Job<'_>,
        rivals: DeviceSet,
    ) -> (DeviceSet, DeviceSet) {
        let others = self.relays.usable().without(rivals).without(DeviceSet::of(job.target));
        let usable = others.without(state.broken());
        let (device, host) = match job.direction {
            Direction::ToGpu => (job.to, job.from),
            Direction::FromGpu => (job.from, job.to),
        };
        let readers = usable.intersection(host.reach());
        let reach = readers.intersection(device.reach());
        // What other GPUs may touch is memory of ours; the rest of the GPU's is the program's.
        if !device.reach().without(DeviceSet::of(job.target)).is_empty() {
            return (reach, DeviceSet::EMPTY);
        }
        // The target's side would make its GPU's own work wait for another GPU's stream.
        if job.on.device != job.target {
            return (DeviceSet::EMPTY, DeviceSet::EMPTY);
        }
        let has_side = |relay: &DeviceId| lane_set.side(job.target, *relay).is_some();
        let candidates: DeviceSet = readers.iter().filter(has_side).collect();
        if candidates != readers {
            self.want_resources(job.target);
        }
        let (mut staged, mut refreshed) = (DeviceSet::EMPTY, false);
        for relay in candidates.iter() {
            let mut has = state.take_ring(self, relay);
            if !has && !refreshed {
                // Slots come back when their work is seen done.
                refreshed = true;
                self.lane_sets.refresh(self, lane_set);
                has = state.take_ring(self, relay);
            }
            if has {
                staged = staged.union(DeviceSet::of(relay));
            }
        }
        (DeviceSet::EMPTY, staged)
    }
}

impl Job<'_> {
    fn part(&self, share: &Share) -> Option<(Span, Span)> {
        Some((self.to.part(share.offset, share.size)?, self.from.part(share.offset, share.size)?))
    }

    fn path(&self, share: &Share) -> Path {
        Path { target: self.target, relay: share.relay, direction: self.direction, way: share.way }
    }
}
