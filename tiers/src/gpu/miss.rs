//! Requests that no free list can serve: planned, executed, or refused.

use glake_device::{CaptureState, DriverError};
use glake_stitch::{Grant, Outcome, Plan, PointNumber, Request, StitchError};

use super::clock::CompletionClock;
use super::core::Core;
use super::growth::{Growing, Growth};
use super::lease::LeaseShort;
use super::retry::retry;
use super::{PoolError, PoolStream, Result};

/// Allocation request that missed.
#[derive(Debug)]
pub(super) struct Miss<'a> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) growth: &'a Growth,
    pub(super) request: &'a Request,
    pub(super) stream: PoolStream,
}

impl Miss<'_> {
    /// Finds or makes memory for the request. Waits are made without the growth lock.
    pub(super) fn serve(&self) -> Result<Grant> {
        self.clock.know(self.stream.raw);
        self.clock.tick()?;
        self.clock.note_lag();
        let mut growing = self.growth.lock()?;
        growing.know(self.stream.key, self.stream.raw);
        let (mut grow, mut short) = (true, None);
        let mut asking = self.growth.lease().asking();
        let waits = self.can_wait();
        loop {
            let outcome = self.core.plan(self.request, grow, waits);
            match outcome.map_err(|source| self.out_of_memory(source, grow, short))? {
                Outcome::Ready(grant) => return Ok(grant),
                Outcome::Work(plan) => match growing.carry_out(&plan, self.request.stream) {
                    Ok(Some(grant)) => {
                        self.report_stitch(&plan);
                        self.collect(&mut growing);
                        return Ok(grant);
                    }
                    Ok(None) => grow = true,
                    Err(PoolError::Driver(error)) if error.is_out_of_memory() && grow => {
                        (grow, short) = (false, None);
                    }
                    // The grantor may need memory of this process first.
                    Err(PoolError::Leased { short: refused, .. }) if grow => {
                        drop(growing);
                        grow = asking.ask(refused);
                        short = asking.short();
                        growing = self.growth.lock()?;
                    }
                    Err(error) => return Err(error),
                },
                // The work waited for may need memory that another thread has to allocate first.
                Outcome::Wait(point) => {
                    drop(growing);
                    match self.wait(point) {
                        Err(PoolError::Driver(DriverError::Capturing { .. })) => {
                            if let Some(short) = short.filter(|_| !grow) {
                                let device = self.core.device();
                                return Err(PoolError::Leased { device, short, in_capture: true });
                            }
                            let refusal = self.core.lock().refuse(self.request.size);
                            return Err(PoolError::CaptureOpen { device: self.core.device(), refusal });
                        }
                        waited => waited?,
                    }
                    growing = self.growth.lock()?;
                }
            }
        }
    }

    /// Waits on the host for a completion point, or only for one use of the stream's own bytes if that suffices: the point may also cover
    /// unrelated work.
    fn wait(&self, point: PointNumber) -> Result<()> {
        match self.core.first_use(self.request, point) {
            Some(used) => self.core.wait_use(used).map_err(|error| self.core.failed(error)),
            None => self.clock.wait(point),
        }
    }

    /// Returns whether the stream may wait for bytes withheld by holds: not during its capture. Queries the driver only if there are holds.
    fn can_wait(&self) -> bool {
        let is_any_held = !self.core.lock().held_bytes().is_zero();
        let state = || self.core.driver().capture_state(self.core.device(), self.stream.raw);
        !is_any_held || matches!(retry(state), Ok(CaptureState::None))
    }

    /// Unmaps idle aliases above their limit. A failure does not affect the block that was just allocated; the aliases stay until the next
    /// attempt.
    fn collect(&self, growing: &mut Growing<'_>) {
        let plan = self.core.lock().plan_due_collection();
        let done = plan.map_or(Ok(None), |plan| growing.carry_out(&plan, self.request.stream));
        if let Err(error) = done {
            tracing::warn!(target: "glake::stitch", %error, "idle aliases could not be unmapped");
        }
    }

    fn report_stitch(&self, plan: &Plan) {
        if let Some(stitch) = &plan.stitch {
            tracing::info!(
                target: "glake::stitch",
                device = self.core.device().0,
                stream = self.request.stream.0,
                wanted = stitch.wanted.get(),
                ranges = stitch.ranges,
                extents = stitch.extents,
                grown = stitch.grown.get(),
                "stitched"
            );
        }
    }

    fn out_of_memory(&self, refusal: StitchError, grow: bool, short: Option<LeaseShort>) -> PoolError {
        let device = self.core.device();
        match (grow, short) {
            (false, Some(short)) => PoolError::Leased { device, short, in_capture: false },
            (false, None) => PoolError::DeviceFull { device, refusal },
            (true, _) => self.core.refused(refusal),
        }
    }
}
