//! Eviction of single extents.
//!
//! ```text
//! region ─► begin ─► (its bytes are copied) ─► records.finish_copy ─► unmap ─► release             memory is free
//! ```
//!
//! Invariants: while the allocator marks an extent as moving, its memory is held, and the reservation tells which of its addresses are
//! mapped, so that a failed step is resumed where it stopped. One thread at a time moves the extents of a domain. The growth lock is held
//! for the driver calls of one extent, never during copies.

use glake_device::owned::{Extent, Mapping};
use glake_stitch::ExtentId;

use super::Result;
use super::block_range::BlockRange;
use super::core::Core;
use super::fixed::FixedBlocks;
use super::growth::{Growing, Growth};
use super::point::Done;
use super::records::{Eviction, ExtentRecords};
use super::retry::retry;
use crate::place::{Place, Residency, Step};

/// Eviction operations of a pool.
#[derive(Debug)]
pub(crate) struct Evictions<'a> {
    pub(super) core: &'a Core,
    pub(super) growth: &'a Growth,
    pub(super) fixed: &'a FixedBlocks,
    pub(super) records: &'a ExtentRecords,
}

impl Evictions<'_> {
    /// Begins to evict an extent to `to`, or to the place of its existing copy. With `discard` its bytes are given up.
    pub(crate) fn begin(&self, extent: ExtentId, to: Place, discard: bool) -> Result<Eviction> {
        let growing = self.growth.lock()?;
        let residency = self.records.residency(extent);
        let next = self.records.after(residency, Step::Evict(residency.copy().unwrap_or(to)))?;
        let is_resident = matches!(residency, Residency::Resident { .. });
        if is_resident && growing.extent(extent).is_some_and(Extent::is_exported) {
            return Ok(Eviction::Exported);
        }
        if !discard && matches!(next, Residency::Evicting { .. }) {
            growing.open_home(extent)?;
        }
        let fixed = self.fixed.lock();
        if is_resident && fixed.holds(extent) {
            return Ok(Eviction::Fixed);
        }
        self.records.begin_evict(extent, residency, next, discard)
    }

    /// Returns those of the given extents that were exported and therefore stay.
    pub(crate) fn exported(&self, extents: impl Iterator<Item = ExtentId>) -> Vec<ExtentId> {
        let growing = self.growth.quiet();
        extents.filter(|extent| growing.extent(*extent).is_some_and(Extent::is_exported)).collect()
    }

    /// Begins to give up the memory of an extent and its bytes, wherever they are. The extent must lie entirely in the range of a block.
    pub(crate) fn begin_decommit(&self, extent: ExtentId, range: &BlockRange) -> Result<Eviction> {
        let (begun, _copy) = {
            let growing = self.growth.lock()?;
            if growing.extent(extent).is_some_and(Extent::is_exported) {
                return Ok(Eviction::Exported);
            }
            let fixed = self.fixed.lock();
            if fixed.holds(extent) {
                return Ok(Eviction::Fixed);
            }
            self.records.begin_decommit(extent, range)?
        };
        Ok(begun)
    }

    /// Unmaps extents at all their addresses; `done` proves that nothing uses them. Adjacent extents share one driver call, because beside
    /// copies the driver takes as long for one mapping as for several. Returns the extents whose memory can be released.
    ///
    /// # Errors
    /// The driver's first error; the extents that are not returned are interrupted.
    pub(crate) fn unmap(&self, extents: &[ExtentId], done: &Done) -> (Vec<ExtentId>, Result<()>) {
        let mut unmapped = Vec::with_capacity(extents.len());
        let mut outcome = self.growth.lock().and_then(|growing| {
            let outcome = self.unmap_everywhere(&growing, extents, done);
            let is_mapped = |extent: ExtentId| {
                let mut mappings = growing.mappings_of(extent).into_iter();
                mappings.any(|mapping| self.core.reservation().is_mapped(mapping))
            };
            unmapped.extend(extents.iter().copied().filter(|extent| !is_mapped(*extent)));
            outcome
        });
        for extent in extents.iter().filter(|extent| !unmapped.contains(extent)) {
            outcome = outcome.and(self.records.interrupted(*extent));
        }
        (unmapped, outcome)
    }

    /// Releases the memory of an unmapped extent.
    ///
    /// # Errors
    /// The driver's error; the extent is interrupted.
    pub(crate) fn release(&self, extent: ExtentId) -> Result<()> {
        let mut growing = self.growth.quiet();
        let released = self.core.usable().and_then(|()| self.release_memory(&mut growing, extent));
        let step = if released.is_ok() { Step::Released } else { Step::Failed };
        // Before another thread can see the extent as evicted, and forget it.
        let advanced = self.records.advance(extent, step);
        drop(growing);
        self.growth.lease().tell_returned(false);
        released.and(advanced)
    }

    fn unmap_everywhere(&self, growing: &Growing<'_>, extents: &[ExtentId], done: &Done) -> Result<()> {
        let reservation = self.core.reservation();
        let moving = |extent: &&ExtentId| {
            self.core.lock().extents().state(**extent) == Some(glake_stitch::ExtentState::Moving)
        };
        let mappings = extents.iter().filter(moving).flat_map(|extent| growing.mappings_of(*extent));
        let mut mapped: Vec<Mapping> = mappings.filter(|mapping| reservation.is_mapped(*mapping)).collect();
        if mapped.is_empty() {
            return Ok(());
        }
        reservation.retire(&mapped, done.mark).map_err(|error| self.core.failed(error))?;
        mapped.iter().for_each(|mapping| growing.tell_unmapping(mapping.offset, mapping.size));
        let unmapped = retry(|| {
            mapped.retain(|mapping| reservation.is_mapped(*mapping));
            reservation.unmap(&mapped, &done.passed)
        });
        let Err(error) = unmapped else { return Ok(()) };
        mapped.retain(|mapping| reservation.is_mapped(*mapping));
        reservation.revive(&mapped).map_err(|error| self.core.failed(error))?;
        mapped.iter().for_each(|mapping| growing.tell_mapped(mapping.offset, mapping.size));
        Err(self.core.failed(error))
    }

    /// Releases the memory of an extent, if it has any.
    fn release_memory(&self, growing: &mut Growing<'_>, extent: ExtentId) -> Result<()> {
        if self.core.lock().extents().state(extent) != Some(glake_stitch::ExtentState::Moving) {
            return Ok(());
        }
        // A program may commit the memory again: the lease keeps its size.
        let leased = self.records.residency(extent).authority() == Place::Nowhere;
        if let Some(made) = growing.remove(extent) {
            made.release(leased).map_err(|(made, error)| {
                growing.insert(extent, made);
                self.core.failed(error)
            })?;
        }
        self.core.lock().evictions().finish(extent).map_err(|source| self.core.refused(source))
    }
}
