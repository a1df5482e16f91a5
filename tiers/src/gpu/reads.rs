//! Reads of resident extents that stay in use.
//!
//! ```text
//! cleaner   ├ enqueued ┤ waits   ├ enqueued ┤ waits        the layout lock is held while a piece is enqueued
//! plans                   ▲                     ▲          memory is mapped and unmapped; read memory only after the read
//! ```
//!
//! Invariant: memory stays mapped while it is read: a plan that unmaps it waits for all work, and evictions take the region's turn, which
//! the reader holds. No plan is refused because of a read, and plans for other memory do not wait. Programs may write meanwhile: the bytes
//! read are used only after their digest has been compared.

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

/// Operations that read resident extents.
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

    /// Returns the bytes of an extent that an eviction would copy now; none if the extent cannot leave, has moved, or has a copy already.
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

    /// Calls `enqueue` to enqueue reads of a part of the ranges, at home; returns `None` if the extent has changed since the ranges were
    /// queried. The result of `enqueue` must hold no span.
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
        // Lets a waiting thread take the lock first.
        MutexGuard::unlock_fair(layout);
        done.map(Some)
    }

    /// Returns the extents of the live block of a domain at an address; empty if there is no such block.
    pub(crate) fn extents_of(&self, domain: DomainId, address: Address) -> Vec<ExtentId> {
        block_of(self.core, domain, address).map_or_else(|_| Vec::new(), |(_, extents)| extents)
    }

    /// Returns the bytes of a resident extent that must be preserved.
    pub(crate) fn kept_here(&self, extent: ExtentId) -> Vec<HomeRange> {
        let core = self.core.lock();
        match core.extents().state(extent) {
            Some(glake_stitch::ExtentState::Resident) => self.core.kept(&core, extent).ranges,
            _ => Vec::new(),
        }
    }
}
