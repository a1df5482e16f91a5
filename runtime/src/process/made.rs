//! Streams that were made for the program, which destroys them or leaves them to the end of the process.

use std::collections::HashMap;
use std::sync::Arc;

use glake_device::owned::OwnedStream;
use glake_device::{DeviceId, Driver, Result, Stream};
use parking_lot::Mutex;

/// Those that live.
#[derive(Debug, Default)]
pub(super) struct MadeStreams {
    streams: Mutex<HashMap<(DeviceId, Stream), OwnedStream>>,
}

impl MadeStreams {
    pub(super) fn create(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<Stream> {
        let stream = OwnedStream::new(driver, device)?;
        let raw = stream.id();
        self.streams.lock().insert((device, raw), stream);
        Ok(raw)
    }

    /// Returns whether it was made here.
    pub(super) fn destroy(&self, device: DeviceId, raw: Stream) -> bool {
        let stream = self.streams.lock().remove(&(device, raw));
        stream.is_some()
    }
}
