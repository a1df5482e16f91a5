//! Refill of single extents at the addresses that they keep.
//!
//! ```text
//! region ─► begin: made, mapped, access ─► (copied back) ─► records.finish_refill                as before the eviction
//! ```
//!
//! Invariant: existing memory and mappings are queried from the allocator and the reservation, so that a refill resumes where an eviction
//! or a refill failed.

use glake_stitch::{ExtentId, StreamKey};
use glake_units::Bytes;

use super::Result;
use super::core::Core;
use super::growth::{Growing, Growth};
use super::records::ExtentRecords;
use crate::place::Step;
use crate::store::Return;

/// Operations that refill extents.
#[derive(Debug)]
pub(crate) struct Refills<'a> {
    pub(super) core: &'a Core,
    pub(super) growth: &'a Growth,
    pub(super) records: &'a ExtentRecords,
}

impl Refills<'_> {
    /// Makes an extent's memory again and maps it at all its addresses. Returns the source of its bytes; `None`: there is nothing to copy.
    ///
    /// # Errors
    /// [`super::PoolError::Refused`], [`super::PoolError::Leased`] or [`super::PoolError::DeviceFull`] if there is no memory after
    /// releasing free memory of other domains: the extent stays evicted. The driver's error: the extent is interrupted if its memory was
    /// made.
    pub(crate) fn begin(&self, extent: ExtentId) -> Result<Option<Return>> {
        let mut growing = self.growth.lock()?;
        if !self.records.begin_refill(extent)? {
            return Ok(None);
        }
        let entered = self.make_and_map(&mut growing, extent).and_then(|()| self.records.back(extent));
        if entered.is_err() {
            let residency = self.core.lock().extents().state(extent);
            let is_made = residency != Some(glake_stitch::ExtentState::Evicted);
            self.records.advance(extent, if is_made { Step::Failed } else { Step::NotMade })?;
        }
        entered
    }

    fn make_and_map(&self, growing: &mut Growing<'_>, extent: ExtentId) -> Result<()> {
        let state = self.core.lock().extents().state(extent);
        if state == Some(glake_stitch::ExtentState::Evicted) {
            self.make(growing, extent)?;
        }
        let domain = self.core.lock().extents().size_and_domain(extent).1;
        for mapping in growing.mappings_of(extent) {
            if !self.core.reservation().is_mapped(mapping) {
                growing.map(extent, mapping.offset).map_err(|error| self.core.failed(error))?;
            }
            let given = growing.give_access(domain, mapping.offset, mapping.size);
            given.map_err(|error| self.core.failed(error))?;
        }
        Ok(())
    }

    /// Makes new memory for an extent; if there is none, releases free memory elsewhere first.
    fn make(&self, growing: &mut Growing<'_>, extent: ExtentId) -> Result<()> {
        match self.try_make(growing, extent) {
            Err(error) if error.is_out_of_memory() => {
                let plan = self.core.lock().plan_trim(Bytes::ZERO);
                let Some(plan) = plan else { return Err(error) };
                growing.carry_out(&plan, StreamKey::default())?;
                self.try_make(growing, extent)
            }
            made => made,
        }
    }

    fn try_make(&self, growing: &mut Growing<'_>, extent: ExtentId) -> Result<()> {
        let (size, domain) = {
            let mut core = self.core.lock();
            core.evictions().begin_refill(extent).map_err(|source| self.core.refused(source))?;
            core.extents().size_and_domain(extent)
        };
        let made = growing.count(size).and_then(|mut counted| {
            growing.make(size, domain, &mut counted).map_err(|error| self.core.failed(error))
        });
        self.core.lock().evictions().refill_made(extent, made.is_ok());
        growing.insert(extent, made?);
        Ok(())
    }
}
