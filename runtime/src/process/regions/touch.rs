//! Refills of memory that is about to be used, and release of evicted memory that was freed.

use std::sync::Arc;

use glake_device::{Address, DeviceId};
use glake_stitch::{Allocator, DomainId};
use glake_tiers::LiveBlock;
use glake_units::Bytes;

use super::super::Result;
use super::super::device::{DeviceMemory, Started};
use super::tagged::Tagged;
use super::{RegionSet, current_region};

impl RegionSet {
    /// Returns the domain of an allocation that private pools leave in `routed`: the one of the thread's region, if it is in one. Refills
    /// its evicted memory first.
    ///
    /// # Errors
    /// Errors of the refill.
    #[inline(never)]
    pub(in super::super) fn domain_of(&self, started: &Started, routed: DomainId) -> Result<DomainId> {
        let own = || {
            current_region::with_innermost(&self.flags, |tagged| {
                tagged.domain(&started.pool, &self.table.clock)
            })
        };
        let domain = match routed == Allocator::default_domain() {
            true => own().flatten().unwrap_or(routed),
            false => routed,
        };
        self.touched_domain(started, domain)?;
        Ok(domain)
    }

    /// Refills the evicted memory of a domain that is about to be used; one load if nothing is evicted.
    ///
    /// # Errors
    /// Errors of the refill.
    #[inline]
    pub(in super::super) fn touched_domain(&self, started: &Started, domain: DomainId) -> Result<()> {
        if self.flags.is_any_evicted() { self.touch(started, domain) } else { Ok(()) }
    }

    /// Returns the domain of a block that is about to be freed, if its evicted memory may then be unused.
    #[cold]
    pub(in super::super) fn domain_to_free(&self, address: Address) -> Option<(DeviceId, DomainId)> {
        let mut found = self.registry.devices.iter().filter_map(|memory| {
            let LiveBlock { domain, .. } = memory.started()?.pool.find(address)?;
            Some((memory.id(), domain))
        });
        found.next()
    }

    /// Updates the marks after a free; the domain is unknown if nothing was evicted before it.
    #[cold]
    pub(in super::super) fn freed(&self, domain: Option<(DeviceId, DomainId)>) {
        match domain {
            None => self.given_up(),
            Some((device, domain)) => {
                if let Some((tagged, _)) = self.table.of_domain(device, domain) {
                    self.settle(&[tagged]);
                }
            }
        }
    }

    /// Updates all marks, after blocks were freed or memory was released.
    pub(in super::super) fn given_up(&self) {
        if self.flags.is_any_evicted()
            && let Ok(tags) = self.table.named(None)
        {
            self.settle(&tags);
        }
    }

    /// Opens the gate for tags without evicted memory.
    pub(super) fn settle(&self, tags: &[Arc<Tagged>]) {
        for tagged in tags.iter().filter(|tagged| tagged.is_away()) {
            tagged.settle(&self.flags, &self.gate);
        }
    }

    /// Refills the evicted memory of a domain.
    #[cold]
    fn touch(&self, started: &Started, domain: DomainId) -> Result<()> {
        match self.table.of_domain(started.pool.device(), domain) {
            Some((tagged, region)) if tagged.is_away() => self.bring_back(&tagged, &region),
            _ => Ok(()),
        }
    }

    /// Refills the memory at an address that is about to be accessed; one load if nothing is evicted.
    ///
    /// # Errors
    /// Errors of the refill.
    #[inline]
    pub(in super::super) fn touched(&self, address: Address) -> Result<()> {
        if self.flags.is_any_evicted() { self.touch_address(address) } else { Ok(()) }
    }

    /// Refills like [`RegionSet::touched`] before a write, which also invalidates the copy of an idle region.
    ///
    /// # Errors
    /// Errors of the refill.
    #[inline]
    pub(in super::super) fn written(&self, address: Address) -> Result<()> {
        if self.flags.are_writes_told() { self.write_to(address) } else { Ok(()) }
    }

    #[cold]
    fn write_to(&self, address: Address) -> Result<()> {
        self.touched(address)?;
        if self.flags.is_any_cleaned()
            && let Some((started, domain)) = self.domain_at(address)
        {
            self.handed_out(started, domain, address);
        }
        Ok(())
    }

    /// Records that a block was allocated or is about to be written, so that a copy of its bytes is invalid.
    #[cold]
    pub(in super::super) fn handed_out(&self, started: &Started, domain: DomainId, address: Address) {
        if self.flags.is_any_cleaned()
            && let Some((tagged, region)) = self.table.of_domain(started.pool.device(), domain)
            && tagged.options.clean
        {
            region.void_block(address);
        }
    }

    /// Refills the region of the block that contains an address.
    #[cold]
    fn touch_address(&self, address: Address) -> Result<()> {
        self.domain_at(address).map_or(Ok(()), |(started, domain)| self.touch(started, domain))
    }

    /// Returns the device and domain of the block that contains an address.
    fn domain_at(&self, address: Address) -> Option<(&Started, DomainId)> {
        let started = self.started_at(address)?;
        Some((started, started.pool.find(address)?.domain))
    }

    /// Returns the device whose pool contains an address.
    pub(super) fn started_at(&self, address: Address) -> Option<&Started> {
        let holds = |started: &&Started| {
            let (start, size) = started.pool.range();
            address.0.checked_sub(start.0).is_some_and(|offset| Bytes::new(offset) < size)
        };
        self.registry.devices.iter().filter_map(DeviceMemory::started).find(holds)
    }
}
