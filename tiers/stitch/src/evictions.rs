//! Extents that are evicted and refilled: their addresses stay taken and their blocks live, and what is free in them is handed
//! out to nobody meanwhile.
//!
//! ```text
//!  Resident ──begin──► Moving ──finish──► Evicted ──begin_refill, refill_made──► Moving ──finish_refill──► Resident
//!      ▲                 │
//!      └──finish_refill──┘  nothing was given up
//! ```
//!
//! Invariants: what counts as reserved are the extents that are resident or moving; an alias over a moving extent is not unmapped, so
//! that an extent keeps its addresses while the driver works on them.

use glake_units::Bytes;

use crate::error::StitchError;
use crate::extent::ExtentState;
use crate::free_list::Class;
use crate::heap::Heap;
use crate::ids::ExtentId;

/// The extents of an allocator that leave and come back.
#[derive(Debug)]
pub struct Evictions<'a> {
    pub(crate) heap: &'a mut Heap,
    pub(crate) limit: Bytes,
}

impl Evictions<'_> {
    /// Begins to evict an extent: from now on nothing of it is handed out.
    ///
    /// # Errors
    /// [`StitchError::WrongExtentState`] where it is not resident; [`StitchError::Withheld`] where blocks were freed in it that other
    /// streams may still use. Nothing has changed then.
    pub fn begin(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        self.heap.home.extents.expect_residency(extent, ExtentState::Resident)?;
        self.heap.home.set_apart(extent)
    }

    /// A moving extent is mapped nowhere any more, and its memory released.
    ///
    /// # Errors
    /// [`StitchError::WrongExtentState`].
    pub fn finish(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        self.heap.home.extents.expect_residency(extent, ExtentState::Moving)?;
        self.heap.home.extents.set_state(extent, ExtentState::Evicted);
        let (size, small, mappings) = self.account(extent);
        self.heap.tallies.remove_extents(small, 1, size);
        self.heap.tallies.mappings -= mappings;
        Ok(())
    }

    /// Sets a part of the limit aside for an evicted extent, until [`Evictions::refill_made`].
    ///
    /// # Errors
    /// [`StitchError::OutOfMemory`] where the limit does not allow it; [`StitchError::WrongExtentState`].
    pub fn begin_refill(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        self.heap.home.extents.expect_residency(extent, ExtentState::Evicted)?;
        let size = self.heap.home.extents[extent].size;
        if self.heap.tallies.committed() + size > self.limit.get() {
            return Err(self.heap.out_of_memory(Bytes::new(size), self.limit));
        }
        self.heap.tallies.planned += size;
        Ok(())
    }

    /// Ends [`Evictions::begin_refill`]: the driver has made the memory, and the extent moves; or it has not.
    pub fn refill_made(&mut self, extent: ExtentId, made: bool) {
        let (size, small, mappings) = self.account(extent);
        self.heap.tallies.planned -= size;
        if !made {
            return;
        }
        self.heap.home.extents.set_state(extent, ExtentState::Moving);
        self.heap.tallies.add_extents(small, 1, size);
        self.heap.tallies.add_mappings(mappings);
    }

    /// All of a moving extent is mapped again, or still: its free bytes can be handed out.
    ///
    /// # Errors
    /// [`StitchError::WrongExtentState`].
    pub fn finish_refill(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        self.heap.home.extents.expect_residency(extent, ExtentState::Moving)?;
        self.heap.home.join_again(extent);
        Ok(())
    }

    /// An extent's size, whether it is of slabs, and how many mappings it has when it is resident.
    fn account(&self, id: ExtentId) -> (u64, bool, u64) {
        let extent = &self.heap.home.extents[id];
        (extent.size, extent.class == Class::Slabs, 1 + extent.aliases.len() as u64)
    }
}
