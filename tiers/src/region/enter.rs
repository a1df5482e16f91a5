//! A region's memory comes back to its GPU.

use std::collections::VecDeque;
use std::thread::Scope;

use glake_device::DriverError;
use glake_stitch::{ExtentView, StitchError};
use glake_units::Bytes;

use super::{AHEAD, AT_ONCE, CopyPolicy, Patience, Refilled, Region, RegionError, Result, choose};
use crate::store::{Crossing, Entering, Return};
use crate::{PoolError, Transit};

/// An extent whose bytes are on their way back.
#[derive(Debug)]
struct Copying<'s> {
    view: ExtentView,
    /// `None`: there is nothing to copy.
    entering: Option<Entering<'s>>,
}

/// Extents on their way in, in the order in which they began.
#[derive(Debug, Default)]
struct Pipeline<'s> {
    copying: VecDeque<Copying<'s>>,
    report: Refilled,
    /// The first failure: nothing new begins after it.
    failed: Option<RegionError>,
    /// The first extent whose copy could not be read, or is not what left: the others go on.
    unusable: Option<RegionError>,
}

impl Region {
    /// Makes at least `amount` of memory for what is away of the region, for all of it with [`Bytes::MAX`], at the addresses that it
    /// had, and copies the bytes back. They are there when it returns. Where there is no memory, what is free elsewhere goes back to the
    /// driver, and `patience` is asked whether more will.
    ///
    /// # Errors
    /// [`RegionError::Stopped`]: what came back by then is there, the rest is away or halfway; either direction goes on from
    /// there. [`RegionError::Damaged`], [`RegionError::Unread`]: all others came back, and this one is halfway.
    pub fn refill(&self, amount: Bytes, transit: Transit<'_>, patience: &dyn Patience) -> Result<Refilled> {
        let entering = self.progress.begin();
        let _turn = self.turn.lock();
        let standing = self.pool.forget_emptied(self.domain).and_then(|()| self.pool.standing(self.domain));
        let standing = match standing {
            // It was given up before, and with its last extent it is gone.
            Err(PoolError::Refused { source: StitchError::UnknownDomain { .. }, .. }) => {
                return Ok(Refilled::default());
            }
            standing => standing?,
        };
        let chosen = choose::to_enter(&standing, amount);
        let crossing = Crossing::new(&self.pool, &self.options.tag, transit, Bytes::ZERO);
        let pipeline = std::thread::scope(|scope| {
            let mut pipeline = Pipeline::default();
            for view in chosen {
                if pipeline.failed.is_some() {
                    break;
                }
                match self.begin_entering(scope, view, &crossing, patience, &mut pipeline) {
                    Ok(copying) => pipeline.copying.push_back(copying),
                    Err(error) => pipeline.fail(error),
                }
                let ahead = if crossing.is_enqueued() { AHEAD } else { AT_ONCE };
                while pipeline.copying.len() >= ahead {
                    self.finish_entering(&crossing, &mut pipeline);
                }
            }
            // Without a mark those who wait do so until the copies are done, and compared.
            if crossing.is_enqueued()
                && transit.checks.is_none()
                && let Ok(mark) = transit.mover.mark()
            {
                entering.enqueued(mark);
            }
            while !pipeline.copying.is_empty() {
                self.finish_entering(&crossing, &mut pipeline);
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
                report.away = self.sizes()?.1;
                Ok(report)
            }
        }
    }

    fn begin_entering<'s>(
        &self,
        scope: &'s Scope<'s, '_>,
        view: ExtentView,
        crossing: &'s Crossing<'_>,
        patience: &dyn Patience,
        pipeline: &mut Pipeline<'s>,
    ) -> Result<Copying<'s>> {
        let Some(back) = self.enter(view, crossing, patience, pipeline)? else {
            return Ok(Copying { view, entering: None });
        };
        match crossing.enter(scope, view, back) {
            Ok(entering) => Ok(Copying { view, entering: Some(entering) }),
            Err(error) => {
                self.pool.halfway(view.extent)?;
                Err(error)
            }
        }
    }

    /// Makes and maps an extent's memory. Where there is none, it tries again whenever one of the copies under way has ended. Then frees
    /// that are pending are waited for, and at last others who give memory back: these may need what copies hold of the host's.
    fn enter(
        &self,
        view: ExtentView,
        crossing: &Crossing<'_>,
        patience: &dyn Patience,
        pipeline: &mut Pipeline<'_>,
    ) -> Result<Option<Return>> {
        let mut settled = false;
        loop {
            let error = match self.pool.begin_enter(view.extent) {
                Err(error) if error.is_out_of_memory() => error,
                entered => return Ok(entered?),
            };
            if pipeline.failed.is_some() {
                return Err(error.into());
            }
            if !pipeline.copying.is_empty() {
                self.finish_entering(crossing, pipeline);
            } else if !settled {
                settled = true;
                match self.pool.settle() {
                    // Who captures frees nothing; who gives memory back may.
                    Ok(()) | Err(PoolError::Driver(DriverError::Capturing { .. })) => {}
                    Err(error) => return Err(error.into()),
                }
            } else if !patience.wait() {
                return Err(error.into());
            }
        }
    }

    fn finish_entering(&self, crossing: &Crossing<'_>, pipeline: &mut Pipeline<'_>) {
        let Some(Copying { view, entering }) = pipeline.copying.pop_front() else { return };
        let size = entering.as_ref().map_or(Bytes::ZERO, Entering::size);
        if let Err(error) = entering.map_or(Ok(()), |entering| crossing.entered(entering)) {
            match error {
                RegionError::Damaged { .. } | RegionError::Unread { .. } => {
                    pipeline.unusable.get_or_insert(error);
                }
                error => pipeline.fail(error),
            }
            if let Err(error) = self.pool.halfway(view.extent) {
                pipeline.fail(error.into());
            }
            return;
        }
        let retain = self.is_sealed() && self.options.host_copy == CopyPolicy::Retain;
        match self.pool.arrived(view.extent, retain) {
            Ok(()) => {
                let report = &mut pipeline.report;
                report.mapped = report.mapped.saturating_add(view.size);
                report.copied = report.copied.saturating_add(size);
                crossing.sweep();
            }
            Err(error) => pipeline.fail(error.into()),
        }
    }
}

impl Pipeline<'_> {
    fn fail(&mut self, error: RegionError) {
        self.failed.get_or_insert(error);
    }
}
