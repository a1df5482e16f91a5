//! Moves the bytes of regions over every link.
//!
//! ```text
//! Region ─► shrink, refill ─► Mover ─► copy_list on a stream of the mover's own ─► links
//! ```

use std::sync::Arc;

use glake_device::DeviceId;
use glake_device::owned::{OwnedStream, Span};
use glake_tiers::{MoveError, Mover, Moving};

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
        let driver = engine.epochs().driver();
        let stream = OwnedStream::new(driver, device)?;
        let on = UserStream::of(&**driver, device, stream.id())?;
        let options = CopyOptions { priority, waited: true, ..CopyOptions::default() };
        Ok(LinkMover { engine: engine.clone(), on, options, _stream: stream })
    }
}

impl Mover for LinkMover {
    fn enqueue(&self, copies: &[(Span, Span)]) -> std::result::Result<Box<dyn Moving>, MoveError> {
        Ok(Box::new(Copied(self.engine.copy_list(copies, self.on, self.options)?)))
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
