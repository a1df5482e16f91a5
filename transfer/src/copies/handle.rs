//! Handle of an enqueued copy.

use std::sync::Arc;

use glake_device::{Driver, Stream};

use crate::copies::event_pool::PooledEvent;
use crate::copies::parts::Parts;
use crate::{Result, UserStream};

/// Enqueued copy. Dropping the handle does not affect the copy.
#[derive(Debug)]
pub struct CopyHandle {
    end: End,
    /// Parts of a split copy.
    parts: Option<Parts>,
}

/// Means of detecting the end of the copy.
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

    /// Blocks until the bytes have arrived.
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

    /// Returns whether relays took part in the copy.
    pub fn is_split(&self) -> bool {
        self.parts.is_some()
    }

    /// Checks whether the relays' parts have arrived. Valid once the copy's stream has passed the copy, which a caller with its own event
    /// behind it knows without one of the engine's.
    ///
    /// # Errors
    /// As [`CopyHandle::wait`].
    pub fn check(&self) -> Result<()> {
        self.parts.as_ref().map_or(Ok(()), Parts::check)
    }

    /// Returns whether the bytes have arrived; always `false` for a copy enqueued without [`crate::CopyOptions::waited`], or whose end the
    /// driver could not mark.
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
