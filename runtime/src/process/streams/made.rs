//! Streams created for the program, which destroys them or leaves them to the end of the process.

use std::collections::HashMap;
use std::sync::Arc;

use glake_device::owned::OwnedStream;
use glake_device::{DeviceId, Driver, Result, Stream};

use crate::sync::Mutex;

/// Table of the created streams that exist.
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

    /// Destroys a stream; returns whether it was created here.
    pub(super) fn destroy(&self, device: DeviceId, raw: Stream) -> bool {
        let stream = self.streams.lock().remove(&(device, raw));
        stream.is_some()
    }
}

#[cfg(test)]
#[cfg(schedules)]
mod schedules {
    use glake_sim::{SimOptions, Simulator};
    use shuttle::thread;

    use super::*;
    use crate::sync::schedules;

    /// Each stream is destroyed once even with concurrent requests, and none remains.
    #[test]
    fn a_stream_is_destroyed_once() {
        let sim = Arc::new(Simulator::new(SimOptions::default()).unwrap());
        schedules(move || {
            let (made, driver): (_, Arc<dyn Driver>) = (Arc::new(MadeStreams::default()), sim.clone());
            let common = made.create(&driver, DeviceId(0)).unwrap();
            let threads: Vec<_> = (0..3)
                .map(|_| {
                    let (made, driver) = (made.clone(), driver.clone());
                    thread::spawn(move || {
                        let own = made.create(&driver, DeviceId(0)).unwrap();
                        let destroyed = made.destroy(DeviceId(0), common);
                        assert!(made.destroy(DeviceId(0), own) && !made.destroy(DeviceId(1), own));
                        usize::from(destroyed)
                    })
                })
                .collect();
            let destroyed: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
            assert_eq!((destroyed, made.streams.lock().len()), (1, 0));
        });
    }
}
