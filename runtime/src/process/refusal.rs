//! Error texts for the users of a library.

use std::time::Instant;

use glake_device::{DriverError, Stream};
use glake_stitch::StitchError;
use glake_tiers::PoolError;
use glake_units::Bytes;

use super::device::{DeviceMemory, Started};
use super::device_registry::DeviceRegistry;
use super::observers::Action;
use super::{Grantor, PoolId, ProcessError, Shortage};
use crate::backend::BackendError;

impl DeviceRegistry {
    /// Expands an out-of-memory error with the state of the memory; returns other errors unchanged.
    #[cold]
    pub(super) fn refused(
        &self,
        memory: &DeviceMemory,
        wanted: Bytes,
        raw: Stream,
        error: PoolError,
    ) -> ProcessError {
        match memory.started().filter(|_| error.is_out_of_memory()) {
            Some(started) => self.short(memory, started, wanted, raw, &error),
            None => error.into(),
        }
    }

    /// Returns the grantor of a lease, with its last denial if that `answers` the request, by its time: others may have released memory
    /// since an earlier one.
    pub(super) fn grantor(&self, memory: &DeviceMemory, answers: impl Fn(Instant) -> bool) -> Grantor {
        if !self.observers.agent().is_on() {
            return Grantor::Program;
        }
        let denial = memory.denial.lock();
        Grantor::Agent(denial.as_ref().filter(|(at, _)| answers(*at)).map(|(_, denial)| denial.clone()))
    }

    fn short(
        &self,
        memory: &DeviceMemory,
        started: &Started,
        wanted: Bytes,
        raw: Stream,
        error: &PoolError,
    ) -> ProcessError {
        let stats = started.pool.stats();
        let total = memory.info.memory;
        let reserved = Bytes::new(stats.all.reserved_bytes.current);
        let free = self.completion_events.driver().memory_info(memory.id()).map(|info| info.free);
        let limit = match error {
            PoolError::Refused { source: StitchError::OutOfMemory { limit, .. }, .. }
            | PoolError::CaptureOpen { refusal: StitchError::OutOfMemory { limit, .. }, .. } => *limit,
            _ => total,
        };
        let lease = if let PoolError::Leased { short, .. } = error { Some(*short) } else { None };
        let shortage = Shortage {
            device: memory.id(),
            wanted,
            total,
            free: free.unwrap_or_else(|_| total.saturating_sub(reserved)),
            limit,
            reserved,
            allocated: Bytes::new(stats.all.allocated_bytes.current),
            stitchable: stats.waste.soft,
            pending: stats.waste.stream,
            in_capture: matches!(
                error,
                PoolError::CaptureOpen { .. } | PoolError::Leased { in_capture: true, .. }
            ),
            lease,
            grantor: self.grantor(memory, |_| lease.is_some_and(|short| short.denied)),
        };
        if self.observers.history.is_on() {
            let place = (shortage.free.get(), wanted.get());
            self.observers.history.note(Action::OutOfMemory, memory.id(), place, raw, PoolId::default());
        }
        self.observers.tell_shortage(&shortage);
        ProcessError::OutOfMemory(Box::new(shortage))
    }
}

/// Converts the error of a missing backend for users of a library.
pub(super) fn not_there(error: BackendError) -> ProcessError {
    match error {
        BackendError::Driver(DriverError::NoDriver { library, found }) => {
            ProcessError::NoDriver { library, found }
        }
        BackendError::Driver(error) => ProcessError::Driver(error),
        BackendError::Topology(error) => ProcessError::Topology(error),
    }
}
