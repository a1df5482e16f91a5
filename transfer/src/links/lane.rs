//! Streams, events and slots on one GPU.
//!
//! - A lane serves the copies of one program stream at a time. A relay's lane is in GLake's own context, the target's in its primary context.
//! - A ring of slots in a relay's memory stages copies of GPU memory that the relay may not access.
//! - The target's side of these copies fills or drains the slots in the target's primary context, where its memory is accessible as for the
//!   program.
//!
//! ```text
//!   ring   │ slot 0 │ slot 1 │ slot 2 │ slot 3 │      as many as fit, given the chunk size of a copy
//!          filled by one side, drained by the other; one event per slot and side orders them
//! ```
//!
//! Invariant: a ring is in the pool of its relay while no work uses it, or with a lane set until its work is known to be complete. Therefore a
//! copy never waits for a slot that another stream's copy holds.

use std::sync::Arc;

use glake_device::owned::{Buffer, CompletionEvents, DeviceSet, OwnedEvent, OwnedStream, Span};
use glake_device::{DeviceId, Driver, EventKind};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::Result;

/// Streams and events on one GPU.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) stream: OwnedStream,
    /// Event recorded on `stream` after each copy's part. The lane is idle once it has passed.
    pub(crate) done: OwnedEvent,
    /// Stream that forwards staged bytes.
    pub(crate) second: Second,
    /// Timed events before and after a part.
    pub(crate) clock: [OwnedEvent; 2],
    /// Whether the lane is in the primary context, where the program's own default stream waits for its work.
    pub(crate) is_primary: bool,
}

/// Second stream of a lane.
#[derive(Debug)]
pub(crate) struct Second {
    pub(crate) stream: OwnedStream,
    /// Event recorded on the second stream; the first stream waits for it.
    pub(crate) done: OwnedEvent,
}

/// Stream of a GPU for copies between slots and GPU memory.
#[derive(Debug)]
pub(crate) struct StagingStream {
    pub(crate) stream: OwnedStream,
    /// Events by slot, recorded after the slot's copy.
    pub(crate) done: Vec<OwnedEvent>,
}

impl Lane {
    /// Creates a lane of a relay, in GLake's own context.
    pub(crate) fn of_relay(own: &Arc<dyn Driver>, device: DeviceId) -> Result<Lane> {
        Lane::new(own, device, false)
    }

    /// Creates a lane of a target that is not a relay, in its primary context: for copies in the order of its own streams.
    pub(crate) fn of_target(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Lane> {
        Lane::new(driver, device, true)
    }

    fn new(driver: &Arc<dyn Driver>, device: DeviceId, is_primary: bool) -> Result<Lane> {
        let event = |kind| OwnedEvent::new(driver, device, kind);
        Ok(Lane {
            stream: OwnedStream::new(driver, device)?,
            done: event(EventKind::Plain)?,
            second: Second { stream: OwnedStream::new(driver, device)?, done: event(EventKind::Plain)? },
            clock: [event(EventKind::Timed)?, event(EventKind::Timed)?],
            is_primary,
        })
    }
}

/// Maximum memory of all rings of a relay.
const MOST_RINGS: Bytes = Bytes::mib(64);
/// Ring size, if the memory allows it.
const RING: Bytes = Bytes::mib(32);
/// Minimum ring size that justifies its overhead.
const LEAST_RING: Bytes = Bytes::kib(512);
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
        let memory = memory.min(MOST_RINGS);
        let ring = RING.min(memory);
        if ring < LEAST_RING {
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

/// Streams and events of a lane set on a target, for the slots of one relay.
#[derive(Debug)]
pub(crate) struct TargetSide {
    pub(crate) stream: OwnedStream,
    /// Events by slot, recorded after the target's side of a chunk.
    pub(crate) done: SmallVec<[OwnedEvent; SLOTS]>,
    /// Event recorded after the whole copy.
    pub(crate) end: OwnedEvent,
}

impl TargetSide {
    /// Creates the side in the target's primary context.
    pub(crate) fn new(driver: &Arc<dyn Driver>, target: DeviceId) -> Result<TargetSide> {
        let event = |_| OwnedEvent::new(driver, target, EventKind::Plain);
        Ok(TargetSide {
            stream: OwnedStream::new(driver, target)?,
            done: (0..SLOTS).map(event).collect::<glake_device::Result<_>>()?,
            end: event(0)?,
        })
    }
}
