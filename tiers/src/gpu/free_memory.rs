//! Memory that is free, given back to the driver.

use glake_stitch::{DomainId, Plan, StreamKey};
use glake_units::Bytes;

use super::Result;
use super::clock::CompletionClock;
use super::core::Core;
use super::growth::{Growing, Growth};

/// The free memory of a pool. What is freed but may still be in use is none, and stays.
#[derive(Debug)]
pub(crate) struct FreeMemory<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) growth: &'a Growth,
}

impl FreeMemory<'_> {
    /// Releases it until at most `keep` is reserved, or nothing is left to release. Returns how much went.
    pub(super) fn trim(&self, keep: Bytes) -> Result<Bytes> {
        self.clock.tick()?;
        let mut growing = self.growth.lock()?;
        let before = self.core.lock().reserved_bytes();
        let plan = self.core.lock().plan_trim(keep);
        self.release(&mut growing, plan, before)
    }

    /// Releases all of one domain. Returns how much went.
    pub(super) fn trim_domain(&self, domain: DomainId) -> Result<Bytes> {
        self.clock.tick()?;
        let mut growing = self.growth.lock()?;
        let before = self.core.lock().reserved_bytes();
        let plan = self.core.lock().plan_trim_domain(domain);
        self.release(&mut growing, plan, before)
    }

    /// As [`FreeMemory::trim_domain`], for a shrink: what it was leased goes back too.
    pub(crate) fn give_back_domain(&self, domain: DomainId) -> Result<Bytes> {
        let released = self.trim_domain(domain)?;
        self.growth.lease().give_back(released);
        self.growth.lease().tell_returned(false);
        Ok(released)
    }

    /// Lowers the lease by what is not made, and by what is free and goes back to the driver for it, `most` at most. Returns by how much.
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
        // What was taken is told, whatever the driver answers.
        trimmed.map(|_| taken).or_else(|error| if taken.is_zero() { Err(error) } else { Ok(taken) })
    }

    /// Forgets the extents of a domain that are evicted and hold nothing live.
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
