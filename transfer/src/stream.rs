//! Program stream that orders a copy.

use glake_device::owned::StreamRef;
use glake_device::{DeviceId, Driver, Stream, StreamId};

use crate::Result;

/// Stream handle of the program. May be the legacy or per-thread default stream of the calling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UserStream {
    /// GPU of the stream's context.
    pub device: DeviceId,
    /// CUDA handle.
    pub raw: Stream,
    /// Identity of the stream that the handle denotes.
    pub id: StreamId,
}

impl UserStream {
    /// Resolves a stream handle in a device's context for the calling thread.
    pub fn of(driver: &dyn Driver, device: DeviceId, raw: Stream) -> Result<UserStream> {
        Ok(UserStream { device, raw, id: driver.stream_id(device, raw)? })
    }

    /// Returns the stream for calls of the program's driver.
    pub(crate) fn of_driver(self, driver: &dyn Driver) -> StreamRef<'_> {
        StreamRef::new(driver, self.device, self.raw)
    }
}
