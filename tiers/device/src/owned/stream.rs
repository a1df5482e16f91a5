//! A stream that is destroyed when dropped.

use std::sync::Arc;

use crate::{DeviceId, Driver, Event, Priority, Result, Stream};

/// A stream of a device's context that does not synchronise with the legacy one.
#[derive(Debug)]
pub struct OwnedStream {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    stream: Stream,
}

impl OwnedStream {
    /// A new stream of normal priority.
    pub fn new(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Self> {
        Self::with_priority(driver, device, Priority::Normal)
    }

    /// A new stream.
    pub fn with_priority(driver: &Arc<dyn Driver>, device: DeviceId, priority: Priority) -> Result<Self> {
        let stream = driver.stream_create(device, priority)?;
        Ok(OwnedStream { driver: driver.clone(), device, stream })
    }

    /// Its name, for verbs that take a stream. It dies with this owner.
    pub fn id(&self) -> Stream {
        self.stream
    }

    /// Whose it is.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Makes what is enqueued from now on wait for an event.
    pub fn wait_for(&self, event: Event) -> Result<()> {
        self.driver.stream_wait_event(self.device, self.stream, event)
    }

    /// Waits on the host for its work.
    pub fn synchronize(&self) -> Result<()> {
        self.driver.stream_synchronize(self.device, self.stream)
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        // SAFETY: the stream is alive and this owner's; its work runs to its end. A failure leaves it to the
        // context.
        let _ = unsafe { self.driver.stream_destroy(self.device, self.stream) };
    }
}
