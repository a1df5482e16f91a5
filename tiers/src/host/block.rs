//! Pinned memory in use by a caller.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glake_device::Address;
use glake_device::owned::{PinnedRange, Span};
use glake_units::Bytes;

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
