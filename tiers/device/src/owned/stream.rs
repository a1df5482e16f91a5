//! A stream that is destroyed when dropped.

use std::sync::Arc;

use super::{OwnedEvent, Piece, Span, copy, copy_piece};
use crate::{CaptureState, DeviceId, Driver, Event, EventKind, Priority, Result, Stream};

/// A stream and whose it is: what a call on it needs to run in its context.
#[derive(Clone, Copy, Debug)]
pub struct StreamRef<'a> {
    driver: &'a dyn Driver,
    device: DeviceId,
    stream: Stream,
}

impl<'a> StreamRef<'a> {
    /// A stream that somebody else owns, of the driver's context of a device.
    pub fn new(driver: &'a dyn Driver, device: DeviceId, stream: Stream) -> StreamRef<'a> {
        StreamRef { driver, device, stream }
    }

    /// Whose context it is of.
    pub fn driver(self) -> &'a dyn Driver {
        self.driver
    }

    /// Whose it is.
    pub fn device(self) -> DeviceId {
        self.device
    }

    /// Its name.
    pub fn id(self) -> Stream {
        self.stream
    }

    /// Enqueues a copy between two spans of one size.
    ///
    /// # Errors
    /// As [`copy`].
    pub fn copy(self, to: &Span, from: &Span) -> Result<()> {
        copy(self.driver, self.device, self.stream, to, from)
    }

    /// Enqueues the copy of a piece of a block.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn copy_piece(self, piece: &Piece<'_>) -> Result<()> {
        copy_piece(self.driver, self.device, self.stream, piece)
    }

    /// Makes what is enqueued from now on wait for an event.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn wait_for(self, event: Event) -> Result<()> {
        self.driver.stream_wait_event(self.device, self.stream, event)
    }
}

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

    /// It, for calls.
    pub fn of(&self) -> StreamRef<'_> {
        StreamRef::new(&*self.driver, self.device, self.stream)
    }

    /// Whether it is recording a graph.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn capture_state(&self) -> Result<CaptureState> {
        self.driver.capture_state(self.device, self.stream)
    }

    /// Its name, for verbs that take a stream. It dies with this owner.
    pub fn id(&self) -> Stream {
        self.stream
    }

    /// Whose it is.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// A new event of its context.
    pub fn event(&self) -> Result<OwnedEvent> {
        OwnedEvent::new(&self.driver, self.device, EventKind::Plain)
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
