//! What pageable copies go through: pinned slots for each thread, and a stream on each GPU.
//!
//! Invariant: one copy has the whole of it, or none of it: whoever finds it taken copies another way and waits for nobody.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glake_device::owned::{CompletionEvents, OwnedEvent, OwnedStream, Pages, Registration, Span};
use glake_device::{DeviceId, Driver, EventKind};
use glake_units::Bytes;
use parking_lot::RwLock;
use smallvec::SmallVec;

use crate::Result;

/// Slots a thread: one is filled while the other is under way. Three gain nothing on an H200.
pub(crate) const SLOTS: usize = 2;
/// The most that a slot holds.
const MOST: Bytes = Bytes::mib(2);
/// Slots of less are not worth their calls.
const LEAST: Bytes = Bytes::kib(256);

#[derive(Debug)]
pub(crate) struct StagingBuffers {
    slots: Vec<Slot>,
    /// Of GPUs whose memory is copied, in their primary contexts.
    targets: StagingStreams,
    /// Of relays, in contexts of our own.
    relays: StagingStreams,
    taken: AtomicBool,
}

/// By device.
type StagingStreams = Box<[RwLock<Option<Arc<StagingStream>>>]>;

/// Pinned memory that one thread fills or empties.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) index: usize,
    pub(crate) memory: Span,
    /// Whether work uses it of which nobody knows when it ends: it is never used again.
    pub(crate) lost: AtomicBool,
}

/// A GPU's stream between slots and GPU memory.
#[derive(Debug)]
pub(crate) struct StagingStream {
    pub(crate) stream: OwnedStream,
    /// By slot: recorded after its copy.
    pub(crate) done: Vec<OwnedEvent>,
}

/// Has the whole staging buffers.
#[derive(Debug)]
pub(crate) struct StagingHold(Arc<StagingBuffers>);

impl StagingBuffers {
    /// Slots for so many threads in at most so much pinned memory, without streams yet; `None` where that is too little.
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

    /// Makes the stream and events of a GPU whose memory is copied.
    pub(crate) fn open_target(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<()> {
        self.open(&self.targets, driver, device)
    }

    /// Makes those of a relay, by the driver of contexts of our own.
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

    /// Whether copies of a GPU's memory can go through here.
    pub(crate) fn serves(&self, target: DeviceId) -> bool {
        self.staging_stream(target, target).is_some()
    }

    /// What copies of `target`'s memory over the link of `path` go through.
    pub(crate) fn staging_stream(&self, target: DeviceId, path: DeviceId) -> Option<Arc<StagingStream>> {
        let streams = if path == target { &self.targets } else { &self.relays };
        place(streams, path)?.read().clone()
    }

    /// Takes a relay's stream from copies' next chunks.
    pub(crate) fn close_relay(&self, device: DeviceId) -> Option<Arc<StagingStream>> {
        place(&self.relays, device)?.write().take()
    }

    /// The slots of a thread that may be used; none for threads past those that it was made for.
    pub(crate) fn slots_of(&self, thread: usize) -> SmallVec<[&Slot; SLOTS]> {
        let slots = self.slots.chunks(SLOTS).nth(thread).unwrap_or(&[]);
        slots.iter().filter(|slot| !slot.lost.load(Ordering::Relaxed)).collect()
    }

    /// What its slots take of the host's memory.
    pub(crate) fn pinned(&self) -> Bytes {
        self.slots.iter().map(|slot| slot.memory.size()).sum()
    }

    /// What a slot holds.
    pub(crate) fn slot(&self) -> Bytes {
        self.slots.first().map_or(Bytes::ZERO, |slot| slot.memory.size())
    }

    /// How many threads have slots.
    pub(crate) fn threads(&self) -> usize {
        self.slots.len() / SLOTS
    }

    /// Takes all of it, if nobody has.
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
