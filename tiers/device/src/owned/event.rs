//! An event that is destroyed when dropped.

use std::sync::Arc;

use crate::{DeviceId, Driver, Event, EventKind, Result, Stream};

/// Owner of an event of a device's context.
#[derive(Debug)]
pub struct OwnedEvent {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    event: Event,
}

impl OwnedEvent {
    /// Creates an event in a device's context.
    pub fn new(driver: &Arc<dyn Driver>, device: DeviceId, kind: EventKind) -> Result<Self> {
        let event = driver.event_create(device, kind)?;
        Ok(OwnedEvent { driver: driver.clone(), device, event })
    }

    /// Returns the raw event, for waits of streams. It is valid while this owner lives.
    pub fn id(&self) -> Event {
        self.event
    }

    /// Returns the device whose context the event belongs to.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Records the event on a stream.
    pub fn record(&self, stream: Stream) -> Result<()> {
        self.driver.event_record(self.device, self.event, stream)
    }

    /// Records the event for its whole context.
    pub fn record_context(&self) -> Result<()> {
        self.driver.event_record_context(self.device, self.event)
    }

    /// Returns whether the event has completed.
    pub fn is_passed(&self) -> Result<bool> {
        self.driver.event_query(self.device, self.event)
    }

    /// Blocks the calling thread until the event completes, asleep if it is [`EventKind::Sleeping`].
    pub fn synchronize(&self) -> Result<()> {
        self.driver.event_synchronize(self.device, self.event)
    }

    /// Returns the microseconds since another event; both must be timed and completed.
    pub fn since(&self, from: &OwnedEvent) -> Result<f64> {
        self.driver.event_elapsed(self.device, from.event, self.event)
    }
}

impl Drop for OwnedEvent {
    fn drop(&mut self) {
        // SAFETY: the event is alive and this owner's; waits already enqueued on it stay valid (CUDA keeps a
        // destroyed event until it has completed). If this fails, the event stays with its context.
        let _ = unsafe { self.driver.event_destroy(self.device, self.event) };
    }
}
