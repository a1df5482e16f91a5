//! Copies of extents that stay on their GPU and in use.
//!
//! ```text
//! cleaner   ├ enqueued ┤ waits   ├ enqueued ┤ waits        the layout's lock is held while a piece is enqueued
//! plans                   ▲                     ▲          memory is mapped and unmapped; what was read once that is done
//! ```
//!
//! Invariant: what is read is mapped while it is read: a plan that unmaps it waits for all work, evictions take the region's turn, which
//! the reader holds. No plan is refused because of it, and none of other memory waits for it. Nobody keeps a program from writing
//! meanwhile: what was read counts for nothing before its digest has been compared.

use glake_device::Address;
use glake_device::owned::{Extent, Span};
use glake_stitch::{DomainId, ExtentId, HomeRange};
use parking_lot::MutexGuard;

use super::core::Core;
use super::fixed::{FixedBlocks, block_of};
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

    /// Has `enqueue` enqueue what reads a part of the ranges, at home; `None`: the extent is not as it was when they were asked for. What it
    /// returns holds no span.
    pub(crate) fn with<R>(
        &self,
        extent: ExtentId,
        ranges: &[HomeRange],
        part: &[HomeRange],
        enqueue: impl FnOnce(Vec<Span>) -> R,
    ) -> Result<Option<R>> {
        let layout = self.core.lock_layout();
        if self.kept_here(extent) != ranges {
            return Ok(None);
        }
        let done = packed_home(self.core, part).map(enqueue);
        // Who waits for the lock goes first.
        MutexGuard::unlock_fair(layout);
        done.map(Some)
    }

    /// The extents of the live block of a domain that an address lies in; none: there is no such block.
    pub(crate) fn extents_of(&self, domain: DomainId, address: Address) -> Vec<ExtentId> {
        block_of(self.core, domain, address).map_or_else(|_| Vec::new(), |(_, extents)| extents)
    }

    /// What of an extent that is resident has to be kept.
    pub(crate) fn kept_here(&self, extent: ExtentId) -> Vec<HomeRange> {
        let core = self.core.lock();
        match core.extents().state(extent) {
            Some(glake_stitch::ExtentState::Resident) => self.core.kept(&core, extent).ranges,
            _ => Vec::new(),
        }
    }
}
