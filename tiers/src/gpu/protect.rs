//! Write protection of sealed memory.
//!
//! Invariant: the current access rights are queried from the reservation, so that an interrupted change is resumed where it stopped.

use glake_device::owned::{DeviceSet, Mapping};
use glake_device::{Access, Protection as Rights};
use glake_stitch::{DomainId, ExtentState};
use glake_units::Bytes;

use super::Result;
use super::core::Core;
use super::drain::Drain;
use super::growth::{Growing, Growth};
use super::reach::Reach;
use super::retry::retry;

/// Operations that revoke and restore write access.
#[derive(Debug)]
pub(crate) struct Protection<'a> {
    pub(super) core: &'a Core,
    pub(super) growth: &'a Growth,
    pub(super) reach: &'a Reach,
    pub(super) drain: Drain<'a>,
}

impl Protection<'_> {
    /// Revokes write access of all devices to a domain's resident memory, at all its addresses; waits for their work.
    ///
    /// # Errors
    /// The driver's error; part of the memory may be protected.
    pub(crate) fn protect(&self, domain: DomainId) -> Result<()> {
        let is_open = |writers: DeviceSet| !writers.is_empty();
        if self.runs_of(&self.growth.lock()?, domain, is_open)?.is_empty() {
            return Ok(());
        }
        // The work waited for may need memory that another thread has to allocate first.
        self.drain.wait()?;
        let growing = self.growth.lock()?;
        for (run, writers) in self.runs_of(&growing, domain, is_open)? {
            let access: Vec<Access> =
                writers.iter().map(|device| Access { device, protection: Rights::Read }).collect();
            retry(|| self.core.reservation().protect(run.offset, run.size, &access))
                .map_err(|error| self.core.failed(error))?;
        }
        Ok(())
    }

    /// Restores write access to a domain's memory.
    ///
    /// # Errors
    /// The driver's error; part of the access may be restored.
    pub(crate) fn open(&self, domain: DomainId) -> Result<()> {
        let growing = self.growth.lock()?;
        for (run, _) in
            self.runs_of(&growing, domain, |writers| !self.reach.may_all_write(domain, writers))?
        {
            let given = growing.give_access(domain, run.offset, run.size);
            given.map_err(|error| self.core.failed(error))?;
        }
        Ok(())
    }

    /// Returns the mappings of a domain's resident extents whose writers satisfy `so`; adjacent mappings with the same writers are joined.
    fn runs_of(
        &self,
        growing: &Growing<'_>,
        domain: DomainId,
        so: impl Fn(DeviceSet) -> bool,
    ) -> Result<Vec<(Mapping, DeviceSet)>> {
        let views = self.core.lock().extents().of(domain);
        let here = views.iter().filter(|view| view.state == ExtentState::Resident);
        let mappings = here.flat_map(|view| growing.mappings_of(view.extent));
        let mut found: Vec<(Mapping, DeviceSet)> =
            mappings.map(|mapping| (mapping, self.core.reservation().writers(mapping))).collect();
        found.retain(|(_, writers)| so(*writers));
        found.sort_unstable_by_key(|(mapping, _)| mapping.offset);
        Ok(joined(&found))
    }
}

/// Joins adjacent mappings with the same writers, in offset order.
fn joined(found: &[(Mapping, DeviceSet)]) -> Vec<(Mapping, DeviceSet)> {
    let end = |mapping: &Mapping| mapping.offset.saturating_add(mapping.size);
    let runs = found.chunk_by(|(one, by), (next, also)| end(one) == next.offset && by == also);
    let joined = runs.filter_map(|run| {
        let (first, writers) = *run.first()?;
        let size: Bytes = run.iter().map(|(mapping, _)| mapping.size).sum();
        Some((Mapping { offset: first.offset, size }, writers))
    });
    joined.collect()
}

#[cfg(test)]
mod tests {
    use glake_device::DeviceId;

    use super::*;

    #[test]
    fn what_touches_and_has_the_same_writers_is_one() {
        let [one, two] = [0, 1].map(|device| DeviceSet::of(DeviceId(device)));
        let at = |offset, size, by| (Mapping { offset: Bytes::mib(offset), size: Bytes::mib(size) }, by);
        let found = [at(0, 2, one), at(2, 4, one), at(6, 2, two), at(10, 2, two), at(12, 2, two)];
        assert_eq!(joined(&found), [at(0, 6, one), at(6, 2, two), at(10, 4, two)]);
        assert!(joined(&[]).is_empty());
    }
}
