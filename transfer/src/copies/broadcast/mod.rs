//! Broadcast of one pinned range to several GPUs. Each byte is read from the host once, over one of the links, and forwarded over NVLink.
//!
//! ```text
//!   GPU 0   first   ┤host ─► 0├┤host ─► 0├┤host ─► 0├          pulls its share, slice by slice, into its own copy
//!           second            ┤► 1├┤► 2├┤► 1├┤► 2├┤► 1├┤► 2├   passes each slice on once it is there
//!   GPU 1, 2 likewise, with other shares, at the same time
//! ```
//!
//! Invariant: every slice goes to every target once without an error, by this way or natively, or the call returns an error.

mod slices;

use std::sync::Arc;

use glake_device::owned::{DeviceSet, Span};
use glake_device::{DeviceId, PointerKind};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::copies::broadcast::slices::{Slice, Slices};
use crate::copies::completions::Completions;
use crate::copies::fork::{Fork, Forks};
use crate::copies::native::NativeCopies;
use crate::copies::parts::Parts;
use crate::copies::route::Endpoints;
use crate::copies::span::SpanCopies;
use crate::links::Links;
use crate::links::contexts::Contexts;
use crate::links::counters::Path;
use crate::links::lane_set::{LaneSet, LaneSetState};
use crate::links::ledger::Ledger;
use crate::paths::{Direction, PathGraph, Way};
use crate::traffic::Traffic;
use crate::traffic::routes::Routes;
use crate::{CopyHandle, CopyOptions, Priority, Result, UserStream};

/// Minimum bytes per GPU that justify two streams each.
const LEAST: Bytes = Bytes::mib(1);

/// Broadcast on a stream of the program.
#[derive(Clone, Copy)]
struct Cast<'a> {
    to: &'a [Span],
    from: &'a Span,
    on: UserStream,
    priority: Priority,
}

/// GPU that pulls a share, with the target on that GPU.
#[derive(Clone, Copy)]
struct Source {
    device: DeviceId,
    own: usize,
    rate: f64,
}

/// Broadcasts of one engine.
#[derive(Debug)]
pub(crate) struct BroadcastCopies {
    pub(crate) contexts: Arc<Contexts>,
    pub(crate) routes: Arc<Routes>,
    pub(crate) links: Arc<Links>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) native: Arc<NativeCopies>,
    pub(crate) forks: Arc<Forks>,
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) spans: Arc<SpanCopies>,
    pub(crate) completions: Arc<Completions>,
}

impl BroadcastCopies {
    /// Enqueues copies of one span to several spans.
    ///
    /// # Errors
    /// As [`crate::Engine::copy_to_all`].
    pub(crate) fn copy(
        &self,
        to: &[Span],
        from: &Span,
        on: UserStream,
        options: CopyOptions,
    ) -> Result<CopyHandle> {
        to.iter().try_for_each(|to| Endpoints::of(to, from).map(drop))?;
        self.links.begin_copy(on)?;
        let _call = self.traffic.urgent_call(options.priority);
        let cast = Cast { to, from, on, priority: options.priority };
        let parts = self.enqueue_cast(cast);
        let parts = self.completions.covered(parts, to.iter().filter_map(Span::device).collect(), on)?;
        self.completions.handle(on, options, parts)
    }

    /// Enqueues a broadcast: pulled in shares and forwarded, or one copy per target.
    fn enqueue_cast(&self, cast: Cast<'_>) -> Result<Option<Parts>> {
        let Cast { to, from, on, priority } = cast;
        let sources = self.sources(cast);
        if sources.len() > 1 && self.contexts.is_plain(on) {
            let outcome =
                self.links.with(on.id, |lane_set, state| self.cast(lane_set, state, cast, &sources));
            if let Some(parts) = outcome.transpose()?.flatten() {
                return Ok(Some(parts));
            }
        }
        let mut parts: Option<Parts> = None;
        for to in to {
            let more = self.spans.enqueue(to, from, on, priority)?;
            parts = match (parts, more) {
                (Some(parts), Some(more)) => Some(Parts { used: parts.used.union(more.used), ..more }),
                (parts, more) => more.or(parts),
            };
        }
        Ok(parts)
    }

    /// Returns the GPUs that pull; empty if they are not fully connected or the broadcast is too small.
    fn sources(&self, cast: Cast<'_>) -> SmallVec<[Source; 8]> {
        let none = SmallVec::new();
        let graph = self.routes.graph();
        let mut sources: SmallVec<[Source; 8]> = SmallVec::new();
        for (own, to) in cast.to.iter().enumerate() {
            let Some(device) = to.device() else { return none };
            if sources.iter().any(|source| source.device == device) {
                continue;
            }
            let Some(link) = graph.rates(device, Direction::ToGpu).next() else { return none };
            sources.push(Source { device, own, rate: link.rate.0 });
        }
        let devices: DeviceSet = sources.iter().map(|source| source.device).collect();
        let reached = cast.to.iter().chain([cast.from]).all(|span| devices.is_subset(span.reach()));
        let joined =
            sources.iter().all(|source| devices.without(are_joined(&graph, source.device)).is_empty());
        let least = LEAST.get().saturating_mul(devices.len().into());
        let benefit = cast.from.kind() == PointerKind::Pinned && cast.from.size().get() >= least;
        let usable = devices.is_subset(self.links.relays().usable());
        if benefit && reached && joined && usable { sources } else { none }
    }

    /// Broadcasts over all lanes; `None`, and nothing was enqueued, if the fork fails.
    fn cast(
        &self,
        lane_set: &Arc<LaneSet>,
        state: &mut LaneSetState,
        cast: Cast<'_>,
        sources: &[Source],
    ) -> Result<Option<Parts>> {
        state.withdraw();
        let Ok(Some(mark)) = Fork::mark(lane_set, cast.on) else {
            self.links.want_fork_event(cast.on.device);
            return Ok(None);
        };
        let rates: SmallVec<[f64; 8]> = sources.iter().map(|source| source.rate).collect();
        let slices = Slices::new(cast.from.size(), &rates);
        let mut fork = self.forks.begin(lane_set, state, cast.on, Some(mark));
        let links = self.routes.most_links();
        let prioritized = self.traffic.prioritize(cast.priority, Direction::ToGpu, cast.from.size(), links);
        fork.take(prioritized, sources.iter().map(|source| source.device));
        fork.poll();
        // What must go another way: a slice, and to which targets.
        let mut left: Vec<(Slice, SmallVec<[usize; 8]>)> = Vec::new();
        for slice in slices.clone() {
            let missed = self.pull(&mut fork, cast, sources[slice.source], slice);
            if !missed.is_empty() {
                left.push((slice, missed));
            }
        }
        let (used, serial) = (fork.forked(), fork.state.serial);
        let dead = fork.join()?;
        let lost = slices.filter(|slice| dead.contains(sources[slice.source].device));
        left.extend(lost.map(|slice| (slice, (0..cast.to.len()).collect())));
        for (slice, targets) in left {
            for target in targets {
                let relay = sources[slice.source].device;
                let device = cast.to[target].device().unwrap_or(relay);
                self.ledger.counters.retried(path(device, relay));
                if let Some((to, from)) = ends(&cast.to[target], cast.from, slice) {
                    self.native.copy_twice(&to, &from, cast.on)?;
                }
            }
        }
        self.ledger.counters.split();
        tracing::debug!(
            target: "glake::transfer",
            size = %cast.from.size(), targets = cast.to.len(), links = sources.len(),
            "one copy to several GPUs"
        );
        self.links.relays().tell()?;
        let (relays, lane_set, used) =
            (self.links.relays().clone(), Arc::downgrade(lane_set), used.without(dead));
        Ok(Some(Parts { relays, lane_set, used, serial, shares: None }))
    }

    /// Enqueues a slice: from the host to its source's own target, and from there to all others. Returns the targets that the slice does
    /// not reach.
    fn pull(
        &self,
        fork: &mut Fork<'_>,
        cast: Cast<'_>,
        source: Source,
        slice: Slice,
    ) -> SmallVec<[usize; 8]> {
        let Source { device, own, .. } = source;
        let count = cast.to.len();
        let others = (1..count).map(|step| (own + step) % count);
        let all = || (0..count).collect();
        // Both streams before anything is pulled, so that the second waits for the fork and not only for the first.
        let (Some([_, second]), Some((to, from))) =
            (fork.streams(device), ends(&cast.to[own], cast.from, slice))
        else {
            return all();
        };
        // What is passed on, and what orders it.
        let operations = 3 + u32::try_from(count).unwrap_or(u32::MAX);
        if !fork.has_room(Some(device), operations) || !fork.send(path(device, device), &to, &from) {
            return all();
        }
        if let Err(error) = fork.stagger(device) {
            fork.blame(device, &error);
            return others.collect();
        }
        others
            .filter(|other| {
                let Some(next) = cast.to[*other].part(slice.offset, slice.size) else { return true };
                let passed = second.of().copy(&next, &to);
                if let Err(error) = &passed {
                    fork.blame(device, error);
                } else if let Some(target) = next.device() {
                    self.ledger.counters.sent(path(target, device), slice.size, 1);
                }
                passed.is_err()
            })
            .collect()
    }
}

/// Returns whether a target, which is a relay too, is connected to the other targets by NVLink.
fn are_joined(graph: &PathGraph, target: DeviceId) -> DeviceSet {
    graph.rates(target, Direction::ToGpu).map(|path| path.relay).collect()
}

fn path(target: DeviceId, relay: DeviceId) -> Path {
    // What is passed on comes out of the relay's memory.
    let way = if target == relay { Way::Direct } else { Way::Staged };
    Path { target, relay, direction: Direction::ToGpu, way }
}

fn ends(to: &Span, from: &Span, slice: Slice) -> Option<(Span, Span)> {
    Some((to.part(slice.offset, slice.size)?, from.part(slice.offset, slice.size)?))
}
