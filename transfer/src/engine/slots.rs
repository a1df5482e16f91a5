//! Slots in a relay's memory, through which copies go that the relay cannot make in one.
//!
//! Invariant: a ring is in the pool of its relay, where no work uses it, or with a lease until its work was seen done. So a
//! copy never waits for a slot that another stream's copy holds.

use std::sync::Arc;

use glake_device::DeviceId;
use glake_device::owned::{Buffer, DeviceSet, Epochs, Span};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::Result;

/// The most memory of a relay that all its slots together take.
const MOST: Bytes = Bytes::mib(16);
/// A slot holds as much; less where there is less memory.
const SLOT: Bytes = Bytes::mib(4);

/// Two slots: one is filled while the other is emptied.
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) slots: [Span; 2],
}

impl Ring {
    /// The rings that fit into so much memory of a relay; none of less than 512 KiB.
    pub(super) fn all(epochs: &Arc<Epochs>, relay: DeviceId, memory: Bytes) -> Result<SmallVec<[Ring; 4]>> {
        let memory = memory.min(MOST);
        let slot = SLOT.min(Bytes::new(memory.get() / 2));
        if slot < Bytes::kib(256) {
            return Ok(SmallVec::new());
        }
        let buffer = Arc::new(Buffer::new(epochs, relay, memory, DeviceSet::EMPTY)?);
        let part = |index: u64| buffer.span(Bytes::new(index * slot.get()), slot);
        let rings = (0..memory.get() / (2 * slot.get()))
            .map_while(|index| Some(Ring { slots: [part(2 * index)?, part(2 * index + 1)?] }));
        Ok(rings.collect())
    }

    /// What a slot holds.
    pub(super) fn slot(&self) -> Bytes {
        self.slots[0].size()
    }
}
