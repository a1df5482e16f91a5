//! Read holds: events on live blocks, up to which something beside the blocks' streams still reads them.
//!
//! ```text
//! stream:  … write ─┬────────────── free ─ malloc, where the limit asks ─ wait for the event ─ write …
//! queue:            └─ copy out ─ event ─────────────────────────────────────┘
//! ```
//!
//! While a block lives a hold changes nothing. Once the block is freed its bytes are its stream's alone, behind a wait on the GPU for the
//! event, and only where there is no other memory; they are as any other once the event has passed. Nobody else has them, and nothing is
//! unmapped, before the completion point that comes after the free: the event was recorded before it, in the same context.
//!
//! Events of one stream pass in the order in which they were recorded. So of many of them few are asked for: the oldest, then one further
//! and further ahead, then halves of what is left between.
//!
//! Invariants: a read hold that the allocator has pending has its event here; both change under the allocator's lock, an event's passing
//! too.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use glake_device::owned::{OwnedEvent, Span};
use glake_device::{Address, DriverError, StreamId};
use glake_stitch::{HoldId, HomeRange, StreamKey};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::core::Core;
use super::retry::retry;
use super::{PoolError, Result};

/// One life of a block: from when it is handed out until it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId {
    /// Where the block begins.
    pub address: Address,
    /// No other block of the pool ever has the same.
    pub generation: u64,
    /// The stream that it goes back to.
    pub stream: StreamKey,
}

/// So many holds at least are not asked for while nothing is freed.
const LEAST: usize = 32;

/// A hold and the event with which it passes.
pub(super) type HoldEvent = (HoldId, Arc<OwnedEvent>);

/// Holds of one stream, the oldest first: the event of each covers what those before it are for.
type Line = VecDeque<HoldEvent>;

/// The events of holds.
#[derive(Debug, Default)]
pub(super) struct HoldEvents {
    /// By the stream that their events were recorded on.
    lines: Mutex<FxHashMap<StreamId, Line>>,
    /// How many had not passed when they were asked for last.
    left: AtomicUsize,
}

impl HoldEvents {
    /// The event of a hold; `None`: it has passed.
    pub(super) fn event(&self, hold: HoldId) -> Option<Arc<OwnedEvent>> {
        let lines = self.lines.lock();
        lines.values().find_map(|line| Some(line[place_of(line, hold)?].1.clone()))
    }

    /// Returns whether there are twice as many now as when they were asked for last.
    pub(super) fn add(&self, hold: HoldId, event: &Arc<OwnedEvent>, on: StreamId) -> bool {
        let mut lines = self.lines.lock();
        let line = lines.entry(on).or_default();
        line.insert(line.partition_point(|(other, _)| *other < hold), (hold, event.clone()));
        count(&lines) > self.left.load(Relaxed).max(LEAST) * 2
    }

    fn streams(&self) -> Vec<StreamId> {
        self.lines.lock().keys().copied().collect()
    }

    /// The hold of a stream with so many before it.
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

    /// Those of a stream up to one of them, which are no more here.
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
    /// Tells the allocator which read holds have passed.
    pub(super) fn poll_holds(&self) -> std::result::Result<(), DriverError> {
        self.poll_events(self.holds()).map(|_| ()).map_err(|(_, error)| error)
    }

    /// Tells the allocator which holds have passed; returns them.
    ///
    /// # Errors
    /// What the driver answers when it is asked for the event of one.
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
    /// The last hold of a stream whose event has passed. Others may end holds meanwhile: what is found then is one further behind.
    fn last_passed(&self, on: StreamId) -> std::result::Result<Option<HoldId>, (HoldId, DriverError)> {
        let mut last = None;
        // How many are known to have passed; where one has not; how much further the next one is.
        let (mut passed, mut not, mut ahead) = (0, usize::MAX, 1);
        while passed < not {
            let next = if not == usize::MAX { passed + ahead - 1 } else { usize::midpoint(passed, not) };
            match self.after(on, next) {
                Some((hold, event)) if retry(|| event.is_passed()).map_err(|error| (hold, error))? => {
                    (last, passed, ahead) = (last.max(Some(hold)), next + 1, ahead * 2);
                }
                Some(_) => not = next,
                // There are not so many.
                None if ahead == 1 => break,
                None => ahead = 1.max(ahead / 2),
            }
        }
        Ok(last)
    }
}

/// The read holds of a pool.
#[derive(Clone, Copy, Debug)]
pub struct ReadHolds<'a> {
    pub(super) core: &'a Core,
}

impl ReadHolds<'_> {
    /// The life of the live block that a range of bytes lies in.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] where no live block has the first byte; [`PoolError::OutsideBlock`] where the range leaves it.
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

    /// Holds a block until an event that was recorded on a stream in the context of its device, for work that was enqueued before on
    /// whatever stream. Holds of one stream are asked for in the order in which their events were recorded.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]: that block lives no more.
    pub fn hold(&self, block: BlockId, event: &Arc<OwnedEvent>, on: StreamId) -> Result<HoldId> {
        let offset = self.core.offset(block.address)?;
        let mut allocator = self.core.lock();
        let hold = allocator.hold(offset, block.generation);
        let (device, address) = (self.core.device(), block.address);
        let hold = hold.ok_or(PoolError::UnknownAddress { device, address })?;
        let are_many = self.core.holds().add(hold, event, on);
        drop(allocator);
        // Completion points ask for them where something is freed. Where nothing is, somebody has to.
        if are_many && let Err(error) = self.core.poll_holds() {
            // Whoever waits for one of them hears of it.
            tracing::debug!(target: "glake::completion", %error, "read holds were not asked for");
        }
        Ok(hold)
    }

    /// Ends a hold before its event has passed: the block's own stream waits for the event now. A hold that has ended is no error.
    pub fn end(&self, hold: HoldId) {
        let mut allocator = self.core.lock();
        allocator.pass_hold(hold);
        self.core.holds().remove(hold);
    }

    /// Bytes of live blocks, for asynchronous work.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] outside of the pool; what the driver's table of mappings answers where not all of it is mapped.
    pub fn span(&self, address: Address, size: Bytes) -> Result<Span> {
        self.core.span(HomeRange { offset: self.core.offset(address)?, size })
    }

    /// Freed bytes that holds keep from everybody but their stream.
    pub fn freed_bytes(&self) -> Bytes {
        self.core.lock().held_bytes()
    }

    /// How many holds are not known to have passed.
    pub fn count(&self) -> usize {
        self.core.holds().count()
    }
}
