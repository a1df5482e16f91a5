//! Memory that is about to be used comes back first.

use glake_device::Address;
use glake_stitch::{Allocator, DomainId};
use glake_units::Bytes;

use super::super::Result;
use super::super::device::{DeviceMemory, Started};
use super::{Regions, entered};

impl Regions {
    /// The domain that an allocation goes to which private pools leave in `routed`: that of the region that the thread is in, if any.
    /// What is away of it comes back first.
    ///
    /// # Errors
    /// What the refill meets.
    #[inline(never)]
    pub(in super::super) fn domain_of(&self, started: &Started, routed: DomainId) -> Result<DomainId> {
        let own =
            || entered::with_innermost(&self.marks, |slot| slot.domain(&started.pool, &self.table.clock));
        let domain = match routed == Allocator::default_domain() {
            true => own().flatten().unwrap_or(routed),
            false => routed,
        };
        if self.marks.is_any_away() {
            self.touch(started, domain)?;
        }
        Ok(domain)
    }

    /// Brings back what is away of a domain.
    #[cold]
    fn touch(&self, started: &Started, domain: DomainId) -> Result<()> {
        match self.table.of_domain(started.pool.device(), domain) {
            Some((slot, region)) if slot.is_away() => self.bring_back(&slot, &region),
            _ => Ok(()),
        }
    }

    /// Brings back the region of the block that an address lies in.
    #[cold]
    pub(super) fn touch_address(&self, address: Address) -> Result<()> {
        let holds = |started: &&Started| {
            let (start, size) = started.pool.range();
            address.0.checked_sub(start.0).is_some_and(|offset| Bytes::new(offset) < size)
        };
        let started = self.starter.devices.iter().filter_map(DeviceMemory::started).find(holds);
        match started.and_then(|started| Some((started, started.pool.find(address)?.domain))) {
            Some((started, domain)) => self.touch(started, domain),
            None => Ok(()),
        }
    }
}
