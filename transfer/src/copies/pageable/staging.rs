//! Staging buffers of pageable copies: pinned slots for each thread, and a stream on each GPU.
//!
//! Invariant: one copy holds all buffers or none. A copy that finds them in use takes another path without waiting.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use glake_device::owned::{CompletionEvents, OwnedEvent, OwnedStream, Pages, Registration, Span};
use glake_device::{DeviceId, Driver, EventKind};
use glake_units::Bytes;
use parking_lot::RwLock;
use smallvec::SmallVec;

use crate::Result;
use crate::links::Contexts;
use crate::links::lane::StagingStream;

/// Slots per thread: one is filled while the other is in flight. On an H200 a third one gains nothing.
pub(crate) const SLOTS: usize = 2;
/// Maximum slot size.
const MOST: Bytes = Bytes::mib(2);
/// Minimum slot size that justifies its overhead.
const LEAST: Bytes = Bytes::kib(256);

/// Staging resources of pageable copies, created when a GPU first needs them.
#[derive(Debug)]
pub(crate) struct Staging {
    contexts: Arc<Contexts>,
    pub(crate) threads: usize,
    memory: Bytes,
    pub(crate) made: OnceLock<Arc<StagingBuffers>>,
}

/// Slots of all threads, and the streams that copy between them and GPU memory.
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

impl Staging {
    /// Creates the staging for `threads` threads in at most `memory` bytes of pinned memory.
    pub(crate) fn new(contexts: &Arc<Contexts>, threads: usize, memory: Bytes) -> Staging {
        Staging { contexts: contexts.clone(), threads, memory, made: OnceLock::new() }
    }

    /// Returns whether the options allow any staging.
    pub(crate) fn is_wanted(&self) -> bool {
        self.threads > 0
    }

    /// Returns the pinned host memory of the slots.
    pub(crate) fn pinned(&self) -> Bytes {
        self.made.get().map_or(Bytes::ZERO, |staging| staging.pinned())
    }

    /// Creates the slots, and a stream on a GPU whose memory is copied.
    pub(crate) fn open_target(&self, device: DeviceId) -> Result<()> {
        self.make()?.map_or(Ok(()), |staging| staging.open_target(self.contexts.driver(), device))
    }

    /// Creates a stream on a relay.
    pub(crate) fn open_relay(&self, device: DeviceId) -> Result<()> {
        self.make()?.map_or(Ok(()), |staging| staging.open_relay(self.contexts.own_driver(), device))
    }

    /// Takes a relay's stream out of use. Copies in progress keep it until they end.
    pub(crate) fn close_relay(&self, device: DeviceId) -> Option<Arc<StagingStream>> {
        self.made.get()?.close_relay(device)
    }

    /// Returns the slots, and creates them on the first call.
    fn make(&self) -> Result<Option<&Arc<StagingBuffers>>> {
        if !self.is_wanted() {
            return Ok(None);
        }
        let (contexts, threads) = (&self.contexts, self.threads);
        if self.made.get().is_none()
            && let Some(staging) =
                StagingBuffers::new(contexts.program(), contexts.devices(), threads, self.memory)?
        {
            // Only the engine's thread makes them.
            let _ = self.made.set(staging);
        }
        Ok(self.made.get())
    }
}

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
