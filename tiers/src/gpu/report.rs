//! What a pool tells about its blocks and its memory.

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

impl LiveBlock {
    pub(super) fn of(core: &Core, block: glake_stitch::LiveBlock) -> Self {
        let glake_stitch::LiveBlock { offset, size, requested, domain, stream } = block;
        LiveBlock { address: core.address(offset), size, requested, domain, stream }
    }
}

/// What a pool tells about itself besides its blocks.
#[derive(Debug)]
pub struct Report<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) waits: &'a WaitTimer,
    pub(super) lease: &'a Lease,
}

impl Report<'_> {
    /// The largest request of the default domain that would be served now ([`Allocator::largest`]), by the pool's limit, by what
    /// the driver has left, and by the lease.
    ///
    /// # Errors
    /// What the driver answers when asked for its free memory.
    pub fn largest(&self) -> Result<Bytes> {
        self.core.usable()?;
        let info = self.core.driver().memory_info(self.core.device());
        let free = info.map_err(|error| self.core.failed(error))?.free.min(self.lease.room());
        let largest = self.core.lock().largest(Allocator::default_domain(), free);
        largest.map_err(|source| self.core.refused(source))
    }

    /// The GPU time that streams spent in waits for other streams which the program did not ask for, made under
    /// [`glake_stitch::Borrow::Wait`]. Waits that are not over yet are counted, not timed.
    pub fn gpu_waits(&self) -> GpuWaits {
        self.waits.told()
    }

    /// Starts the peaks from what is now.
    pub fn reset_peaks(&self) {
        self.core.lock().reset_peaks();
    }

    /// How many such waits there ever were: the number of the next.
    pub fn gpu_waits_made(&self) -> u64 {
        self.waits.made()
    }

    /// How long a stream stood still in those of these numbers that are over; the last few thousand are known.
    pub fn gpu_wait_time(&self, stream: Stream, numbers: &Range<u64>) -> Duration {
        self.waits.time_of(stream, numbers)
    }

    /// Starts the totals and the counters from zero, and what was noted of lags and waits.
    pub fn reset_totals(&self) {
        self.core.lock().reset_totals();
        self.clock.reset_lag();
        self.waits.reset();
        self.lease.reset();
    }

    /// How many free ranges there are.
    pub fn free_ranges(&self) -> usize {
        self.core.lock().report().free_ranges()
    }

    /// Every mapped range and what lies in it; offsets count from [`super::GpuPool::base`].
    pub fn segments(&self) -> Vec<Segment> {
        self.core.lock().report().segments()
    }
}
