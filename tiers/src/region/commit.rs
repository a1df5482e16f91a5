//! Decommit and commit: memory of parts of live blocks, given up by the program and made again.
//!
//! ```text
//! decommit   drain ─► per extent that lies wholly in the range:  its copy goes ─► completion point ─► unmap everywhere, release
//! commit     per extent of the range without memory:  make ─► map everywhere, access                contents are undefined
//! ```
//!
//! The block stays live and keeps its addresses. Refills and shrinks skip decommitted extents.

use glake_device::Address;
use glake_stitch::ExtentView;
use glake_units::Bytes;
use rustc_hash::FxHashSet;

use super::shrink::Pipeline;
use super::{Region, RegionError, Result, Shrunk, SkipReason, WaitPolicy};
use crate::gpu::{BlockRange, Eviction};
use crate::{Place, Residency, TransferContext};

impl Region {
    /// Releases the memory of all extents that lie entirely in a range of one live block. The bytes are lost, and must not be accessed
    /// until they are committed again. Fixed and exported extents stay. Waits for all work enqueued on every device of the process, as
    /// [`Region::shrink`] does.
    ///
    /// The caller guarantees that no work on these bytes is enqueued until they are committed.
    ///
    /// # Errors
    /// [`RegionError::Sealed`], [`RegionError::Captured`]; [`crate::PoolError::UnknownAddress`], [`crate::PoolError::OutsideBlock`]:
    /// nothing has changed. Refused while a capture is open. The driver's error: the same call resumes the operation.
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
            match self.begin_settled(|| Ok(self.pool.evictions().begin_decommit(view.extent, &range)?)) {
                Ok(Eviction::Fixed) => pipeline.report.skipped.push(self.skip(&view, SkipReason::Fixed)),
                Ok(Eviction::Exported) => {
                    pipeline.report.skipped.push(self.skip(&view, SkipReason::Exported));
                }
                Ok(Eviction::Withheld) => {
                    pipeline.report.skipped.push(self.skip(&view, SkipReason::Withheld));
                }
                Ok(Eviction::Release { .. }) => pipeline.unused.push(view),
                // Neither requires unmapping.
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

    /// Makes memory for the decommitted extents in a range of one live block. Returns its size. The contents are undefined.
    ///
    /// # Errors
    /// [`RegionError::Sealed`]; [`crate::PoolError::UnknownAddress`], [`crate::PoolError::OutsideBlock`]. The driver's error, or too little
    /// memory: memory made before stays, and the same call resumes the operation.
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
        // Decommitted extents, and those that a failed commit left incomplete.
        let standing = self.standing_in(&range, false).into_iter();
        let without_bytes = standing.filter(|(_, residency)| residency.authority() == Place::Nowhere);
        let chosen: Vec<ExtentView> = without_bytes.map(|(view, _)| view).collect();
        if chosen.is_empty() {
            return Ok(Bytes::ZERO);
        }
        match self.bring_in(chosen, context, wait_policy, &refilling) {
            Ok(made) => Ok(made.mapped),
            // A commit copies no bytes back: the wrapper about refilled bytes does not apply.
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

    /// Returns the region's extents in a range of a block.
    fn standing_in(&self, range: &BlockRange, wholly: bool) -> Vec<(ExtentView, Residency)> {
        let extents: FxHashSet<_> = range.extents(&self.pool, wholly).into_iter().collect();
        let mut standing = self.pool.records().standing(self.domain);
        standing.retain(|(view, _)| extents.contains(&view.extent));
        standing
    }
}
