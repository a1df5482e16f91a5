//! Blocks used in turn, for more bytes than may be pinned at once.
//!
//! ```text
//!  GPU ──copy──► [ slot ] ──write──► file          while one slot is filled, others are emptied
//!                [ slot ]
//!  GPU ◄──copy── [ slot ] ◄──read─── file
//! ```

use std::sync::Arc;

use glake_device::owned::Span;
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};

use super::HostBlock;

/// Ring of slots of one size. A clone refers to the same ring.
#[derive(Clone, Debug)]
pub struct Ring {
    turns: Arc<Turns>,
    slot: Bytes,
}

#[derive(Debug)]
struct Turns {
    slots: Mutex<Slots>,
    returned: Condvar,
}

#[derive(Debug)]
struct Slots {
    free: Vec<HostBlock>,
    /// Number of slots, free or in use.
    left: usize,
}

/// Slot in use; dropping it makes it available to the next caller. The work on it must have completed by then, because its bytes are reused
/// at once, unlike a block's. If completion is uncertain, [`RingSlot::give_up`] removes the slot from the ring.
#[derive(Debug)]
pub struct RingSlot {
    turns: Arc<Turns>,
    /// Block of the slot; taken on drop.
    block: Option<HostBlock>,
}

impl Ring {
    pub(super) fn new(blocks: Vec<HostBlock>, slot: Bytes) -> Self {
        let slots = Mutex::new(Slots { left: blocks.len(), free: blocks });
        Ring { turns: Arc::new(Turns { slots, returned: Condvar::new() }), slot }
    }

    /// Returns the size of a slot.
    pub fn slot(&self) -> Bytes {
        self.slot
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> usize {
        self.turns.slots.lock().left
    }

    /// Returns the next free slot, waiting for one; a caller that holds all slots waits forever. `None` if all were given up.
    pub fn next(&self) -> Option<RingSlot> {
        let mut slots = self.turns.slots.lock();
        loop {
            if let Some(block) = slots.free.pop() {
                return Some(RingSlot { turns: self.turns.clone(), block: Some(block) });
            }
            if slots.left == 0 {
                return None;
            }
            self.turns.returned.wait(&mut slots);
        }
    }

    /// Returns a free slot, if there is one.
    pub fn try_next(&self) -> Option<RingSlot> {
        let block = self.turns.slots.lock().free.pop()?;
        Some(RingSlot { turns: self.turns.clone(), block: Some(block) })
    }
}

impl RingSlot {
    /// Returns a span of a part of the slot for asynchronous work; `None` beyond its end.
    pub fn span(&self, offset: Bytes, size: Bytes) -> Option<Span> {
        self.block.as_ref()?.span(offset, size)
    }

    /// Returns the bytes. The caller must wait for device work on them.
    pub fn as_slice(&self) -> &[u8] {
        self.block.as_ref().map_or(&[], HostBlock::as_slice)
    }

    /// Returns the bytes mutably; `None` while spans of the slot live.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        self.block.as_mut()?.as_mut_slice()
    }

    /// Removes the slot from the ring: its memory returns to the pool, which waits for the work on it.
    pub fn give_up(mut self) {
        self.block = None;
        self.turns.slots.lock().left -= 1;
        self.turns.returned.notify_all();
    }
}

impl Drop for RingSlot {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        self.turns.slots.lock().free.push(block);
        self.turns.returned.notify_one();
    }
}
