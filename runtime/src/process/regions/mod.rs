//! The regions of a process: what is allocated where, what leaves its GPUs and what comes back.
//!
//! ```text
//! enter(tag) ─► this thread's allocations ─► Slot of the tag ─► a tiers::Region a device
//! shrink, refill ─► moves ─► Region ─► LinkMover ─► host                gate: who may use it meanwhile
//! malloc, copies ─► Marks: one load ─ something is away ─► refill of what is touched first
//! ```
//!
//! | tag | memory |
//! |---|---|
//! | as defined | what threads allocated while they were in it |
//! | `graph (a, b)` | the private pool of this number; all its bytes, free ones too |
//! | `default` | all other |
//!
//! Invariants: a tag of which anything is away, or leaves, is marked before the first byte leaves and until the last is back; its
//! marks and the gate say the same. No lock is held while bytes move but the region's own turn.

mod ask;
mod background;
mod choose;
mod coming;
mod doors;
mod entered;
mod freeing;
mod hooks;
mod left;
mod marks;
mod moves;
mod others;
mod predict;
mod relays;
mod report;
mod slot;
mod stores;
mod table;
#[cfg(test)]
mod tests;
mod touch;
mod view;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glake_device::DeviceId;

use super::gate::Gate;
use super::imports::Imports;
use super::starter::Starter;
use crate::config;
pub use ask::{Refill, Shrink, Tier};
pub(super) use background::Background;
use coming::Comings;
use freeing::Freeing;
pub use hooks::Hook;
use hooks::Hooks;
pub use left::Left;
pub(super) use marks::Marks;
use predict::Prediction;
use relays::Begun;
pub use report::{Moved, RefillReport, ShrinkReport, SkippedExtent};
use stores::Stores;
use table::Table;
pub use view::RegionView;
pub(super) use view::{copy_name, policy_name};

/// The regions of a process; shared with what goes on in the background.
#[derive(Debug)]
pub(super) struct Regions {
    starter: Arc<Starter>,
    config: config::Tiers,
    marks: Arc<Marks>,
    gate: Gate,
    table: Table,
    stores: Stores,
    prediction: Prediction,
    hooks: Hooks,
    imports: Arc<Imports>,
    comings: Arc<Comings>,
    /// By device.
    freeing: Box<[Freeing]>,
    /// Whether host memory was pinned ahead, or is about to be.
    prepared: AtomicBool,
    begun: Begun,
}

impl Regions {
    pub(super) fn new(starter: &Arc<Starter>, config: config::Tiers, imports: &Arc<Imports>) -> Regions {
        let devices = starter.devices.len();
        Regions {
            starter: starter.clone(),
            marks: Arc::default(),
            gate: Gate::default(),
            table: Table::new(devices, config.extent),
            stores: Stores::new(starter, config.clone()),
            prediction: Prediction::new(starter),
            hooks: Hooks::default(),
            imports: imports.clone(),
            comings: Arc::default(),
            freeing: (0..devices).map(|_| Freeing::default()).collect(),
            prepared: AtomicBool::new(false),
            begun: Begun::default(),
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

    pub(super) fn marks(&self) -> &Arc<Marks> {
        &self.marks
    }

    fn freeing_of(&self, device: DeviceId) -> Option<&Freeing> {
        self.freeing.get(usize::try_from(device.0).ok()?)
    }
}
