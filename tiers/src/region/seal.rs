//! Sealing: periods in which a region's bytes are not written.

use std::sync::atomic::Ordering;

use glake_device::Address;

use super::{Policy, Region, RegionError, Result};

impl Region {
    /// Seals the region: the caller guarantees that its bytes are not written until it is unsealed. Allocations are refused meanwhile. With
    /// `strict`, writes fault on every device that has access now, at all addresses; the call waits for the work of these devices, and so
    /// does each refill at its end.
    ///
    /// # Errors
    /// [`RegionError::NotSealable`] for a region with another policy. The driver's error: the region is sealed, but only partly protected;
    /// seal it again, or unseal it.
    pub fn seal(&self, strict: bool) -> Result<()> {
        if self.options.policy != Policy::Sealed {
            return Err(RegionError::NotSealable { tag: self.options.tag.clone() });
        }
        let _turn = self.turn.lock();
        self.pool.records().seal(self.domain, true);
        self.sealed.store(true, Ordering::Release);
        self.strict.store(strict, Ordering::Release);
        if strict {
            Ok(self.pool.protection().protect(self.domain)?)
        } else {
            Ok(self.pool.protection().open(self.domain)?)
        }
    }

    /// Unseals the region: its bytes may change again, and retained copies are dropped.
    ///
    /// # Errors
    /// The error of the pool; the region stays sealed.
    pub fn unseal(&self) -> Result<()> {
        let _turn = self.turn.lock();
        self.pool.protection().open(self.domain)?;
        self.pool.records().seal(self.domain, false);
        self.strict.store(false, Ordering::Release);
        self.sealed.store(false, Ordering::Release);
        Ok(())
    }

    /// Returns whether the region is sealed.
    pub fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }

    /// Restores a strict seal's protection after memory was mapped or opened for a copy.
    pub(super) fn protect(&self) -> Result<()> {
        if self.strict.load(Ordering::Acquire) {
            Ok(self.pool.protection().protect(self.domain)?)
        } else {
            Ok(())
        }
    }

    /// Keeps the extents of the live block at an address on their GPU until it is unfixed as many times: other components, such as a
    /// network card that they are registered with, know them by more than their addresses. Ends with the block, or applies to the next
    /// block at its address.
    ///
    /// # Errors
    /// [`crate::PoolError::UnknownAddress`] if no block of the region is there; [`crate::PoolError::Evicted`] if part of it is evicted.
    pub fn fix(&self, address: Address) -> Result<()> {
        Ok(self.pool.fixed().fix(self.domain, address)?)
    }

    /// Reverts one [`Region::fix`].
    ///
    /// # Errors
    /// [`crate::PoolError::UnknownAddress`] if nothing is fixed there.
    pub fn unfix(&self, address: Address) -> Result<()> {
        Ok(self.pool.fixed().unfix(self.domain, address)?)
    }
}
