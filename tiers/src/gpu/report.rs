//! Statistics and listings of a pool.

use std::ops::Range;
use std::time::Duration;

use glake_device::{Address, Stream};
use glake_stitch::{Allocator, DomainId, Segment, StreamKey};
use glake_units::Bytes;

use super::Result;
use super::clock::CompletionClock;
use super::core::Core;
use super::lease::Lease;
use super::waits::{GpuWaits, WaitTimer};

/// Block that was allocated and not freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Address of the first byte.
    pub address: Address,
    /// Size of the block: the request rounded up to 512 bytes.
    pub size: Bytes,
    /// Size that was requested.
    pub requested: Bytes,
    /// Domain of the block.
    pub domain: DomainId,
    /// Stream for which the block was allocated.
    pub stream: StreamKey,
}

impl LiveBlock {
    pub(super) fn of(core: &Core, block: glake_stitch::LiveBlock) -> Self {
        let glake_stitch::LiveBlock { offset, size, requested, domain, stream } = block;
        LiveBlock { address: core.address(offset), size, requested, domain, stream }
    }
}

/// Statistics of a pool beyond its blocks.
#[derive(Debug)]
pub struct Report<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) waits: &'a WaitTimer,
    pub(super) lease: &'a Lease,
}

impl Report<'_> {
    /// Returns the largest request of the default domain that could be served now ([`Allocator::largest`]), given the pool's limit, the
    /// driver's free memory and the lease.
    ///
    /// # Errors
    /// The driver's error when queried for its free memory.
    pub fn largest(&self) -> Result<Bytes> {
        self.core.usable()?;
        let info = self.core.driver().memory_info(self.core.device());
        let free = info.map_err(|error| self.core.failed(error))?.free.min(self.lease.room());
        let largest = self.core.lock().largest(Allocator::default_domain(), free);
        largest.map_err(|source| self.core.refused(source))
    }

    /// Returns the GPU time that streams spent waiting for other streams without the program's request, under
    /// [`glake_stitch::Borrow::Wait`]. Unfinished waits are counted but not timed.
    pub fn gpu_waits(&self) -> GpuWaits {
        self.waits.told()
    }

    /// Resets the peaks to the current values.
    pub fn reset_peaks(&self) {
        self.core.lock().reset_peaks();
    }

    /// Returns the total number of such waits, which is the number of the next one.
    pub fn gpu_waits_made(&self) -> u64 {
        self.waits.made()
    }

    /// Returns how long a stream stood still in the finished waits with these numbers; only the last few thousand are known.
    pub fn gpu_wait_time(&self, stream: Stream, numbers: &Range<u64>) -> Duration {
        self.waits.time_of(stream, numbers)
    }

    /// Resets the totals, the counters, and the statistics of lags and waits.
    pub fn reset_totals(&self) {
        self.core.lock().reset_totals();
        self.clock.reset_lag();
        self.waits.reset();
        self.lease.reset();
    }

    /// Returns the number of free ranges.
    pub fn free_ranges(&self) -> usize {
        self.core.lock().report().free_ranges()
    }

    /// Returns every mapped range with its contents; offsets count from [`super::GpuPool::base`].
    pub fn segments(&self) -> Vec<Segment> {
        self.core.lock().report().segments()
    }
}
