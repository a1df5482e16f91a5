//! Relays rest while everything is away: a process that has left its GPUs leaves the others too.
//!
//! Invariant: relays that rest are woken by whatever brings memory back, before it begins; a rest that is asked for beside such a
//! beginning is taken back. Both write what they do before they look for the other.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use glake_transfer::StayedRelay;

use super::Regions;
use super::slot::sizes;

/// How many times memory began to come back.
#[derive(Debug, Default)]
pub(super) struct Begun(AtomicU64);

/// How long a report waits for contexts to go: each takes some 65 ms on an H200.
const REPORT: Duration = Duration::from_secs(2);

impl Begun {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Regions {
    /// Memory is about to come back: relays are made ready beside it, for its later extents.
    pub(super) fn wake_relays(&self) {
        self.begun.0.fetch_add(1, Ordering::SeqCst);
        self.starter.engine.wake(&self.starter.devices);
    }

    /// Memory has left, since so many times that some began to come back: where nothing of it is on a GPU any more, or all was to
    /// leave, relays rest.
    pub(super) fn rest_relays(&self, everything: bool, begun: u64) {
        let regions = || self.table.named(None).into_iter().flatten().flat_map(|slot| slot.regions());
        if !self.config.relays_rest || !(everything || regions().all(|region| sizes(&region).0.is_zero())) {
            return;
        }
        self.starter.engine.rest(&self.starter.devices);
        if self.begun.get() != begun {
            self.starter.engine.wake(&self.starter.devices);
        }
    }

    /// Relays that were to rest and whose contexts are there still.
    pub(super) fn stayed_relays(&self) -> Vec<StayedRelay> {
        self.starter.engine.made().map(|engine| engine.stayed(REPORT)).unwrap_or_default()
    }
}
