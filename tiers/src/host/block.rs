//! Pinned memory in somebody's hands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glake_device::Address;
use glake_device::owned::{PinnedRange, Span};
use glake_units::Bytes;

use super::HostPool;

/// Pinned host memory that every device copies from and to at full speed. It goes back to its pool when it is dropped and no
/// span of it lives; work that is enqueued on it by then need not be done: the pool hands it out again after that.
///
/// What is in it is what its last owner left.
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

    /// Where it begins: at a multiple of 4 KiB.
    pub fn start(&self) -> Address {
        self.range.start()
    }

    /// How long it is: what was asked for.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// A part of it, for asynchronous work; `None` past its end.
    pub fn span(&self, offset: Bytes, size: Bytes) -> Option<Span> {
        let end = offset.checked_add(size)?;
        if end > self.size { None } else { self.range.span(offset, size) }
    }

    /// Its bytes. Work that a device still does on them is the caller's to wait for.
    pub fn as_slice(&self) -> &[u8] {
        let bytes = self.range.as_slice();
        bytes.get(..self.length()).unwrap_or(bytes)
    }

    /// Its bytes, to change; `None` while spans of it live.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        let length = self.length();
        Arc::get_mut(&mut self.range)?.as_mut_slice().get_mut(..length)
    }

    /// Says whether it is kept as a copy of what a GPU has as well. It counts against the budget either way; the statistics,
    /// and a refusal, tell such memory apart, because it can be given up without loss.
    pub fn set_retained(&self, retained: bool) {
        if self.retained.swap(retained, Ordering::AcqRel) != retained {
            self.pool.count_retained(self.range.size(), retained);
        }
    }

    /// As [`HostBlock::set_retained`] said.
    pub fn is_retained(&self) -> bool {
        self.retained.load(Ordering::Acquire)
    }

    /// It lies in memory of this process, so it fits.
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
