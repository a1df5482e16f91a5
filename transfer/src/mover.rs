//! Moves the bytes of regions over every link.
//!
//! ```text
//! Region ─► shrink, refill ─► Mover ─► copy_list on a stream of the mover's own ─► links
//! ```

use std::sync::Arc;

use glake_device::owned::{OwnedEvent, OwnedStream, Span};
use glake_device::{DeviceId, Driver, EventKind, Stream};
use glake_tiers::{Mark, MoveError, Mover, Moving};

use crate::{CopyHandle, CopyOptions, Engine, Priority, Result, UserStream};

/// The engine's copies between one GPU and the host, on a stream that nothing else uses.
#[derive(Debug)]
pub struct LinkMover {
    engine: Arc<Engine>,
    on: UserStream,
    options: CopyOptions,
    _stream: OwnedStream,
}

impl LinkMover {
    /// For regions of a GPU.
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

    /// All shares of a copy are joined on the mover's stream.
    fn mark(&self) -> std::result::Result<Arc<dyn Mark>, MoveError> {
        let driver = self.engine.completion_events().driver().clone();
        let event = OwnedEvent::new(&driver, self.on.device, EventKind::Plain)?;
        event.record(self.on.raw)?;
        Ok(Arc::new(Behind { driver, event }))
    }
}

/// A point of a mover's stream.
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

/// A handle holds no spans.
#[derive(Debug)]
struct Copied(CopyHandle);

impl Moving for Copied {
    fn wait(self: Box<Self>) -> std::result::Result<(), MoveError> {
        Ok(self.0.wait()?)
    }
}
