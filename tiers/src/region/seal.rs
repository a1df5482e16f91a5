//! Bytes that nobody writes to for a while.

use std::sync::atomic::Ordering;

use glake_device::Address;

use super::{Policy, Region, RegionError, Result};

impl Region {
    /// The caller promises that nobody writes to its bytes from now on, until it is unsealed. Nothing new is handed out meanwhile. With
    /// `strict` a write faults, on every device that has access by then and at all addresses; this waits for their work, and so does
    /// each refill at its end.
    ///
    /// # Errors
    /// [`RegionError::NotSealable`] where its policy is another one. What the driver answers: the region is sealed then, and not
    /// all of it protected; seal it again, or unseal it.
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

    /// Its bytes may change again: copies that were retained are dropped.
    ///
    /// # Errors
    /// What the pool answers; it is sealed still.
    pub fn unseal(&self) -> Result<()> {
        let _turn = self.turn.lock();
        self.pool.protection().open(self.domain)?;
        self.pool.records().seal(self.domain, false);
        self.strict.store(false, Ordering::Release);
        self.sealed.store(false, Ordering::Release);
        Ok(())
    }

    /// Whether it is sealed.
    pub fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }

    /// What is here is as its seal says, after something was mapped or opened for a copy.
    pub(super) fn protect(&self) -> Result<()> {
        if self.strict.load(Ordering::Acquire) {
            Ok(self.pool.protection().protect(self.domain)?)
        } else {
            Ok(())
        }
    }

    /// The extents of the live block that an address lies in stay on their GPU until it is let go as often: somebody knows them by
    /// more than their addresses, as a network card that they were registered with does. That ends with its block, or goes on with the
    /// next one at its address.
    ///
    /// # Errors
    /// [`crate::PoolError::UnknownAddress`] where no block of the region is; [`crate::PoolError::Evicted`] where some of it is evicted.
    pub fn fix(&self, address: Address) -> Result<()> {
        Ok(self.pool.fixed().fix(self.domain, address)?)
    }

    /// Takes one [`Region::fix`] back.
    ///
    /// # Errors
    /// [`crate::PoolError::UnknownAddress`] where nothing is fixed.
    pub fn unfix(&self, address: Address) -> Result<()> {
        Ok(self.pool.fixed().unfix(self.domain, address)?)
    }
}
