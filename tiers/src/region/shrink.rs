//! Operations that release a region's memory: shrink, decommit and its reversal, demotion; and the selection of extents to move.
//!
//! ```text
//! shrink     extents  [ copying | copying | copying ]  [ copied | copied ]  [ wait for one completion point ]  unmapped  released
//! decommit   drain ─► per extent that lies wholly in the range:  its copy goes ─► completion point ─► unmap everywhere, release
//! commit     per extent of the range without memory:  make ─► map everywhere, access                contents are undefined
//! demote     per evicted extent:  its block written to a file, piece by piece ─► the file becomes the valid copy ─► the block is free
//! ```
//!
//! A decommitted block stays live and keeps its addresses. Refills and shrinks skip decommitted extents.
//!
//! No other operation waits for a demotion: an extent may be refilled, and its blocks may be freed meanwhile. The file is dropped then.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Scope;

use glake_device::Address;
use glake_stitch::{ExtentId, ExtentView};
use glake_units::Bytes;
use rustc_hash::FxHashSet;

use super::{
    CONCURRENT_EXTENTS, Policy, Region, RegionError, Result, Shrunk, SkipReason, Skipped, WaitPolicy,
};
use crate::gpu::{BlockRange, CompletionPoint, Eviction};
use crate::store::{EvictionCopy, ExtentTransfer, write_block};
use crate::{FileTier, HostPool, Place, PoolError, Residency, Store, TransferContext};

/// Attempts to wait for an extent's pending frees while other threads keep freeing.
const MAX_DRAINS: usize = 8;

/// Maximum number of pending completion points while copies run: points cover unrelated work too, such as a refill enqueued ahead.
const MAX_PENDING_POINTS: usize = 16;

/// Concurrency of an eviction: copies in progress, and the timing of unmapping.
#[derive(Clone, Copy, Debug)]
struct Pace {
    /// Extents copied concurrently: while one is waited for, or memory is made for the next, the others keep the links busy.
    at_once: usize,
    /// Extents per completion point, which is recorded on each device and waited for once.
    batch: usize,
    /// Whether extents are unmapped while no copies run, and released one by one as the next copies begin. On an H200 the driver unmaps in
    /// 0.04 ms when idle, in 0.3 to 1 ms beside copies, and releases in 0.1 to 0.2 ms. That is negligible beside the 2.4 ms of an extent
    /// over PCIe, but not beside the 0.7 ms over NVLink.
    apart: bool,
}

impl Pace {
    fn to(place: Place) -> Pace {
        match place {
            Place::Peer(_) => Pace { at_once: 8, batch: 16, apart: true },
            _ => Pace { at_once: CONCURRENT_EXTENTS, batch: 2, apart: false },
        }
    }
}

/// Extent whose bytes are being copied out.
#[derive(Debug)]
struct ExtentCopy<'s> {
    view: ExtentView,
    evicting: EvictionCopy<'s>,
    /// Bytes in blocks that are not copied.
    undefined: Bytes,
}

/// Extents being evicted, in the order in which they began.
#[derive(Debug, Default)]
pub(super) struct Pipeline<'s> {
    copying: VecDeque<ExtentCopy<'s>>,
    /// Extents that are copied and wait for the next completion point.
    pub(super) unused: Vec<ExtentView>,
    /// Batches of extents with their completion points.
    marked: VecDeque<(Vec<ExtentView>, CompletionPoint)>,
    /// Unmapped extents whose memory can be released.
    unmapped: VecDeque<ExtentView>,
    pub(super) report: Shrunk,
    /// First failure, after which no further extent begins.
    pub(super) failed: Option<RegionError>,
}

impl Region {
    /// Releases at least `amount` bytes of the region's memory to the driver, or all of it with [`Bytes::MAX`]. Free extents go first.
    /// Others are copied to `to` first: their live bytes, or all bytes of a graph's pool, except those declared dead with
    /// [`crate::LiveBytes`]. An extent with a complete copy is not copied again, wherever its copy is; evicted extents stay where they are.
    /// Blocks keep their addresses. Waits for all work enqueued on every device of the process, in its primary context; creates no context.
    ///
    /// The caller guarantees that no work on the evicted memory is enqueued until the region is refilled.
    ///
    /// # Errors
    /// Refused while a capture is open, with nothing changed. [`RegionError::Stopped`]: memory released before is gone, the rest is
    /// resident or interrupted; either direction resumes.
    pub fn shrink(&self, amount: Bytes, to: &Store, context: TransferContext<'_>) -> Result<Shrunk> {
        let _turn = self.turn.lock();
        self.pool.drain().wait()?;
        let stays = self.pool.domains().is_held(self.domain) || self.pool.fixed().is_whole(self.domain);
        let free = if stays { Bytes::ZERO } else { self.pool.free_memory().give_back_domain(self.domain)? };
        let mut report = Shrunk { freed: free, ..Shrunk::default() };
        let fixed = self.pool.fixed().extents(self.domain);
        let mut standing = self.pool.records().standing(self.domain);
        let stay = standing.extract_if(.., |(view, _)| fixed.contains(&view.extent));
        report.skipped.extend(stay.map(|(view, _)| self.skip(&view, SkipReason::Fixed)));
        let chosen = to_leave(&standing, amount.saturating_sub(free));
        let sizes = self.copied_sizes(&standing, &chosen);
        let transfer =
            ExtentTransfer::new(&self.pool, &self.options.tag, context, sizes.iter().copied().sum());
        let over = AtomicBool::new(false);
        let (mut report, mut failed) = std::thread::scope(|scope| {
            to.pin_ahead(scope, &sizes, &over);
            let left = self.evict_next(scope, &transfer, to, chosen, report);
            over.store(true, Ordering::Relaxed);
            left
        });
        // Protects extents again that were opened for a copy and stayed.
        if let Err(error) = self.protect() {
            failed.get_or_insert(error);
        }
        match failed {
            Some(source) => Err(self.stopped(report.freed, report.copied, source)),
            None => {
                report.resident = self.sizes().0;
                Ok(report)
            }
        }
    }

    /// Returns the sizes of the copies to be made, in order.
    pub(super) fn copied_sizes(
        &self,
        standing: &[(ExtentView, Residency)],
        chosen: &[ExtentView],
    ) -> Vec<Bytes> {
        if self.options.policy == Policy::Discard {
            return Vec::new();
        }
        let copied = self.uncopied(standing, chosen);
        let sizes = copied.iter().map(|view| self.pool.records().size_to_copy(view.extent));
        sizes.filter(|size| !size.is_zero()).collect()
    }

    /// Returns those of the chosen extents that have no copy anywhere.
    pub(super) fn uncopied(
        &self,
        standing: &[(ExtentView, Residency)],
        chosen: &[ExtentView],
    ) -> Vec<ExtentView> {
        let new = standing.iter().filter(|(_, residency)| *residency == Residency::NEW);
        let new: FxHashSet<ExtentId> = new.map(|(view, _)| view.extent).collect();
        let is_uncopied = |view: &&ExtentView| new.contains(&view.extent) && !self.clean.has(view.extent);
        chosen.iter().filter(is_uncopied).copied().collect()
    }

    fn evict_next<'s>(
        &self,
        scope: &'s Scope<'s, '_>,
        transfer: &'s ExtentTransfer<'_>,
        to: &Store,
        chosen: Vec<ExtentView>,
        report: Shrunk,
    ) -> (Shrunk, Option<RegionError>) {
        let mut pipeline = Pipeline { report, ..Pipeline::default() };
        let pace = Pace::to(to.place());
        for view in chosen {
            if pipeline.failed.is_some() {
                break;
            }
            self.begin(scope, view, to, transfer, &mut pipeline);
            if pace.apart {
                self.release(1, &mut pipeline);
            }
            while pipeline.copying.len() >= pace.at_once {
                self.finish_copy(transfer, &mut pipeline);
            }
            if pace.apart && pipeline.copying.len() + pipeline.unused.len() >= pace.batch {
                self.unmap_copied(transfer, &mut pipeline);
            }
            if !pace.apart {
                if pipeline.unused.len() >= pace.batch {
                    self.mark(&mut pipeline);
                }
                while pipeline.is_unmapping_due() {
                    self.unmap_next(&mut pipeline);
                }
                self.release(usize::MAX, &mut pipeline);
            }
        }
        self.unmap_copied(transfer, &mut pipeline);
        self.release(usize::MAX, &mut pipeline);
        (pipeline.report, pipeline.failed)
    }

    /// Finishes all copies in progress and unmaps the copied extents.
    fn unmap_copied(&self, transfer: &ExtentTransfer<'_>, pipeline: &mut Pipeline<'_>) {
        while !pipeline.copying.is_empty() {
            self.finish_copy(transfer, pipeline);
        }
        self.unmap_unused(pipeline);
    }

    /// Unmaps all extents that are waiting for a completion point.
    pub(super) fn unmap_unused(&self, pipeline: &mut Pipeline<'_>) {
        self.mark(pipeline);
        while !pipeline.marked.is_empty() {
            self.unmap_next(pipeline);
        }
    }

    fn begin<'s>(
        &self,
        scope: &'s Scope<'s, '_>,
        view: ExtentView,
        to: &Store,
        transfer: &'s ExtentTransfer<'_>,
        pipeline: &mut Pipeline<'s>,
    ) {
        let discard = self.options.policy == Policy::Discard;
        let begun =
            self.begin_settled(|| Ok(self.pool.evictions().begin(view.extent, to.place(), discard)?));
        let skip = |reason| self.skip(&view, reason);
        match begun {
            Ok(Eviction::Fixed) => pipeline.report.skipped.push(skip(SkipReason::Fixed)),
            Ok(Eviction::Exported) => pipeline.report.skipped.push(skip(SkipReason::Exported)),
            Ok(Eviction::Withheld) => pipeline.report.skipped.push(skip(SkipReason::Withheld)),
            // Only a decommit returns this.
            Ok(Eviction::Decommitted) => {}
            Ok(Eviction::Release { undefined }) => {
                pipeline.report.undefined = pipeline.report.undefined.saturating_add(undefined);
                pipeline.unused.push(view);
            }
            Ok(Eviction::Copy { ranges, undefined }) => {
                if self.leave_unchanged(view.extent, &ranges, to, &mut pipeline.report) {
                    pipeline.report.undefined = pipeline.report.undefined.saturating_add(undefined);
                    return pipeline.unused.push(view);
                }
                match transfer.begin_evict(scope, to, ranges) {
                    Ok(evicting) => pipeline.copying.push_back(ExtentCopy { view, evicting, undefined }),
                    Err(error) => self.gave_up(view.extent, error, pipeline),
                }
            }
            Err(error) => pipeline.fail(error),
        }
    }

    pub(super) fn skip(&self, view: &ExtentView, reason: SkipReason) -> Skipped {
        Skipped { address: self.pool.core().address(view.offset), size: view.size, reason }
    }

    /// Begins an eviction; if blocks freed meanwhile are used by other streams, waits for their work and retries.
    pub(super) fn begin_settled(&self, begin: impl Fn() -> Result<Eviction>) -> Result<Eviction> {
        for _ in 0..MAX_DRAINS {
            match begin()? {
                Eviction::Withheld => self.pool.drain().wait()?,
                begun => return Ok(begun),
            }
        }
        Ok(Eviction::Withheld)
    }

    fn finish_copy(&self, transfer: &ExtentTransfer<'_>, pipeline: &mut Pipeline<'_>) {
        let Some(ExtentCopy { view, evicting, undefined }) = pipeline.copying.pop_front() else { return };
        let size = evicting.size();
        match transfer.finish_evict(evicting) {
            Ok(copy) => match self.pool.records().finish_copy(view.extent, copy) {
                Ok(()) => {
                    pipeline.report.copied = pipeline.report.copied.saturating_add(size);
                    pipeline.report.undefined = pipeline.report.undefined.saturating_add(undefined);
                    pipeline.unused.push(view);
                }
                Err(error) => pipeline.fail(error.into()),
            },
            Err(error) => self.gave_up(view.extent, error, pipeline),
        }
    }

    /// Cancels the eviction of an extent whose copy failed: it stays resident.
    fn gave_up(&self, extent: ExtentId, error: RegionError, pipeline: &mut Pipeline<'_>) {
        pipeline.fail(error);
        if let Err(error) = self.pool.records().cancel_evict(extent) {
            pipeline.fail(error.into());
        }
    }

    /// Records a completion point for the extents copied so far.
    fn mark(&self, pipeline: &mut Pipeline<'_>) {
        let views = std::mem::take(&mut pipeline.unused);
        if views.is_empty() {
            return;
        }
        match self.pool.clock().completion_point() {
            Ok(point) => pipeline.marked.push_back((views, point)),
            Err(error) => self.interrupted(&views, error, pipeline),
        }
    }

    fn unmap_next(&self, pipeline: &mut Pipeline<'_>) {
        let Some((views, point)) = pipeline.marked.pop_front() else { return };
        let done = match self.pool.clock().passed(point) {
            Ok(done) => done,
            Err(error) => return self.interrupted(&views, error, pipeline),
        };
        let extents: Vec<ExtentId> = views.iter().map(|view| view.extent).collect();
        let (unmapped, outcome) = self.pool.evictions().unmap(&extents, &done);
        pipeline.unmapped.extend(views.iter().filter(|view| unmapped.contains(&view.extent)));
        if let Err(error) = outcome {
            pipeline.fail(error.into());
        }
    }

    /// Releases at most `most` unmapped extents.
    pub(super) fn release(&self, most: usize, pipeline: &mut Pipeline<'_>) {
        let most = most.min(pipeline.unmapped.len());
        for view in pipeline.unmapped.drain(..most).collect::<Vec<_>>() {
            match self.pool.evictions().release(view.extent) {
                Ok(()) if view.state == glake_stitch::ExtentState::Evicted => {}
                Ok(()) => pipeline.report.freed = pipeline.report.freed.saturating_add(view.size),
                Err(error) => pipeline.fail(error.into()),
            }
        }
    }

    /// Marks extents as interrupted: they have complete copies, but their memory cannot be released now.
    fn interrupted(&self, views: &[ExtentView], error: PoolError, pipeline: &mut Pipeline<'_>) {
        pipeline.fail(error.into());
        for view in views {
            if let Err(error) = self.pool.records().interrupted(view.extent) {
                pipeline.fail(error.into());
            }
        }
    }
}

impl Pipeline<'_> {
    /// Returns whether a batch can be unmapped without waiting, or too many are pending. Errors of the driver are left to the wait.
    fn is_unmapping_due(&mut self) -> bool {
        self.marked.len() > MAX_PENDING_POINTS
            || self.marked.front_mut().is_some_and(|(_, point)| point.has_passed().unwrap_or(true))
    }

    pub(super) fn fail(&mut self, error: RegionError) {
        self.failed.get_or_insert(error);
    }
}

type PlacedExtent = (ExtentView, Residency);

/// Selects extents to evict, at least `amount` bytes if available: first interrupted ones, then those with a copy, then the rest, each in
/// address order.
pub(super) fn to_leave(standing: &[PlacedExtent], amount: Bytes) -> Vec<ExtentView> {
    let rank = |residency: Residency| match residency {
        Residency::Interrupted { .. } => Some(0),
        Residency::Resident { copy: Some(_) } => Some(1),
        Residency::Resident { copy: None } => Some(2),
        _ => None,
    };
    chosen(standing, rank, |view| view.state != glake_stitch::ExtentState::Evicted, amount)
}

/// Selects extents to refill, at least `amount` bytes if that many are evicted: first interrupted ones, then the rest, each in address
/// order.
pub(super) fn to_enter(standing: &[PlacedExtent], amount: Bytes) -> Vec<ExtentView> {
    let rank = |residency: Residency| match residency {
        Residency::Interrupted { .. } => Some(0),
        _ if residency.is_decommitted() => None,
        Residency::Evicted { .. } => Some(1),
        _ => None,
    };
    chosen(standing, rank, |_| true, amount)
}

fn chosen(
    standing: &[PlacedExtent],
    rank: impl Fn(Residency) -> Option<u8>,
    counts: impl Fn(&ExtentView) -> bool,
    amount: Bytes,
) -> Vec<ExtentView> {
    let ranked = standing.iter().filter_map(|(view, residency)| Some((rank(*residency)?, *view)));
    let mut ranked: Vec<(u8, ExtentView)> = ranked.collect();
    ranked.sort_by_key(|(rank, view)| (*rank, view.offset));
    let mut left = amount;
    let views = ranked.into_iter().map(|(_, view)| view);
    views
        .take_while(|view| {
            let takes = !left.is_zero();
            if counts(view) {
                left = left.saturating_sub(view.size);
            }
            takes
        })
        .collect()
}

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

/// Parameters of a demotion.
#[derive(Clone, Copy)]
pub struct Demotion<'a> {
    /// Tier for the files.
    pub files: &'a FileTier,
    /// Host pool for bytes in transit when they are read back: see [`crate::Store::File`].
    pub host: &'a Arc<HostPool>,
    /// Whether to continue; called before each piece of 16 MiB, and after the last of a file.
    pub keep_going: &'a dyn Fn() -> bool,
}

impl std::fmt::Debug for Demotion<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Demotion").field("files", &self.files).finish_non_exhaustive()
    }
}

impl Region {
    /// Moves copies of evicted extents from host memory to files, until at least `amount` of host memory is free. Returns the number of
    /// bytes freed. Ends early if `keep_going` returns false or a refill of the region begins.
    ///
    /// # Errors
    /// [`crate::RegionError::File`]: the current copy and the following ones stay in host memory.
    pub fn demote(&self, amount: Bytes, demotion: Demotion<'_>) -> Result<Bytes> {
        let Demotion { files, host, keep_going } = demotion;
        let goes_on = || keep_going() && !self.progress.is_refilling();
        let standing = self.pool.records().standing(self.domain);
        let mut evicted: Vec<ExtentView> = standing.into_iter().map(|(view, _)| view).collect();
        // A refill begins with the first addresses, which therefore stay in host memory longest.
        evicted.sort_by_key(|view| std::cmp::Reverse(view.offset));
        let mut freed = Bytes::ZERO;
        for view in evicted {
            if freed >= amount || !goes_on() {
                break;
            }
            let Some(block) = self.pool.records().evicted_to_host(view.extent) else { continue };
            let Some(file) = write_block(files, &block, &goes_on)? else { break };
            if self.pool.records().demote(view.extent, &block, file, host)? {
                freed = freed.saturating_add(block.size());
            }
        }
        Ok(freed)
    }
}
