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
mod background_refills;
mod choose;
mod cleaner;
mod closing;
mod commit;
mod current_region;
mod demote;
mod flags;
mod holdings;
mod hooks;
mod idle;
mod live;
mod memory_usage;
mod ongoing_shrinks;
mod others;
mod predict;
mod refill;
mod relays;
mod report;
mod shrink;
mod stores;
mod table;
mod tagged;
#[cfg(test)]
#[cfg(not(schedules))]
mod tests;
mod touch;
mod view;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use glake_device::DeviceId;
use glake_device::owned::Digests;
use glake_tiers::HostPool;
use glake_units::Bytes;

use super::device_registry::DeviceRegistry;
use super::gate::Gate;
use super::imports::Imports;
use crate::config;
pub use api::Regions;
pub use ask::{Refill, Shrink, Tier};
use background::Background;
use background_refills::BackgroundRefills;
use cleaner::Cleaner;
pub(super) use flags::RegionFlags;
pub use hooks::Hook;
use hooks::Hooks;
pub use live::LiveCallback;
use live::LiveCallbacks;
pub use memory_usage::MemoryUsage;
use ongoing_shrinks::OngoingShrinks;
use predict::Prediction;
use relays::RefillCount;
pub use report::{Moved, RefillReport, ShrinkReport, SkippedExtent};
use stores::Stores;
use table::Table;
pub use view::RegionView;
pub(super) use view::{copy_name, policy_name};

/// State of the regions, shared with background work.
#[derive(Debug)]
pub(super) struct RegionSet {
    registry: Arc<DeviceRegistry>,
    config: config::Tiers,
    flags: Arc<RegionFlags>,
    gate: Gate,
    table: Arc<Table>,
    stores: Stores,
    prediction: Prediction,
    hooks: Hooks,
    live_callbacks: LiveCallbacks,
    imports: Arc<Imports>,
    background_refills: Arc<BackgroundRefills>,
    /// Ongoing shrinks by device.
    ongoing_shrinks: Box<[OngoingShrinks]>,
    /// Whether host memory was pinned ahead of time, or is being pinned.
    prepared: AtomicBool,
    refills_begun: RefillCount,
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
            refills_begun: RefillCount::default(),
            config,
        }
    }

    /// Claims the task of pinning host memory ahead of time; returns whether the caller has it.
    fn take_preparation(&self) -> bool {
        !self.prepared.swap(true, Ordering::Relaxed)
    }

    /// Ends the files of evicted memory, because the process ends.
    pub(super) fn end_files(&self) {
        self.stores.end_files();
    }

    /// Returns the pool of pinned host memory that a device can access.
    ///
    /// # Errors
    /// [`super::ProcessError::Host`].
    pub(super) fn host(&self, device: DeviceId) -> super::Result<Arc<HostPool>> {
        self.stores.host(device)
    }

    /// Returns the digest kernels for a device.
    ///
    /// # Errors
    /// Errors of loading the kernels.
    pub(super) fn digests(&self, device: DeviceId) -> super::Result<Option<Arc<Digests>>> {
        self.stores.digests(true, device)
    }

    /// Returns the size of the arenas in which host memory is pinned.
    pub(super) fn host_arena(&self) -> Bytes {
        self.config.host_arena
    }

    /// Returns the gate of the regions.
    pub(super) fn gate(&self) -> &Gate {
        &self.gate
    }

    pub(super) fn flags(&self) -> &Arc<RegionFlags> {
        &self.flags
    }

    fn ongoing_shrinks_of(&self, device: DeviceId) -> Option<&OngoingShrinks> {
        self.ongoing_shrinks.get(usize::try_from(device.0).ok()?)
    }
}
