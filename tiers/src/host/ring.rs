//! A few blocks that take turns, for more bytes than may be pinned at once.
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

/// Slots of one size. A clone is the same ring.
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
    /// Free or in somebody's hands.
    left: usize,
}

/// A slot in somebody's hands; dropping it lets the next one have it. Work on it is to be done by then: unlike a block's, a
/// slot's bytes are somebody else's at once. Where that is not sure, [`RingSlot::give_up`] takes it out of the ring.
#[derive(Debug)]
pub struct RingSlot {
    turns: Arc<Turns>,
    /// Taken when it is dropped.
    block: Option<HostBlock>,
}

impl Ring {
    pub(super) fn new(blocks: Vec<HostBlock>, slot: Bytes) -> Self {
        let slots = Mutex::new(Slots { left: blocks.len(), free: blocks });
        Ring { turns: Arc::new(Turns { slots, returned: Condvar::new() }), slot }
    }

    /// How long a slot is.
    pub fn slot(&self) -> Bytes {
        self.slot
    }

    /// How many there are.
    pub fn slots(&self) -> usize {
        self.turns.slots.lock().left
    }

    /// The next slot that is free; waits for one. Who holds all of them waits for ever. `None`: all were given up.
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

    /// The next slot, if one is free.
    pub fn try_next(&self) -> Option<RingSlot> {
        let block = self.turns.slots.lock().free.pop()?;
        Some(RingSlot { turns: self.turns.clone(), block: Some(block) })
    }
}

impl RingSlot {
    /// A part of it, for asynchronous work; `None` past its end.
    pub fn span(&self, offset: Bytes, size: Bytes) -> Option<Span> {
        self.block.as_ref()?.span(offset, size)
    }

    /// Its bytes. Work that a device still does on them is the caller's to wait for.
    pub fn as_slice(&self) -> &[u8] {
        self.block.as_ref().map_or(&[], HostBlock::as_slice)
    }

    /// Its bytes, to change; `None` while spans of it live.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        self.block.as_mut()?.as_mut_slice()
    }

    /// Takes it out of the ring: its memory goes back to the pool, which waits for the work on it.
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
