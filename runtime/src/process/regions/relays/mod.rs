//! Suspension of relays while everything is evicted: a process that has left its own GPUs must not occupy others.
//!
//! ```text
//! shrink of everything ─► relays suspended          refill ─► its extents, over one link ─► relays resumed
//! ```
//!
//! Relays are resumed after the refill, because the driver creates no memory while it creates a context. That takes about as long as the
//! other links could save, and longer the more memory is pinned.
//!
//! Invariant: every refill wakes suspended relays; a suspension that races with the begin of a refill is undone. Both write their own state
//! before they read the other's.

#[cfg(test)]
#[cfg(not(schedules))]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use glake_transfer::UnsuspendedRelay;

use super::RegionSet;

/// Number of refills that have begun.
#[derive(Debug, Default)]
pub(super) struct RefillCount(AtomicU64);

/// Maximum wait of a report for contexts to be destroyed; each takes about 65 ms on an H200.
const REPORT: Duration = Duration::from_secs(2);

impl RefillCount {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl RegionSet {
    /// Counts a refill that is about to begin; [`RegionSet::resume_relays`] follows.
    pub(super) fn count_refill(&self) {
        self.refills_begun.0.fetch_add(1, Ordering::SeqCst);
    }

    /// Resumes suspended relays in the background, after a refill has ended or failed.
    pub(super) fn resume_relays(&self) {
        self.registry.engine.resume_relays(&self.registry.devices);
    }

    /// Suspends relays because everything was evicted. `begun`: the number of refills begun before, to detect a race.
    pub(super) fn suspend_relays(&self, begun: u64) {
        self.registry.engine.suspend_relays(&self.registry.devices);
        if self.refills_begun.get() != begun {
            self.resume_relays();
        }
    }

    /// Returns relays that should be suspended but still have a context.
    pub(super) fn unsuspended_relays(&self) -> Vec<UnsuspendedRelay> {
        self.registry.engine.made().map(|engine| engine.unsuspended(REPORT)).unwrap_or_default()
    }
}
