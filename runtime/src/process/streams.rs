//! Which stream a handle means, remembered: asking the driver is no part of a hit.
//!
//! A thread remembers a few in a table of its own, without a lock; the process remembers all. The per-thread default
//! stream is remembered by threads only, because its handle means another stream on each. A handle whose stream was
//! destroyed and that names a new one is taken for the same stream, as torch takes it.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use glake_device::{DeviceId, Driver, Stream};
use glake_stitch::StreamKey;
use glake_tiers::PoolStream;
use parking_lot::RwLock;
use rustc_hash::FxHashMap;

/// Handles that a thread remembers, by the lowest bits that tell them apart.
const SLOTS: usize = 32;
/// The default streams that a thread remembers besides, by device.
const OWN: usize = 16;

/// A handle and what it means.
#[derive(Clone, Copy)]
struct Known {
    process: u32,
    device: u32,
    stream: PoolStream,
}

thread_local! {
    static KNOWN: [Cell<Option<Known>>; SLOTS + OWN] = const { [const { Cell::new(None) }; SLOTS + OWN] };
}

/// The streams of a process.
#[derive(Debug)]
pub(super) struct Streams {
    /// Tells the processes of one program apart, of which tests have several.
    process: u32,
    known: RwLock<Table>,
}

#[derive(Debug, Default)]
struct Table {
    streams: FxHashMap<(u32, Stream), PoolStream>,
    /// The handle by which a stream was used first.
    handles: FxHashMap<StreamKey, Stream>,
}

impl Streams {
    pub(super) fn new() -> Self {
        static PROCESSES: AtomicU32 = AtomicU32::new(0);
        Streams { process: PROCESSES.fetch_add(1, Ordering::Relaxed), known: RwLock::default() }
    }

    /// The stream of a handle, for the calling thread.
    #[inline]
    pub(super) fn of(
        &self,
        driver: &dyn Driver,
        device: DeviceId,
        raw: Stream,
    ) -> glake_device::Result<PoolStream> {
        let known = KNOWN.with(|known| known[slot(device, raw)].get());
        match known {
            Some(known)
                if known.stream.raw == raw && known.device == device.0 && known.process == self.process =>
            {
                Ok(known.stream)
            }
            _ => self.learn(driver, device, raw),
        }
    }

    #[cold]
    fn learn(&self, driver: &dyn Driver, device: DeviceId, raw: Stream) -> glake_device::Result<PoolStream> {
        let shared = raw != Stream::PER_THREAD;
        let known = self.known.read().streams.get(&(device.0, raw)).copied().filter(|_| shared);
        let stream = match known {
            Some(stream) => stream,
            None => {
                let stream = PoolStream::of(driver, device, raw)?;
                let mut table = self.known.write();
                table.handles.entry(stream.key).or_insert(raw);
                if shared {
                    table.streams.insert((device.0, raw), stream);
                }
                stream
            }
        };
        let known = Known { process: self.process, device: device.0, stream };
        KNOWN.with(|table| table[slot(device, raw)].set(Some(known)));
        Ok(stream)
    }

    /// A stream is gone; threads that remember it still take its handle for it.
    pub(super) fn forget(&self, device: DeviceId, raw: Stream) {
        self.known.write().streams.remove(&(device.0, raw));
    }

    /// The handle by which a stream was used first.
    pub(super) fn handle(&self, key: StreamKey) -> Option<Stream> {
        self.known.read().handles.get(&key).copied()
    }
}

/// Handles are addresses of structures, or small numbers.
#[inline]
fn slot(device: DeviceId, raw: Stream) -> usize {
    let device = device.0 as usize;
    if raw == Stream::PER_THREAD {
        return SLOTS + device % OWN;
    }
    #[allow(clippy::cast_possible_truncation)] // the lowest bits are meant
    let mixed = (raw.0 ^ raw.0 >> 5 ^ raw.0 >> 12) as usize;
    (mixed ^ device << 2) % SLOTS
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use glake_device::Priority;
    use glake_device::sim::{SimOptions, SimTopology, Simulator};
    use glake_device::{Recorder, Verb};
    use glake_units::Bytes;

    use super::*;

    fn two() -> (Arc<Recorder>, Streams) {
        let topology = SimTopology::uniform(2, Bytes::gib(1));
        let simulator = Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap();
        (Arc::new(Recorder::measured(Arc::new(simulator))), Streams::new())
    }

    fn asked(driver: &Recorder) -> u64 {
        driver.counters().of(Verb::StreamId).calls
    }

    #[test]
    fn a_handle_is_asked_for_once_however_many_there_are() {
        let (driver, streams) = two();
        let handles: Vec<_> =
            (0..100).map(|_| driver.stream_create(DeviceId(0), Priority::Normal).unwrap()).collect();
        for _ in 0..3 {
            for &raw in &handles {
                let direct = PoolStream { raw, key: streams.of(&*driver, DeviceId(0), raw).unwrap().key };
                assert_eq!(streams.of(&*driver, DeviceId(0), raw).unwrap(), direct);
            }
        }
        assert_eq!(asked(&driver), 100);
        std::thread::scope(|scope| {
            scope.spawn(|| streams.of(&*driver, DeviceId(0), handles[0]).unwrap());
        });
        assert_eq!(asked(&driver), 100, "threads tell each other");
        let key = streams.of(&*driver, DeviceId(0), handles[7]).unwrap().key;
        assert_eq!(streams.handle(key), Some(handles[7]));
    }

    #[test]
    fn default_streams_are_told_apart() {
        let (driver, streams) = two();
        let of = |device, raw| streams.of(&*driver, DeviceId(device), Stream(raw)).unwrap().key;
        assert_eq!(of(0, 0), of(0, 1));
        assert_ne!(of(0, 0), of(1, 0));
        let own = of(0, 2);
        assert_ne!(own, of(1, 2));
        assert_eq!(own, of(0, 2));
        std::thread::scope(|scope| {
            scope.spawn(|| assert_ne!(of(0, 2), own));
        });
        let (other_driver, other) = two();
        assert_ne!(other.of(&*other_driver, DeviceId(0), Stream(0)).unwrap().key, of(0, 0));
    }
}
