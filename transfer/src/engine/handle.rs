//! What a copy is known by after it was enqueued.

use std::sync::Arc;

use glake_device::{Driver, Stream};

use crate::Result;
use crate::UserStream;
use crate::engine::event_pool::PooledEvent;
use crate::engine::parts::Parts;

/// A copy that was enqueued. Dropping it costs nothing and leaves the copy as it is.
#[derive(Debug)]
pub struct CopyHandle {
    end: End,
    /// Of a copy that was split.
    parts: Option<Parts>,
}

/// What tells that the copy is done.
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

    /// Waits on the host until the bytes are there.
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

    /// Whether relays took part in it.
    pub fn is_split(&self) -> bool {
        self.parts.is_some()
    }

    /// Whether what relays took has arrived: to be asked once the copy's stream has come past it, which whoever has an event of their own
    /// behind it knows without one of the engine's.
    ///
    /// # Errors
    /// As [`CopyHandle::wait`].
    pub fn check(&self) -> Result<()> {
        self.parts.as_ref().map_or(Ok(()), Parts::check)
    }

    /// Whether the bytes are there; never of a copy that was enqueued without [`crate::CopyOptions::waited`], or whose end the
    /// driver would not mark.
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
