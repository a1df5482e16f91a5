//! Memory in use on each GPU by holder.

use glake_device::DeviceId;
use glake_transfer::WhyUnsuspended;
use glake_units::Bytes;
use serde_json::{Value, json};

use super::super::Result;
use super::super::device::DeviceMemory;
use super::RegionSet;
use super::others::{self, Known};
use super::tagged::Tagged;
use crate::process::gate::DEFAULT;

/// Prefix of the holder name of a relay's context that could not be suspended; the reason follows. Listed whatever its size.
const STAYS: &str = "context for copies of other GPUs, which stays: ";

/// Memory of one holder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryUsage {
    /// GPU of the memory; `None` for host memory.
    pub device: Option<DeviceId>,
    /// Description of the holder.
    pub holder: String,
    /// Size of the memory.
    pub bytes: Bytes,
}

impl MemoryUsage {
    /// Returns the entry as JSON for the C interface.
    pub fn json(&self) -> Value {
        json!({ "device": self.device.map(|device| device.0), "holder": self.holder, "bytes": self.bytes.get() })
    }
}

impl RegionSet {
    /// Implements `Regions::memory_usage`.
    pub(super) fn memory_usage(&self) -> Result<Vec<MemoryUsage>> {
        self.table.cover(&self.registry.devices);
        let tags = self.table.named(None)?;
        // First, because it waits for contexts to be destroyed.
        let stayed = self.unsuspended_relays();
        let costs = self.registry.engine.made().map(|engine| engine.relay_cost()).unwrap_or_default();
        let mut left = Vec::new();
        for memory in self.registry.devices.iter() {
            let device = memory.id();
            let mut holders: Vec<(String, Bytes)> = Vec::new();
            for tagged in &tags {
                holders.push((holder(tagged), resident(tagged, device)));
            }
            if let Some(started) = memory.started() {
                let named: Bytes = holders.iter().map(|(_, bytes)| *bytes).sum();
                let given_up = started.pool.reserved().saturating_sub(named);
                holders.push((
                    "pool: copies of other GPUs' memory, and private pools that were given up".to_owned(),
                    given_up,
                ));
            }
            let stays = stayed.iter().find(|stayed| stayed.relay == device);
            if let Some(stayed) = stays {
                holders.push((format!("{STAYS}{}", stayed.why), stayed.context));
            }
            for cost in costs.iter().filter(|cost| cost.relay == device && stays.is_none()) {
                holders.push(("context for copies of other GPUs".to_owned(), cost.context));
                holders.push(("slots for copies of other GPUs".to_owned(), cost.slots));
            }
            // The query would create a context again that is about to be destroyed.
            let asked = match stays.map(|stayed| stayed.why) {
                Some(WhyUnsuspended::UnderWay | WhyUnsuspended::Lost) => false,
                Some(_) => true,
                None => holders.iter().any(|(_, bytes)| !bytes.is_zero()),
            };
            if memory.started().is_some() || asked {
                self.rest(memory, &mut holders)?;
            }
            left.extend(holders.into_iter().map(|(holder, bytes)| MemoryUsage {
                device: Some(device),
                holder,
                bytes,
            }));
        }
        for host in self.stores.host_statistics() {
            for (holder, bytes) in [
                ("pinned host memory: bytes that are evicted or offloaded", host.in_use),
                ("pinned host memory: retained copies", host.retained),
                (
                    "pinned host memory: free",
                    host.pinned.saturating_sub(host.in_use).saturating_sub(host.retained),
                ),
            ] {
                left.push(MemoryUsage { device: None, holder: holder.to_owned(), bytes });
            }
        }
        left.push(MemoryUsage {
            device: None,
            holder: "pinned host memory: slots and lists of copies".to_owned(),
            bytes: self.pinned_by_engine(),
        });
        left.retain(|left| !left.bytes.is_zero() || left.holder.starts_with(STAYS));
        Ok(left)
    }

    /// Adds the holders outside this library's pools.
    fn rest(&self, memory: &DeviceMemory, holders: &mut Vec<(String, Bytes)>) -> Result<()> {
        let info = self.registry.completion_events.driver().memory_info(memory.id())?;
        let ours: Bytes = holders.iter().map(|(_, bytes)| *bytes).sum();
        let others = info.total.saturating_sub(info.free).saturating_sub(ours);
        let known = Known {
            imported: self
                .imports
                .mapped()
                .iter()
                .filter(|of| of.device == memory.id())
                .map(|of| of.size)
                .sum(),
            before: memory.started().map_or(Bytes::ZERO, |started| started.before),
            pinned: self.pinned(),
        };
        holders.extend(others::holders(others, known).map(|(holder, bytes)| (holder.to_owned(), bytes)));
        Ok(())
    }

    /// Returns the host memory pinned by this library; contexts on all GPUs have page tables for it.
    fn pinned(&self) -> Bytes {
        let stores: Bytes = self.stores.host_statistics().iter().map(|host| host.pinned).sum();
        stores.saturating_add(self.pinned_by_engine())
    }

    fn pinned_by_engine(&self) -> Bytes {
        self.registry.engine.made().map_or(Bytes::ZERO, |engine| engine.pinned())
    }
}

fn holder(tagged: &Tagged) -> String {
    match tagged.tag() {
        DEFAULT => "pool: outside of regions".to_owned(),
        tag => format!("pool: '{tag}'"),
    }
}

fn resident(tagged: &Tagged, device: DeviceId) -> Bytes {
    let regions = tagged.regions();
    regions.iter().filter(|region| region.pool().device() == device).map(|region| region.sizes().0).sum()
}
