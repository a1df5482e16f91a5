//! Eviction and refill of extents. Their addresses stay reserved and their blocks live; free bytes in them are not handed out meanwhile.
//!
//! ```text
//!  Resident ──begin──► Moving ──finish──► Evicted ──begin_refill, refill_made──► Moving ──finish_refill──► Resident
//!      ▲                 │
//!      └──finish_refill──┘  the eviction was cancelled
//! ```
//!
//! Invariants: resident and moving extents count as reserved; an alias over a moving extent is not unmapped, so that the extent keeps its
//! addresses while the driver works on them.

use glake_units::Bytes;

use crate::error::StitchError;
use crate::extent::ExtentState;
use crate::free_list::Class;
use crate::heap::Heap;
use crate::ids::ExtentId;

/// Interface that evicts and refills extents of an allocator.
#[derive(Debug)]
pub struct Evictions<'a> {
    pub(crate) heap: &'a mut Heap,
    pub(crate) limit: Bytes,
}

impl Evictions<'_> {
    /// Begins the eviction of an extent: its free bytes are not handed out from now on.
    ///
    /// # Errors
    /// [`StitchError::WrongExtentState`] if the extent is not resident; [`StitchError::Withheld`] if other streams may still use blocks
    /// freed in it. Nothing has changed then.
    pub fn begin(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        self.heap.home.extents.expect_residency(extent, ExtentState::Resident)?;
        self.heap.home.set_apart(extent)
    }

    /// Completes the eviction of a moving extent, which is unmapped everywhere and whose memory is released.
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

    /// Reserves a part of the limit for the refill of an evicted extent, until [`Evictions::refill_made`].
    ///
    /// # Errors
    /// [`StitchError::OutOfMemory`] if the limit does not allow it; [`StitchError::WrongExtentState`].
    pub fn begin_refill(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        self.heap.home.extents.expect_residency(extent, ExtentState::Evicted)?;
        let size = self.heap.home.extents[extent].size;
        if self.heap.tallies.committed() + size > self.limit.get() {
            return Err(self.heap.out_of_memory(Bytes::new(size), self.limit));
        }
        self.heap.tallies.planned += size;
        Ok(())
    }

    /// Completes [`Evictions::begin_refill`]. If `made`, the driver created the memory and the extent is moving; else it stays evicted.
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

    /// Makes a moving extent resident: it is mapped at all its addresses, and its free bytes can be handed out.
    ///
    /// # Errors
    /// [`StitchError::WrongExtentState`].
    pub fn finish_refill(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        self.heap.home.extents.expect_residency(extent, ExtentState::Moving)?;
        self.heap.home.join_again(extent);
        Ok(())
    }

    /// Returns an extent's size, whether it holds slabs, and its number of mappings when resident.
    fn account(&self, id: ExtentId) -> (u64, bool, u64) {
        let extent = &self.heap.home.extents[id];
        (extent.size, extent.class == Class::Slabs, 1 + extent.aliases.len() as u64)
    }
}
