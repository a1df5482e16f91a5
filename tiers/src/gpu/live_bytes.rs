//! What a program says of its blocks' bytes, and what follows for copies that are there already.
//!
//! ```text
//! set, clear     ─► LiveRanges, under the allocator's lock ─► copies that hold less than what counts now are dropped
//! ask ─► answer  the same, for who learns the ranges later: of a block that was freed meanwhile nothing is said
//! ```

use glake_device::Address;
use glake_stitch::{Allocator, DomainId};
use glake_units::Bytes;

use super::core::Core;
use super::live_ranges::{self, ByteRange, Saying};
use super::records::ExtentRecords;
use super::{PoolError, Result};

/// The blocks of a pool, as their program speaks of them.
#[derive(Debug)]
pub struct LiveBytes<'a> {
    pub(super) core: &'a Core,
    pub(super) records: &'a ExtentRecords,
}

/// A block of which somebody says later which of its bytes count. Until then all do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveAnswer {
    block: Bytes,
    number: Saying,
}

impl LiveBytes<'_> {
    /// Of the block that begins at an address these bytes count and no others: rounded out to 512 bytes they are copied when its
    /// memory leaves, and the others have any value afterwards. Holds until it is said anew, or the block is freed; for memory that has
    /// left already, from its next way out on.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; [`PoolError::OutsideBlock`]: what was said before holds.
    pub fn set(&self, address: Address, ranges: &[ByteRange]) -> Result<()> {
        let block = {
            let allocator = self.core.lock();
            let (block, size) = self.block(&allocator, address)?;
            let live = self.rounded(block, size, ranges)?;
            self.core.live_ranges().say(block, Some(live));
            block
        };
        self.records.drop_outgrown(block)
    }

    /// All bytes of the block that begins at an address count again.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`].
    pub fn clear(&self, address: Address) -> Result<()> {
        let block = {
            let allocator = self.core.lock();
            let (block, _) = self.block(&allocator, address)?;
            self.core.live_ranges().end(block);
            block
        };
        self.records.drop_outgrown(block)
    }

    /// Somebody says later which bytes of the block that begins at an address count.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`].
    pub fn ask(&self, address: Address) -> Result<LiveAnswer> {
        let answer = {
            let allocator = self.core.lock();
            let (block, _) = self.block(&allocator, address)?;
            LiveAnswer { block, number: self.core.live_ranges().say(block, None) }
        };
        self.records.drop_outgrown(answer.block)?;
        Ok(answer)
    }

    /// The answer to [`LiveBytes::ask`], as often as there is a new one; with `None` all bytes count. Says nothing of a block that was
    /// freed meanwhile, nor of one of which something else was said.
    ///
    /// # Errors
    /// [`PoolError::OutsideBlock`]: all of its bytes count then.
    pub fn answer(&self, answer: LiveAnswer, ranges: Option<&[ByteRange]>) -> Result<()> {
        let said = {
            let allocator = self.core.lock();
            let Some((size, _)) = allocator.blocks().at(answer.block) else { return Ok(()) };
            let live = ranges.map(|ranges| self.rounded(answer.block, size, ranges)).transpose();
            let (live, wrong) = match live {
                Ok(live) => (live, None),
                Err(error) => (None, Some(error)),
            };
            let said = self.core.live_ranges().change(answer.block, answer.number, live);
            wrong.map_or(Ok(said), Err)
        };
        self.records.drop_outgrown(answer.block)?;
        said.map(|_| ())
    }

    /// The domain of the block of [`LiveBytes::ask`]; `None` once it was freed, or something else was said of it.
    pub fn asked(&self, answer: LiveAnswer) -> Option<DomainId> {
        let allocator = self.core.lock();
        let still = self.core.live_ranges().is(answer.block, answer.number);
        still.then(|| allocator.blocks().find(answer.block).map(|block| block.domain)).flatten()
    }

    fn block(&self, allocator: &Allocator, address: Address) -> Result<(Bytes, Bytes)> {
        let offset = self.core.offset(address)?;
        let found = allocator.blocks().at(offset);
        found.map(|(size, _)| (offset, size)).ok_or_else(|| self.core.unknown_offset(offset))
    }

    fn rounded(&self, block: Bytes, size: Bytes, ranges: &[ByteRange]) -> Result<Vec<ByteRange>> {
        live_ranges::rounded(ranges, size).map_err(|wrong| PoolError::OutsideBlock {
            device: self.core.device(),
            address: self.core.address(block),
            size: size.get(),
            start: wrong.start.get(),
            end: wrong.end.get(),
        })
    }
}
