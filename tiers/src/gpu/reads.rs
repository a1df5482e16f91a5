//! Copies of extents that stay on their GPU and in use.
//!
//! ```text
//! cleaner   ├ piece ┤   ├ piece ┤   ├ piece ┤        the layout's lock is held for a piece
//! plans               ▲           ▲                  memory is mapped and unmapped in between
//! ```
//!
//! Invariant: what is read is mapped while it is read, and no plan is refused because of it. Nobody keeps a program from writing
//! meanwhile: what was read counts for nothing before its digest has been compared.

use glake_device::owned::{Extent, Span};
use glake_stitch::{ExtentId, HomeRange};
use parking_lot::MutexGuard;

use super::core::Core;
use super::fixed::FixedBlocks;
use super::growth::Growth;
use super::{GpuPool, Result};
use crate::place::Residency;
use crate::store::packed_home;

/// What is read of extents that stay.
#[derive(Debug)]
pub(crate) struct ResidentReads<'a> {
    pool: &'a GpuPool,
    core: &'a Core,
    growth: &'a Growth,
    fixed: &'a FixedBlocks,
}

impl<'a> ResidentReads<'a> {
    pub(crate) fn of(pool: &'a GpuPool) -> Self {
        ResidentReads { pool, core: &pool.core, growth: &pool.growth, fixed: &pool.fixed }
    }

    /// What would be copied of an extent now; nothing of one that cannot leave, or that was moved, or has a copy already.
    ///
    /// # Errors
    /// [`super::PoolError::Poisoned`].
    pub(crate) fn ranges(&self, extent: ExtentId) -> Result<Vec<HomeRange>> {
        let is_exported = self.growth.lock()?.extent(extent).is_some_and(Extent::is_exported);
        if is_exported
            || self.fixed.lock().holds(extent)
            || self.pool.records.residency(extent) != Residency::NEW
        {
            return Ok(Vec::new());
        }
        Ok(self.kept_here(extent))
    }

    /// Does `work` with a part of the ranges, at home; `None`: the extent is not as it was when they were asked for.
    pub(crate) fn with<R>(
        &self,
        extent: ExtentId,
        ranges: &[HomeRange],
        part: &[HomeRange],
        work: impl FnOnce(Vec<Span>) -> R,
    ) -> Result<Option<R>> {
        let layout = self.core.lock_layout();
        if self.kept_here(extent) != ranges {
            return Ok(None);
        }
        let done = packed_home(self.core, part).map(work);
        // Who waits for it goes first.
        MutexGuard::unlock_fair(layout);
        done.map(Some)
    }

    fn kept_here(&self, extent: ExtentId) -> Vec<HomeRange> {
        let core = self.core.lock();
        match core.extents().state(extent) {
            Some(glake_stitch::ExtentState::Resident) => self.core.kept(&core, extent).ranges,
            _ => Vec::new(),
        }
    }
}
