//! Release of free memory to the driver.

use glake_stitch::{DomainId, Plan, StreamKey};
use glake_units::Bytes;

use super::Result;
use super::clock::CompletionClock;
use super::core::Core;
use super::growth::{Growing, Growth};

/// Free memory of a pool. Freed memory that may still be in use does not count and stays.
#[derive(Debug)]
pub(crate) struct FreeMemory<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) growth: &'a Growth,
}

impl FreeMemory<'_> {
    /// Releases free memory until at most `keep` is reserved. Returns the number of bytes released.
    pub(super) fn trim(&self, keep: Bytes) -> Result<Bytes> {
        self.clock.tick()?;
        let mut growing = self.growth.lock()?;
        let before = self.core.lock().reserved_bytes();
        let plan = self.core.lock().plan_trim(keep);
        self.release(&mut growing, plan, before)
    }

    /// Releases all free memory of one domain. Returns the number of bytes released.
    pub(super) fn trim_domain(&self, domain: DomainId) -> Result<Bytes> {
        self.clock.tick()?;
        let mut growing = self.growth.lock()?;
        let before = self.core.lock().reserved_bytes();
        let plan = self.core.lock().plan_trim_domain(domain);
        self.release(&mut growing, plan, before)
    }

    /// Releases the free memory of a domain for a shrink, which also lowers the lease by it.
    pub(crate) fn give_back_domain(&self, domain: DomainId) -> Result<Bytes> {
        let released = self.trim_domain(domain)?;
        self.growth.lease().give_back(released);
        self.growth.lease().tell_returned(false);
        Ok(released)
    }

    /// Lowers the lease by unused and by free memory, which is released, at most `most` in total. Returns the number of bytes taken from
    /// the lease.
    pub(super) fn take_lease(&self, most: Bytes) -> Result<Bytes> {
        let lease = self.growth.lease();
        let unused = lease.take_unused(most);
        let rest = most.saturating_sub(unused);
        if rest.is_zero() || lease.view().leased.is_none() {
            return Ok(unused);
        }
        let keep = self.core.lock().reserved_bytes().saturating_sub(rest);
        let trimmed = self.trim(keep);
        let taken = unused.saturating_add(lease.take_unused(rest));
        // Reports the bytes taken, even if the driver failed.
        trimmed.map(|_| taken).or_else(|error| if taken.is_zero() { Err(error) } else { Ok(taken) })
    }

    /// Forgets evicted extents of a domain that hold no live bytes.
    pub(crate) fn forget_emptied(&self, domain: DomainId) -> Result<()> {
        self.clock.tick()?;
        let mut growing = self.growth.lock()?;
        let plan = self.core.lock().plan_forget(domain);
        plan.map_or(Ok(()), |plan| growing.carry_out(&plan, StreamKey::default()).map(|_| ()))
    }

    fn release(&self, growing: &mut Growing<'_>, plan: Option<Plan>, before: Bytes) -> Result<Bytes> {
        if let Some(plan) = plan {
            growing.carry_out(&plan, StreamKey::default())?;
        }
        Ok(before.saturating_sub(self.core.lock().reserved_bytes()))
    }
}
