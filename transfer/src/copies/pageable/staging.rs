//! Staging buffers of pageable copies: pinned slots for each thread, and a stream on each GPU.
//!
//! Invariant: one copy holds all buffers or none. A copy that finds them in use takes another path without waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glake_device::owned::{CompletionEvents, OwnedEvent, OwnedStream, Pages, Registration, Span};
use glake_device::{DeviceId, Driver, EventKind};
use glake_units::Bytes;
use parking_lot::RwLock;
use smallvec::SmallVec;

use crate::Result;
use crate::links::lane::StagingStream;

/// Slots per thread: one is filled while the other is in flight. On an H200 a third one gains nothing.
pub(crate) const SLOTS: usize = 2;
/// Maximum slot size.
const MOST: Bytes = Bytes::mib(2);
/// Minimum slot size that justifies its overhead.
const LEAST: Bytes = Bytes::kib(256);

#[derive(Debug)]
pub(crate) struct StagingBuffers {
    slots: Vec<Slot>,
    /// Streams on GPUs whose memory is copied, in their primary contexts.
    targets: StagingStreams,
    /// Streams on relays, in GLake's own contexts.
    relays: StagingStreams,
    taken: AtomicBool,
}

/// Indexed by device.
type StagingStreams = Box<[RwLock<Option<Arc<StagingStream>>>]>;

/// Pinned memory that one thread fills or drains.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) index: usize,
    pub(crate) memory: Span,
    /// Whether work of unknown duration uses the slot. Such a slot is never used again.
    pub(crate) lost: AtomicBool,
}

/// Exclusive hold of the staging buffers.
#[derive(Debug)]
pub(crate) struct StagingHold(Arc<StagingBuffers>);

impl StagingBuffers {
    /// Allocates slots for `threads` threads in at most `memory` bytes of pinned memory, without streams; `None` if that is too little.
    pub(crate) fn new(
        completion_events: &Arc<CompletionEvents>,
        devices: usize,
        threads: usize,
        memory: Bytes,
    ) -> Result<Option<Arc<StagingBuffers>>> {
        let count = threads.saturating_mul(SLOTS);
        let Some(each) = u64::try_from(count).ok().and_then(|count| memory.get().checked_div(count)) else {
            return Ok(None);
        };
        let slot = Bytes::new(each & !4095).min(MOST);
        if slot < LEAST {
            return Ok(None);
        }
        let all = Bytes::new(slot.get().saturating_mul(count as u64));
        let memory = Arc::new(Registration::new(completion_events, Pages::new(all, 0)?)?);
        let part = |index: usize| Span::pinned(&memory, Bytes::new(slot.get() * index as u64), slot);
        let streams = || (0..devices).map(|_| RwLock::default()).collect();
        let slot = |index| part(index).map(|memory| Slot { index, memory, lost: AtomicBool::new(false) });
        Ok(Some(Arc::new(StagingBuffers {
            slots: (0..count).map_while(slot).collect(),
            targets: streams(),
            relays: streams(),
            taken: AtomicBool::new(false),
        })))
    }

    /// Creates the stream and events of a GPU whose memory is copied.
    pub(crate) fn open_target(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<()> {
        self.open(&self.targets, driver, device)
    }

    /// Creates those of a relay in GLake's own contexts.
    pub(crate) fn open_relay(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<()> {
        self.open(&self.relays, driver, device)
    }

    fn open(&self, streams: &StagingStreams, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<()> {
        let Some(place) = place(streams, device).filter(|place| place.read().is_none()) else {
            return Ok(());
        };
        let event = |_: &Slot| OwnedEvent::new(driver, device, EventKind::Plain);
        let done = self.slots.iter().map(event).collect::<glake_device::Result<_>>()?;
        let staging_stream = StagingStream { stream: OwnedStream::new(driver, device)?, done };
        *place.write() = Some(Arc::new(staging_stream));
        Ok(())
    }

    /// Returns whether copies of a GPU's memory can be staged.
    pub(crate) fn serves(&self, target: DeviceId) -> bool {
        self.staging_stream(target, target).is_some()
    }

    /// Returns the stream for copies of `target`'s memory over the link of `path`.
    pub(crate) fn staging_stream(&self, target: DeviceId, path: DeviceId) -> Option<Arc<StagingStream>> {
        let streams = if path == target { &self.targets } else { &self.relays };
        place(streams, path)?.read().clone()
    }

    /// Takes a relay's stream out of use for later chunks.
    pub(crate) fn close_relay(&self, device: DeviceId) -> Option<Arc<StagingStream>> {
        place(&self.relays, device)?.write().take()
    }

    /// Returns the usable slots of a thread; empty for threads beyond the number that has slots.
    pub(crate) fn slots_of(&self, thread: usize) -> SmallVec<[&Slot; SLOTS]> {
        let slots = self.slots.chunks(SLOTS).nth(thread).unwrap_or(&[]);
        slots.iter().filter(|slot| !slot.lost.load(Ordering::Relaxed)).collect()
    }

    /// Returns the pinned memory of the slots.
    pub(crate) fn pinned(&self) -> Bytes {
        self.slots.iter().map(|slot| slot.memory.size()).sum()
    }

    /// Returns the size of a slot.
    pub(crate) fn slot(&self) -> Bytes {
        self.slots.first().map_or(Bytes::ZERO, |slot| slot.memory.size())
    }

    /// Returns the number of threads with slots.
    pub(crate) fn threads(&self) -> usize {
        self.slots.len() / SLOTS
    }

    /// Takes the buffers, unless a copy holds them.
    pub(crate) fn take(self: &Arc<Self>) -> Option<StagingHold> {
        let was_free = self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        was_free.then(|| StagingHold(self.clone()))
    }
}

fn place(streams: &StagingStreams, device: DeviceId) -> Option<&RwLock<Option<Arc<StagingStream>>>> {
    streams.get(usize::try_from(device.0).ok()?)
}

impl StagingHold {
    pub(crate) fn staging(&self) -> &Arc<StagingBuffers> {
        &self.0
    }
}

impl Drop for StagingHold {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}
