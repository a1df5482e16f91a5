//! A range of a live block, and the extents that it lies in.
//!
//! ```text
//! block     [      range      ]
//! extents  |  e0  |  e1  |  e2  |         e1 lies wholly in the range, e0 and e2 do not
//! ```

use glake_device::Address;
use glake_stitch::{Allocator, ExtentId, HomeRange};
use glake_units::Bytes;

use super::core::Core;
use super::live_ranges::{ByteRange, at_home, without};
use super::{GpuPool, PoolError, Result};

/// Bytes of a block that is live, or was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRange {
    address: Address,
    /// Where the block begins, from the start of the reservation.
    block: Bytes,
    /// In the block's own bytes.
    range: ByteRange,
}

impl BlockRange {
    /// `size` bytes from an address on, which lie in one live block of a pool. That it stays live is the caller's to see to.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`], [`PoolError::OutsideBlock`].
    pub(crate) fn of(pool: &GpuPool, address: Address, size: Bytes) -> Result<BlockRange> {
        let core = &pool.core;
        let offset = core.offset(address)?;
        let found = core.lock().blocks().find(offset);
        let block = found.ok_or_else(|| core.unknown_offset(offset))?;
        let start = offset.saturating_sub(block.offset);
        let end = start.saturating_add(size);
        if end > block.size {
            return Err(PoolError::OutsideBlock {
                device: core.device(),
                address: core.address(block.offset),
                size: block.size.get(),
                start: start.get(),
                end: end.get(),
            });
        }
        Ok(BlockRange { address, block: block.offset, range: ByteRange { start, end } })
    }

    /// The extents that lie in it wholly, or with any byte.
    pub(crate) fn extents(&self, pool: &GpuPool, wholly: bool) -> Vec<ExtentId> {
        let core = pool.core.lock();
        let parts = self.parts(&core);
        let touched = parts.iter().flat_map(|part| core.extents().touching(*part));
        let mut extents: Vec<ExtentId> = touched
            .filter(|(_, home)| !wholly || without(&[*home], &parts).is_empty())
            .map(|(extent, _)| extent)
            .collect();
        // Two parts of one block may lie in one extent.
        extents.dedup();
        extents
    }

    /// Whether an extent lies in it wholly, and the block is live.
    pub(super) fn covers(&self, core: &Allocator, extent: ExtentId) -> bool {
        let parts = self.parts(core);
        let mut touched = parts.iter().flat_map(|part| core.extents().touching(*part));
        touched.any(|(own, home)| own == extent && without(&[home], &parts).is_empty())
    }

    /// The block was freed.
    pub(super) fn unknown(&self, core: &Core) -> PoolError {
        PoolError::UnknownAddress { device: core.device(), address: self.address }
    }

    /// Its bytes at home, in the order of addresses.
    fn parts(&self, core: &Allocator) -> Vec<HomeRange> {
        let home = core.blocks().home_of(self.block).unwrap_or_default();
        let mut parts = at_home(&[self.range], &home);
        parts.sort_unstable_by_key(|part| part.offset);
        parts
    }
}
