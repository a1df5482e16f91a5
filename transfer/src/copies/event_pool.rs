//! Pooled events that mark the ends of copies for waiting callers, so that steady state creates none.

use std::sync::Arc;

use glake_device::owned::OwnedEvent;
use glake_device::{DeviceId, Driver, EventKind};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::Result;
use crate::UserStream;

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
