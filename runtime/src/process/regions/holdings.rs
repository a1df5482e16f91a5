//! Holdings of the process on each GPU, as reported to an agent, and the memory in use on each GPU by holder. Memory outside the pool is
//! attributed as far as it can be known:
//!
//! ```text
//! in use ─┬ pool, relays: reported by their owners
//!         └ others ─► imported ─► before the pool started ─► page tables of pinned memory ─► since
//! ```
//!
//! Invariant: the parts add up to the whole, whatever is assumed of each.

use glake_device::DeviceId;
use glake_tiers::{Policy, RegionHolding};
use glake_transfer::WhyUnsuspended;
use glake_units::Bytes;
use serde_json::{Value, json};

use super::super::Result;
use super::super::device::DeviceMemory;
use super::RegionSet;
use super::table::Tagged;
use crate::process::gate::DEFAULT;

/// Holdings of the process on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct DeviceHolding {
    /// Bytes of the pool, including memory being created.
    pub(in super::super) made: Bytes,
    /// Bytes of the pool that cannot be evicted.
    pub(in super::super) fixed: Bytes,
    /// Evicted bytes that are copied back before a use.
    pub(in super::super) evicted: Bytes,
    /// Parts of `evicted` in files and on other GPUs.
    pub(in super::super) in_files: Bytes,
    pub(in super::super) in_peers: Bytes,
    /// Evicted bytes that return without a copy.
    pub(in super::super) room: Bytes,
    /// Additional bytes requested for growth.
    pub(in super::super) growth: Bytes,
    /// Bytes to copy out if everything were evicted now.
    pub(in super::super) dirty: Bytes,
    /// Bytes that could be evicted and refilled without a copy.
    pub(in super::super) discardable: Bytes,
    /// Bytes without live contents now, which would have to be copied once they have some.
    pub(in super::super) unused: Bytes,
    /// Pinned host memory occupied by copies.
    pub(in super::super) hosted: Bytes,
}

/// Maximum number of attempts to get consistent numbers while memory moves.
const TRIES: u32 = 8;

impl RegionSet {
    /// Returns the current holdings on a device. Does not wait for moves in progress.
    pub(in super::super) fn device_holding(&self, memory: &DeviceMemory) -> DeviceHolding {
        let mut held = self.holding_at_once(memory);
        for _ in 0..TRIES {
            if held.made == memory.lease.view().made {
                break;
            }
            // Some memory has moved meanwhile and would count twice or not at all.
            held = self.holding_at_once(memory);
        }
        held
    }

    fn holding_at_once(&self, memory: &DeviceMemory) -> DeviceHolding {
        let made = memory.lease.view().made;
        let mut held = DeviceHolding { made, ..DeviceHolding::default() };
        if memory.started().is_none() {
            return held;
        }
        let mut of_regions = Bytes::ZERO;
        for (policy, holding) in self.region_holdings(memory.id()) {
            let RegionHolding { resident, evicted, in_files, in_peers, fixed, .. } = holding;
            let RegionHolding { discardable, dirty, unused, hosted, .. } = holding;
            add(&mut of_regions, resident);
            let comes_back = if policy == Policy::Discard { &mut held.room } else { &mut held.evicted };
            add(comes_back, evicted);
            add(&mut held.in_files, in_files);
            add(&mut held.in_peers, in_peers);
            add(&mut held.fixed, fixed);
            add(&mut held.discardable, discardable);
            add(&mut held.dirty, dirty);
            add(&mut held.unused, unused);
            add(&mut held.hosted, hosted);
        }
        // Copies of other GPUs' memory, and memory of released pools: no shrink can evict them.
        add(&mut held.fixed, made.saturating_sub(of_regions));
        // A refill also requests room to grow; without one, none is requested.
        if !held.evicted.is_zero() || !held.room.is_zero() {
            held.growth = memory.lease.growth();
        }
        held
    }

    fn region_holdings(&self, device: DeviceId) -> Vec<(Policy, RegionHolding)> {
        self.table.cover(&self.registry.devices);
        let tags = self.table.named(None).unwrap_or_default();
        let regions = tags
            .iter()
            .flat_map(|tagged| tagged.regions().into_iter().map(|region| (tagged.options.policy, region)));
        let own = regions.filter(|(_, region)| region.pool().device() == device);
        own.map(|(policy, region)| (policy, region.holding())).collect()
    }

    /// Returns the bytes created on all devices.
    pub(in super::super) fn made(&self) -> Bytes {
        self.registry.devices.iter().map(|memory| memory.lease.view().made).sum()
    }
}

fn add(sum: &mut Bytes, bytes: Bytes) {
    *sum = sum.saturating_add(bytes);
}

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
        let stayed = self.relays.unsuspended();
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
                let plain = started.pool.report().plain_bytes();
                holders.push(("pool: plain memory, which stays (glake.plain)".to_owned(), plain));
                let given_up = started.pool.reserved().saturating_sub(named).saturating_sub(plain);
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
        holders.extend(split_by_holder(others, known).map(|(holder, bytes)| (holder.to_owned(), bytes)));
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

/// Pinned host memory for which the driver allocates one page of tables on each GPU with a context. Measured on an H200.
const PINNED: u64 = Bytes::gib(1).get();
const TABLES: Bytes = Bytes::mib(2);

/// Known parts of the memory outside the pool.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Known {
    /// Memory of other processes that is mapped here.
    pub(super) imported: Bytes,
    /// Memory in use on the GPU when its pool started.
    pub(super) before: Bytes,
    /// Host memory pinned by this library.
    pub(super) pinned: Bytes,
}

/// Estimates the memory of a GPU for page tables of pinned host memory.
fn tables(pinned: Bytes) -> Bytes {
    Bytes::new(pinned.get().div_ceil(PINNED).saturating_mul(TABLES.get()))
}

/// Splits the memory in use by holder, with a description of each.
fn split_by_holder(given_out: Bytes, known: Known) -> [(&'static str, Bytes); 4] {
    let mut rest = given_out;
    let mut take = |most: Bytes| {
        let taken = most.min(rest);
        rest = rest.saturating_sub(taken);
        taken
    };
    // The time at which imported memory was created is unknown: it counts as neither.
    let imported = take(known.imported);
    let before = take(known.before);
    let tables = take(tables(known.pinned));
    [
        ("imported: memory of other processes that is open here", imported),
        (
            "taken before the pool started: contexts, modules and other libraries of this process, and other processes",
            before,
        ),
        ("about: the driver's page tables of pinned host memory, 2 MiB for each GiB", tables),
        (
            "taken since by others: contexts, modules and other libraries of this process, and other processes",
            rest,
        ),
    ]
}

#[cfg(test)]
mod others_tests {
    use super::*;

    #[test]
    fn the_parts_add_up_and_tables_are_rounded_up() {
        let known = Known { imported: Bytes::mib(100), before: Bytes::mib(500), pinned: Bytes::gib(16) };
        let amounts =
            |given_out, known| split_by_holder(given_out, known).map(|(_, bytes)| bytes.get() >> 20);
        assert_eq!(amounts(Bytes::mib(700), known), [100, 500, 32, 68]);
        assert_eq!(amounts(Bytes::mib(610), known), [100, 500, 10, 0]);
        assert_eq!(amounts(Bytes::mib(90), known), [90, 0, 0, 0]);
        let one = Known { pinned: Bytes::new(1), ..Known::default() };
        assert_eq!(amounts(Bytes::mib(700), one), [0, 0, 2, 698]);
        assert_eq!(tables(Bytes::ZERO), Bytes::ZERO);
        assert_eq!(tables(Bytes::new(PINNED + 1)), Bytes::mib(4));
    }
}
