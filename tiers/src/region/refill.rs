//! Refill of a region's extents, and streams that start work before it has completed.
//!
//! ```text
//! refill   made, mapped ─► copies enqueued ─► mark ─► all bytes arrived
//! wait     ░░░░░ on the host ░░░░░░░░░░░░░░░│ its stream, on the GPU │ nothing to wait for
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::Scope;

use glake_device::{Address, DeviceId, DriverError, Stream};
use glake_stitch::{ExtentId, ExtentView};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};

use super::{
    CONCURRENT_EXTENTS, CopyPolicy, MAX_EXTENTS_AHEAD, Mark, Policy, Refilled, Region, RegionError, Result,
    WaitPolicy, shrink,
};
use crate::gpu::BlockRange;
use crate::store::{ExtentTransfer, RefillCopy, Return};
use crate::{Place, PoolError, Residency, TransferContext};

/// Fill byte for bytes without a copy, if the caller asks for it.
pub(super) const POISON: u8 = 0xab;

/// Extent whose bytes are being copied back.
#[derive(Debug)]
struct ExtentCopy<'s> {
    view: ExtentView,
    /// Copy in progress; `None`: there is nothing to copy.
    refilling: Option<RefillCopy<'s>>,
}

/// Extents being refilled, in the order in which they began.
#[derive(Debug, Default)]
struct Pipeline<'s> {
    copying: VecDeque<ExtentCopy<'s>>,
    report: Refilled,
    /// First failure, after which no further extent begins.
    failed: Option<RegionError>,
    /// First extent with an unreadable or damaged copy; the others continue.
    unusable: Option<RegionError>,
}

impl Region {
    /// Refills at least `amount` bytes of evicted memory at the same addresses, or all of it with [`Bytes::MAX`], and waits for the copies.
    /// If there is no memory, releases free memory elsewhere and asks `wait_policy` whether to wait for more. Ends early without an error
    /// if `wait_policy` no longer wants the refill.
    ///
    /// # Errors
    /// [`RegionError::Stopped`]: extents refilled before stay resident, the rest is evicted or interrupted; either direction resumes.
    /// [`RegionError::Damaged`], [`RegionError::Unread`]: all other extents were refilled, and this one is interrupted.
    pub fn refill(
        &self,
        amount: Bytes,
        context: TransferContext<'_>,
        wait_policy: &dyn WaitPolicy,
    ) -> Result<Refilled> {
        let refilling = self.progress.begin();
        let _turn = self.turn.lock();
        self.pool.free_memory().forget_emptied(self.domain)?;
        let standing = self.pool.records().standing(self.domain);
        self.bring_in(shrink::to_enter(&standing, amount), context, wait_policy, &refilling)
    }

    /// Reads evicted bytes of one live block from their copies in host memory, without the GPU. Bytes that were declared dead are left as
    /// they are. Returns `false` if some of the range is on the GPU, on a peer or in a file; nothing is read then.
    ///
    /// # Errors
    /// [`crate::PoolError::UnknownAddress`], [`crate::PoolError::OutsideBlock`].
    pub fn read_evicted(&self, address: Address, into: &mut [u8]) -> Result<bool> {
        let range = BlockRange::of(&self.pool, address, Bytes::new(into.len() as u64))?;
        let Some(parts) = self.pool.records().host_parts(&range) else { return Ok(false) };
        Ok(parts.iter().all(|part| part.read(into).is_some()))
    }

    /// Refills the given extents, as [`Region::refill`] does.
    pub(super) fn bring_in(
        &self,
        chosen: Vec<ExtentView>,
        context: TransferContext<'_>,
        wait_policy: &dyn WaitPolicy,
        refilling: &BegunRefill<'_>,
    ) -> Result<Refilled> {
        let transfer = ExtentTransfer::new(&self.pool, &self.options.tag, context, Bytes::ZERO);
        let pipeline = std::thread::scope(|scope| {
            let mut pipeline = Pipeline::default();
            for view in chosen {
                if pipeline.failed.is_some() || !wait_policy.goes_on() {
                    break;
                }
                match self.begin_refill(scope, view, &transfer, wait_policy, &mut pipeline) {
                    Ok(copying) => pipeline.copying.push_back(copying),
                    Err(error) => pipeline.fail(error),
                }
                let ahead = if transfer.is_enqueued() { MAX_EXTENTS_AHEAD } else { CONCURRENT_EXTENTS };
                while pipeline.copying.len() >= ahead {
                    self.finish_refill(&transfer, &mut pipeline);
                }
            }
            // Without a mark, waiting streams wait until the copies have completed and were verified.
            if transfer.is_enqueued()
                && context.checks.is_none()
                && let Ok(mark) = context.mover.mark()
            {
                refilling.enqueued(mark);
            }
            while !pipeline.copying.is_empty() {
                self.finish_refill(&transfer, &mut pipeline);
            }
            if let Err(error) = self.protect() {
                pipeline.fail(error);
            }
            Pipeline { copying: VecDeque::new(), ..pipeline }
        });
        let Pipeline { mut report, failed, unusable, .. } = pipeline;
        match (failed, unusable) {
            (Some(source), _) => Err(self.stopped(report.mapped, report.copied, source)),
            (None, Some(unusable)) => Err(unusable),
            (None, None) => {
                report.evicted = self.sizes().1;
                Ok(report)
            }
        }
    }

    fn begin_refill<'s>(
        &self,
        scope: &'s Scope<'s, '_>,
        view: ExtentView,
        transfer: &'s ExtentTransfer<'_>,
        wait_policy: &dyn WaitPolicy,
        pipeline: &mut Pipeline<'s>,
    ) -> Result<ExtentCopy<'s>> {
        let Some(back) = self.refill_next(view, transfer, wait_policy, pipeline)? else {
            return Ok(ExtentCopy { view, refilling: None });
        };
        match transfer.begin_refill(scope, view, back) {
            Ok(refilling) => Ok(ExtentCopy { view, refilling: Some(refilling) }),
            Err(error) => {
                self.pool.records().interrupted(view.extent)?;
                Err(error)
            }
        }
    }

    /// Makes and maps an extent's memory. If there is none, retries each time a copy in progress ends, then waits for pending frees, and at
    /// last for other holders to release memory: they may need host memory that the copies hold.
    fn refill_next(
        &self,
        view: ExtentView,
        transfer: &ExtentTransfer<'_>,
        wait_policy: &dyn WaitPolicy,
        pipeline: &mut Pipeline<'_>,
    ) -> Result<Option<Return>> {
        let mut settled = false;
        loop {
            let error = match self.pool.refills().begin(view.extent) {
                Err(error) if error.is_out_of_memory() => error,
                entered => return Ok(entered?),
            };
            if pipeline.failed.is_some() {
                return Err(error.into());
            }
            if !pipeline.copying.is_empty() {
                self.finish_refill(transfer, pipeline);
            } else if !settled {
                settled = true;
                match self.pool.settle() {
                    // A capturing thread frees no memory; other holders of memory may.
                    Ok(()) | Err(PoolError::Driver(DriverError::Capturing { .. })) => {}
                    Err(error) => return Err(error.into()),
                }
            } else if !wait_policy.wait(&error) {
                return Err(error.into());
            }
        }
    }

    fn finish_refill(&self, transfer: &ExtentTransfer<'_>, pipeline: &mut Pipeline<'_>) {
        let Some(ExtentCopy { view, refilling }) = pipeline.copying.pop_front() else { return };
        let size = refilling.as_ref().map_or(Bytes::ZERO, RefillCopy::size);
        let arrived = refilling.map_or(Ok(()), |refilling| transfer.finish_refill(refilling));
        if let Err(error) = arrived.and_then(|()| self.poison(view.extent, transfer)) {
            match error {
                RegionError::Damaged { .. } | RegionError::Unread { .. } => {
                    pipeline.unusable.get_or_insert(error);
                }
                error => pipeline.fail(error),
            }
            if let Err(error) = self.pool.records().interrupted(view.extent) {
                pipeline.fail(error.into());
            }
            return;
        }
        let retain = self.is_sealed() && self.options.host_copy == CopyPolicy::Retain;
        match self.pool.records().finish_refill(view.extent, retain) {
            Ok(()) => {
                let report = &mut pipeline.report;
                report.mapped = report.mapped.saturating_add(view.size);
                report.copied = report.copied.saturating_add(size);
                transfer.sweep();
            }
            Err(error) => pipeline.fail(error.into()),
        }
    }
}

impl Region {
    /// Fills bytes without a copy with [`POISON`] if the caller asks for it, so that a program that relies on them fails visibly.
    fn poison(&self, extent: ExtentId, transfer: &ExtentTransfer<'_>) -> Result<()> {
        if !transfer.fills_undefined() || self.options.policy == Policy::Discard {
            return Ok(());
        }
        let undefined = self.pool.records().undefined(extent);
        Ok(undefined.iter().try_for_each(|range| self.pool.core().fill(*range, POISON))?)
    }
}

impl Pipeline<'_> {
    fn fail(&mut self, error: RegionError) {
        self.failed.get_or_insert(error);
    }
}

/// Progress of a region's refills, for threads that wait for them.
#[derive(Debug, Default)]
pub(super) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of refills that have begun, including those waiting for their turn.
    refills: usize,
    /// Mark behind all copies of the current refill, once they are enqueued.
    mark: Option<Arc<dyn Mark>>,
}

/// Guard of a refill in progress; dropping it ends the refill.
#[derive(Debug)]
pub(super) struct BegunRefill<'a>(&'a Progress);

impl Progress {
    pub(super) fn begin(&self) -> BegunRefill<'_> {
        self.state.lock().refills += 1;
        BegunRefill(self)
    }

    /// Returns whether a refill has begun.
    pub(super) fn is_refilling(&self) -> bool {
        self.state.lock().refills > 0
    }
}

impl BegunRefill<'_> {
    /// Publishes a mark behind all copies of the refill.
    pub(super) fn enqueued(&self, mark: Arc<dyn Mark>) {
        self.0.state.lock().mark = Some(mark);
        self.0.changed.notify_all();
    }
}

impl Drop for BegunRefill<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.refills -= 1;
        state.mark = None;
        self.0.changed.notify_all();
    }
}

impl Region {
    /// Returns whether a refill is in progress or waits for its turn.
    pub fn is_refilling(&self) -> bool {
        self.progress.is_refilling()
    }

    /// Orders later work of a stream after the region's refill: waits on the host while the refill makes and maps memory, and on the stream
    /// for its copies. Returns at once if nothing is evicted.
    ///
    /// If a copy fails on the GPU later, the refill reports it.
    ///
    /// # Errors
    /// [`RegionError::Evicted`] if part of the region is evicted and no refill of all of it is in progress; [`RegionError::Unordered`].
    pub fn wait(&self, device: DeviceId, stream: Stream) -> Result<()> {
        let mut state = self.progress.state.lock();
        loop {
            let mark = state.mark.clone();
            let in_order = mark.is_some();
            let is_apart = |residency: Residency| match residency {
                Residency::Resident { .. } => false,
                // A decommitted extent has no bytes to wait for.
                _ if residency.authority() == Place::Nowhere => false,
                Residency::Refilling { .. } => !in_order,
                _ => true,
            };
            if !self.pool.records().has_any(self.domain, is_apart) {
                drop(state);
                let followed = mark.map_or(Ok(()), |mark| mark.follow(device, stream));
                return followed.map_err(|source| RegionError::Unordered {
                    device,
                    tag: self.options.tag.clone(),
                    source,
                });
            }
            if state.refills == usize::from(in_order) {
                return Err(RegionError::Evicted {
                    device: self.pool.device(),
                    tag: self.options.tag.clone(),
                });
            }
            self.progress.changed.wait(&mut state);
        }
    }
}
