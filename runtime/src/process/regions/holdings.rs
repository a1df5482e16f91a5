//! What the process holds of each GPU, as an agent has to know it.

use glake_device::DeviceId;
use glake_tiers::{Policy, RegionHolding};
use glake_units::Bytes;

use super::super::device::DeviceMemory;
use super::RegionSet;

/// What the process holds of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct DeviceHolding {
    /// What its pool holds, in flight included.
    pub(in super::super) made: Bytes,
    /// The part of it that cannot leave.
    pub(in super::super) fixed: Bytes,
    /// What is evicted and is copied back before a use.
    pub(in super::super) evicted: Bytes,
    /// What comes back beside, without a copy.
    pub(in super::super) room: Bytes,
    /// Room to grow that is asked for with it.
    pub(in super::super) growth: Bytes,
    /// What would have to be copied out if all left now.
    pub(in super::super) dirty: Bytes,
    /// What could leave and come back without any copy.
    pub(in super::super) discardable: Bytes,
    /// What has no live bytes now, and would have to be copied out once it has.
    pub(in super::super) unused: Bytes,
    /// Pinned host memory that copies take.
    pub(in super::super) hosted: Bytes,
}

/// How often is looked anew at what moves.
const TRIES: u32 = 8;

impl RegionSet {
    /// Of a device now. Waits for nobody who moves memory.
    pub(in super::super) fn device_holding(&self, memory: &DeviceMemory) -> DeviceHolding {
        let mut held = self.holding_at_once(memory);
        for _ in 0..TRIES {
            if held.made == memory.lease.view().made {
                break;
            }
            // Some of it has moved meanwhile, and would count twice or not at all.
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
        // Copies of other GPUs' memory, and what pools that were given up still hold: no shrink takes it.
        add(&mut held.fixed, made.saturating_sub(of_regions));
        // Memory that comes back asks for room to grow beside it; where nothing does, nothing is asked for.
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

    /// What is made on all devices.
    pub(in super::super) fn made(&self) -> Bytes {
        self.registry.devices.iter().map(|memory| memory.lease.view().made).sum()
    }
}

fn add(sum: &mut Bytes, bytes: Bytes) {
    *sum = sum.saturating_add(bytes);
}
