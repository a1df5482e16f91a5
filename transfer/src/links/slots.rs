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

/// Maximum memory of all rings of a relay.
const MOST: Bytes = Bytes::mib(64);
/// Ring size, if the memory allows it.
const RING: Bytes = Bytes::mib(32);
/// Minimum ring size that justifies its overhead.
const LEAST: Bytes = Bytes::kib(512);
/// Maximum number of slots per ring.
pub(crate) const SLOTS: usize = 8;

/// Ring of slots, mapped for every GPU, with the relay's events.
#[derive(Debug)]
pub(crate) struct Ring {
    memory: Span,
    /// Events by slot, recorded on the relay's lane after its side of a chunk.
    pub(crate) done: SmallVec<[OwnedEvent; SLOTS]>,
}

impl Ring {
    /// Allocates as many rings as fit into `memory` bytes of a relay, accessible to `reach`, in GLake's own contexts. Rings have at least
    /// 512 KiB.
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

    /// Returns the size of the ring.
    pub(crate) fn size(&self) -> Bytes {
        self.memory.size()
    }

    /// Returns the number of slots of a size.
    pub(crate) fn count(&self, slot: Bytes) -> usize {
        let count = self.memory.size().get() / slot.get().max(1);
        usize::try_from(count).unwrap_or(SLOTS).min(SLOTS)
    }

    /// Returns the first `size` bytes of a slot.
    pub(crate) fn slot(&self, index: usize, slot: Bytes, size: Bytes) -> Option<Span> {
        self.memory.part(Bytes::new(slot.get().checked_mul(index as u64)?), size)
    }
}
