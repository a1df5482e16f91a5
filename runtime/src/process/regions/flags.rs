//! What an allocation and a copy look at first: whether any thread is in a region, whether any region is cleaned, and whether anything is
//! evicted.

use std::sync::atomic::{AtomicU64, Ordering};

/// Two counts in one word: threads that allocate in a region below, tags of which memory is evicted above. Between them, whether any
/// region is cleaned, and whether anything was ever decommitted.
#[derive(Debug, Default)]
pub(in super::super) struct RegionFlags(AtomicU64);

/// One tag of which memory is evicted.
const EVICTED: u64 = 1 << 32;
/// Regions are cleaned: there may be copies that a write makes void.
const CLEANED: u64 = 1 << 31;
/// Parts of live blocks may have no memory.
const DECOMMITTED: u64 = 1 << 30;

impl RegionFlags {
    /// Whether nothing has to be asked: no thread is in a region, and nothing is evicted. One relaxed load: who enters a region sees
    /// it on its own thread, and who uses what another thread is shrinking breaks that one's promise anyway.
    #[inline]
    pub(in super::super) fn is_plain(&self) -> bool {
        self.0.load(Ordering::Relaxed) & !(CLEANED | DECOMMITTED) == 0
    }

    /// Whether anything is evicted, or about to be.
    #[inline]
    pub(in super::super) fn is_any_evicted(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= EVICTED
    }

    /// Whether a write has to be told of: anything is evicted, or any region is cleaned.
    #[inline]
    pub(in super::super) fn are_writes_told(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= CLEANED
    }

    /// Whether any region is cleaned.
    #[inline]
    pub(in super::super) fn is_any_cleaned(&self) -> bool {
        self.0.load(Ordering::Relaxed) & CLEANED != 0
    }

    /// Whether parts of live blocks may have no memory.
    #[inline]
    pub(in super::super) fn is_any_decommitted(&self) -> bool {
        self.0.load(Ordering::Relaxed) & DECOMMITTED != 0
    }

    /// From now on, for as long as the process lives.
    pub(super) fn set_decommitted(&self) {
        self.0.fetch_or(DECOMMITTED, Ordering::Release);
    }

    /// From now on, for as long as the process lives.
    pub(super) fn set_cleaned(&self) {
        self.0.fetch_or(CLEANED, Ordering::Release);
    }

    pub(super) fn add_thread(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn sub_thread(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn add_evicted(&self) {
        self.0.fetch_add(EVICTED, Ordering::Release);
    }

    pub(super) fn sub_evicted(&self) {
        self.0.fetch_sub(EVICTED, Ordering::Release);
    }
}
