//! Completion of enqueued copies: the handle for the caller, pooled events that mark the ends of copies, and the relays' parts of a split copy.

use std::sync::{Arc, Weak};

use glake_device::owned::{DeviceSet, OwnedEvent};
use glake_device::{DeviceId, Driver, EventKind, Stream};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::links::lane_set::LaneSet;
use crate::links::relays::Relays;
use crate::paths::Shares;
use crate::{Result, TransferError, UserStream};

/// Enqueued copy. Dropping the handle does not affect the copy.
#[derive(Debug)]
pub struct CopyHandle {
    end: End,
    /// Parts of a split copy.
    parts: Option<Parts>,
}

/// Means of detecting the end of the copy.
#[derive(Debug)]
enum End {
    PooledEvent(PooledEvent),
    Stream(Arc<dyn Driver>, UserStream),
}

impl CopyHandle {
    pub(crate) fn marked(mark: PooledEvent, parts: Option<Parts>) -> CopyHandle {
        CopyHandle { end: End::PooledEvent(mark), parts }
    }

    pub(crate) fn unmarked(driver: &Arc<dyn Driver>, on: UserStream, parts: Option<Parts>) -> CopyHandle {
        CopyHandle { end: End::Stream(driver.clone(), on), parts }
    }

    /// Blocks until the bytes have arrived.
    ///
    /// # Errors
    /// [`crate::TransferError::Lost`] where a relay was lost before its part was seen to arrive; what the driver answers.
    pub fn wait(self) -> Result<()> {
        match &self.end {
            End::PooledEvent(mark) => mark.synchronize()?,
            // The handle means the waiting thread's own stream here, and the copying thread's may be another.
            End::Stream(driver, on) if on.raw == Stream::PER_THREAD => {
                driver.context_synchronize(on.device)?
            }
            End::Stream(driver, on) => driver.stream_synchronize(on.device, on.raw)?,
        }
        self.check()
    }

    /// Returns whether relays took part in the copy.
    pub fn is_split(&self) -> bool {
        self.parts.is_some()
    }

    /// Checks whether the relays' parts have arrived. Valid once the copy's stream has passed the copy, which a caller with its own event
    /// behind it knows without one of the engine's.
    ///
    /// # Errors
    /// As [`CopyHandle::wait`].
    pub fn check(&self) -> Result<()> {
        self.parts.as_ref().map_or(Ok(()), Parts::check)
    }

    /// Returns whether the bytes have arrived; always `false` for a copy enqueued without [`crate::CopyOptions::waited`], or whose end the
    /// driver could not mark.
    ///
    /// # Errors
    /// As [`CopyHandle::wait`].
    pub fn is_done(&self) -> Result<bool> {
        match &self.end {
            End::PooledEvent(mark) if mark.is_passed()? => {
                self.check()?;
                Ok(true)
            }
            End::PooledEvent(_) | End::Stream(..) => Ok(false),
        }
    }
}

/// Idle events, indexed by the device of the streams they mark.
#[derive(Debug)]
pub(crate) struct EventPool {
    driver: Arc<dyn Driver>,
    idle: Mutex<FxHashMap<DeviceId, Vec<OwnedEvent>>>,
}

/// Marked point of a stream. Dropping it returns the event to the pool.
#[derive(Debug)]
pub(crate) struct PooledEvent {
    marks: Arc<EventPool>,
    event: Option<OwnedEvent>,
}

impl EventPool {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Arc<EventPool> {
        Arc::new(EventPool { driver, idle: Mutex::default() })
    }

    /// Records an event at the current end of a stream.
    pub(crate) fn mark(self: &Arc<Self>, on: UserStream) -> Result<PooledEvent> {
        let idle = self.idle.lock().get_mut(&on.device).and_then(Vec::pop);
        let event = match idle {
            Some(event) => event,
            None => OwnedEvent::new(&self.driver, on.device, EventKind::Plain)?,
        };
        // On failure too the event is kept.
        let recorded = event.record(on.raw);
        let mark = PooledEvent { marks: self.clone(), event: Some(event) };
        recorded?;
        Ok(mark)
    }
}

impl PooledEvent {
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.event.as_ref().map_or(Ok(()), |event| Ok(event.synchronize()?))
    }

    pub(crate) fn is_passed(&self) -> Result<bool> {
        self.event.as_ref().map_or(Ok(true), |event| Ok(event.is_passed()?))
    }
}

impl Drop for PooledEvent {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            self.marks.idle.lock().entry(event.device()).or_default().push(event);
        }
    }
}

/// Parts of a split copy.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) relays: Arc<Relays>,
    /// Lane set of the copy; dropped once its relays are idle and all of its results were reported.
    pub(crate) lane_set: Weak<LaneSet>,
    /// GPUs whose lanes carry parts.
    pub(crate) used: DeviceSet,
    /// Serial number of the copy within its lane set.
    pub(crate) serial: u64,
    /// Share of each path, for a copy between two spans.
    pub(crate) shares: Option<Shares>,
}

impl Parts {
    /// Returns which of `relays` are lost. Valid once the copy's stream has passed the join: earlier work of a relay without an error has
    /// arrived.
    ///
    /// # Errors
    /// The driver's, if a relay's answer is inconclusive.
    pub(crate) fn lost(&self, relays: DeviceSet) -> Result<DeviceSet> {
        let Some(lane_set) = self.lane_set.upgrade() else {
            return Ok(self.relays.fenced().intersection(relays));
        };
        let mut lost = DeviceSet::EMPTY;
        for relay in relays.iter() {
            let Some(lane) = lane_set.lane(relay) else { continue };
            // Of a later copy's event too: what is asked is the context's error.
            let asked = lane.done.is_passed().or_else(|error| match error.is_sticky() {
                true => Err(error),
                false => lane.done.is_passed(),
            });
            match asked {
                Ok(_) => {}
                Err(error) if error.is_sticky() => lost = lost.union(DeviceSet::of(relay)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(lost)
    }

    /// Returns an error if a relay of the copy is lost.
    ///
    /// # Errors
    /// [`TransferError::Lost`]; see [`Parts::lost`].
    pub(crate) fn check(&self) -> Result<()> {
        let lost = self.lost(self.used)?;
        lost.iter().for_each(|relay| self.relays.fence(relay));
        let first: Option<DeviceId> = lost.iter().next();
        first.map_or(Ok(()), |relay| Err(TransferError::Lost { relay, copies: 1 }))
    }
}
