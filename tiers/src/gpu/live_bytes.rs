//! Live byte ranges declared by the program, and their effect on existing copies.
//!
//! ```text
//! set, clear     ─► LiveRanges, under the allocator's lock ─► copies that hold less than the live bytes are dropped
//! ask ─► answer  the same for ranges that become known later; an answer for a freed block is ignored
//! ```

use glake_device::Address;
use glake_stitch::{Allocator, DomainId};
use glake_units::Bytes;

use super::core::Core;
use super::live_ranges::{self, ByteRange, Saying};
use super::records::ExtentRecords;
use super::{PoolError, Result};

/// Interface for declaring live bytes of a pool's blocks.
#[derive(Debug)]
pub struct LiveBytes<'a> {
    pub(super) core: &'a Core,
    pub(super) records: &'a ExtentRecords,
}

/// Block whose live ranges will be declared later. Until then, all its bytes are live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveAnswer {
    block: Bytes,
    number: Saying,
}

impl LiveBytes<'_> {
    /// Declares the live bytes of the block that begins at an address: only these are preserved when its memory leaves, rounded out to 512
    /// bytes; the others become undefined. The declaration holds until the next one or the free. For memory that is already evicted, it
    /// takes effect at the next eviction.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; [`PoolError::OutsideBlock`]: the previous declaration holds.
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

    /// Declares all bytes of the block that begins at an address live again.
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

    /// Announces that the live ranges of the block at an address will be declared later.
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

    /// Answers a [`LiveBytes::ask`], any number of times; `None` makes all bytes live. Ignored if the block was freed or declared otherwise
    /// meanwhile.
    ///
    /// # Errors
    /// [`PoolError::OutsideBlock`]: all bytes of the block are live then.
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

    /// Returns the domain of the block of a [`LiveBytes::ask`]; `None` once the block was freed or declared otherwise.
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
