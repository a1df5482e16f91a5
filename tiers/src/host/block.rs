//! Pinned memory in use by a caller: blocks, and rings of blocks used in turn for more bytes than may be pinned at once.
//!
//! ```text
//!  GPU ──copy──► [ slot ] ──write──► file          while one slot is filled, others are emptied
//!                [ slot ]
//!  GPU ◄──copy── [ slot ] ◄──read─── file
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glake_device::Address;
use glake_device::owned::{PinnedRange, Span};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};

use super::HostPool;

/// Block of pinned host memory that every device copies from and to at full speed. It returns to its pool when it is dropped and no span of
/// it lives. Work enqueued on it may still be running then: the pool hands the memory out again only after that work.
///
/// The initial contents are those of the previous owner.
#[derive(Debug)]
pub struct HostBlock {
    pool: Arc<HostPool>,
    range: Arc<PinnedRange>,
    size: Bytes,
    retained: AtomicBool,
}

impl HostBlock {
    pub(super) fn new(pool: &Arc<HostPool>, range: PinnedRange, size: Bytes) -> Self {
        HostBlock { pool: pool.clone(), range: Arc::new(range), size, retained: AtomicBool::new(false) }
    }

    /// Returns the address of the first byte, a multiple of 4 KiB.
    pub fn start(&self) -> Address {
        self.range.start()
    }

    /// Returns the requested size in bytes.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// Returns a span of a part of the block for asynchronous work; `None` beyond its end.
    pub fn span(&self, offset: Bytes, size: Bytes) -> Option<Span> {
        let end = offset.checked_add(size)?;
        if end > self.size { None } else { self.range.span(offset, size) }
    }

    /// Returns the bytes. The caller must wait for device work on them.
    pub fn as_slice(&self) -> &[u8] {
        let bytes = self.range.as_slice();
        bytes.get(..self.length()).unwrap_or(bytes)
    }

    /// Returns the bytes mutably; `None` while spans of the block live.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        let length = self.length();
        Arc::get_mut(&mut self.range)?.as_mut_slice().get_mut(..length)
    }

    /// Marks the block as a copy of data that is also on a GPU. It counts against the budget in either case; statistics and errors list
    /// such memory separately, because it can be given up without loss.
    pub fn set_retained(&self, retained: bool) {
        if self.retained.swap(retained, Ordering::AcqRel) != retained {
            self.pool.count_retained(self.range.size(), retained);
        }
    }

    /// Returns whether the block is marked as a retained copy.
    pub fn is_retained(&self) -> bool {
        self.retained.load(Ordering::Acquire)
    }

    /// Returns the size as `usize`, which fits because the memory is mapped in this process.
    fn length(&self) -> usize {
        usize::try_from(self.size.get()).unwrap_or(usize::MAX)
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        self.set_retained(false);
        self.pool.give_back(self.range.clone());
    }
}

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
