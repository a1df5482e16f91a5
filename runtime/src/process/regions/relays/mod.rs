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

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use glake_transfer::UnsuspendedRelay;

use super::super::device_registry::DeviceRegistry;

/// Maximum wait of a report for contexts to be destroyed; each takes about 65 ms on an H200.
const REPORT: Duration = Duration::from_secs(2);

/// Relays of a process, suspended while everything is evicted.
#[derive(Debug)]
pub(super) struct Relays {
    registry: Arc<DeviceRegistry>,
    /// Number of refills that have begun.
    refills_begun: AtomicU64,
}

impl Relays {
    pub(super) fn new(registry: &Arc<DeviceRegistry>) -> Relays {
        Relays { registry: registry.clone(), refills_begun: AtomicU64::new(0) }
    }

    pub(super) fn refills_begun(&self) -> u64 {
        self.refills_begun.load(Ordering::SeqCst)
    }

    /// Counts a refill that is about to begin; [`Relays::resume`] follows.
    pub(super) fn count_refill(&self) {
        self.refills_begun.fetch_add(1, Ordering::SeqCst);
    }

    /// Resumes suspended relays in the background, after a refill has ended or failed.
    pub(super) fn resume(&self) {
        self.registry.engine.resume_relays(&self.registry.devices);
    }

    /// Suspends relays because everything was evicted. `begun`: the number of refills begun before, to detect a race.
    pub(super) fn suspend(&self, begun: u64) {
        self.registry.engine.suspend_relays(&self.registry.devices);
        if self.refills_begun() != begun {
            self.resume();
        }
    }

    /// Returns relays that should be suspended but still have a context.
    pub(super) fn unsuspended(&self) -> Vec<UnsuspendedRelay> {
        self.registry.engine.made().map(|engine| engine.unsuspended(REPORT)).unwrap_or_default()
    }
}
