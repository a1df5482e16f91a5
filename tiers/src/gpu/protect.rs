//! Memory that work may read and not write.
//!
//! Invariant: what a device may do with a mapping is asked of the reservation, so that what was interrupted is taken up there.

use glake_device::owned::{DeviceSet, Mapping};
use glake_device::{Access, Protection};
use glake_stitch::{DomainId, ExtentId, Residency};
use glake_units::Bytes;

use super::execute::retry;
use super::{GpuPool, PlanState, Result};

impl GpuPool {
    /// Takes from every device the right to write to what is here of a domain, at all its addresses; waits for their work.
    ///
    /// # Errors
    /// What the driver answers; some may be protected then.
    pub(crate) fn protect_domain(&self, domain: DomainId) -> Result<()> {
        let is_open = |writers: DeviceSet| !writers.is_empty();
        if self.runs_of(&*self.growth()?, domain, is_open)?.is_empty() {
            return Ok(());
        }
        // What is waited for may need memory of another thread first.
        self.drain()?;
        let held = self.growth()?;
        for (run, writers) in self.runs_of(&held, domain, is_open)? {
            let access: Vec<Access> =
                writers.iter().map(|device| Access { device, protection: Protection::Read }).collect();
            retry(|| self.reservation.protect(run.offset, run.size, &access))
                .map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    /// Gives it back.
    ///
    /// # Errors
    /// What the driver answers; some may be given back then.
    pub(crate) fn open_domain(&self, domain: DomainId) -> Result<()> {
        let held = self.growth()?;
        for (run, _) in self.runs_of(&held, domain, |writers| !self.may_all_write(writers))? {
            let given = self.give_access(&held, domain, run.offset, run.size);
            given.map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    /// Opens an extent at home before it is copied: a copy goes over devices that may load and store.
    pub(super) fn open_home(&self, held: &PlanState, extent: ExtentId) -> Result<()> {
        let Some(home) = self.mappings_of(held, extent).first().copied() else { return Ok(()) };
        if self.may_all_write(self.reservation.writers(home)) {
            return Ok(());
        }
        let domain = self.core.lock().extents().size_and_domain(extent).1;
        self.give_access(held, domain, home.offset, home.size).map_err(|error| self.failed(error))
    }

    fn may_all_write(&self, writers: DeviceSet) -> bool {
        self.peers().union(DeviceSet::of(self.device)).is_subset(writers)
    }

    /// The mappings of a domain's extents that are resident and of whose writers this is so, joined where they touch and have the same.
    fn runs_of(
        &self,
        held: &PlanState,
        domain: DomainId,
        so: impl Fn(DeviceSet) -> bool,
    ) -> Result<Vec<(Mapping, DeviceSet)>> {
        let views = self.core.lock().extents().of(domain).map_err(|source| self.refused(source))?;
        let here = views.iter().filter(|view| view.residency == Residency::Resident);
        let mappings = here.flat_map(|view| self.mappings_of(held, view.extent));
        let mut found: Vec<(Mapping, DeviceSet)> =
            mappings.map(|mapping| (mapping, self.reservation.writers(mapping))).collect();
        found.retain(|(_, writers)| so(*writers));
        found.sort_unstable_by_key(|(mapping, _)| mapping.offset);
        let end = |mapping: &Mapping| mapping.offset.saturating_add(mapping.size);
        let runs = found.chunk_by(|(one, by), (next, also)| end(one) == next.offset && by == also);
        let joined = runs.filter_map(|run| {
            let (first, writers) = *run.first()?;
            let size: Bytes = run.iter().map(|(mapping, _)| mapping.size).sum();
            Some((Mapping { offset: first.offset, size }, writers))
        });
        Ok(joined.collect())
    }
}
