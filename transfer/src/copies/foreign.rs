//! Copies of GPU memory that relays may not touch, the program's or a closed region's, through slots in their memory.
//!
//! ```text
//!   lane, in our context on the relay     ┤host ─► slot 0├┤host ─► slot 1├┤host ─► slot 0├ ...       over the relay's own link
//!   target's side, in its primary context                 ┤slot 0 ─► target├┤slot 1 ─► target├ ...   over NVLink
//! ```
//!
//! From a GPU the target's side fills the slots and the lane empties them. Each waits for the other's event of a slot before it uses
//! that. Chunks of several relays take turns, so that all links get under way at once.
//!
//! Invariant: no context but the target's primary one touches the target's memory.

use glake_device::owned::{OwnedEvent, OwnedStream, Span};
use glake_device::{DeviceId, DriverError};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::copies::fork::Fork;
use crate::links::lane::TargetSide;
use crate::links::ledger::Path;
use crate::paths::{Direction, Share};

/// Part that is staged through a relay's slots in chunks; at most one per relay.
#[derive(Clone, Debug)]
pub(crate) struct Staged {
    pub(crate) path: Path,
    /// Ranges (destination, source), consecutive.
    ranges: SmallVec<[(Span, Span); 2]>,
    share: Share,
    /// Bytes enqueued so far.
    sent: Bytes,
}

/// Staged part in progress.
struct Going<'a> {
    index: usize,
    lane: &'a OwnedStream,
    side: &'a TargetSide,
    /// Size of a slot, and number of slots.
    slot: Bytes,
    slots: usize,
    /// Index of the slot for the next chunk.
    next: usize,
    /// Number of chunks that may fill slots without waiting for their draining.
    empty: usize,
}

/// One side of a chunk: its stream, and the slot's events to wait for and to record.
struct Hop<'a> {
    on: &'a OwnedStream,
    done: &'a OwnedEvent,
    /// GPU that is blamed for an error.
    device: DeviceId,
}

/// Number of chunks per part, within the limits of their size. The first one does not overlap with another.
const CHUNKS: u64 = 4;
const CHUNK: [Bytes; 2] = [Bytes::mib(2), Bytes::mib(4)];
/// Maximum operations of a chunk on either stream: its turn on the link, the wait for the other side, the copy, and its event.
const OPERATIONS: u32 = 4;
/// Maximum number of chunks per part, slot size permitting.
const MOST: u64 = 60;
const PAGE: Bytes = Bytes::kib(4);

impl<'a> Fork<'a> {
    /// Enqueues parts through the slots held by their relays' lanes, and records the progress of each.
    pub(crate) fn stage(&mut self, parts: &mut [Staged]) {
        let mut going: SmallVec<[Going<'a>; 8]> = SmallVec::new();
        for (index, part) in parts.iter().enumerate() {
            let Path { target, relay, .. } = part.path;
            let Some(ring) = self.state.ring(relay).map(|ring| ring.size()) else { continue };
            let slot = chunk(part.share.size, ring).min(self.slice());
            let Some(slots) = self.state.ring(relay).map(|ring| ring.count(slot)) else { continue };
            let Some((lane, side)) = self.both_sides(target, relay) else { continue };
            let (next, same) = self.state.lay_out(relay, slot, slots);
            // Behind a fork the work of earlier copies is done.
            let empty = if self.is_unordered && same { 0 } else { slots };
            if self.is_unordered && !same && !self.follow(relay, side) {
                self.state.forget_layout(relay);
                continue;
            }
            going.push(Going { index, lane, side, slot, slots, next, empty });
        }
        while !going.is_empty() {
            going.retain(|going| self.chunk(&mut parts[going.index], going));
        }
    }

    /// Enqueues the next chunk of a part. Returns `false` if there is none or it cannot be enqueued.
    fn chunk(&mut self, part: &mut Staged, going: &mut Going<'a>) -> bool {
        let Path { target, relay, direction, .. } = part.path;
        let Some((to, from)) = part.next(going.slot).filter(|_| going.slots > 0) else { return false };
        if !self.has_room(Some(relay), OPERATIONS) {
            return false;
        }
        // The link is the relay's; NVLink, on the other side, has no barriers.
        if !self.is_turn(going.lane.of()) {
            return false;
        }
        let (index, size) = (going.next, to.size());
        let Some(ring) = self.state.ring(relay) else { return false };
        let Some(slot) = ring.slot(index, going.slot, size) else { return false };
        let lane = Hop { on: going.lane, done: &ring.done[index], device: relay };
        let side = Hop { on: &going.side.stream, done: &going.side.done[index], device: target };
        let (fill, empty) = match direction {
            Direction::ToGpu => (lane, side),
            Direction::FromGpu => (side, lane),
        };
        let filled = fill.enqueue((going.empty == 0).then_some(&empty), &slot, &from);
        // A slot that was filled in vain is filled again by whoever is next, behind all that the lane has.
        let enqueued = filled.and_then(|()| empty.enqueue(Some(&fill), &to, &slot));
        if let Err((device, error)) = enqueued {
            self.state.forget_layout(relay);
            self.blame(device, &error);
            return false;
        }
        self.sent(part.path, size, 2);
        part.sent = part.sent.saturating_add(size);
        (going.next, going.empty) = ((index + 1) % going.slots, going.empty.saturating_sub(1));
        self.state.next_slot(relay, going.next);
        true
    }
}

impl Hop<'_> {
    /// Enqueues a copy that waits for the other side of the slot.
    fn enqueue(
        &self,
        behind: Option<&Hop<'_>>,
        to: &Span,
        from: &Span,
    ) -> Result<(), (DeviceId, DriverError)> {
        let wait = || behind.map_or(Ok(()), |other| self.on.wait_for(other.done.id()));
        let copied = wait().and_then(|()| self.on.of().copy(to, from));
        copied.and_then(|()| self.done.record(self.on.id())).map_err(|error| (self.device, error))
    }
}

impl Staged {
    /// Creates a staged part of which nothing is enqueued yet.
    pub(crate) fn new(path: Path, share: Share, ranges: SmallVec<[(Span, Span); 2]>) -> Staged {
        Staged { path, ranges, share, sent: Bytes::ZERO }
    }

    /// Returns the share that was not enqueued.
    pub(crate) fn rest(&self) -> Option<Share> {
        self.share.behind(self.sent)
    }

    /// Returns the next bytes, at most `most`, within one range.
    fn next(&self, most: Bytes) -> Option<(Span, Span)> {
        let mut before = self.sent;
        let (to, from) = self.ranges.iter().find(|(to, _)| {
            let is_here = before < to.size();
            before = if is_here { before } else { before.saturating_sub(to.size()) };
            is_here
        })?;
        let size = most.min(to.size().saturating_sub(before));
        to.part(before, size).zip(from.part(before, size))
    }
}

/// Returns the chunk size of a part, for a ring that holds at least two chunks.
fn chunk(part: Bytes, ring: Bytes) -> Bytes {
    let even = Bytes::new(part.get() / CHUNKS).max(CHUNK[0]).min(CHUNK[1]);
    let few = Bytes::new(part.get() / MOST);
    let most = Bytes::new(ring.get() / 2);
    even.max(few).align_up(PAGE).unwrap_or(most).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_few_and_fit_their_ring() {
        let ring = Bytes::mib(32);
        let of = |mib| chunk(Bytes::mib(mib), ring);
        assert_eq!([1, 8, 16, 32, 240].map(of), [2, 2, 4, 4, 4].map(Bytes::mib));
        assert_eq!(of(600), Bytes::mib(10));
        assert_eq!(of(1 << 20), Bytes::mib(16));
        assert_eq!(chunk(Bytes::gib(1), Bytes::mib(1)), Bytes::kib(512));
    }
}
