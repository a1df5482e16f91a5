//! A stream that is destroyed when dropped.

use std::sync::Arc;

use super::{OwnedEvent, Piece, Span, copy, copy_piece};
use crate::{CaptureState, DeviceId, Driver, Event, EventKind, Priority, Result, Stream};

/// A stream with the driver and the device that calls on it need.
#[derive(Clone, Copy, Debug)]
pub struct StreamRef<'a> {
    driver: &'a dyn Driver,
    device: DeviceId,
    stream: Stream,
}

impl<'a> StreamRef<'a> {
    /// Wraps a stream that the caller owns, in the driver's context of a device.
    pub fn new(driver: &'a dyn Driver, device: DeviceId, stream: Stream) -> StreamRef<'a> {
        StreamRef { driver, device, stream }
    }

    /// Returns the driver whose context the stream belongs to.
    pub fn driver(self) -> &'a dyn Driver {
        self.driver
    }

    /// Returns the device of the stream.
    pub fn device(self) -> DeviceId {
        self.device
    }

    /// Returns the raw stream.
    pub fn id(self) -> Stream {
        self.stream
    }

    /// Enqueues a copy between two spans of equal size.
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

    /// Makes work enqueued from now on wait for an event.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn wait_for(self, event: Event) -> Result<()> {
        self.driver.stream_wait_event(self.device, self.stream, event)
    }
}

/// Owner of a stream that does not synchronise with the legacy one.
#[derive(Debug)]
pub struct OwnedStream {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    stream: Stream,
}

impl OwnedStream {
    /// Creates a stream of normal priority.
    pub fn new(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Self> {
        Self::with_priority(driver, device, Priority::Normal)
    }

    /// Creates a stream with a given priority.
    pub fn with_priority(driver: &Arc<dyn Driver>, device: DeviceId, priority: Priority) -> Result<Self> {
        let stream = driver.stream_create(device, priority)?;
        Ok(OwnedStream { driver: driver.clone(), device, stream })
    }

    /// Borrows the stream for calls.
    pub fn of(&self) -> StreamRef<'_> {
        StreamRef::new(&*self.driver, self.device, self.stream)
    }

    /// Returns the capture state of the stream.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn capture_state(&self) -> Result<CaptureState> {
        self.driver.capture_state(self.device, self.stream)
    }

    /// Returns the raw stream, for verbs that take one. It is valid while this owner lives.
    pub fn id(&self) -> Stream {
        self.stream
    }

    /// Returns the device of the stream.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Creates an event in the stream's context.
    pub fn event(&self) -> Result<OwnedEvent> {
        OwnedEvent::new(&self.driver, self.device, EventKind::Plain)
    }

    /// Makes work enqueued from now on wait for an event.
    pub fn wait_for(&self, event: Event) -> Result<()> {
        self.driver.stream_wait_event(self.device, self.stream, event)
    }

    /// Blocks the calling thread until the stream's work is done.
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
