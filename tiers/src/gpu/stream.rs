//! Streams as a pool knows them.

use glake_device::{DeviceId, Driver, Result, Stream};
use glake_stitch::StreamKey;

/// A stream: the handle that events are recorded on, and what tells it apart from every other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolStream {
    /// The driver's handle.
    pub raw: Stream,
    /// Its identity: the legacy and the per-thread default streams are told apart, and a handle that is used again
    /// after its stream was destroyed is another stream.
    pub key: StreamKey,
}

impl PoolStream {
    /// Stream of unknown identity: it owns no blocks, and no events are recorded on it.
    pub const UNKNOWN: PoolStream = PoolStream { raw: Stream(0), key: StreamKey::UNKNOWN };

    /// Asks the driver which stream a handle means.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn of(driver: &dyn Driver, device: DeviceId, raw: Stream) -> Result<Self> {
        driver.stream_id(device, raw).map(|id| PoolStream { raw, key: StreamKey(id.0) })
    }
}
