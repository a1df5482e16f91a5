//! Relays are suspended while everything is evicted: a process that has left its GPUs leaves the others too.
//!
//! ```text
//! shrink of everything ─► relays suspended          refill ─► its extents, over one link ─► relays resumed
//! ```
//!
//! Behind the refill: the driver makes no memory while it makes a context, and that takes as long as other links could save, the longer
//! the more memory is pinned.
//!
//! Invariant: suspended relays are woken by whatever brings memory back; a suspension that is asked for beside its beginning is taken back.
//! Both write what they do before they look for the other.

#[cfg(test)]
#[cfg(not(schedules))]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use glake_transfer::UnsuspendedRelay;

use super::RegionSet;

/// How many times memory began to come back.
#[derive(Debug, Default)]
pub(super) struct RefillCount(AtomicU64);

/// How long a report waits for contexts to go: each takes some 65 ms on an H200.
const REPORT: Duration = Duration::from_secs(2);

impl RefillCount {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl RegionSet {
    /// Memory is about to come back; [`RegionSet::resume_relays`] follows.
    pub(super) fn count_refill(&self) {
        self.refills_begun.0.fetch_add(1, Ordering::SeqCst);
    }

    /// Memory has come back, or will not: suspended relays are made ready, in the background.
    pub(super) fn resume_relays(&self) {
        self.registry.engine.resume_relays(&self.registry.devices);
    }

    /// All was to leave, since so many times that some began to come back: relays are suspended.
    pub(super) fn suspend_relays(&self, begun: u64) {
        self.registry.engine.suspend_relays(&self.registry.devices);
        if self.refills_begun.get() != begun {
            self.resume_relays();
        }
    }

    /// Relays that were to rest and whose contexts are there still.
    pub(super) fn unsuspended_relays(&self) -> Vec<UnsuspendedRelay> {
        self.registry.engine.made().map(|engine| engine.unsuspended(REPORT)).unwrap_or_default()
    }
}
