//! The last rungs before a refusal: stitch smaller pieces, give back what other owners do not use, wait.

use glake_units::Bytes;

use super::Allocator;
use super::miss::{Runs, Want};
use crate::error::StitchError;
use crate::ids::Epoch;
use crate::plan::Outcome;

impl Allocator {
    pub(super) fn shortage(&mut self, want: &Want, runs: &Runs, grow: bool) -> Result<Outcome, StitchError> {
        let mut want = *want;
        if self.settings.fragment_limit.is_none() {
            want.stitch_from = want.stitch_from.min(self.settings.extent_near_limit.get());
        }
        if self.may_stitch(&want) {
            if let Some(plan) = self.plan_stitch(&want, runs) {
                return Ok(Outcome::Work(plan));
            }
            if grow && let Some(plan) = self.plan_growth(&want, runs) {
                return Ok(Outcome::Work(plan));
            }
        }
        self.stats.counters.retries += 1;
        if let Some(plan) = self.plan_release(Bytes::MAX) {
            return Ok(Outcome::Work(plan));
        }
        if let Some(epoch) = self.oldest_pending() {
            self.stats.counters.host_waits += 1;
            return Ok(Outcome::Wait(epoch));
        }
        Err(self.refuse(Bytes::new(want.requested)))
    }

    /// Counts a request that is refused, and says how memory stands: also where what [`Outcome::Wait`] asks for cannot be waited for.
    pub fn refuse(&mut self, wanted: Bytes) -> StitchError {
        self.stats.counters.ooms += 1;
        StitchError::OutOfMemory {
            wanted,
            reserved: Bytes::new(self.reserved()),
            limit: self.settings.limit,
            free: Bytes::new(self.free_bytes()),
            stitchable: Bytes::new(self.stitchable_bytes()),
        }
    }

    /// The oldest epoch that holds back bytes somebody could use.
    fn oldest_pending(&self) -> Option<Epoch> {
        self.lists.iter().filter_map(|(_, list)| list.oldest_pending(&self.pieces, self.passed)).min()
    }
}
