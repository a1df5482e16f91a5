//! Execution of a plan's steps on the driver, with rollback.

use glake_device::owned::{Mapping, Sequence};
use glake_device::{DriverError, Refusal};
use glake_stitch::{Allocator, ExtentId, Plan, Step};

use super::clock::CompletionClock;
use super::core::Core;
use super::growth::Growing;
use super::lease::Counted;
use super::records::ExtentRecords;
use super::retry::retry;
use super::{PoolError, Result};

/// Execution of one plan.
#[derive(Debug)]
pub(super) struct Execution<'a, 'g> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) records: &'a ExtentRecords,
    pub(super) growing: &'a mut Growing<'g>,
    /// Lease account of the plan's new extents.
    pub(super) counted: &'a mut Counted,
}

impl Execution<'_, '_> {
    /// Executes all steps of a plan, or none: on failure the driver's state is restored, or the pool is poisoned.
    pub(super) fn run(&mut self, plan: &Plan) -> Result<()> {
        for (done, step) in plan.steps.iter().enumerate() {
            if let Err(error) = self.step(step) {
                return Err(self.undo(&plan.steps[..done], error));
            }
        }
        for step in &plan.steps {
            if let Step::Release { extent, .. } = step {
                self.growing.remove(*extent);
                self.records.forget(*extent);
            }
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> std::result::Result<(), DriverError> {
        match step {
            Step::Create { extent, size, domain } => {
                let made = self.growing.make(*size, *domain, self.counted)?;
                self.growing.insert(*extent, made);
                Ok(())
            }
            Step::Map { extent, offset, .. } => self.growing.map(*extent, *offset).map(|_| ()),
            Step::Access { offset, size, domain } => self.growing.give_access(*domain, *offset, *size),
            Step::Unmap { offset, size, extents } => {
                let proof = self.clock.proof();
                let mappings = self.growing.mappings_from(*offset, extents);
                let reservation = self.core.reservation();
                reservation.retire(&mappings, proof.sequence())?;
                self.growing.tell_unmapping(*offset, *size);
                let unmapped = match retry(|| reservation.unmap(&mappings, &proof)) {
                    Err(DriverError::Refused { reason: Refusal::InUse, .. }) => {
                        self.unmap_what_was_read(&mappings)
                    }
                    answer => answer,
                };
                if unmapped.is_err() {
                    reservation.revive(&mappings)?;
                    self.growing.tell_mapped(*offset, *size);
                }
                unmapped
            }
            // The last step, which cannot fail: see `run`.
            Step::Release { .. } => Ok(()),
        }
    }

    /// Unmaps memory that a resident read ([`super::reads`]) may have used since it became free; a later completion point covers the read.
    #[cold]
    fn unmap_what_was_read(&self, mappings: &[Mapping]) -> std::result::Result<(), DriverError> {
        let passed = self.clock.passed_now()?;
        self.core.reservation().retire(mappings, passed.sequence())?;
        retry(|| self.core.reservation().unmap(mappings, &passed))
    }

    /// Rolls back the executed steps, last first, and returns the error to report.
    fn undo(&mut self, done: &[Step], error: DriverError) -> PoolError {
        let undone = done.iter().rev().try_for_each(|step| self.undo_step(step));
        match undone {
            Ok(()) => self.core.failed(error),
            Err(second) => self.core.poisoned(format!("{error}; and undoing it: {second}")),
        }
    }

    fn undo_step(&mut self, step: &Step) -> std::result::Result<(), DriverError> {
        match step {
            Step::Create { extent, .. } => {
                self.growing.remove(*extent);
                Ok(())
            }
            // The address was never handed out, so that no work can use it and no wait is needed: a wait for the whole
            // context would break a capture.
            Step::Map { offset, size, .. } => {
                let mapping = [Mapping { offset: *offset, size: *size }];
                self.core.reservation().retire(&mapping, Sequence::START)?;
                retry(|| self.core.reservation().unmap(&mapping, &self.clock.completion_events().start()))
            }
            Step::Unmap { offset, size, extents } => {
                for mapping in self.growing.mappings_from(*offset, extents).iter().zip(extents) {
                    self.growing.map(*mapping.1, mapping.0.offset)?;
                }
                let domain_of = |extent: &ExtentId| self.core.lock().extents().size_and_domain(*extent).1;
                let domain = extents.first().map_or_else(Allocator::default_domain, domain_of);
                self.growing.give_access(domain, *offset, *size)
            }
            // Access ends with the mappings, which are undone next because they precede it.
            Step::Access { offset, size, .. } => {
                self.growing.tell_unmapping(*offset, *size);
                Ok(())
            }
            Step::Release { .. } => Ok(()),
        }
    }
}
