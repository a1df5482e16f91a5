//! A region's memory leaves its GPU.
//!
//! ```text
//! extents   [ copying | copying | copying ]  [ copied, waits for its epoch ]  released
//! ```

use std::collections::VecDeque;

use glake_stitch::{ExtentId, ExtentView, Presence};
use glake_units::Bytes;

use super::{
    AT_ONCE, HostCopy, Moving, Policy, Region, RegionError, Result, Shrunk, SkipReason, Skipped, choose,
};
use crate::pool::{Leave, Passage};
use crate::{Place, Store, Transit};

/// How often an extent's pending frees are waited for, where other threads go on freeing.
const DRAINS: usize = 8;

/// An extent whose bytes are on their way.
#[derive(Debug)]
struct Copying {
    view: ExtentView,
    copy: HostCopy,
    moving: Box<dyn Moving>,
}

/// Extents on their way out, in the order in which they began.
#[derive(Debug, Default)]
struct Pipeline {
    copying: VecDeque<Copying>,
    copied: VecDeque<(ExtentView, Passage)>,
    report: Shrunk,
    /// The first failure: nothing new begins after it.
    failed: Option<RegionError>,
}

impl Region {
    /// Gives at least `amount` of the region's memory back to the driver, all of it with [`Bytes::MAX`]: free extents, then
    /// others, their live bytes copied to `to` first (of a graph's pool, all); what has a whole copy elsewhere goes without one. Blocks
    /// keep their addresses. Waits for all work that was enqueued on every device that may touch the pool's memory.
    ///
    /// The caller promises that no work on what leaves is enqueued from now on until the region is refilled.
    ///
    /// # Errors
    /// While a capture is open that is refused, with nothing changed. [`RegionError::Stopped`]: what went by then is gone, the
    /// rest is where it was or halfway; either direction goes on from there.
    pub fn shrink(&self, amount: Bytes, to: &Store, transit: Transit<'_>) -> Result<Shrunk> {
        let _turn = self.turn.lock();
        self.pool.drain()?;
        let free = if self.pool.keeps_all(self.domain) {
            Bytes::ZERO
        } else {
            self.pool.trim_domain(self.domain)?
        };
        let mut pipeline =
            Pipeline { report: Shrunk { freed: free, ..Shrunk::default() }, ..Pipeline::default() };
        let pinned = self.pool.pinned(self.domain);
        let mut standing = self.pool.standing(self.domain)?;
        let stay = standing.extract_if(.., |(view, _)| pinned.contains(&view.extent));
        pipeline.report.skipped.extend(stay.map(|(view, _)| self.skip(&view, SkipReason::Pinned)));
        let chosen = choose::to_leave(&standing, amount.saturating_sub(free));
        for view in chosen {
            if pipeline.failed.is_some() {
                break;
            }
            self.begin(view, to, transit, &mut pipeline);
            while pipeline.copying.len() >= AT_ONCE {
                self.finish_copy(&mut pipeline);
            }
            while pipeline.copied.len() > AT_ONCE {
                self.release_next(&mut pipeline);
            }
        }
        while !pipeline.copying.is_empty() {
            self.finish_copy(&mut pipeline);
        }
        while !pipeline.copied.is_empty() {
            self.release_next(&mut pipeline);
        }
        // What a copy was opened for and stayed.
        if let Err(error) = self.protect() {
            pipeline.fail(error);
        }
        let Pipeline { mut report, failed, .. } = pipeline;
        match failed {
            Some(source) => Err(self.stopped(report.freed, source)),
            None => {
                report.left = self.sizes()?.0;
                Ok(report)
            }
        }
    }

    fn begin(&self, view: ExtentView, to: &Store, transit: Transit<'_>, pipeline: &mut Pipeline) {
        let begun = self.begin_leaving(view.extent, to.place());
        let skip = |reason| self.skip(&view, reason);
        match begun {
            Ok(Leave::Pinned) => pipeline.report.skipped.push(skip(SkipReason::Pinned)),
            Ok(Leave::Exported) => pipeline.report.skipped.push(skip(SkipReason::Exported)),
            Ok(Leave::Withheld) => pipeline.report.skipped.push(skip(SkipReason::Withheld)),
            Ok(Leave::Release) => self.release_later(view, pipeline),
            Ok(Leave::Copy(ranges)) => {
                let Store::Host(host) = to;
                let enqueued = HostCopy::take(host, ranges).map_err(RegionError::from).and_then(|copy| {
                    let pairs = copy.out(&self.pool)?;
                    let moving = transit.mover.enqueue(&pairs);
                    let moving = moving.map_err(|source| self.unmoved(copy.size(), source))?;
                    Ok(Copying { view, copy, moving })
                });
                match enqueued {
                    Ok(copying) => pipeline.copying.push_back(copying),
                    Err(error) => self.gave_up(view.extent, error, pipeline),
                }
            }
            Err(error) => pipeline.fail(error),
        }
    }

    fn skip(&self, view: &ExtentView, reason: SkipReason) -> Skipped {
        Skipped { address: self.pool.address_at(view.offset), size: view.size, reason }
    }

    /// Where blocks were freed meanwhile that other streams used, their work is waited for.
    fn begin_leaving(&self, extent: ExtentId, to: Place) -> Result<Leave> {
        for _ in 0..DRAINS {
            match self.pool.begin_leave(extent, to, self.options.policy == Policy::Discard)? {
                Leave::Withheld => self.pool.drain()?,
                begun => return Ok(begun),
            }
        }
        Ok(Leave::Withheld)
    }

    fn finish_copy(&self, pipeline: &mut Pipeline) {
        let Some(Copying { view, copy, moving }) = pipeline.copying.pop_front() else { return };
        let size = copy.size();
        match moving.wait() {
            Ok(()) => match self.pool.copied(view.extent, copy) {
                Ok(()) => {
                    pipeline.report.copied = pipeline.report.copied.saturating_add(size);
                    self.release_later(view, pipeline);
                }
                Err(error) => pipeline.fail(error.into()),
            },
            Err(source) => {
                let error = self.unmoved(size, source);
                self.gave_up(view.extent, error, pipeline);
            }
        }
    }

    /// The bytes were not copied: the extent stays.
    fn gave_up(&self, extent: ExtentId, error: RegionError, pipeline: &mut Pipeline) {
        pipeline.fail(error);
        if let Err(error) = self.pool.stays(extent) {
            pipeline.fail(error.into());
        }
    }

    fn release_later(&self, view: ExtentView, pipeline: &mut Pipeline) {
        match self.pool.begin_release(view.extent) {
            Ok(passage) => pipeline.copied.push_back((view, passage)),
            Err(error) => pipeline.fail(error.into()),
        }
    }

    fn release_next(&self, pipeline: &mut Pipeline) {
        let Some((view, passage)) = pipeline.copied.pop_front() else { return };
        match self.pool.release(view.extent, passage) {
            Ok(()) if view.presence == Presence::Away => {}
            Ok(()) => pipeline.report.freed = pipeline.report.freed.saturating_add(view.size),
            Err(error) => pipeline.fail(error.into()),
        }
    }
}

impl Pipeline {
    fn fail(&mut self, error: RegionError) {
        self.failed.get_or_insert(error);
    }
}
