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
use crate::{Place, Residency, TransferContext};

impl Region {
    /// Gives the memory of the extents back to the driver that lie wholly in these bytes of one of its live blocks. Until they are
    /// committed again nothing may touch them; their bytes are lost. What is fixed or exported stays. Waits for all work that was enqueued
    /// on every device of the process, as [`Region::shrink`] does.
    ///
    /// The caller promises that no work on these bytes is enqueued from now on until they are committed.
    ///
    /// # Errors
    /// [`RegionError::Sealed`], [`RegionError::Captured`]; [`crate::PoolError::UnknownAddress`], [`crate::PoolError::OutsideBlock`]: nothing
    /// has changed. While a capture is open that is refused. What the driver answers: the same call goes on from there.
    pub fn decommit(&self, address: Address, size: Bytes) -> Result<Shrunk> {
        let range = BlockRange::of(&self.pool, address, size)?;
        let _turn = self.turn.lock();
        self.refuse_sealed()?;
        if self.pool.domains().is_held(self.domain) {
            return Err(RegionError::Captured { tag: self.options.tag.clone() });
        }
        self.pool.drain().wait()?;
        self.void_block(address);
        let mut pipeline = Pipeline::default();
        for (view, _) in self.standing_in(&range, true) {
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
                Ok(Eviction::Decommitted | Eviction::Copy { .. }) => {}
                Err(error) => {
                    pipeline.fail(error);
                    break;
                }
            }
        }
        self.unmap_unused(&mut pipeline);
        self.release(usize::MAX, &mut pipeline);
        let Pipeline { mut report, failed, .. } = pipeline;
        failed.map_or(Ok(()), Err)?;
        report.resident = self.sizes().0;
        Ok(report)
    }

    /// Makes memory for the extents of these bytes of one of its live blocks that were decommitted; returns how much. Their bytes have any
    /// value.
    ///
    /// # Errors
    /// [`RegionError::Sealed`]; [`crate::PoolError::UnknownAddress`], [`crate::PoolError::OutsideBlock`]. What the driver answers, and where
    /// there is no memory: what was made by then stays, and the same call goes on.
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
        self.refuse_sealed()?;
        let chosen = self.to_commit(&range);
        if chosen.is_empty() {
            return Ok(Bytes::ZERO);
        }
        match self.bring_in(chosen, context, wait_policy, &refilling) {
            Ok(made) => Ok(made.mapped),
            // No bytes come back: what a refill says of those is not so here.
            Err(RegionError::Stopped { source, .. }) => Err(*source),
            Err(error) => Err(error),
        }
    }

    fn refuse_sealed(&self) -> Result<()> {
        match self.is_sealed() {
            true => Err(RegionError::Sealed { tag: self.options.tag.clone() }),
            false => Ok(()),
        }
    }

    /// Extents of a range whose bytes were given up, and those that a commit left half made.
    fn to_commit(&self, range: &BlockRange) -> Vec<ExtentView> {
        let standing = self.standing_in(range, false).into_iter();
        let to_commit = standing.filter(|(_, residency)| residency.authority() == Place::Nowhere);
        to_commit.map(|(view, _)| view).collect()
    }

    /// As often as a shrink, pending frees are waited for.
    fn begin_decommit(&self, view: &ExtentView, range: &BlockRange) -> Result<Eviction> {
        self.begin_settled(|| Ok(self.pool.evictions().begin_decommit(view.extent, range)?))
    }

    /// Its extents that lie in a range of a block.
    fn standing_in(&self, range: &BlockRange, wholly: bool) -> Vec<(ExtentView, Residency)> {
        let extents: FxHashSet<_> = range.extents(&self.pool, wholly).into_iter().collect();
        let mut standing = self.pool.records().standing(self.domain);
        standing.retain(|(view, _)| extents.contains(&view.extent));
        standing
    }
}
