//! Blocks whose memory stays where it is, because somebody knows it by more than its address.
//!
//! Invariant: an extent of a fixed live block is not evicted. An address is fixed: that ends with its block, or goes on with
//! the next one there.

use std::collections::BTreeMap;

use glake_device::Address;
use glake_stitch::{DomainId, ExtentId, Residency};
use rustc_hash::FxHashSet;

use super::{GpuPool, PoolError, Result};

/// Where pinned blocks begin, and how often each was pinned.
pub(super) type Pins = BTreeMap<Address, usize>;

impl GpuPool {
    /// The extents of the block of a domain that an address lies in stay, until it is unpinned as often.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; [`PoolError::Evicted`] where some of it is not resident.
    pub(crate) fn fix(&self, domain: DomainId, address: Address) -> Result<()> {
        let mut pins = self.pins.lock();
        let (base, extents) = self.block_of(domain, address)?;
        let core = self.core.lock();
        if extents.iter().any(|&extent| core.extents().residency(extent) != Some(Residency::Resident)) {
            return Err(PoolError::Evicted { device: self.device, address });
        }
        *pins.entry(base).or_default() += 1;
        Ok(())
    }

    /// Takes one [`GpuPool::fix`] back.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] where nothing is pinned there.
    pub(crate) fn unfix(&self, domain: DomainId, address: Address) -> Result<()> {
        let mut pins = self.pins.lock();
        let base = self.block_of(domain, address).map_or(address, |(base, _)| base);
        let Some(count) = pins.get_mut(&base) else {
            return Err(PoolError::UnknownAddress { device: self.device, address });
        };
        *count -= 1;
        if *count == 0 {
            pins.remove(&base);
        }
        Ok(())
    }

    /// The extents of a domain that pinned blocks lie in.
    pub(crate) fn pinned(&self, domain: DomainId) -> FxHashSet<ExtentId> {
        self.extents_of_pins(&self.pins.lock(), domain)
    }

    pub(super) fn extents_of_pins(&self, pins: &Pins, domain: DomainId) -> FxHashSet<ExtentId> {
        let blocks = pins.keys().filter_map(|&address| self.block_of(domain, address).ok());
        // One that was freed, and its addresses handed out as a part of another block, is not fixed by that.
        let whole = blocks.filter(|(base, _)| pins.contains_key(base));
        whole.flat_map(|(_, extents)| extents).collect()
    }

    /// Where the live block of a domain begins that an address lies in, and its extents.
    fn block_of(&self, domain: DomainId, address: Address) -> Result<(Address, Vec<ExtentId>)> {
        let unknown = || PoolError::UnknownAddress { device: self.device, address };
        let offset = self.offset(address)?;
        let core = self.core.lock();
        let block = core.blocks().find(offset).filter(|block| block.domain == domain).ok_or_else(unknown)?;
        let backing = core.blocks().backing(block.offset).ok_or_else(unknown)?;
        Ok((self.address(block.offset), backing.extents))
    }
}
