//! Parts of live blocks that have no memory: given up by their program, and had again.
//!
//! ```text
//! decommit   drain ─► per extent that lies wholly in the range:  its copy goes ─► completion point ─► unmap everywhere, release
//! commit     per extent of the range without memory:  make ─► map everywhere, access                the bytes have any value
//! ```
//!
//! The block stays live and keeps its addresses. Refills pass over what was decommitted, and a shrink finds nothing there.

use glake_device::Address;
use glake_stitch::ExtentView;
use glake_units::Bytes;
use rustc_hash::FxHashSet;

use super::shrink::Pipeline;
use super::{Region, RegionError, Result, Shrunk, SkipReason, WaitPolicy};
use crate::gpu::{BlockRange, Eviction};
use crate::{Residency, TransferContext};

impl Region {
    /// Gives the memory of the extents back to the driver that lie wholly in these bytes of one of its live blocks. Until they are
    /// committed again nothing may touch them; their bytes are lost. What is fixed or exported stays. Waits for all work that was enqueued
    /// on every device of the process, as [`Region::shrink`] does.
    ///
    /// The caller promises that no work on these bytes is enqueued from now on until they are committed.
    ///
    /// # Errors
    /// [`RegionError::Sealed`]; [`crate::PoolError::UnknownAddress`], [`crate::PoolError::OutsideBlock`]: nothing has changed. While a
    /// capture is open that is refused. [`RegionError::Stopped`]: the same call goes on from there.
    pub fn decommit(&self, address: Address, size: Bytes) -> Result<Shrunk> {
        let range = BlockRange::of(&self.pool, address, size)?;
        let _turn = self.turn.lock();
        if self.is_sealed() {
            return Err(RegionError::Sealed { tag: self.options.tag.clone() });
        }
        self.pool.drain().wait()?;
        self.void_block(address);
        let mut pipeline = Pipeline::default();
        for (view, _) in self.standing_in(&range, true)? {
            match self.begin_decommit(&view, &range) {
                Ok(Eviction::Fixed) => pipeline.report.skipped.push(self.skip(&view, SkipReason::Fixed)),
                Ok(Eviction::Exported) => {
                    pipeline.report.skipped.push(self.skip(&view, SkipReason::Exported));
                }
                Ok(Eviction::Withheld) => {
                    pipeline.report.skipped.push(self.skip(&view, SkipReason::Withheld));
                }
                Ok(Eviction::Release { .. }) => pipeline.unused.push(view),
                // There is nothing to copy.
                Ok(Eviction::GivenUp | Eviction::Copy { .. }) => {}
                Err(error) => {
                    pipeline.fail(error);
                    break;
                }
            }
        }
        self.unmap_unused(&mut pipeline);
        self.release(usize::MAX, &mut pipeline);
        let Pipeline { mut report, failed, .. } = pipeline;
        match failed {
            Some(source) => Err(self.stopped(report.freed, Bytes::ZERO, source)),
            None => {
                report.resident = self.sizes()?.0;
                Ok(report)
            }
        }
    }

    /// Makes memory for the extents of these bytes of one of its live blocks that were decommitted; returns how much. Their bytes have any
    /// value.
    ///
    /// # Errors
    /// [`crate::PoolError::UnknownAddress`], [`crate::PoolError::OutsideBlock`]. [`RegionError::Stopped`], where there is no memory too:
    /// what was made by then stays, and the same call goes on.
    pub fn commit(
        &self,
        address: Address,
        size: Bytes,
        context: TransferContext<'_>,
        wait_policy: &dyn WaitPolicy,
    ) -> Result<Bytes> {
        let range = BlockRange::of(&self.pool, address, size)?;
        let refilling = self.progress.begin();
        let _turn = self.turn.lock();
        let mut chosen = self.standing_in(&range, false)?;
        chosen.retain(|(_, residency)| residency.is_decommitted());
        if chosen.is_empty() {
            return Ok(Bytes::ZERO);
        }
        Ok(self
            .bring_in(chosen.into_iter().map(|(view, _)| view).collect(), context, wait_policy, &refilling)?
            .mapped)
    }

    /// As often as a shrink, pending frees are waited for.
    fn begin_decommit(&self, view: &ExtentView, range: &BlockRange) -> Result<Eviction> {
        self.begin_settled(|| Ok(self.pool.evictions().begin_decommit(view.extent, range)?))
    }

    /// Its extents that lie in a range of a block.
    fn standing_in(&self, range: &BlockRange, wholly: bool) -> Result<Vec<(ExtentView, Residency)>> {
        let extents: FxHashSet<_> = range.extents(&self.pool, wholly).into_iter().collect();
        let mut standing = self.pool.records().standing(self.domain)?;
        standing.retain(|(view, _)| extents.contains(&view.extent));
        Ok(standing)
    }
}
