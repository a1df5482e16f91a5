//! Background copies that are waited for: their parts go where there is room, decided as late as can be.
//!
//! ```text
//!   the copy   ├──┬──┬──┬──┬──┬──┬──┬──┬─┬─┬┤     batches, smaller towards the end
//!   path 1      └──►▓▓▓▓ ░░░░                      two a path are enqueued, in slices behind its barrier; whichever path has room
//!   path 2         └──►▓▓ ░░░░  (a busy link)      takes the next one, so a busy link takes fewer
//! ```
//!
//! Invariants:
//! - No stream of the program waits for what is enqueued late: the copy's own stream is joined when all of it is enqueued, and
//!   the lanes are of a lane set that is the copy's alone. Only the caller waits.
//! - Every batch was seen to arrive, or is copied again on the copy's stream, behind what was enqueued of it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::StreamId;
use glake_device::owned::{DeviceSet, OwnedEvent, Span};
use glake_units::Bytes;
use smallvec::SmallVec;

use super::Scheduler;
use crate::Result;
use crate::engine::contexts::Contexts;
use crate::engine::counters::Path;
use crate::engine::endpoints::Endpoints;
use crate::engine::fork::{Fork, Forks};
use crate::engine::ledger::Ledger;
use crate::engine::native::NativeCopies;
use crate::engine::routes::Routes;
use crate::kinds::resources::Resources;
use crate::links::Links;
use crate::links::lane_set::{LaneSet, LaneSetState};
use crate::paths::Way;
use crate::schedule::prioritized::Prioritized;
use crate::{Priority, UserStream};

/// How large batches are: two keep a link busy for longer than the host takes to enqueue the next; the last ones are small, so that
/// all links end together.
const BATCH: [Bytes; 2] = [Bytes::mib(2), Bytes::mib(8)];
/// Batches that are enqueued on a path.
const AHEAD: usize = 2;
const PAGE: Bytes = Bytes::kib(4);

/// One path and what is enqueued on it.
struct Going {
    path: Path,
    /// The batches under way, each with its end, and events for more.
    under_way: VecDeque<(OwnedEvent, Part)>,
    idle: Vec<OwnedEvent>,
    /// Whether it gets more.
    is_open: bool,
    /// How fast it was of late, beside the others: what arrived, the older the less.
    pace: u64,
}

/// A part of the copy.
#[derive(Clone, Copy, Debug)]
struct Part {
    offset: Bytes,
    size: Bytes,
}

/// A copy whose bytes find their ways.
struct Deferred<'a> {
    to: &'a Span,
    from: &'a Span,
    /// How much of it was given to paths.
    next: Bytes,
    going: SmallVec<[Going; 8]>,
    /// What no path brought.
    left: SmallVec<[Part; 8]>,
}

/// The copies of one engine that are bound late.
#[derive(Debug)]
pub(crate) struct DeferredCopies {
    pub(crate) contexts: Arc<Contexts>,
    pub(crate) routes: Arc<Routes>,
    pub(crate) links: Arc<Links>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) native: Arc<NativeCopies>,
    pub(crate) forks: Arc<Forks>,
    pub(crate) scheduler: Arc<dyn Scheduler>,
    pub(crate) resources: Arc<Resources>,
    /// How many there were.
    pub(crate) count: AtomicU64,
}

impl DeferredCopies {
    /// Copies as links have room, and returns when all that went over lanes has arrived, and the rest is enqueued on the user's
    /// stream. False, and nothing done: this is no copy for it.
    ///
    /// # Errors
    /// As [`crate::Engine::copy`].
    pub(crate) fn copy(&self, to: &Span, from: &Span, on: UserStream) -> Result<bool> {
        let Endpoints::HostAndGpu { target, direction, pinned: true } = Endpoints::of(to, from)? else {
            return Ok(false);
        };
        let relays = self.links.relays();
        if !self.scheduler.defers(to.size())
            || !self.routes.may_split(target, to.size())
            || (on.device != target && !relays.ready().contains(target))
            || !self.contexts.is_plain(on)
        {
            return Ok(false);
        }
        self.resources.want(target);
        self.links.look_around();
        let paths = self.paths(to, from, Path { target, relay: target, direction, way: Way::Direct });
        if paths.len() < 2 {
            return Ok(false);
        }
        self.links.begin_copy(on)?;
        // A lane set of its own: no driver counts its streams so far down from the end.
        let own = StreamId(u64::MAX - self.count.fetch_add(1, Ordering::Relaxed));
        let left = self.links.with(own, |lane_set, state| {
            let prioritized = self.scheduler.prioritize(
                Priority::Background,
                direction,
                to.size(),
                self.routes.most_links(),
            );
            self.spread(lane_set, state, (to, from, on), &paths, prioritized)
        });
        self.links.lane_sets().forget(own);
        let Some(left) = left.transpose()?.flatten() else { return Ok(false) };
        for part in left {
            let ends = (to.part(part.offset, part.size), from.part(part.offset, part.size));
            if let (Some(to), Some(from)) = ends {
                self.native.copy_twice(&to, &from, on)?;
                self.ledger.counters.native(part.size);
            }
        }
        Ok(true)
    }

    /// The target's own link, which `direct` is, and those of the relays that may touch its memory and are known to serve it.
    fn paths(&self, to: &Span, from: &Span, direct: Path) -> SmallVec<[Path; 8]> {
        let (target, direction) = (direct.target, direct.direction);
        let rivals = self.scheduler.contenders(target, direction).rivals;
        let usable = self.links.relays().usable().without(rivals);
        let reach = usable.intersection(to.reach()).intersection(from.reach());
        let graph = self.routes.graph();
        let serves = |way, relay| match way {
            Way::Direct => !self.links.relays().is_fenced(target),
            Way::ZeroStaging => reach.contains(relay),
            Way::Staged => false,
        };
        let rates = graph.rates(target, direction).filter(|path| serves(path.way, path.relay));
        rates.map(|path| Path { relay: path.relay, way: path.way, ..direct }).collect()
    }

    /// What no lane brought; `None`, and nothing done, where the lane set lacks something.
    fn spread<'a>(
        &'a self,
        lane_set: &Arc<LaneSet>,
        state: &mut LaneSetState,
        (to, from, on): (&Span, &Span, UserStream),
        paths: &[Path],
        prioritized: Prioritized<'a>,
    ) -> Result<Option<SmallVec<[Part; 8]>>> {
        let broken = state.broken();
        let usable = |path: &&Path| !broken.contains(path.relay);
        let ready = |path: &Path| {
            let stream = &lane_set.lane(path.relay)?.stream;
            let idle = (0..AHEAD).map(|_| stream.event().ok()).collect::<Option<Vec<OwnedEvent>>>()?;
            Some(Going { path: *path, under_way: VecDeque::new(), idle, is_open: true, pace: 0 })
        };
        let going: SmallVec<[Going; 8]> = paths.iter().filter(usable).filter_map(ready).collect();
        if going.len() < 2 {
            return Ok(None);
        }
        let Ok(Some(event)) = Fork::mark(lane_set, on) else {
            self.links.want_fork_event(on.device);
            return Ok(None);
        };
        let mut fork = self.forks.begin(lane_set, state, on, Some(event));
        fork.take(prioritized, std::iter::empty());
        let mut late = Deferred { to, from, next: Bytes::ZERO, going, left: SmallVec::new() };
        while late.fill(&mut fork) {
            late.wait(&mut fork);
        }
        fork.join()?;
        // All of it was seen to arrive, or is copied again: nobody has lost anything.
        for going in &late.going {
            state.make_good(going.path.relay, state.owner.unwrap_or_default(), state.serial);
        }
        let lost = state.poll(lane_set, DeviceSet::EMPTY, &*self.scheduler);
        lost.iter().for_each(|relay| self.links.relays().fence(relay));
        self.ledger.counters.split();
        Ok(Some(late.left))
    }
}

impl Deferred<'_> {
    /// Gives batches to the paths that have room; whether anything is under way then.
    fn fill(&mut self, fork: &mut Fork<'_>) -> bool {
        let size = self.to.size();
        while self.next < size {
            let room = self.going.iter().enumerate().filter(|(_, going)| !going.idle.is_empty());
            let Some((index, _)) = room.min_by_key(|(_, going)| going.under_way.len()) else { break };
            let left = size.saturating_sub(self.next);
            let even = Bytes::new(left.get() / (AHEAD * self.going.len()) as u64);
            let batch = even.align_up(PAGE).unwrap_or(left).max(BATCH[0]).min(BATCH[1]).min(left);
            let part = Part { offset: self.next, size: batch };
            self.next = self.next.saturating_add(batch);
            self.send(fork, index, part);
        }
        let is_under_way = self.going.iter().any(|going| !going.under_way.is_empty());
        if !is_under_way && self.next < size {
            // No path is open any more.
            self.left.push(Part { offset: self.next, size: size.saturating_sub(self.next) });
            self.next = size;
        }
        is_under_way
    }

    /// Enqueues a batch on a path. A path that does not take all of it gets no more.
    fn send(&mut self, fork: &mut Fork<'_>, index: usize, part: Part) {
        let going = &mut self.going[index];
        let Some(end) = going.idle.pop() else { return };
        let mut sent = Bytes::ZERO;
        while sent < part.size {
            let size = fork.slice().min(part.size.saturating_sub(sent));
            let offset = part.offset.saturating_add(sent);
            let ends = (self.to.part(offset, size), self.from.part(offset, size));
            let (Some(to), Some(from)) = ends else { break };
            if !fork.send(going.path, &to, &from) {
                break;
            }
            sent = sent.saturating_add(size);
        }
        let relay = going.path.relay;
        let told = sent.is_zero() || fork.stream(relay).is_some_and(|stream| fork.marks(stream, &end));
        // What is not known to arrive is copied again, behind what is under way.
        let kept = if told { sent } else { Bytes::ZERO };
        if !kept.is_zero() {
            going.under_way.push_back((end, Part { size: kept, ..part }));
        }
        if kept < part.size {
            going.close();
            let (offset, size) = (part.offset.saturating_add(kept), part.size.saturating_sub(kept));
            self.left.push(Part { offset, size });
        }
    }

    /// Waits for the batch that should be the first to arrive, and looks what else has. The other paths have a batch more behind
    /// the one that they are at, so that none of them falls idle meanwhile.
    fn wait(&mut self, fork: &mut Fork<'_>) {
        let ends = self.going.iter().enumerate().filter_map(|(index, going)| Some((index, going.end()?)));
        let Some((first, _)) = ends.min_by(|(_, a), (_, b)| a.total_cmp(b)) else { return };
        let mut arrived: SmallVec<[Bytes; 8]> = SmallVec::new();
        for (index, going) in self.going.iter_mut().enumerate() {
            let (mut bytes, mut awaited) = (Bytes::ZERO, index == first);
            while let Some((end, part)) = going.under_way.front() {
                let passed = if awaited { end.synchronize().map(|()| true) } else { end.is_passed() };
                awaited = false;
                match passed {
                    Ok(false) => break,
                    Ok(true) => {
                        bytes = bytes.saturating_add(part.size);
                        let end = going.under_way.pop_front().map(|(end, _)| end);
                        // A path that gets no more keeps no events.
                        going.idle.extend(end.filter(|_| going.is_open));
                    }
                    Err(error) => {
                        fork.blame(going.path.relay, &error);
                        going.close();
                        self.left.extend(going.under_way.drain(..).map(|(_, part)| part));
                    }
                }
            }
            arrived.push(bytes);
        }
        for (going, bytes) in self.going.iter_mut().zip(arrived) {
            going.pace = going.pace / 4 * 3 + bytes.get();
        }
    }
}

impl Going {
    /// When the batch that it is at ends, beside those of the others.
    fn end(&self) -> Option<f64> {
        self.under_way.front().map(|(_, part)| part.size.get() as f64 / (self.pace + 1) as f64)
    }

    /// It gets no more.
    fn close(&mut self) {
        self.is_open = false;
        self.idle.clear();
    }
}
