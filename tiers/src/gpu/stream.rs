//! Streams, as a pool identifies them.

use glake_device::{DeviceId, Driver, Result, Stream};
use glake_stitch::StreamKey;

/// Stream of the program: its driver handle and its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolStream {
    /// Handle of the driver.
    pub raw: Stream,
    /// Identity of the stream: distinguishes the legacy from the per-thread default streams, and a reused handle from the destroyed stream
    /// that had it before.
    pub key: StreamKey,
}

impl PoolStream {
    /// Stream of unknown identity: it owns no blocks, and no events are recorded on it.
    pub const UNKNOWN: PoolStream = PoolStream { raw: Stream(0), key: StreamKey::UNKNOWN };

    /// Resolves a stream handle with the driver.
    ///
    /// # Errors
    /// The driver's error.
    pub fn of(driver: &dyn Driver, device: DeviceId, raw: Stream) -> Result<Self> {
        driver.stream_id(device, raw).map(|id| PoolStream { raw, key: StreamKey(id.0) })
    }
}
