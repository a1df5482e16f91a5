//! Core of a pool: the pure allocator under its lock, the address reservation, the driver, the poisoned state, and records of blocks that
//! change under the allocator's lock.
//!
//! ```text
//! allocator's lock ─► OwedEdges    edges between streams that were granted and are not recorded on the device yet
//!                  ├► Lives        exported blocks, until their free
//!                  ├► LiveRanges   live bytes declared by the program
//!                  └► HoldEvents   events on live blocks, until which other components than the blocks' streams read them
//!
//! hold   stream:  … write ─┬────────────── free ─ malloc, under memory pressure ─ wait for the event ─ write …
//!        queue:            └─ copy out ─ event ─────────────────────────────────────┘
//! ```
//!
//! A hold has no effect while its block lives. After the free, only the block's own stream may reuse its bytes before the event, with a
//! wait on the GPU, and only if there is no other memory; after the event the bytes are ordinary free memory. Other streams get the bytes,
//! and memory is unmapped, only after the completion point that follows the free. That point also covers the event, which was recorded
//! before it in the same context. Events of one stream complete in the order in which they were recorded. Therefore few of many are
//! queried: the oldest, then further and further ahead, then a binary search.
//!
//! Invariants:
//! - The allocator's lock is held for pure work only. It is the last lock taken, except for those of the records above.
//! - A poisoned pool stays poisoned, with the first cause.
//! - The allocator counts an edge as recorded from the grant on. Until it is on the device (another thread is recording it, or recording
//!   failed), every other grant to the stream records one as well.
//! - A life is ended, by a free or a restore, before the bytes can be handed out again.
//! - Every read hold that is pending in the allocator has its event here, also when an event completes.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use glake_device::owned::{CompletionEvents, OwnedEvent, Reservation, Span};
use glake_device::{Address, DeviceId, Driver, DriverError, StreamId};
use glake_stitch::{
    Allocator, DomainId, ExtentId, Grant, HoldId, HomeRange, Outcome, Plan, Request, Settings, StitchError,
    StreamKey, StreamUse,
};
use glake_units::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;

use super::error::retry;
use super::live_ranges::{BytesToKeep, LiveRanges};
use super::plain::Plain;
use super::uses::UseEvents;
use super::{PoolError, Result};

/// Result of a free.
#[derive(Debug)]
pub(super) struct FreedBlock {
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
    plain: Plain,
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
        let unit = settings.granularity;
        let allocator = Allocator::new(settings).map_err(|source| PoolError::Refused { device, source })?;
        let reservation = Arc::new(Reservation::new(completion_events, device, allocator.address_space())?);
        Ok(Core {
            device,
            plain: Plain::new(unit, allocator.home_space()),
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
    pub(super) fn free(&self, offset: Bytes) -> std::result::Result<FreedBlock, StitchError> {
        let mut allocator = self.allocator.lock();
        let size = allocator.free(offset)?;
        self.end_block(offset);
        Ok(FreedBlock { size, emptied: allocator.take_emptied(), uses: allocator.take_uses() })
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
    pub(super) fn kept(&self, allocator: &Allocator, extent: ExtentId) -> BytesToKeep {
        let all = allocator.extents().kept_ranges(extent);
        self.live_ranges.narrow(all, |block| allocator.blocks().home_of(block))
    }

    /// Converts an offset to an address.
    #[inline]
    pub(crate) fn address(&self, offset: Bytes) -> Address {
        let shift = self.plain.shift(offset);
        Address((self.reservation.start().0 + offset.get()).wrapping_add(shift))
    }

    /// Returns the record of plain memory.
    pub(super) fn plain(&self) -> &Plain {
        &self.plain
    }

    /// Returns whether a domain has plain extents.
    pub(super) fn is_plain(&self, domain: DomainId) -> bool {
        self.lock().domain_options(domain).is_some_and(|options| options.plain)
    }

    /// Converts an address to an offset.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] outside the pool.
    #[inline]
    pub(super) fn offset(&self, address: Address) -> Result<Bytes> {
        let offset = address.0.checked_sub(self.reservation.start().0).map(Bytes::new);
        let inside = offset.filter(|&offset| offset < self.reservation.size());
        inside
            .or_else(|| self.plain.offset(address))
            .ok_or(PoolError::UnknownAddress { device: self.device, address })
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

/// Number of required edges not recorded yet, by stream. Increased under the allocator's lock.
#[derive(Debug, Default)]
pub(super) struct OwedEdges {
    owed: Mutex<FxHashMap<StreamKey, usize>>,
    /// Total over all streams; changes under the lock of `owed`.
    count: AtomicUsize,
}

impl OwedEdges {
    /// Notes that a grant needs an edge, by itself or because its stream has an unrecorded one. Must be called under the allocator's lock.
    #[inline]
    pub(super) fn owe(&self, mut grant: Grant, stream: StreamKey) -> Grant {
        if grant.edge || self.count.load(Ordering::Relaxed) > 0 {
            grant.edge = self.note(grant.edge, stream);
        }
        grant
    }

    /// Notes an edge if the grant needs one or the stream has an unrecorded one. Returns whether it does.
    #[cold]
    fn note(&self, needs: bool, stream: StreamKey) -> bool {
        let mut owed = self.owed.lock();
        let edge = needs || owed.contains_key(&stream);
        if edge {
            *owed.entry(stream).or_default() += 1;
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        edge
    }

    /// Notes that one edge of a stream has been recorded on the device.
    pub(super) fn made(&self, stream: StreamKey) {
        let mut owed = self.owed.lock();
        if let Some(left) = owed.get_mut(&stream) {
            *left -= 1;
            if *left == 0 {
                owed.remove(&stream);
            }
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Life of an exported block, ended by a free or a restore.
#[derive(Clone, Debug, Default)]
pub struct BlockLife {
    ended: Arc<AtomicBool>,
}

impl BlockLife {
    /// Returns whether the block is gone: its bytes may belong to another block.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// Lives of exported blocks by offset. Changes under the allocator's lock.
#[derive(Debug, Default)]
pub(super) struct Lives {
    /// Number of lives; 0 in most pools, and read at every free.
    count: AtomicUsize,
    by_block: Mutex<FxHashMap<Bytes, BlockLife>>,
}

impl Lives {
    /// Returns the life of the block at an offset, starting it if necessary.
    pub(super) fn of(&self, block: Bytes) -> BlockLife {
        let mut lives = self.by_block.lock();
        let life = lives.entry(block).or_default().clone();
        self.count.store(lives.len(), Ordering::Relaxed);
        life
    }

    /// Ends the life of the block at an offset.
    #[inline]
    pub(super) fn end(&self, block: Bytes) {
        if self.count.load(Ordering::Relaxed) > 0 {
            self.end_exported(block);
        }
    }

    #[cold]
    fn end_exported(&self, block: Bytes) {
        let mut lives = self.by_block.lock();
        if let Some(life) = lives.remove(&block) {
            life.ended.store(true, Ordering::Release);
        }
        self.count.store(lives.len(), Ordering::Relaxed);
    }
}

/// Identity of one allocation of a block, from malloc to free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId {
    /// Address of the first byte.
    pub address: Address,
    /// Generation number, unique among the blocks of the pool.
    pub generation: u64,
    /// Stream to which the block returns.
    pub stream: StreamKey,
}

/// Minimum number of pending holds before they are queried without a free.
const MIN_HOLDS_TO_QUERY: usize = 32;

/// Hold and the event that ends it.
pub(super) type HoldEvent = (HoldId, Arc<OwnedEvent>);

/// Holds of one stream, oldest first: each event also covers the holds before it.
type Line = VecDeque<HoldEvent>;

/// Events of pending holds.
#[derive(Debug, Default)]
pub(super) struct HoldEvents {
    /// Queues by the stream that recorded the events.
    lines: Mutex<FxHashMap<StreamId, Line>>,
    /// Number of pending holds after the last query.
    left: AtomicUsize,
}

impl HoldEvents {
    /// Returns the event of a hold, or `None` if the hold has ended.
    pub(super) fn event(&self, hold: HoldId) -> Option<Arc<OwnedEvent>> {
        let lines = self.lines.lock();
        lines.values().find_map(|line| Some(line[place_of(line, hold)?].1.clone()))
    }

    /// Adds a hold. Returns whether the number of holds has doubled since the last query.
    pub(super) fn add(&self, hold: HoldId, event: &Arc<OwnedEvent>, on: StreamId) -> bool {
        let mut lines = self.lines.lock();
        let line = lines.entry(on).or_default();
        line.insert(line.partition_point(|(other, _)| *other < hold), (hold, event.clone()));
        count(&lines) > self.left.load(Relaxed).max(MIN_HOLDS_TO_QUERY) * 2
    }

    fn streams(&self) -> Vec<StreamId> {
        self.lines.lock().keys().copied().collect()
    }

    /// Returns the hold of a stream at position `before` in its queue.
    fn after(&self, on: StreamId, before: usize) -> Option<HoldEvent> {
        self.lines.lock().get(&on)?.get(before).cloned()
    }

    pub(super) fn remove(&self, hold: HoldId) {
        let mut lines = self.lines.lock();
        lines.retain(|_, line| {
            if let Some(place) = place_of(line, hold) {
                line.remove(place);
            }
            !line.is_empty()
        });
    }

    /// Removes and returns a stream's holds up to and including `last`.
    fn take_until(&self, on: StreamId, last: HoldId) -> Vec<HoldEvent> {
        let mut lines = self.lines.lock();
        let Some(line) = lines.get_mut(&on) else { return Vec::new() };
        let passed = line.partition_point(|(hold, _)| *hold <= last);
        let passed = line.drain(..passed).collect();
        if line.is_empty() {
            lines.remove(&on);
        }
        passed
    }

    pub(super) fn count(&self) -> usize {
        count(&self.lines.lock())
    }
}

fn count(lines: &FxHashMap<StreamId, Line>) -> usize {
    lines.values().map(VecDeque::len).sum()
}

fn place_of(line: &Line, hold: HoldId) -> Option<usize> {
    line.binary_search_by_key(&hold, |(hold, _)| *hold).ok()
}

impl Core {
    /// Tells the allocator which read holds have ended.
    pub(super) fn poll_holds(&self) -> std::result::Result<(), DriverError> {
        self.poll_events(self.holds()).map(|_| ()).map_err(|(_, error)| error)
    }

    /// Tells the allocator which holds have ended, and returns them.
    ///
    /// # Errors
    /// The driver's error for an event query.
    pub(super) fn poll_events(
        &self,
        events: &HoldEvents,
    ) -> std::result::Result<Vec<HoldEvent>, (HoldId, DriverError)> {
        let mut all = Vec::new();
        for on in events.streams() {
            if let Some(last) = events.last_passed(on)? {
                let mut allocator = self.lock();
                let passed = events.take_until(on, last);
                passed.iter().for_each(|(hold, _)| allocator.pass_hold(*hold));
                all.extend(passed);
            }
        }
        events.left.store(events.count(), Relaxed);
        Ok(all)
    }
}

impl HoldEvents {
    /// Returns the last hold of a stream whose event has completed. If other threads end holds meanwhile, the result may be a later one.
    fn last_passed(&self, on: StreamId) -> std::result::Result<Option<HoldId>, (HoldId, DriverError)> {
        let mut last = None;
        // Number known to have completed; position of one that has not; distance to the next probe.
        let (mut passed, mut not, mut ahead) = (0, usize::MAX, 1);
        while passed < not {
            let next = if not == usize::MAX { passed + ahead - 1 } else { usize::midpoint(passed, not) };
            match self.after(on, next) {
                Some((hold, event)) if retry(|| event.is_passed()).map_err(|error| (hold, error))? => {
                    (last, passed, ahead) = (last.max(Some(hold)), next + 1, ahead * 2);
                }
                Some(_) => not = next,
                // The queue is shorter.
                None if ahead == 1 => break,
                None => ahead = 1.max(ahead / 2),
            }
        }
        Ok(last)
    }
}

/// Read hold operations of a pool.
#[derive(Clone, Copy, Debug)]
pub struct ReadHolds<'a> {
    pub(super) core: &'a Core,
}

impl ReadHolds<'_> {
    /// Returns the identity of the live block that holds a byte range.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] if no live block holds the first byte; [`PoolError::OutsideBlock`] if the range exceeds the block.
    pub fn identify(&self, address: Address, size: Bytes) -> Result<BlockId> {
        let offset = self.core.offset(address)?;
        let mut allocator = self.core.lock();
        let unknown = PoolError::UnknownAddress { device: self.core.device(), address };
        let Some(block) = allocator.blocks().find(offset) else { return Err(unknown) };
        let start = offset.saturating_sub(block.offset).get();
        let end = start.saturating_add(size.get());
        let begins = self.core.address(block.offset);
        if end > block.size.get() {
            let (device, size) = (self.core.device(), block.size.get());
            return Err(PoolError::OutsideBlock { device, address: begins, size, start, end });
        }
        let generation = allocator.generation(block.offset).ok_or(unknown)?;
        Ok(BlockId { address: begins, generation, stream: block.stream })
    }

    /// Holds a block until an event completes. The event must have been recorded on `on`, in the context of the block's device, after the
    /// work that reads the block. Holds of one stream must be added in the order in which their events were recorded.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] if the block has been freed.
    pub fn hold(&self, block: BlockId, event: &Arc<OwnedEvent>, on: StreamId) -> Result<HoldId> {
        let offset = self.core.offset(block.address)?;
        let mut allocator = self.core.lock();
        let hold = allocator.hold(offset, block.generation);
        let (device, address) = (self.core.device(), block.address);
        let hold = hold.ok_or(PoolError::UnknownAddress { device, address })?;
        let are_many = self.core.holds().add(hold, event, on);
        drop(allocator);
        // Completion points query holds when memory is freed; without frees, this call must.
        if are_many && let Err(error) = self.core.poll_holds() {
            // A thread that waits for one of them sees the error.
            tracing::debug!(target: "glake::completion", %error, "querying read holds failed");
        }
        Ok(hold)
    }

    /// Ends a hold before its event completes. The caller must have made the block's own stream wait for the event, since the stream may reuse
    /// the bytes at once. Ending a hold twice is no error.
    pub fn end(&self, hold: HoldId) {
        let mut allocator = self.core.lock();
        allocator.pass_hold(hold);
        self.core.holds().remove(hold);
    }

    /// Returns a span of live blocks for asynchronous work.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] outside the pool; [`PoolError::Plain`]; the error of the driver's mapping table if part of the range
    /// is not mapped.
    pub fn span(&self, address: Address, size: Bytes) -> Result<Span> {
        let offset = self.core.offset(address)?;
        if self.core.plain().holds(offset) {
            return Err(PoolError::Plain { device: self.core.device(), address });
        }
        self.core.span(HomeRange { offset, size })
    }

    /// Returns the freed bytes that holds reserve for the stream of their block.
    pub fn freed_bytes(&self) -> Bytes {
        self.core.lock().held_bytes()
    }

    /// Returns the number of holds not known to have ended.
    pub fn count(&self) -> usize {
        self.core.holds().count()
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

#[cfg(test)]
mod owed_tests {
    use super::*;

    #[test]
    fn a_stream_that_is_owed_an_edge_makes_one_for_every_grant() {
        let (owed, one, other) = (OwedEdges::default(), StreamKey(1), StreamKey(2));
        assert!(!owed.note(false, one));
        assert!(owed.note(true, one));
        assert!(owed.note(false, one) && !owed.note(false, other));
        owed.made(one);
        assert!(owed.note(false, one), "one of two is made");
        owed.made(one);
        owed.made(one);
        assert!(!owed.note(false, one));
        assert_eq!(owed.count.load(Ordering::Relaxed), 0);
        owed.made(other);
        assert_eq!(owed.count.load(Ordering::Relaxed), 0, "nothing was owed");
    }
}

#[cfg(test)]
mod lives_tests {
    use super::*;

    #[test]
    fn a_life_ends_with_its_block_and_no_other() {
        let lives = Lives::default();
        let [one, again, other] = [Bytes::ZERO, Bytes::ZERO, Bytes::mib(2)].map(|block| lives.of(block));
        lives.end(Bytes::mib(1));
        assert!(!one.has_ended() && !other.has_ended());
        lives.end(Bytes::ZERO);
        assert!(one.has_ended() && again.has_ended() && !other.has_ended());
        assert!(!lives.of(Bytes::ZERO).has_ended(), "the next block there has a life of its own");
    }
}
