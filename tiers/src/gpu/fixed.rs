//! Blocks whose physical memory must not move, because another component knows it by more than its address.
//!
//! Invariant: an extent of a fixed live block is not evicted. Fixing applies to an address: it ends with its block, or applies to the next
//! block there. The lock is taken after the growth lock and before those of the extent records and the allocator.

use std::collections::BTreeMap;
use std::sync::Arc;

use glake_device::Address;
use glake_stitch::{DomainId, ExtentId, ExtentState};
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::FxHashSet;

use super::core::Core;
use super::{PoolError, Result};

/// Addresses of fixed blocks, with the number of times each was fixed.
type Pins = BTreeMap<Address, usize>;

/// Fixed blocks of a pool.
#[derive(Debug)]
pub(crate) struct FixedBlocks {
    core: Arc<Core>,
    pins: Mutex<Pins>,
}

/// Guard under which the set of fixed blocks does not change.
#[derive(Debug)]
pub(super) struct Fixed<'a> {
    core: &'a Core,
    pins: MutexGuard<'a, Pins>,
}

impl FixedBlocks {
    /// Creates an empty set.
    pub(super) fn new(core: Arc<Core>) -> Self {
        FixedBlocks { core, pins: Mutex::default() }
    }

    /// Keeps the extents of the block at `address` on their GPU, until the block is unfixed as many times.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; [`PoolError::Evicted`] if part of the block is not resident.
    pub(crate) fn fix(&self, domain: DomainId, address: Address) -> Result<()> {
        let mut pins = self.pins.lock();
        let (base, extents) = block_of(&self.core, domain, address)?;
        let core = self.core.lock();
        if extents.iter().any(|&extent| core.extents().state(extent) != Some(ExtentState::Resident)) {
            return Err(PoolError::Evicted { device: self.core.device(), address });
        }
        *pins.entry(base).or_default() += 1;
        Ok(())
    }

    /// Reverts one [`FixedBlocks::fix`].
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] if no block is fixed at the address.
    pub(crate) fn unfix(&self, domain: DomainId, address: Address) -> Result<()> {
        let mut pins = self.pins.lock();
        let base = block_of(&self.core, domain, address).map_or(address, |(base, _)| base);
        let Some(count) = pins.get_mut(&base) else {
            return Err(PoolError::UnknownAddress { device: self.core.device(), address });
        };
        *count -= 1;
        if *count == 0 {
            pins.remove(&base);
        }
        Ok(())
    }

    /// Returns the extents of a domain that hold fixed blocks.
    pub(crate) fn extents(&self, domain: DomainId) -> FxHashSet<ExtentId> {
        self.lock().extents(domain)
    }

    /// Locks the set: no block is fixed or unfixed while the guard is held.
    pub(super) fn lock(&self) -> Fixed<'_> {
        Fixed { core: &self.core, pins: self.pins.lock() }
    }
}

impl Fixed<'_> {
    /// Returns whether an extent holds a fixed block.
    pub(super) fn holds(&self, extent: ExtentId) -> bool {
        if self.pins.is_empty() {
            return false;
        }
        let domain = self.core.lock().extents().size_and_domain(extent).1;
        self.extents(domain).contains(&extent)
    }

    fn extents(&self, domain: DomainId) -> FxHashSet<ExtentId> {
        let blocks = self.pins.keys().filter_map(|&address| block_of(self.core, domain, address).ok());
        // A fixed address inside another block does not fix that block.
        let whole = blocks.filter(|(base, _)| self.pins.contains_key(base));
        whole.flat_map(|(_, extents)| extents).collect()
    }
}

/// Finds the live block of a domain at an address. Returns its start and its extents.
pub(super) fn block_of(core: &Core, domain: DomainId, address: Address) -> Result<(Address, Vec<ExtentId>)> {
    let unknown = || PoolError::UnknownAddress { device: core.device(), address };
    let offset = core.offset(address)?;
    let allocator = core.lock();
    let block = allocator.blocks().find(offset).filter(|block| block.domain == domain).ok_or_else(unknown)?;
    let backing = allocator.blocks().backing(block.offset).ok_or_else(unknown)?;
    Ok((core.address(block.offset), backing.extents))
}

#[cfg(test)]
mod tests {
    use glake_stitch::Allocator;
    use glake_units::Bytes;

    use super::super::fixture::Parts;
    use super::*;

    #[test]
    fn a_block_is_fixed_as_often_as_it_was_said() {
        let parts = Parts::new();
        let (fixed, domain) = (FixedBlocks::new(parts.core.clone()), Allocator::default_domain());
        let block = parts.core.address(parts.grow(Bytes::mib(4)));
        let inside = Address(block.0 + 4096);
        fixed.fix(domain, block).unwrap();
        fixed.fix(domain, inside).unwrap();
        let extents = fixed.extents(domain);
        assert_eq!(extents.len(), 1);
        fixed.unfix(domain, inside).unwrap();
        assert!(extents.iter().all(|extent| fixed.lock().holds(*extent)));
        fixed.unfix(domain, block).unwrap();
        assert!(fixed.extents(domain).is_empty());
        fixed.unfix(domain, block).unwrap_err();
    }

    #[test]
    fn what_is_freed_is_fixed_no_more() {
        let parts = Parts::new();
        let (fixed, domain) = (FixedBlocks::new(parts.core.clone()), Allocator::default_domain());
        let offset = parts.grow(Bytes::mib(4));
        let address = parts.core.address(offset);
        fixed.fix(domain, address).unwrap();
        parts.core.free(offset).unwrap();
        assert!(fixed.extents(domain).is_empty());
        let unknown = fixed.fix(domain, address).unwrap_err();
        assert!(matches!(unknown, PoolError::UnknownAddress { .. }), "{unknown}");
    }

    #[test]
    fn what_is_evicted_cannot_be_fixed() {
        let parts = Parts::new();
        let (fixed, domain) = (FixedBlocks::new(parts.core.clone()), Allocator::default_domain());
        let offset = parts.grow(Bytes::mib(4));
        let extent = parts.core.lock().blocks().backing(offset).unwrap().extents[0];
        parts.core.lock().evictions().begin(extent).unwrap();
        let evicted = fixed.fix(domain, parts.core.address(offset)).unwrap_err();
        assert!(matches!(evicted, PoolError::Evicted { .. }), "{evicted}");
    }
}
