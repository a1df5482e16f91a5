//! Flags that every allocation and copy reads first: whether any thread is in a region, any region is cleaned, or anything is evicted.

use std::sync::atomic::{AtomicU64, Ordering};

/// Two counters in one word: threads inside regions in the low bits, tags with evicted memory in the high bits. Between them are the flags
/// for cleaned regions and decommitted memory.
#[derive(Debug, Default)]
pub(in super::super) struct RegionFlags(AtomicU64);

/// One tag with evicted memory.
const EVICTED: u64 = 1 << 32;
/// Flag: regions are cleaned, so that a write may invalidate a copy.
const CLEANED: u64 = 1 << 31;
/// Flag: parts of live blocks may be decommitted.
const DECOMMITTED: u64 = 1 << 30;

impl RegionFlags {
    /// Returns whether no thread is in a region and nothing is evicted. One relaxed load suffices: a thread that enters a region sees its
    /// own write, and a use of memory that another thread shrinks is a race in the program.
    #[inline]
    pub(in super::super) fn is_plain(&self) -> bool {
        self.0.load(Ordering::Relaxed) & !(CLEANED | DECOMMITTED) == 0
    }

    /// Returns whether anything is evicted or about to be.
    #[inline]
    pub(in super::super) fn is_any_evicted(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= EVICTED
    }

    /// Returns whether writes must be reported: anything is evicted, or any region is cleaned.
    #[inline]
    pub(in super::super) fn are_writes_told(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= CLEANED
    }

    /// Returns whether any region is cleaned.
    #[inline]
    pub(in super::super) fn is_any_cleaned(&self) -> bool {
        self.0.load(Ordering::Relaxed) & CLEANED != 0
    }

    /// Returns whether parts of live blocks may be decommitted.
    #[inline]
    pub(in super::super) fn is_any_decommitted(&self) -> bool {
        self.0.load(Ordering::Relaxed) & DECOMMITTED != 0
    }

    /// Sets the flag for the rest of the process's life.
    pub(super) fn set_decommitted(&self) {
        self.0.fetch_or(DECOMMITTED, Ordering::Release);
    }

    /// Sets the flag for the rest of the process's life.
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
