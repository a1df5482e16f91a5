//! A plan's steps on the driver, and their undoing.

use glake_device::DriverError;
use glake_device::owned::{Extent, Mapping, Passed, Sequence};
use glake_stitch::{Allocator, DomainId, ExtentId, Plan, Step};
use glake_units::Bytes;

use super::{GpuPool, PlanState, PoolError, Result};

/// How often a busy device is asked again before the plan is given up: about 100 ms.
const ATTEMPTS: u32 = 1000;
const PAUSE: std::time::Duration = std::time::Duration::from_micros(100);

impl GpuPool {
    /// Does all of a plan's steps, or none: then the driver is as it was, or the pool is poisoned.
    pub(super) fn execute(&self, held: &mut PlanState, plan: &Plan) -> Result<()> {
        for (done, step) in plan.steps.iter().enumerate() {
            if let Err(error) = self.step(held, step) {
                return Err(self.undo(held, &plan.steps[..done], error));
            }
        }
        for step in &plan.steps {
            if let Step::Release { extent, .. } = step {
                held.extents.remove(extent);
                let gone = self.kept.lock().remove(extent);
                drop(gone);
            }
        }
        Ok(())
    }

    fn step(&self, held: &mut PlanState, step: &Step) -> std::result::Result<(), DriverError> {
        match step {
            Step::Create { extent, size, domain } => {
                let properties = held.properties.get(domain).copied().unwrap_or(self.properties);
                let made = retry(|| Extent::new(&self.driver, *size, properties))?;
                held.extents.insert(*extent, made);
                Ok(())
            }
            Step::Map { extent, offset, .. } => self.map(held, *extent, *offset).map(|_| ()),
            Step::Access { offset, size, domain } => self.give_access(held, *domain, *offset, *size),
            Step::Unmap { offset, size, extents } => {
                let proof = self.proof();
                let mappings = mappings(held, *offset, extents);
                self.reservation.retire(&mappings, proof.sequence())?;
                self.tell_unmapping(*offset, *size);
                let unmapped = retry(|| self.reservation.unmap(&mappings, &proof));
                if unmapped.is_err() {
                    self.reservation.revive(&mappings)?;
                    self.tell_mapped(*offset, *size);
                }
                unmapped
            }
            // The last thing to be done, when nothing can fail any more: see `execute`.
            Step::Release { .. } => Ok(()),
        }
    }

    pub(super) fn map(
        &self,
        held: &PlanState,
        extent: ExtentId,
        offset: Bytes,
    ) -> std::result::Result<Option<Mapping>, DriverError> {
        held.extents.get(&extent).map(|extent| retry(|| self.reservation.map(offset, extent))).transpose()
    }

    /// To a range of one domain.
    pub(super) fn give_access(
        &self,
        held: &PlanState,
        domain: DomainId,
        offset: Bytes,
        size: Bytes,
    ) -> std::result::Result<(), DriverError> {
        let access = self.reach.access(held.peer_blocks.of(domain));
        retry(|| self.reservation.set_access(offset, size, &access))?;
        self.tell_mapped(offset, size);
        Ok(())
    }

    pub(super) fn tell_mapped(&self, offset: Bytes, size: Bytes) {
        if let Some(observer) = &self.observer {
            observer.mapped(self.device, self.address(offset), size);
        }
    }

    pub(super) fn tell_unmapping(&self, offset: Bytes, size: Bytes) {
        if let Some(observer) = &self.observer {
            observer.unmapping(self.device, self.address(offset), size);
        }
    }

    /// Undoes the steps that were done, last first; returns the error to report.
    fn undo(&self, held: &mut PlanState, done: &[Step], error: DriverError) -> PoolError {
        let undone = done.iter().rev().try_for_each(|step| self.undo_step(held, step));
        match undone {
            Ok(()) => self.failed(error),
            Err(second) => self.poisoned(format!("{error}; and undoing it: {second}")),
        }
    }

    fn undo_step(&self, held: &mut PlanState, step: &Step) -> std::result::Result<(), DriverError> {
        match step {
            Step::Create { extent, .. } => {
                held.extents.remove(extent);
                Ok(())
            }
            // Nobody was told of the address, so no work can use it, and nothing is waited for: a wait for the whole
            // context would break a capture.
            Step::Map { offset, size, .. } => {
                let mapping = [Mapping { offset: *offset, size: *size }];
                self.reservation.retire(&mapping, Sequence::START)?;
                retry(|| self.reservation.unmap(&mapping, &self.epochs.start()))
            }
            Step::Unmap { offset, size, extents } => {
                for mapping in mappings(held, *offset, extents).iter().zip(extents) {
                    self.map(held, *mapping.1, mapping.0.offset)?;
                }
                let domain_of = |extent: &ExtentId| self.core.lock().extents().size_and_domain(*extent).1;
                let domain = extents.first().map_or_else(Allocator::default_domain, domain_of);
                self.give_access(held, domain, *offset, *size)
            }
            // Access goes with the mappings: it is set after them, so they are undone next.
            Step::Access { offset, size, .. } => {
                self.tell_unmapping(*offset, *size);
                Ok(())
            }
            Step::Release { .. } => Ok(()),
        }
    }

    /// The latest completion: what the core says has passed was enqueued before it was recorded. Before the first one
    /// the core gives back only what was never handed out.
    fn proof(&self) -> Passed {
        self.clock.lock().passed().unwrap_or_else(|| self.epochs.start())
    }
}

/// The mappings of extents that lie side by side from `offset` on.
fn mappings(held: &PlanState, offset: Bytes, extents: &[ExtentId]) -> Vec<Mapping> {
    let mut at = offset;
    let sizes = extents.iter().filter_map(|extent| held.extents.get(extent)).map(Extent::size);
    sizes
        .map(|size| {
            let mapping = Mapping { offset: at, size };
            at = at.saturating_add(size);
            mapping
        })
        .collect()
}

/// Asks again while the device is busy.
pub(super) fn retry<T>(
    mut call: impl FnMut() -> std::result::Result<T, DriverError>,
) -> std::result::Result<T, DriverError> {
    for _ in 1..ATTEMPTS {
        match call() {
            Err(DriverError::NotReady { .. }) => std::thread::sleep(PAUSE),
            answer => return answer,
        }
    }
    call()
}
