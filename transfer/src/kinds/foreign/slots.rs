//! Slots in a relay's memory, through which copies go of GPU memory that it may not touch.
//!
//! ```text
//!   ring   │ slot 0 │ slot 1 │ slot 2 │ slot 3 │      as many as the chunks of a copy leave room for
//!          filled by one side, emptied by the other, which tell each other by an event a slot
//! ```
//!
//! Invariant: a ring is in the pool of its relay, where no work uses it, or with a lane set until its work was seen done. So a
//! copy never waits for a slot that another stream's copy holds.

use std::sync::Arc;

use glake_device::owned::{Buffer, CompletionEvents, DeviceSet, OwnedEvent, Span};
use glake_device::{DeviceId, EventKind};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::Result;

/// The most memory of a relay that all its rings together take.
const MOST: Bytes = Bytes::mib(64);
/// What a ring holds; less where there is less memory.
const RING: Bytes = Bytes::mib(32);
/// A smaller ring is not worth its calls.
const LEAST: Bytes = Bytes::kib(512);
/// A ring is not cut into more slots.
pub(crate) const SLOTS: usize = 8;

/// Memory for slots, mapped for every GPU, and the relay's events of them.
#[derive(Debug)]
pub(crate) struct Ring {
    memory: Span,
    /// By slot: recorded on the relay's lane after its part of a chunk.
    pub(crate) done: SmallVec<[OwnedEvent; SLOTS]>,
}

impl Ring {
    /// The rings that fit into so much memory of a relay, which the work of `reach` may touch; the clock is that of contexts of
    /// our own. None of less than 512 KiB.
    pub(crate) fn all(
        own: &Arc<CompletionEvents>,
        relay: DeviceId,
        memory: Bytes,
        reach: DeviceSet,
    ) -> Result<SmallVec<[Ring; 2]>> {
        let memory = memory.min(MOST);
        let ring = RING.min(memory);
        if ring < LEAST {
            return Ok(SmallVec::new());
        }
        let buffer = Arc::new(Buffer::lent(own, relay, memory, reach)?);
        let event = |_| OwnedEvent::new(own.driver(), relay, EventKind::Plain);
        let count = memory.get() / ring.get();
        let parts = (0..count).map_while(|index| buffer.span(Bytes::new(index * ring.get()), ring));
        parts
            .map(|memory| {
                Ok(Ring { memory, done: (0..SLOTS).map(event).collect::<glake_device::Result<_>>()? })
            })
            .collect()
    }

    /// How many bytes it holds.
    pub(crate) fn size(&self) -> Bytes {
        self.memory.size()
    }

    /// How many slots of a size it has.
    pub(crate) fn count(&self, slot: Bytes) -> usize {
        let count = self.memory.size().get() / slot.get().max(1);
        usize::try_from(count).unwrap_or(SLOTS).min(SLOTS)
    }

    /// So much of one of its slots of a size.
    pub(crate) fn slot(&self, index: usize, slot: Bytes, size: Bytes) -> Option<Span> {
        self.memory.part(Bytes::new(slot.get().checked_mul(index as u64)?), size)
    }
}
