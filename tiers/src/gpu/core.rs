//! Core of a pool: the pure allocator under its lock, the address reservation, the driver, and the poisoned state.
//!
//! Invariants: the allocator's lock is held for pure work only. It is the last lock taken, except for the locks of owed edges, block lives,
//! live ranges and holds, which change under it. A poisoned pool stays poisoned, with the first cause.

use std::sync::{Arc, OnceLock};

use glake_device::owned::{CompletionEvents, Reservation, Span};
use glake_device::{Address, DeviceId, Driver, DriverError};
use glake_stitch::{
    Allocator, ExtentId, Grant, HomeRange, Outcome, Plan, Request, Settings, StitchError, StreamKey,
    StreamUse,
};
use glake_units::Bytes;
use parking_lot::{Mutex, MutexGuard};

use super::holds::HoldEvents;
use super::live_ranges::{Kept, LiveRanges};
use super::lives::Lives;
use super::owed::OwedEdges;
use super::uses::UseEvents;
use super::{PoolError, Result};

/// Result of a free.
#[derive(Debug)]
pub(super) struct Freed {
    pub(super) size: Bytes,
    /// Evicted extents that lost their last live block.
    pub(super) emptied: Vec<ExtentId>,
    /// Uses by other streams whose tracking ends.
    pub(super) uses: Vec<StreamUse>,
}

/// State shared by all parts of one GPU's pool.
#[derive(Debug)]
pub(crate) struct Core {
    device: DeviceId,
    completion_events: Arc<CompletionEvents>,
    reservation: Arc<Reservation>,
    allocator: Mutex<Allocator>,
    owed: OwedEdges,
    lives: Lives,
    live_ranges: LiveRanges,
    holds: HoldEvents,
    uses: UseEvents,
    /// Held during each plan's driver calls, and during each read of a resident extent.
    layout: Mutex<()>,
    poison: OnceLock<String>,
}

impl Core {
    /// Creates an empty allocator and reserves addresses for its maximum size.
    pub(super) fn new(
        completion_events: &Arc<CompletionEvents>,
        device: DeviceId,
        settings: Settings,
    ) -> Result<Self> {
        let allocator = Allocator::new(settings).map_err(|source| PoolError::Refused { device, source })?;
        let reservation = Arc::new(Reservation::new(completion_events, device, allocator.address_space())?);
        Ok(Core {
            device,
            completion_events: completion_events.clone(),
            reservation,
            allocator: Mutex::new(allocator),
            owed: OwedEdges::default(),
            lives: Lives::default(),
            live_ranges: LiveRanges::default(),
            holds: HoldEvents::default(),
            uses: UseEvents::default(),
            layout: Mutex::new(()),
            poison: OnceLock::new(),
        })
    }

    /// Returns the device of the pool.
    pub(crate) fn device(&self) -> DeviceId {
        self.device
    }

    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        self.completion_events.driver()
    }

    /// Returns the source of completion events.
    pub(super) fn completion_events(&self) -> &CompletionEvents {
        &self.completion_events
    }

    pub(super) fn reservation(&self) -> &Arc<Reservation> {
        &self.reservation
    }

    /// Locks the allocator. Driver calls are forbidden while it is held.
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Allocator> {
        self.allocator.lock()
    }

    /// Locks the mappings: while it is held, no plan maps or unmaps memory. Taken after the growth lock if both are needed.
    pub(super) fn lock_layout(&self) -> MutexGuard<'_, ()> {
        self.layout.lock()
    }

    /// Takes a free piece that fits the request. The allocator's part is inlined and a hit's grant is returned in place: copying it would
    /// read whole words that were just written in parts, and stall on store forwarding.
    #[inline]
    pub(super) fn take(&self, request: &Request) -> Option<Grant> {
        let mut allocator = self.allocator.lock();
        let grant = allocator.take(request)?;
        Some(self.owed.owe(grant, request.stream))
    }

    /// Plans how to serve a request after a miss; `may_wait` tells whether its stream can wait for other work.
    pub(super) fn plan(
        &self,
        request: &Request,
        grow: bool,
        waits: bool,
    ) -> std::result::Result<Outcome, StitchError> {
        let mut allocator = self.allocator.lock();
        let planned = match waits {
            true => allocator.plan(request, grow),
            false => allocator.plan_in_capture(request, grow),
        };
        planned.map(|outcome| match outcome {
            Outcome::Ready(grant) => Outcome::Ready(self.owed.owe(grant, request.stream)),
            other => other,
        })
    }

    /// Commits an executed plan to the allocator.
    pub(super) fn commit(&self, plan: &Plan, stream: StreamKey) -> Option<Grant> {
        let mut allocator = self.allocator.lock();
        allocator.commit(plan.id).map(|grant| self.owed.owe(grant, stream))
    }

    /// Frees the block at an offset.
    #[inline]
    pub(super) fn free(&self, offset: Bytes) -> std::result::Result<Freed, StitchError> {
        let mut allocator = self.allocator.lock();
        let size = allocator.free(offset)?;
        self.end_block(offset);
        Ok(Freed { size, emptied: allocator.take_emptied(), uses: allocator.take_uses() })
    }

    /// Returns the ordering edges that grants require and that are not recorded yet.
    pub(super) fn owed(&self) -> &OwedEdges {
        &self.owed
    }

    /// Returns the lives of exported blocks, which change under the allocator's lock.
    pub(super) fn lives(&self) -> &Lives {
        &self.lives
    }

    /// Returns the live ranges declared by the program, which change under the allocator's lock.
    pub(super) fn live_ranges(&self) -> &LiveRanges {
        &self.live_ranges
    }

    /// Returns the events of read holds, which change under the allocator's lock.
    pub(super) fn holds(&self) -> &HoldEvents {
        &self.holds
    }

    /// Returns the events of recorded stream uses.
    pub(super) fn uses(&self) -> &UseEvents {
        &self.uses
    }

    /// Ends the life of a block. Called under the allocator's lock.
    #[inline]
    pub(super) fn end_block(&self, offset: Bytes) {
        self.lives.end(offset);
        self.live_ranges.end(offset);
    }

    /// Returns the bytes of an extent that must be preserved, based on its live blocks and their declared live ranges. `allocator` must be
    /// the locked allocator of this core.
    pub(super) fn kept(&self, allocator: &Allocator, extent: ExtentId) -> Kept {
        let all = allocator.extents().kept_ranges(extent);
        self.live_ranges.narrow(all, |block| allocator.blocks().home_of(block))
    }

    /// Converts an offset to an address.
    #[inline]
    pub(crate) fn address(&self, offset: Bytes) -> Address {
        Address(self.reservation.start().0 + offset.get())
    }

    /// Converts an address to an offset.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] outside the pool.
    #[inline]
    pub(super) fn offset(&self, address: Address) -> Result<Bytes> {
        let offset = address.0.checked_sub(self.reservation.start().0).map(Bytes::new);
        let inside = offset.filter(|&offset| offset < self.reservation.size());
        inside.ok_or(PoolError::UnknownAddress { device: self.device, address })
    }

    /// Returns a span of the pool's memory for asynchronous work.
    ///
    /// # Errors
    /// The error of the driver's mapping table if part of the range is not mapped.
    pub(crate) fn span(&self, range: HomeRange) -> Result<Span> {
        self.reservation.span(range.offset, range.size).map_err(|error| self.failed(error))
    }

    /// Fills mapped memory with one byte and waits for completion.
    ///
    /// # Errors
    /// The driver's error.
    pub(crate) fn fill(&self, range: HomeRange, byte: u8) -> Result<()> {
        self.reservation.fill(range.offset, range.size, byte).map_err(|error| self.failed(error))
    }

    /// Returns the error for an offset without memory.
    pub(crate) fn unknown_offset(&self, offset: Bytes) -> PoolError {
        PoolError::UnknownAddress { device: self.device, address: self.address(offset) }
    }

    /// Returns an error if the pool is poisoned.
    ///
    /// # Errors
    /// [`PoolError::Poisoned`] once the pool is out of use.
    #[inline]
    pub(super) fn usable(&self) -> Result<()> {
        match self.poison.get() {
            Some(cause) => Err(PoolError::Poisoned { device: self.device, cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// Converts a driver error to the error to report; a lost context poisons the pool.
    pub(super) fn failed(&self, error: DriverError) -> PoolError {
        if error.is_sticky() { self.poisoned(error.to_string()) } else { PoolError::Driver(error) }
    }

    /// Poisons the pool with the given cause and returns the error to report.
    pub(super) fn poisoned(&self, cause: String) -> PoolError {
        let cause = self.poison.get_or_init(|| cause).clone();
        PoolError::Poisoned { device: self.device, cause }
    }

    /// Converts an allocator error to the error to report.
    pub(super) fn refused(&self, source: StitchError) -> PoolError {
        PoolError::Refused { device: self.device, source }
    }
}

#[cfg(test)]
mod tests {
    use glake_device::{Refusal, Verb};

    use super::super::fixture::Parts;
    use super::*;

    #[test]
    fn offsets_are_those_of_addresses_inside() {
        let parts = Parts::new();
        let core = &parts.core;
        let (start, size) = (core.reservation().start(), core.reservation().size());
        assert_eq!(core.offset(core.address(Bytes::mib(3))).unwrap(), Bytes::mib(3));
        for outside in [Address(start.0 - 1), Address(start.0 + size.get())] {
            let error = core.offset(outside).unwrap_err();
            assert!(
                matches!(error, PoolError::UnknownAddress { address, .. } if address == outside),
                "{error}"
            );
        }
    }

    #[test]
    fn the_first_cause_stays() {
        let parts = Parts::new();
        let core = &parts.core;
        let address = core.address(Bytes::ZERO);
        let harmless = DriverError::Refused { verb: Verb::Map, address, reason: Refusal::InvalidValue };
        assert!(matches!(core.failed(harmless), PoolError::Driver(_)));
        core.usable().unwrap();
        core.poisoned("one".to_owned());
        core.poisoned("two".to_owned());
        let error = core.usable().unwrap_err();
        assert!(matches!(&error, PoolError::Poisoned { cause, .. } if cause == "one"), "{error}");
    }
}
