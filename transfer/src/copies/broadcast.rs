//! Broadcast of one pinned range to several GPUs. Each byte is read from the host once, over one of the links, and forwarded over NVLink.
//!
//! ```text
//!   GPU 0   first   ┤host ─► 0├┤host ─► 0├┤host ─► 0├          pulls its share, slice by slice, into its own copy
//!           second            ┤► 1├┤► 2├┤► 1├┤► 2├┤► 1├┤► 2├   forwards each slice after its arrival
//!   GPU 1, 2 likewise, with other shares, at the same time
//!
//!   bytes   │ GPU 0's share │ GPU 1's share │ GPU 2's share │     in proportion to the rates of their links
//!   slices  │ 0 │ 3 │ 6 │ 9 │ 1 │ 4 │ 7 │ 10│ 2 │ 5 │ 8 │ 11│     in the order of their issue
//! ```
//!
//! Invariant: every slice is enqueued to every target once without an error, as above or natively, or the call returns an error.

use std::sync::Arc;

use glake_device::owned::{DeviceSet, Span};
use glake_device::{DeviceId, PointerKind};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::copies::fork::Fork;
use crate::copies::handle::Parts;
use crate::copies::shared::{Shared, check_sizes};
use crate::copies::span::SpanCopies;
use crate::links::lane_set::{LaneSet, LaneSetState};
use crate::links::ledger::Path;
use crate::paths::{Direction, GRAIN, PathGraph, Way};
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
    pub(crate) shared: Arc<Shared>,
    pub(crate) spans: Arc<SpanCopies>,
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
        to.iter().try_for_each(|to| check_sizes(to, from))?;
        self.shared.links.begin_copy(on)?;
        let _call = self.shared.traffic.urgent_call(options.priority);
        let cast = Cast { to, from, on, priority: options.priority };
        let parts = self.enqueue_cast(cast);
        let parts = self.shared.covered(parts, to.iter().filter_map(Span::device).collect(), on)?;
        self.shared.handle(on, options, parts)
    }

    /// Enqueues a broadcast: pulled in shares and forwarded, or one copy per target.
    fn enqueue_cast(&self, cast: Cast<'_>) -> Result<Option<Parts>> {
        let Cast { to, from, on, priority } = cast;
        let sources = self.sources(cast);
        if sources.len() > 1 && self.shared.contexts.is_plain(on) {
            let outcome =
                self.shared.links.with(on.id, |lane_set, state| self.cast(lane_set, state, cast, &sources));
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
        let graph = self.shared.routes.graph();
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
        let usable = devices.is_subset(self.shared.links.relays().usable());
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
            self.shared.links.want_fork_event(cast.on.device);
            return Ok(None);
        };
        let rates: SmallVec<[f64; 8]> = sources.iter().map(|source| source.rate).collect();
        let slices = Slices::new(cast.from.size(), &rates);
        let mut fork = Fork::begin(&self.shared, lane_set, state, cast.on, Some(mark));
        let links = self.shared.routes.most_links();
        let prioritized =
            self.shared.traffic.prioritize(cast.priority, Direction::ToGpu, cast.from.size(), links);
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
                self.shared.ledger.counters.retried(path(device, relay));
                if let Some((to, from)) = ends(&cast.to[target], cast.from, slice) {
                    self.shared.native.copy_twice(&to, &from, cast.on)?;
                }
            }
        }
        self.shared.ledger.counters.split();
        tracing::debug!(
            target: "glake::transfer",
            size = %cast.from.size(), targets = cast.to.len(), links = sources.len(),
            "one copy to several GPUs"
        );
        self.shared.links.relays().tell()?;
        let (relays, lane_set, used) =
            (self.shared.links.relays().clone(), Arc::downgrade(lane_set), used.without(dead));
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
                    self.shared.ledger.counters.sent(path(target, device), slice.size, 1);
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

/// Slice that is pulled and forwarded as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    /// Index of the GPU that pulls it.
    pub(crate) source: usize,
    pub(crate) offset: Bytes,
    pub(crate) size: Bytes,
}

/// Slices of a broadcast in round-robin order of their shares.
#[derive(Clone, Debug)]
pub(crate) struct Slices {
    /// Remaining part and slice size of each share.
    left: SmallVec<[(Slice, Bytes); 8]>,
    prioritized: usize,
}

/// Minimum slice size, so that issuing takes no longer than the transfer. On H200s 2 MiB is best for 64 MiB, 8 MiB for 1 GiB; above that, 4
/// to 64 MiB make no difference.
const LEAST_SLICE: Bytes = Bytes::mib(1);
const LARGEST_SLICE: Bytes = Bytes::mib(8);
/// Minimum number of slices per share: the last slice must still be forwarded after it was pulled.
const LEAST_SLICES: u64 = 8;
/// Maximum number of slices per share. More would fill the driver's queues, and a call that finds a queue full blocks until the stream
/// progresses, possibly until later work of the program.
const MOST_SLICES: u64 = 64;

impl Slices {
    /// Divides `size` bytes among links in proportion to `rates`.
    pub(crate) fn new(size: Bytes, rates: &[f64]) -> Slices {
        let all: f64 = rates.iter().sum();
        let (mut sum, mut offset) = (0.0, Bytes::ZERO);
        let mut left = SmallVec::new();
        for (source, rate) in rates.iter().enumerate() {
            sum += rate;
            let end = if source + 1 == rates.len() { size } else { grains(size, sum / all) };
            let share = end.saturating_sub(offset);
            let part = |parts| Bytes::new(share.get().div_ceil(parts)).align_up(GRAIN).unwrap_or(share);
            let slice = part(LEAST_SLICES).max(LEAST_SLICE).min(LARGEST_SLICE).max(part(MOST_SLICES));
            left.push((Slice { source, offset, size: share }, slice));
            offset = offset.max(end);
        }
        Slices { left, prioritized: 0 }
    }
}

impl Iterator for Slices {
    type Item = Slice;

    fn next(&mut self) -> Option<Slice> {
        let count = self.left.len();
        let at = (0..count)
            .map(|step| (self.prioritized + step) % count)
            .find(|at| !self.left[*at].0.size.is_zero())?;
        self.prioritized = at + 1;
        let (rest, most) = &mut self.left[at];
        let slice = Slice { size: rest.size.min(*most), ..*rest };
        rest.offset = rest.offset.saturating_add(slice.size);
        rest.size = rest.size.saturating_sub(slice.size);
        Some(slice)
    }
}

/// Returns `part` of `size` in whole grains.
#[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::cast_sign_loss)]
fn grains(size: Bytes, part: f64) -> Bytes {
    let grains = (size.get() as f64 * part / GRAIN.get() as f64) as u64;
    Bytes::new(grains.saturating_mul(GRAIN.get())).min(size)
}

#[cfg(test)]
mod slices_tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn links_take_turns_and_share_by_their_rates() {
        let slices: Vec<Slice> = Slices::new(Bytes::mib(12), &[50.0, 50.0, 100.0]).collect();
        let of = |source| slices.iter().filter(move |slice| slice.source == source);
        let sizes = [0, 1, 2].map(|source| of(source).map(|slice| slice.size).sum::<Bytes>());
        assert_eq!(sizes, [Bytes::mib(3), Bytes::mib(3), Bytes::mib(6)]);
        let sources: Vec<usize> = slices.iter().map(|slice| slice.source).collect();
        assert_eq!(sources, [0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 2, 2]);
        assert_eq!(Slices::new(Bytes::gib(4), &[1.0; 4]).next().unwrap().size, Bytes::mib(16));
        assert_eq!(Slices::new(Bytes::gib(1), &[1.0; 4]).next().unwrap().size, Bytes::mib(8));
        assert_eq!(Slices::new(Bytes::mib(64), &[1.0; 4]).next().unwrap().size, Bytes::mib(2));
    }

    proptest! {
        #[test]
        fn slices_cover_the_bytes_once(size in 1_u64..1 << 34, rates in prop::collection::vec(1.0..100.0, 1..9)) {
            let size = Bytes::new(size);
            let mut slices: Vec<Slice> = Slices::new(size, &rates).collect();
            prop_assert!(slices.len() as u64 <= MOST_SLICES * rates.len() as u64);
            slices.sort_unstable_by_key(|slice| slice.offset);
            let mut end = Bytes::ZERO;
            for slice in slices {
                prop_assert_eq!(slice.offset, end);
                prop_assert!(!slice.size.is_zero());
                end = slice.offset.saturating_add(slice.size);
            }
            prop_assert_eq!(end, size);
        }
    }
}
