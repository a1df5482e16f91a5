//! Holdings of the process on each GPU, as reported to an agent.

use glake_device::DeviceId;
use glake_tiers::{Policy, RegionHolding};
use glake_units::Bytes;

use super::super::device::DeviceMemory;
use super::RegionSet;

/// Holdings of the process on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct DeviceHolding {
    /// Bytes of the pool, including memory being created.
    pub(in super::super) made: Bytes,
    /// Bytes of the pool that cannot be evicted.
    pub(in super::super) fixed: Bytes,
    /// Evicted bytes that are copied back before a use.
    pub(in super::super) evicted: Bytes,
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
            let RegionHolding { resident, evicted, fixed, discardable, dirty, unused, hosted } = holding;
            add(&mut of_regions, resident);
            let comes_back = if policy == Policy::Discard { &mut held.room } else { &mut held.evicted };
            add(comes_back, evicted);
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
