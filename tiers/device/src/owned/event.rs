//! An event that is destroyed when dropped.

use std::sync::Arc;

use crate::{DeviceId, Driver, Event, EventKind, Result, Stream};

/// An event of a device's context.
#[derive(Debug)]
pub struct OwnedEvent {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    event: Event,
}

impl OwnedEvent {
    /// A new event.
    pub fn new(driver: &Arc<dyn Driver>, device: DeviceId, kind: EventKind) -> Result<Self> {
        let event = driver.event_create(device, kind)?;
        Ok(OwnedEvent { driver: driver.clone(), device, event })
    }

    /// Its name, for waits of streams. It dies with this owner.
    pub fn id(&self) -> Event {
        self.event
    }

    /// Whose it is.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Marks a point of a stream.
    pub fn record(&self, stream: Stream) -> Result<()> {
        self.driver.event_record(self.device, self.event, stream)
    }

    /// Marks a point of its whole context.
    pub fn record_context(&self) -> Result<()> {
        self.driver.event_record_context(self.device, self.event)
    }

    /// Whether its point has been passed.
    pub fn is_passed(&self) -> Result<bool> {
        self.driver.event_query(self.device, self.event)
    }

    /// Waits on the host for its point, asleep if it is [`EventKind::Sleeping`].
    pub fn synchronize(&self) -> Result<()> {
        self.driver.event_synchronize(self.device, self.event)
    }

    /// Microseconds from another passed event to this one, both timed.
    pub fn since(&self, from: &OwnedEvent) -> Result<f64> {
        self.driver.event_elapsed(self.device, from.event, self.event)
    }
}

impl Drop for OwnedEvent {
    fn drop(&mut self) {
        // SAFETY: the event is alive and this owner's; waits already enqueued on it stay valid (CUDA keeps a
        // destroyed event until it has completed). A failure leaves it to the context.
        let _ = unsafe { self.driver.event_destroy(self.device, self.event) };
    }
}
