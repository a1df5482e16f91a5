//! What a pool tells about its blocks and its memory.

use glake_device::Address;
use glake_stitch::{Allocator, Counters, DomainId, Segment, Stats, StreamKey};
use glake_units::Bytes;

use super::{GpuPool, Result};

/// A block that was handed out and not freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Where it begins.
    pub address: Address,
    /// How long it is: the request rounded up to 512 bytes.
    pub size: Bytes,
    /// What was asked for.
    pub requested: Bytes,
    /// Whose memory it is.
    pub domain: DomainId,
    /// The stream that it was asked for on.
    pub stream: StreamKey,
}

impl GpuPool {
    /// The block that begins at an address: its size and what was asked for.
    pub fn block(&self, address: Address) -> Option<(Bytes, Bytes)> {
        self.core.lock().blocks().at(self.offset(address).ok()?)
    }

    /// The pool's addresses, at home and in aliases, mapped or not: where they begin, and how many they are.
    #[inline]
    pub fn range(&self) -> (Address, Bytes) {
        (self.reservation.start(), self.reservation.size())
    }

    /// The live block that an address lies in, at its start or anywhere else: large ones, small ones and stitched ones.
    /// Slower than [`GpuPool::block`], which knows starts alone.
    pub fn find(&self, address: Address) -> Option<LiveBlock> {
        let offset = self.offset(address).ok()?;
        let found = self.core.lock().blocks().find(offset);
        found.map(|block| self.live_block(block))
    }

    /// The live blocks of a domain, in the order of their addresses.
    pub fn blocks_of(&self, domain: DomainId) -> Vec<LiveBlock> {
        let blocks = self.core.lock().blocks().of(domain);
        blocks.into_iter().map(|block| self.live_block(block)).collect()
    }

    pub(super) fn live_block(&self, block: glake_stitch::LiveBlock) -> LiveBlock {
        let glake_stitch::LiveBlock { offset, size, requested, domain, stream } = block;
        LiveBlock { address: self.address(offset), size, requested, domain, stream }
    }

    /// The largest request of the default domain that would be served now ([`Allocator::largest`]), by the pool's limit and
    /// by what the driver has left.
    ///
    /// # Errors
    /// What the driver answers when asked for its free memory.
    pub fn largest(&self) -> Result<Bytes> {
        self.usable()?;
        let free = self.driver.memory_info(self.device).map_err(|error| self.failed(error))?.free;
        let largest = self.core.lock().largest(Allocator::default_domain(), free);
        largest.map_err(|source| self.refused(source))
    }

    /// Everything that is counted; walks the free pieces.
    pub fn stats(&self) -> Stats {
        self.core.lock().report().stats()
    }

    /// What was done, without walking anything.
    pub fn counters(&self) -> Counters {
        self.core.lock().counters()
    }

    /// Starts the peaks from what is now.
    pub fn reset_peaks(&self) {
        self.core.lock().reset_peaks();
    }

    /// Starts the totals and the counters from zero, and what was noted of lags and waits.
    pub fn reset_totals(&self) {
        self.core.lock().reset_totals();
        self.reset_lag();
        self.reset_waits();
    }

    /// Physical memory held.
    pub fn reserved(&self) -> Bytes {
        self.core.lock().reserved_bytes()
    }

    /// How many free ranges there are.
    pub fn free_ranges(&self) -> usize {
        self.core.lock().report().free_ranges()
    }

    /// Every mapped range and what lies in it; offsets count from [`GpuPool::base`].
    pub fn segments(&self) -> Vec<Segment> {
        self.core.lock().report().segments()
    }
}
