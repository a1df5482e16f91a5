//! A byte range of a live block, and the extents that hold it.
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

/// Byte range of a block that is, or was, live.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockRange {
    address: Address,
    /// Offset of the block in the reservation.
    block: Bytes,
    /// Byte range relative to the block's start.
    range: ByteRange,
}

impl BlockRange {
    /// Returns the range of `size` bytes from `address`, which must lie in one live block. The caller keeps the block live.
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

    /// Returns the extents that overlap the range; with `wholly`, only those that lie entirely in it.
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

    /// Returns whether the block is live and an extent lies entirely in the range.
    pub(super) fn covers(&self, core: &Allocator, extent: ExtentId) -> bool {
        let parts = self.parts(core);
        let mut touched = parts.iter().flat_map(|part| core.extents().touching(*part));
        touched.any(|(own, home)| own == extent && without(&[home], &parts).is_empty())
    }

    /// Returns the error for a block that has been freed.
    pub(super) fn unknown(&self, core: &Core) -> PoolError {
        PoolError::UnknownAddress { device: core.device(), address: self.address }
    }

    /// Returns the home ranges of the bytes, in the order of the block.
    pub(super) fn pieces(&self, core: &Allocator) -> Vec<HomeRange> {
        let home = core.blocks().home_of(self.block).unwrap_or_default();
        at_home(&[self.range], &home)
    }

    /// Returns the home ranges of the bytes, in address order.
    fn parts(&self, core: &Allocator) -> Vec<HomeRange> {
        let mut parts = self.pieces(core);
        parts.sort_unstable_by_key(|part| part.offset);
        parts
    }
}
