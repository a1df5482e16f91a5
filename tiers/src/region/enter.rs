//! A region's memory comes back to its GPU.

use std::collections::VecDeque;

use glake_device::DriverError;
use glake_device::owned::Span;
use glake_stitch::ExtentView;
use glake_units::Bytes;

use super::{AHEAD, CopyPolicy, Moving, Patience, Refilled, Region, RegionError, Result, choose};
use crate::{PoolError, Transit};

/// An extent whose bytes are on their way back.
#[derive(Debug)]
struct Copying {
    view: ExtentView,
    size: Bytes,
    moving: Option<Box<dyn Moving>>,
}

/// Extents on their way in, in the order in which they began.
#[derive(Debug, Default)]
struct Pipeline {
    copying: VecDeque<Copying>,
    report: Refilled,
    /// The first failure: nothing new begins after it.
    failed: Option<RegionError>,
}

impl Region {
    /// Makes at least `amount` of memory for what is away of the region, for all of it with [`Bytes::MAX`], at the addresses that it
    /// had, and copies the bytes back. They are there when it returns. Where there is no memory, what is free elsewhere goes back to the
    /// driver, and `patience` is asked whether more will.
    ///
    /// # Errors
    /// [`RegionError::Stopped`]: what came back by then is there, the rest is away or halfway; either direction goes on from
    /// there.
    pub fn refill(&self, amount: Bytes, transit: Transit<'_>, patience: &dyn Patience) -> Result<Refilled> {
        let entering = self.progress.begin();
        let _turn = self.turn.lock();
        self.pool.forget_emptied(self.domain)?;
        let chosen = choose::to_enter(&self.pool.standing(self.domain)?, amount);
        let mut pipeline = Pipeline::default();
        for view in chosen {
            if pipeline.failed.is_some() {
                break;
            }
            match self.begin_entering(view, transit, patience, &mut pipeline) {
                Ok(copying) => pipeline.copying.push_back(copying),
                Err(error) => pipeline.fail(error),
            }
            while pipeline.copying.len() >= AHEAD {
                self.finish_entering(&mut pipeline);
            }
        }
        // Without a mark those who wait do so until the copies are done.
        if let Ok(mark) = transit.mover.mark() {
            entering.enqueued(mark);
        }
        while !pipeline.copying.is_empty() {
            self.finish_entering(&mut pipeline);
        }
        if let Err(error) = self.protect() {
            pipeline.fail(error);
        }
        let Pipeline { mut report, failed, .. } = pipeline;
        match failed {
            Some(source) => Err(self.stopped(report.mapped, source)),
            None => {
                report.away = self.sizes()?.1;
                Ok(report)
            }
        }
    }

    fn begin_entering(
        &self,
        view: ExtentView,
        transit: Transit<'_>,
        patience: &dyn Patience,
        pipeline: &mut Pipeline,
    ) -> Result<Copying> {
        let pairs = self.enter(view, patience, pipeline)?;
        let size = pairs.iter().map(|(to, _)| to.size()).sum();
        if pairs.is_empty() {
            return Ok(Copying { view, size, moving: None });
        }
        match transit.mover.enqueue(&pairs) {
            Ok(moving) => Ok(Copying { view, size, moving: Some(moving) }),
            Err(source) => {
                self.pool.halfway(view.extent)?;
                Err(self.unmoved(size, source))
            }
        }
    }

    /// Makes and maps an extent's memory. Where there is none, frees that are pending are waited for first, then others who give
    /// memory back: these may need what the copies under way hold of the host's, so the copies end before.
    fn enter(
        &self,
        view: ExtentView,
        patience: &dyn Patience,
        pipeline: &mut Pipeline,
    ) -> Result<Vec<(Span, Span)>> {
        let mut settled = false;
        loop {
            let error = match self.pool.begin_enter(view.extent) {
                Err(error) if error.is_out_of_memory() => error,
                entered => return Ok(entered?),
            };
            while !pipeline.copying.is_empty() {
                self.finish_entering(pipeline);
            }
            if pipeline.failed.is_some() {
                return Err(error.into());
            }
            if !settled {
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

    fn finish_entering(&self, pipeline: &mut Pipeline) {
        let Some(Copying { view, size, moving }) = pipeline.copying.pop_front() else { return };
        if let Err(source) = moving.map_or(Ok(()), |moving| moving.wait()) {
            pipeline.fail(self.unmoved(size, source));
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
            }
            Err(error) => pipeline.fail(error.into()),
        }
    }
}

impl Pipeline {
    fn fail(&mut self, error: RegionError) {
        self.failed.get_or_insert(error);
    }
}
