//! Read holds: events on live blocks, until which another component than the blocks' streams still reads them.
//!
//! ```text
//! stream:  … write ─┬────────────── free ─ malloc, under memory pressure ─ wait for the event ─ write …
//! queue:            └─ copy out ─ event ─────────────────────────────────────┘
//! ```
//!
//! A hold has no effect while its block lives. After the free, only the block's own stream may reuse its bytes before the event, with a
//! wait on the GPU, and only if there is no other memory; after the event the bytes are ordinary free memory. Other streams get the bytes,
//! and memory is unmapped, only after the completion point that follows the free. That point also covers the event, which was recorded
//! before it in the same context.
//!
//! Events of one stream complete in the order in which they were recorded. Therefore few of many are queried: the oldest, then further and
//! further ahead, then a binary search.
//!
//! Invariants: every read hold that is pending in the allocator has its event here. Both change under the allocator's lock, also when an
//! event completes.

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
const LEAST: usize = 32;

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
        count(&lines) > self.left.load(Relaxed).max(LEAST) * 2
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
            tracing::debug!(target: "glake::completion", %error, "read holds were not asked for");
        }
        Ok(hold)
    }

    /// Ends a hold before its event completes: the block's own stream waits for the event instead. Ending a hold twice is no error.
    pub fn end(&self, hold: HoldId) {
        let mut allocator = self.core.lock();
        allocator.pass_hold(hold);
        self.core.holds().remove(hold);
    }

    /// Returns a span of live blocks for asynchronous work.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] outside the pool; the error of the driver's mapping table if part of the range is not mapped.
    pub fn span(&self, address: Address, size: Bytes) -> Result<Span> {
        self.core.span(HomeRange { offset: self.core.offset(address)?, size })
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
