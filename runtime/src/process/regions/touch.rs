//! Memory that is about to be used comes back first; what is nobody's any more keeps nobody out.

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
    /// The domain that an allocation goes to which private pools leave in `routed`: that of the region that the thread is in, if any.
    /// What is evicted of it comes back first.
    ///
    /// # Errors
    /// What the refill meets.
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

    /// Brings back what is evicted of a domain that somebody is about to use; one load where nothing is evicted.
    ///
    /// # Errors
    /// What the refill meets.
    #[inline]
    pub(in super::super) fn touched_domain(&self, started: &Started, domain: DomainId) -> Result<()> {
        if self.flags.is_any_evicted() { self.touch(started, domain) } else { Ok(()) }
    }

    /// The domain of a block that is about to be freed, where what is evicted may then be nobody's.
    #[cold]
    pub(in super::super) fn domain_to_free(&self, address: Address) -> Option<(DeviceId, DomainId)> {
        let mut found = self.registry.devices.iter().filter_map(|memory| {
            let LiveBlock { domain, .. } = memory.started()?.pool.find(address)?;
            Some((memory.id(), domain))
        });
        found.next()
    }

    /// A block was freed; of which domain is not known where nothing was evicted before.
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

    /// Blocks were freed, or memory was given up.
    pub(in super::super) fn given_up(&self) {
        if self.flags.is_any_evicted()
            && let Ok(tags) = self.table.named(None)
        {
            self.settle(&tags);
        }
    }

    /// Opens the gate for those of which nothing is evicted any more.
    pub(super) fn settle(&self, tags: &[Arc<Tagged>]) {
        for tagged in tags.iter().filter(|tagged| tagged.is_away()) {
            tagged.settle(&self.flags, &self.gate);
        }
    }

    /// Brings back what is evicted of a domain.
    #[cold]
    fn touch(&self, started: &Started, domain: DomainId) -> Result<()> {
        match self.table.of_domain(started.pool.device(), domain) {
            Some((tagged, region)) if tagged.is_away() => self.bring_back(&tagged, &region),
            _ => Ok(()),
        }
    }

    /// Brings back what somebody is about to touch at an address; one load where nothing is evicted.
    ///
    /// # Errors
    /// What the refill meets.
    #[inline]
    pub(in super::super) fn touched(&self, address: Address) -> Result<()> {
        if self.flags.is_any_evicted() { self.touch_address(address) } else { Ok(()) }
    }

    /// As [`RegionSet::touched`], of what is about to be written to: a copy of it that was made while nobody used it counts no more.
    ///
    /// # Errors
    /// What the refill meets.
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

    /// A block of a domain was handed out, or is about to be written to: its bytes are not those that were copied.
    #[cold]
    pub(in super::super) fn handed_out(&self, started: &Started, domain: DomainId, address: Address) {
        if self.flags.is_any_cleaned()
            && let Some((tagged, region)) = self.table.of_domain(started.pool.device(), domain)
            && tagged.options.clean
        {
            region.void_block(address);
        }
    }

    /// Brings back the region of the block that an address lies in.
    #[cold]
    fn touch_address(&self, address: Address) -> Result<()> {
        self.domain_at(address).map_or(Ok(()), |(started, domain)| self.touch(started, domain))
    }

    /// The domain of the block that an address lies in, and whose it is.
    fn domain_at(&self, address: Address) -> Option<(&Started, DomainId)> {
        let started = self.started_at(address)?;
        Some((started, started.pool.find(address)?.domain))
    }

    /// The device whose pool an address is of.
    pub(super) fn started_at(&self, address: Address) -> Option<&Started> {
        let holds = |started: &&Started| {
            let (start, size) = started.pool.range();
            address.0.checked_sub(start.0).is_some_and(|offset| Bytes::new(offset) < size)
        };
        self.registry.devices.iter().filter_map(DeviceMemory::started).find(holds)
    }
}
