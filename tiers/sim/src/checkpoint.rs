//! Checkpoint of processes that share simulated GPUs: their memory is not counted, and their calls block.
//!
//! The process keeps its bytes all the time, so they are unchanged after a restore. All GPUs of a folder are changed under the locks of all
//! their ledgers.
//!
//! Behaves like driver 580 on an H100: a restore without enough room leaves a process checkpointed, and each later restore fails with error
//! 304 regardless of room. A living process without a context is reported as running.

use std::path::Path;
use std::time::{Duration, Instant};

use glake_device::{DriverError, Result, Verb};
use glake_meter::checkpoint::{CheckpointError, ProcessCheckpoint, ProcessState, Step};

use super::calls::Condition;
use super::ledger::{Ledger, Locked, Place, is_alive};
use super::topology::SimTopology;

/// CUDA's number `CUDA_ERROR_OPERATING_SYSTEM`.
const RESTORE_FAILED_BEFORE: u32 = 304;

/// Checkpoint interface for processes that share the GPUs of a folder ([`crate::SimOptions::shared`]).
#[derive(Debug)]
pub struct SimCheckpoint {
    ledgers: Vec<Ledger>,
}

/// All ledgers, locked against changes.
struct Held<'a> {
    _locks: Vec<Locked>,
    /// Records of a process, each with its ledger.
    places: Vec<(&'a Ledger, Place)>,
}

impl SimCheckpoint {
    /// Opens the GPUs of a folder; creates it if it does not exist.
    ///
    /// # Errors
    /// [`DriverError::Os`] if the folder cannot be written or holds GPUs of other sizes.
    pub fn open(folder: &Path, topology: &SimTopology) -> Result<SimCheckpoint> {
        let ledgers = topology.gpus.iter().enumerate().map(|(index, gpu)| Ledger::open(folder, index, gpu));
        let ledgers = ledgers.collect::<std::io::Result<_>>();
        let failed = |source| DriverError::Os { verb: Verb::Devices, source };
        Ok(SimCheckpoint { ledgers: ledgers.map_err(failed)? })
    }

    fn hold(&self, pid: u32) -> std::result::Result<Held<'_>, CheckpointError> {
        let failed = |source| CheckpointError::Os { pid, source };
        let (mut locks, mut places) = (Vec::new(), Vec::new());
        for ledger in &self.ledgers {
            locks.push(ledger.lock().map_err(failed)?);
            places.extend(ledger.places(pid).map_err(failed)?.into_iter().map(|place| (ledger, place)));
        }
        if places.is_empty() {
            Err(CheckpointError::NoContext { pid })
        } else {
            Ok(Held { _locks: locks, places })
        }
    }

    /// Locks the ledgers and finds a process that must be in the given state.
    fn hold_in(
        &self,
        pid: u32,
        step: Step,
        state: ProcessState,
    ) -> std::result::Result<Held<'_>, CheckpointError> {
        let held = self.hold(pid)?;
        let found = held.state();
        match found == state {
            true => Ok(held),
            false => Err(CheckpointError::State {
                pid,
                step,
                found,
                todo: "ask for its state, and go on from there",
            }),
        }
    }
}

impl Held<'_> {
    fn state(&self) -> ProcessState {
        let any = |condition| self.places.iter().any(|(_, place)| place.condition == condition);
        match (any(Condition::Checkpointed) || self.is_lost(), any(Condition::Locked)) {
            (true, _) => ProcessState::Checkpointed,
            (false, true) => ProcessState::Locked,
            (false, false) => ProcessState::Running,
        }
    }

    fn is_lost(&self) -> bool {
        self.places.iter().any(|(_, place)| place.condition == Condition::Lost)
    }

    fn set(&self, condition: Condition) {
        self.places.iter().for_each(|(ledger, place)| ledger.set_condition(place.record, condition));
    }
}

impl ProcessCheckpoint for SimCheckpoint {
    fn state(&self, pid: u32) -> std::result::Result<ProcessState, CheckpointError> {
        match self.hold(pid) {
            Err(CheckpointError::NoContext { .. }) if is_alive(pid) => Ok(ProcessState::Running),
            held => Ok(held?.state()),
        }
    }

    fn lock(&self, pid: u32, within: Duration) -> std::result::Result<(), CheckpointError> {
        let until = Instant::now() + within;
        let places: Vec<(&Ledger, usize)> = {
            let held = self.hold_in(pid, Step::Lock, ProcessState::Running)?;
            held.set(Condition::Locked);
            held.places.iter().map(|(ledger, place)| (*ledger, place.record)).collect()
        };
        // Without the locks, because running calls may need the ledgers.
        if places.iter().all(|(ledger, record)| ledger.wait_for_calls(*record, until)) {
            return Ok(());
        }
        self.unlock(pid)?;
        Err(CheckpointError::Late { pid, within })
    }

    fn checkpoint(&self, pid: u32) -> std::result::Result<(), CheckpointError> {
        let held = self.hold_in(pid, Step::Checkpoint, ProcessState::Locked)?;
        for (ledger, place) in &held.places {
            ledger.save(*place).map_err(|source| CheckpointError::Os { pid, source })?;
        }
        held.set(Condition::Checkpointed);
        Ok(())
    }

    fn restore(&self, pid: u32) -> std::result::Result<(), CheckpointError> {
        let held = self.hold_in(pid, Step::Restore, ProcessState::Checkpointed)?;
        if held.is_lost() {
            return Err(CheckpointError::Failed { pid, step: Step::Restore, code: RESTORE_FAILED_BEFORE });
        }
        let failed = |source| CheckpointError::Os { pid, source };
        for ledger in &self.ledgers {
            let of = held.places.iter().filter(|(other, _)| std::ptr::eq(*other, ledger));
            let saved = of.map(|(_, place)| place.saved).sum();
            if !ledger.has_room(saved).map_err(failed)? {
                held.set(Condition::Lost);
                return Err(CheckpointError::NoRoom { pid });
            }
        }
        for (ledger, place) in &held.places {
            ledger.load(*place).map_err(failed)?;
        }
        held.set(Condition::Locked);
        Ok(())
    }

    fn unlock(&self, pid: u32) -> std::result::Result<(), CheckpointError> {
        self.hold_in(pid, Step::Unlock, ProcessState::Locked)?.set(Condition::Running);
        Ok(())
    }
}
