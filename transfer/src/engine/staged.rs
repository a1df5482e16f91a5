//! Copies through slots in the relays' memory.
//!
//! ```text
//!   first   ┤host ─► slot 0├┤slot 0 ─► target├┤host ─► slot 0├┤slot 0 ─► target├      one slot each: a stream's own
//!   second                   ┤host ─► slot 1├┤slot 1 ─► target├┤host ─► slot 1├ ...        order keeps it right
//! ```
//!
//! The second stream begins when the first has filled its slot, so that the two are never both off the link. Chunks of
//! several relays take turns, so that all links get under way at once.

use glake_device::Stream;
use glake_device::owned::{self, Span};
use glake_units::Bytes;
use smallvec::SmallVec;

use super::counters::Path;
use super::fork::Fork;
use crate::graph::Share;

/// A part that goes through slots.
#[derive(Clone, Debug)]
pub(super) struct Staged {
    pub(super) path: Path,
    pub(super) to: Span,
    pub(super) from: Span,
    /// Where it lies in the copy.
    pub(super) offset: Bytes,
    /// How much of it is enqueued, from its start on.
    pub(super) sent: Bytes,
}

/// A part under way.
struct Going {
    index: usize,
    streams: [Stream; 2],
    slots: [Span; 2],
    chunk: Bytes,
    turn: usize,
}

/// Fewer bytes are not worth two more copies: issuing them takes the host as long as they take the link.
const LEAST: Bytes = Bytes::kib(512);
/// A part is made of so many chunks at least, if they are not too small.
const CHUNKS: u64 = 2;
const PAGE: Bytes = Bytes::kib(4);

impl Fork<'_> {
    /// Enqueues parts through the slots that their relays' lanes hold; each says how far it came.
    pub(super) fn stage(&mut self, parts: &mut [Staged]) {
        let mut going: SmallVec<[Going; 8]> = SmallVec::new();
        for (index, part) in parts.iter().enumerate() {
            let relay = part.path.relay;
            let Some(ring) = self.state.ring(relay) else { continue };
            let (slots, slot) = (ring.slots.clone(), ring.slot());
            let Some(streams) = self.streams(relay) else { continue };
            let chunk = Bytes::new(part.to.size().get() / CHUNKS).align_up(PAGE).unwrap_or(slot);
            // Both streams have one under way.
            let chunk = chunk.min(Bytes::new(self.slice().get() / 2));
            going.push(Going { index, streams, slots, chunk: chunk.max(LEAST).min(slot), turn: 0 });
        }
        while !going.is_empty() {
            going.retain(|going| self.chunk(&mut parts[going.index], going));
        }
    }

    /// Enqueues the next chunk of a part; false where there is none, or none more can be.
    fn chunk(&mut self, part: &mut Staged, going: &mut Going) -> bool {
        let left = part.to.size().saturating_sub(part.sent);
        let size = going.chunk.min(left);
        if size.is_zero() {
            return false;
        }
        let side = going.turn % 2;
        let slot = going.slots[side].part(Bytes::ZERO, size);
        let ends = (part.to.part(part.sent, size), part.from.part(part.sent, size));
        let (Some(slot), (Some(to), Some(from))) = (slot, ends) else { return false };
        let relay = part.path.relay;
        let stream = going.streams[side];
        if !self.is_turn(relay, stream) {
            return false;
        }
        let enqueue = |to: &Span, from: &Span| owned::copy(&*self.engine.driver, relay, stream, to, from);
        let filled = enqueue(&slot, &from).and_then(|()| match going.turn {
            0 => self.stagger(relay),
            _ => Ok(()),
        });
        // A slot that was filled in vain is filled again by whoever is next.
        if let Err(error) = filled.and_then(|()| enqueue(&to, &slot)) {
            self.blame(relay, &error);
            return false;
        }
        self.sent(part.path, size, 2);
        part.sent = part.sent.saturating_add(size);
        going.turn += 1;
        true
    }
}

impl Staged {
    /// What of it was not enqueued.
    pub(super) fn rest(&self) -> Option<Share> {
        let size = self.to.size().saturating_sub(self.sent);
        let offset = self.offset.saturating_add(self.sent);
        (!size.is_zero()).then_some(Share { relay: self.path.relay, way: self.path.way, offset, size })
    }
}
