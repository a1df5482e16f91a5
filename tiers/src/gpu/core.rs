//! What all parts of a pool stand on: the pure allocator under its lock, the addresses, the driver, and whether the pool is of use.
//!
//! Invariants: the allocator's lock is held for pure work only, and is the last to be taken but for those of owed edges, of
//! exported blocks' lives, of live ranges and of holds, which change under it. A pool that is out of use stays so, with the first cause.

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

/// A block that was taken back.
#[derive(Debug)]
pub(super) struct Freed {
    pub(super) size: Bytes,
    /// The evicted extents that lost their last live block.
    pub(super) emptied: Vec<ExtentId>,
    /// The uses of other streams that may go on.
    pub(super) uses: Vec<StreamUse>,
}

/// The core of one GPU's pool.
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
    /// Taken for each plan's driver calls, and for each read of an extent that stays.
    layout: Mutex<()>,
    poison: OnceLock<String>,
}

impl Core {
    /// An allocator that owns nothing yet, and addresses for all that it may own.
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

    /// Whose memory it is.
    pub(crate) fn device(&self) -> DeviceId {
        self.device
    }

    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        self.completion_events.driver()
    }

    /// The clock of the driver's completions.
    pub(super) fn completion_events(&self) -> &CompletionEvents {
        &self.completion_events
    }

    pub(super) fn reservation(&self) -> &Arc<Reservation> {
        &self.reservation
    }

    /// The allocator. No call of the driver while it is held.
    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, Allocator> {
        self.allocator.lock()
    }

    /// What is mapped where: while it is held no plan maps or unmaps anything. Taken under the growth lock, if under any.
    pub(super) fn lock_layout(&self) -> MutexGuard<'_, ()> {
        self.layout.lock()
    }

    /// A free piece that fits. The allocator's part is compiled into it, and a hit's grant is not passed on: a copy reads as a
    /// whole what was just written in parts, and has to wait for it.
    #[inline]
    pub(super) fn take(&self, request: &Request) -> Option<Grant> {
        let mut allocator = self.allocator.lock();
        let grant = allocator.take(request)?;
        Some(self.owed.owe(grant, request.stream))
    }

    /// What serves a request that is no hit, of a stream that can wait for something or not.
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

    /// A plan was executed.
    pub(super) fn commit(&self, plan: &Plan, stream: StreamKey) -> Option<Grant> {
        let mut allocator = self.allocator.lock();
        allocator.commit(plan.id).map(|grant| self.owed.owe(grant, stream))
    }

    /// Takes a block back.
    #[inline]
    pub(super) fn free(&self, offset: Bytes) -> std::result::Result<Freed, StitchError> {
        let mut allocator = self.allocator.lock();
        let size = allocator.free(offset)?;
        self.end_block(offset);
        Ok(Freed { size, emptied: allocator.take_emptied(), uses: allocator.take_uses() })
    }

    /// The edges that grants were promised and that are not made.
    pub(super) fn owed(&self) -> &OwedEdges {
        &self.owed
    }

    /// The lives of exported blocks: to be changed under the allocator's lock.
    pub(super) fn lives(&self) -> &Lives {
        &self.lives
    }

    /// What a program says of blocks' bytes: to be changed under the allocator's lock.
    pub(super) fn live_ranges(&self) -> &LiveRanges {
        &self.live_ranges
    }

    /// The events of holds: to be changed under the allocator's lock.
    pub(super) fn holds(&self) -> &HoldEvents {
        &self.holds
    }

    /// The events of uses.
    pub(super) fn uses(&self) -> &UseEvents {
        &self.uses
    }

    /// A block is live no more: under the allocator's lock.
    #[inline]
    pub(super) fn end_block(&self, offset: Bytes) {
        self.lives.end(offset);
        self.live_ranges.end(offset);
    }

    /// The bytes of an extent that have to be kept, by what is live in it and what programs say of that; `allocator` is this core's.
    pub(super) fn kept(&self, allocator: &Allocator, extent: ExtentId) -> Kept {
        let all = allocator.extents().kept_ranges(extent);
        self.live_ranges.narrow(all, |block| allocator.blocks().home_of(block))
    }

    /// The address of an offset.
    #[inline]
    pub(crate) fn address(&self, offset: Bytes) -> Address {
        Address(self.reservation.start().0 + offset.get())
    }

    /// The offset of an address.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] outside the pool.
    #[inline]
    pub(super) fn offset(&self, address: Address) -> Result<Bytes> {
        let offset = address.0.checked_sub(self.reservation.start().0).map(Bytes::new);
        let inside = offset.filter(|&offset| offset < self.reservation.size());
        inside.ok_or(PoolError::UnknownAddress { device: self.device, address })
    }

    /// Memory of the pool for asynchronous work.
    ///
    /// # Errors
    /// What the driver's table of mappings answers where not all of it is mapped.
    pub(crate) fn span(&self, range: HomeRange) -> Result<Span> {
        self.reservation.span(range.offset, range.size).map_err(|error| self.failed(error))
    }

    /// Fills mapped memory with one byte, and returns when that is done.
    ///
    /// # Errors
    /// What the driver answers.
    pub(crate) fn fill(&self, range: HomeRange, byte: u8) -> Result<()> {
        self.reservation.fill(range.offset, range.size, byte).map_err(|error| self.failed(error))
    }

    /// No memory is there.
    pub(crate) fn unknown_offset(&self, offset: Bytes) -> PoolError {
        PoolError::UnknownAddress { device: self.device, address: self.address(offset) }
    }

    /// # Errors
    /// [`PoolError::Poisoned`] once the pool is out of use.
    #[inline]
    pub(super) fn usable(&self) -> Result<()> {
        match self.poison.get() {
            Some(cause) => Err(PoolError::Poisoned { device: self.device, cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// The error to report for the driver's answer; a lost context ends the pool.
    pub(super) fn failed(&self, error: DriverError) -> PoolError {
        if error.is_sticky() { self.poisoned(error.to_string()) } else { PoolError::Driver(error) }
    }

    /// Puts the pool out of use.
    pub(super) fn poisoned(&self, cause: String) -> PoolError {
        let cause = self.poison.get_or_init(|| cause).clone();
        PoolError::Poisoned { device: self.device, cause }
    }

    /// The error to report for the allocator's answer.
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
