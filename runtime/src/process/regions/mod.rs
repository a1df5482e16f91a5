//! The regions of a process: what is allocated where, what leaves its GPUs and what comes back.
//!
//! ```text
//! Regions ─► RegionSet: shared with what goes on in the background
//! enter(tag) ─► this thread's allocations ─► the tag (`Tagged`) ─► a tiers::Region a device
//! shrink, refill ─► moves ─► Region ─► LinkMover ─► host                gate: who may use it meanwhile
//! malloc, copies ─► RegionFlags: one load ─ something is evicted ─► refill of what is touched first
//! ```
//!
//! | tag | memory |
//! |---|---|
//! | as defined | what threads allocated while they were in it |
//! | `graph (a, b)` | the private pool of this number; all its bytes, free ones too |
//! | `default` | all other |
//!
//! Invariants: a tag of which anything is evicted, or leaves, is marked before the first byte leaves and until the last is back; the
//! gate reads that mark and the flags count it. No lock is held while bytes move but the region's own turn.

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
mod moves;
mod ongoing_shrinks;
mod others;
mod predict;
mod relays;
mod report;
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

/// The regions of a process, and what moves them; shared with what goes on in the background.
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
    /// By device.
    ongoing_shrinks: Box<[OngoingShrinks]>,
    /// Whether host memory was pinned ahead, or is about to be.
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
                registry.observers.agent().activity.clone(),
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

    /// Whether the caller is the one who pins host memory ahead.
    fn take_preparation(&self) -> bool {
        !self.prepared.swap(true, Ordering::Relaxed)
    }

    /// The process ends, and what of its memory is in files ends with it.
    pub(super) fn end_files(&self) {
        self.stores.end_files();
    }

    /// Pinned host memory that work of a device may touch.
    ///
    /// # Errors
    /// [`super::ProcessError::Host`].
    pub(super) fn host(&self, device: DeviceId) -> super::Result<Arc<HostPool>> {
        self.stores.host(device)
    }

    /// What digests memory of a device.
    ///
    /// # Errors
    /// What loading it meets.
    pub(super) fn digests(&self, device: DeviceId) -> super::Result<Option<Arc<Digests>>> {
        self.stores.digests(true, device)
    }

    /// How much host memory is pinned at once.
    pub(super) fn host_arena(&self) -> Bytes {
        self.config.host_arena
    }

    /// The gate.
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
