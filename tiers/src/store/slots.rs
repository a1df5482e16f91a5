//! Parts of an extent in the slots of a ring, on their way between its GPU and a file.
//!
//! Invariant: a slot goes back to its ring when the copy through it is done. Where that is not sure it leaves the ring.

use std::collections::VecDeque;
use std::sync::Arc;

use glake_device::owned::Span;
use glake_units::Bytes;

use crate::{HostError, HostPool, MoveError, Mover, Moving, PAGE, Ring, RingSlot};

/// A slot is as long as this, where there is so much: long enough that copies run at full speed.
const SLOT: Bytes = Bytes::mib(16);
/// Two for each extent that is under way.
const SLOTS: usize = 6;
/// How many parts of an extent are under way: while one is written or read, another is copied.
const AHEAD: usize = 2;

/// Slots of whole pages, shorter ones where there is not so much.
pub(super) fn ring(host: &Arc<HostPool>) -> Result<Ring, HostError> {
    let mut slot = SLOT;
    loop {
        match host.ring(slot, SLOTS) {
            Err(error) if error.is_shortage() && slot > PAGE => slot = Bytes::new(slot.get() / 2),
            answer => return answer,
        }
    }
}

/// A slot whose bytes are being copied.
#[derive(Debug)]
pub(super) struct Part {
    slot: RingSlot,
    size: Bytes,
    moving: Box<dyn Moving>,
}

/// The parts of one extent that are under way, in the order of its bytes.
#[derive(Debug)]
pub(super) struct Parts<'a> {
    ring: &'a Ring,
    mover: &'a dyn Mover,
    begun: VecDeque<Part>,
}

/// Why a part does not go on.
#[derive(Debug)]
pub(super) enum Halt {
    Host(HostError),
    Move(MoveError),
}

impl<'a> Parts<'a> {
    pub(super) fn new(ring: &'a Ring, mover: &'a dyn Mover) -> Self {
        Parts { ring, mover, begun: VecDeque::new() }
    }

    /// A slot for the next part; `None`: finish one first.
    pub(super) fn slot(&self) -> Result<Option<RingSlot>, Halt> {
        match self.begun.len() {
            // Who holds none waits; who holds some never does, so that all go on.
            0 => self.ring.next().map(Some).ok_or(Halt::Host(HostError::Spent { slot: self.ring.slot() })),
            AHEAD.. => Ok(None),
            _ => Ok(self.ring.try_next()),
        }
    }

    /// Begins to copy between a slot and these spans at home, which are `size` bytes. `pair` says which is which.
    pub(super) fn begin(
        &mut self,
        slot: RingSlot,
        home: Vec<Span>,
        pair: impl Fn(Span, Span) -> (Span, Span),
    ) -> Result<(), Halt> {
        let mut at = Bytes::ZERO;
        let pairs = home.into_iter().filter_map(|home| {
            let staged = slot.span(at, home.size());
            at = at.saturating_add(home.size());
            staged.map(|staged| pair(staged, home))
        });
        let pairs: Vec<(Span, Span)> = pairs.collect();
        match self.mover.enqueue(&pairs) {
            Ok(moving) => {
                self.begun.push_back(Part { slot, size: at, moving });
                Ok(())
            }
            Err(error) => {
                drop(pairs);
                slot.give_up();
                Err(Halt::Move(error))
            }
        }
    }

    /// Waits for the first part: its slot, and how many bytes of it count. `None`: none is under way.
    pub(super) fn finish(&mut self) -> Result<Option<(RingSlot, Bytes)>, Halt> {
        let Some(Part { slot, size, moving }) = self.begun.pop_front() else { return Ok(None) };
        match moving.wait() {
            Ok(()) => Ok(Some((slot, size))),
            Err(error) => {
                slot.give_up();
                Err(Halt::Move(error))
            }
        }
    }
}

impl Drop for Parts<'_> {
    fn drop(&mut self) {
        // Of an extent that was given up: its slots are others' once their copies are done.
        while !self.begun.is_empty() {
            let _ = self.finish();
        }
    }
}

/// What lies between two places of spans side by side.
pub(super) fn between(home: &[Span], from: Bytes, to: Bytes) -> Vec<Span> {
    let mut at = Bytes::ZERO;
    let part = |span: &Span| {
        let (begin, end) = (at, at.saturating_add(span.size()));
        at = end;
        let (first, last) = (begin.max(from), end.min(to));
        let size = last.checked_sub(first).filter(|size| !size.is_zero())?;
        span.part(first.saturating_sub(begin), size)
    };
    home.iter().filter_map(part).collect()
}
