//! Mover of regions over every link.
//!
//! ```text
//! Region ─► shrink, refill ─► Mover ─► copy_list on a stream of the mover's own ─► links
//! ```

use std::sync::Arc;

use glake_device::owned::{OwnedEvent, OwnedStream, Span};
use glake_device::{DeviceId, Driver, EventKind, Stream};
use glake_tiers::{Mark, MoveError, Mover, Moving};

use crate::{CopyHandle, CopyOptions, Engine, Priority, Result, UserStream};

/// Copies of the engine between one GPU and the host, on a dedicated stream.
#[derive(Debug)]
pub struct LinkMover {
    engine: Arc<Engine>,
    on: UserStream,
    options: CopyOptions,
    _stream: OwnedStream,
}

impl LinkMover {
    /// Creates a mover for regions of a GPU.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn new(engine: &Arc<Engine>, device: DeviceId, priority: Priority) -> Result<LinkMover> {
        let driver = engine.completion_events().driver();
        let stream = OwnedStream::new(driver, device)?;
        let on = UserStream::of(&**driver, device, stream.id())?;
        let options = CopyOptions { priority, unordered: true, ..CopyOptions::default() };
        // The slots' other side, above all: until it is made copies of regions take one link.
        engine.expect_copies_of(device);
        Ok(LinkMover { engine: engine.clone(), on, options, _stream: stream })
    }
}

impl Mover for LinkMover {
    fn enqueue(&self, copies: &[(Span, Span)]) -> std::result::Result<Box<dyn Moving>, MoveError> {
        Ok(Box::new(Copied(self.engine.copy_list(copies, self.on, self.options)?)))
    }

    /// Records an event on the mover's stream, which joins all shares of a copy.
    fn mark(&self) -> std::result::Result<Arc<dyn Mark>, MoveError> {
        let driver = self.engine.completion_events().driver().clone();
        let event = OwnedEvent::new(&driver, self.on.device, EventKind::Plain)?;
        event.record(self.on.raw)?;
        Ok(Arc::new(Behind { driver, event }))
    }
}

/// Recorded event of a mover's stream.
#[derive(Debug)]
struct Behind {
    driver: Arc<dyn Driver>,
    event: OwnedEvent,
}

impl Mark for Behind {
    fn follow(&self, device: DeviceId, stream: Stream) -> std::result::Result<(), MoveError> {
        Ok(self.driver.stream_wait_event(device, stream, self.event.id())?)
    }
}

/// Handle of a copy, without its spans.
#[derive(Debug)]
struct Copied(CopyHandle);

impl Moving for Copied {
    fn wait(self: Box<Self>) -> std::result::Result<(), MoveError> {
        Ok(self.0.wait()?)
    }
}
