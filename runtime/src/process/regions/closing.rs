//! Closing of the gate for a move: uses have ended or are parked, their work has finished, and the votes agree.

use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_tiers::GpuPool;

use super::super::device::DeviceMemory;
use super::super::gate::{Closing, PARKED_IN_VAIN, Tags};
use super::super::{ProcessError, Result};
use super::RegionSet;
use super::ask::Shrink;
use super::shrink::Job;

/// Timeout of a shrink for the GPU work of parked uses: longer work waits for another rank, or for the host.
const PARK_DRAIN: Duration = Duration::from_secs(2);

/// Interval between polls of the parked uses' work.
pub(super) const POLL: Duration = Duration::from_micros(200);

impl RegionSet {
    /// Closes the gate for these jobs: all uses have ended within `timeout` or are parked, their work has finished, and no vote is against
    /// it.
    pub(super) fn close(
        &self,
        jobs: &[Job],
        ask: &Shrink,
        timeout: Duration,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Closing<'_>> {
        let tags = match ask.is_everything() {
            true => Tags::All,
            false => Tags::These(jobs.iter().map(|(tagged, ..)| tagged.tag().to_owned()).collect()),
        };
        let closing = self.gate.close_while(&tags, Some(timeout), goes_on)?;
        self.agreed(closing, tags, jobs.first().map(|(_, region, _)| region.pool()))
    }

    /// Closes the gate for everything, as a shrink does, but moves nothing; memory may be moved later. `goes_on` is called regularly and
    /// returns whether the closing is still wanted.
    pub(in super::super) fn park(
        &self,
        timeout: Duration,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Closing<'_>> {
        let closing = self.gate.close_while(&Tags::All, Some(timeout), goes_on)?;
        let started = self.registry.devices.iter().find_map(DeviceMemory::started);
        self.agreed(closing, Tags::All, started.map(|started| &started.pool))
    }

    /// Waits until the work of parked uses has ended and the votes agree.
    fn agreed<'g>(
        &self,
        closing: Closing<'g>,
        tags: Tags,
        pool: Option<&Arc<GpuPool>>,
    ) -> Result<Closing<'g>> {
        if closing.parked() > 0
            && let Some(pool) = pool
        {
            let begin = Instant::now();
            let mut pending = pool.pending_work()?;
            while !pending.has_ended()? {
                let waited = begin.elapsed();
                if waited >= PARK_DRAIN {
                    closing.hold_off(PARKED_IN_VAIN);
                    return Err(ProcessError::ParkedWork { tags, waited });
                }
                std::thread::sleep(POLL);
            }
        }
        // Asked even without parked uses: a use may have voted against it and run again since the gate closed.
        if !closing.is_agreed() {
            closing.hold_off(PARKED_IN_VAIN);
            return Err(ProcessError::NotAgreed { tags });
        }
        Ok(closing)
    }
}
