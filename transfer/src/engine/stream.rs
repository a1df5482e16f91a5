//! A stream of the program that a copy is ordered on.

use glake_device::owned::StreamRef;
use glake_device::{DeviceId, Driver, Stream, StreamId};

use crate::Result;

/// Any stream, the legacy and the per-thread default ones too; these are the calling thread's to name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UserStream {
    /// Whose context it is of.
    pub device: DeviceId,
    /// The handle.
    pub raw: Stream,
    /// Which stream that is.
    pub id: StreamId,
}

impl UserStream {
    /// Asks the driver which stream a handle of a device's context means for the calling thread.
    pub fn of(driver: &dyn Driver, device: DeviceId, raw: Stream) -> Result<UserStream> {
        Ok(UserStream { device, raw, id: driver.stream_id(device, raw)? })
    }

    /// It, for calls of the driver of the program's contexts.
    pub(crate) fn of_driver(self, driver: &dyn Driver) -> StreamRef<'_> {
        StreamRef::new(driver, self.device, self.raw)
    }
}
