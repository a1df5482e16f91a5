//! Regions of a process: the allocations of each, and their evictions and refills.
//!
//! ```text
//! Regions ─► RegionSet: shared with background work
//! enter(tag) ─► this thread's allocations ─► the tag (`Tagged`) ─► a tiers::Region a device
//! shrink, refill ─► moves ─► Region ─► LinkMover ─► host                gate: which uses may run meanwhile
//! malloc, copies ─► RegionFlags: one load ─ something is evicted ─► refill of the touched memory first
//! ```
//!
//! | tag | memory |
//! |---|---|
//! | as defined | allocations of threads inside the region |
//! | `graph (a, b)` | the private pool of this number; all its bytes, including free ones |
//! | `default` | all other memory |
//!
//! Invariants: a tag is marked as evicted before its first byte leaves and until the last one is back; the gate reads the mark and the
//! flags count it. While bytes move, no lock is held except the region's own turn.

mod api;
mod ask;
mod background;
mod cleaner;
mod holdings;
mod hooks;
mod refill;
mod relays;
mod report;
mod shrink;
mod stores;
mod table;
#[cfg(test)]
#[cfg(not(schedules))]
mod tests;
mod touch;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use glake_device::DeviceId;

use super::device_registry::DeviceRegistry;
use super::gate::Gate;
use super::sharing::Imports;
use crate::config;
pub use api::Regions;
pub use ask::{Refill, Shrink, Tier};
use background::{Background, BackgroundRefills};
use cleaner::Cleaner;
pub use holdings::MemoryUsage;
pub use hooks::{Hook, LiveCallback};
use hooks::{Hooks, LiveCallbacks};
use refill::OngoingShrinks;
use relays::Relays;
use report::Prediction;
pub use report::{Moved, RefillReport, RegionView, ShrinkReport, SkippedExtent};
pub(super) use report::{copy_name, policy_name};
use stores::Stores;
pub(super) use table::RegionFlags;
use table::Table;
pub(super) use touch::Target;

/// State of the regions, shared with background work.
#[derive(Debug)]
pub(super) struct RegionSet {
    registry: Arc<DeviceRegistry>,
    pub(super) config: config::Tiers,
    pub(super) flags: Arc<RegionFlags>,
    pub(super) gate: Gate,
    table: Arc<Table>,
    pub(super) stores: Stores,
    prediction: Prediction,
    hooks: Hooks,
    live_callbacks: LiveCallbacks,
    imports: Arc<Imports>,
    background_refills: Arc<BackgroundRefills>,
    /// Ongoing shrinks by device.
    ongoing_shrinks: Box<[OngoingShrinks]>,
    /// Whether host memory was pinned ahead of time, or is being pinned.
    prepared: AtomicBool,
    relays: Relays,
}

impl RegionSet {
    pub(super) fn new(
        registry: &Arc<DeviceRegistry>,
        config: config::Tiers,
        imports: &Arc<Imports>,
    ) -> RegionSet {
        let devices = registry.devices.len();
        let table = Arc::new(Table::new(devices, config.extent));
        RegionSet {
            registry: registry.clone(),
            flags: Arc::default(),
            gate: Gate::new(
                table.clone(),
                Duration::from_millis(config.park_quantum_ms),
                registry.observers.activity.clone(),
            ),
            table,
            stores: Stores::new(registry, config.clone()),
            prediction: Prediction::new(registry),
            hooks: Hooks::default(),
            live_callbacks: LiveCallbacks::default(),
            imports: imports.clone(),
            background_refills: Arc::default(),
            ongoing_shrinks: (0..devices).map(|_| OngoingShrinks::default()).collect(),
            prepared: AtomicBool::new(false),
            relays: Relays::new(registry),
            config,
        }
    }

    fn ongoing_shrinks_of(&self, device: DeviceId) -> Option<&OngoingShrinks> {
        self.ongoing_shrinks.get(usize::try_from(device.0).ok()?)
    }
}
