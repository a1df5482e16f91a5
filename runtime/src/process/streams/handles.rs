//! Cache from stream handles to streams, so that a hit needs no driver call.
//!
//! ```text
//! handle ─► seats: read without a lock ─► table: all handles, under a lock ─► the driver
//!             └ a seat belongs to one handle forever: empty ─► named ─► known ⇄ forgotten
//! ```
//!
//! The per-thread default stream is cached by threads only, because its handle means another stream on each. If a program destroys a stream
//! itself and its handle is reused, the new stream is taken for the old one, as torch does.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use glake_device::{DeviceId, Driver, Stream, StreamId};
use glake_stitch::StreamKey;
use glake_tiers::PoolStream;
use parking_lot::RwLock;
use rustc_hash::FxHashMap;

/// Number of handles that are found without a lock; a program with more looks some up under the lock.
const SEATS: usize = 1 << SEAT_BITS;
const SEAT_BITS: u32 = 8;
/// Maximum distance of a handle's seat from its preferred one.
const REACH: usize = 4;
/// Value for an empty seat in place of a device.
const EMPTY: u32 = u32::MAX;
/// Value for an unknown stream key.
const UNKNOWN: u64 = u64::MAX;
/// Maximum number of per-thread default streams that a thread caches, by device.
const OWN: usize = 16;

/// A handle and its stream. Written under the table's lock; the name is written once, before the first key.
#[derive(Debug)]
struct Seat {
    key: AtomicU64,
    raw: AtomicU64,
    device: AtomicU32,
}

/// Stream of the per-thread default handle on one thread.
#[derive(Clone, Copy)]
struct Own {
    process: u32,
    device: DeviceId,
    stream: PoolStream,
}

thread_local! {
    static OWN_STREAMS: [Cell<Option<Own>>; OWN] = const { [const { Cell::new(None) }; OWN] };
}

/// Stream handles that a process has used. Embedded in a shared owner, so that the seats are reached without an extra indirection.
#[derive(Debug)]
pub(super) struct StreamHandles {
    /// Number of the process: a test program has several processes.
    process: u32,
    seats: [Seat; SEATS],
    known: RwLock<Table>,
}

#[derive(Debug, Default)]
struct Table {
    streams: FxHashMap<(u32, Stream), PoolStream>,
    /// Handle by which each stream was used first.
    handles: FxHashMap<StreamKey, Stream>,
}

impl StreamHandles {
    pub(super) fn new() -> Self {
        static PROCESSES: AtomicU32 = AtomicU32::new(0);
        let process = PROCESSES.fetch_add(1, Ordering::Relaxed);
        StreamHandles { process, seats: [const { Seat::empty() }; SEATS], known: RwLock::default() }
    }

    /// Returns the stream of a handle for the calling thread.
    #[inline]
    pub(super) fn of(
        &self,
        driver: &dyn Driver,
        device: DeviceId,
        raw: Stream,
    ) -> glake_device::Result<PoolStream> {
        match self.seats_of(device, raw).find_map(|seat| seat.key_of(device, raw)) {
            Some(key) => Ok(PoolStream { raw, key }),
            None => self.learn(driver, device, raw),
        }
    }

    /// Returns whether a stream of the device was used by this handle; default handles do not count.
    pub(super) fn knows(&self, device: DeviceId, raw: Stream) -> bool {
        self.seats_of(device, raw).any(|seat| seat.key_of(device, raw).is_some())
            || self.known.read().streams.contains_key(&(device.0, raw))
    }

    #[cold]
    fn learn(&self, driver: &dyn Driver, device: DeviceId, raw: Stream) -> glake_device::Result<PoolStream> {
        if raw == Stream::PER_THREAD {
            return self.own(driver, device);
        }
        if let Some(&stream) = self.known.read().streams.get(&(device.0, raw)) {
            return Ok(stream);
        }
        let stream = PoolStream::of(driver, device, raw)?;
        let mut table = self.known.write();
        table.handles.entry(stream.key).or_insert(raw);
        table.streams.insert((device.0, raw), stream);
        if let Some(seat) = self.seats_of(device, raw).find(|seat| seat.is_for(device, raw)) {
            seat.raw.store(raw.0, Ordering::Relaxed);
            seat.device.store(device.0, Ordering::Relaxed);
            seat.key.store(stream.key.0, Ordering::Release);
        }
        Ok(stream)
    }

    /// Returns the calling thread's default stream.
    fn own(&self, driver: &dyn Driver, device: DeviceId) -> glake_device::Result<PoolStream> {
        let place = device.0 as usize % OWN;
        let own = OWN_STREAMS.with(|own| own[place].get());
        if let Some(own) = own.filter(|own| own.device == device && own.process == self.process) {
            return Ok(own.stream);
        }
        let stream = PoolStream::of(driver, device, Stream::PER_THREAD)?;
        self.known.write().handles.entry(stream.key).or_insert(Stream::PER_THREAD);
        OWN_STREAMS.with(|own| own[place].set(Some(Own { process: self.process, device, stream })));
        Ok(stream)
    }

    /// Forgets a destroyed stream, whose handle may be reused. Returns its id if it was ever used.
    pub(super) fn forget(&self, device: DeviceId, raw: Stream) -> Option<StreamId> {
        let mut table = self.known.write();
        let known = table.streams.remove(&(device.0, raw));
        if let Some(seat) = self.seats_of(device, raw).find(|seat| seat.key_of(device, raw).is_some()) {
            seat.key.store(UNKNOWN, Ordering::Release);
        }
        known.map(|stream| StreamId(stream.key.0))
    }

    /// Returns the handle by which a stream was used first.
    pub(super) fn handle(&self, key: StreamKey) -> Option<Stream> {
        self.known.read().handles.get(&key).copied()
    }

    /// Returns the seats that a handle may take. Handles are addresses of structures, or small numbers.
    #[inline]
    fn seats_of(&self, device: DeviceId, raw: Stream) -> impl Iterator<Item = &Seat> {
        let mixed = (raw.0 ^ u64::from(device.0) << 48).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        #[allow(clippy::cast_possible_truncation)] // the highest bits
        let first = (mixed >> (u64::BITS - SEAT_BITS)) as usize;
        (first..first + REACH).map(|seat| &self.seats[seat % SEATS])
    }
}

impl Seat {
    const fn empty() -> Self {
        Seat { key: AtomicU64::new(UNKNOWN), raw: AtomicU64::new(0), device: AtomicU32::new(EMPTY) }
    }

    /// Returns the stream key of a handle if this is its seat.
    #[inline]
    fn key_of(&self, device: DeviceId, raw: Stream) -> Option<StreamKey> {
        // A thread that sees a key also sees the names written before it.
        let key = self.key.load(Ordering::Acquire);
        let known = key != UNKNOWN && self.names(device, raw);
        known.then_some(StreamKey(key))
    }

    /// Returns whether a handle without a seat may take this one: the seat is empty or was its own before.
    fn is_for(&self, device: DeviceId, raw: Stream) -> bool {
        self.names(device, raw) || self.device.load(Ordering::Relaxed) == EMPTY
    }

    #[inline]
    fn names(&self, device: DeviceId, raw: Stream) -> bool {
        self.raw.load(Ordering::Relaxed) == raw.0 && self.device.load(Ordering::Relaxed) == device.0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use glake_device::Priority;
    use glake_device::{Recorder, Verb};
    use glake_sim::{SimOptions, SimTopology, Simulator};
    use glake_units::Bytes;

    use super::*;

    fn two() -> (Arc<Recorder>, StreamHandles) {
        let topology = SimTopology::uniform(2, Bytes::gib(1));
        let simulator = Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap();
        (Arc::new(Recorder::measured(Arc::new(simulator))), StreamHandles::new())
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
    fn a_handle_that_is_used_again_is_asked_for_again() {
        let (driver, streams) = two();
        let key = |raw| streams.of(&*driver, DeviceId(0), raw).unwrap().key;
        let first = Stream(0);
        assert_ne!(key(first), key(driver.stream_create(DeviceId(0), Priority::Normal).unwrap()));
        for forgotten in 1..5 {
            streams.forget(DeviceId(0), first);
            assert_eq!(key(first), key(first));
            assert_eq!(asked(&driver), 2 + forgotten);
        }
    }

    #[test]
    fn more_handles_than_seats_are_remembered_too() {
        let (driver, streams) = two();
        let handles: Vec<_> =
            (0..3 * SEATS).map(|_| driver.stream_create(DeviceId(1), Priority::Normal).unwrap()).collect();
        let keys = || handles.iter().map(|&raw| streams.of(&*driver, DeviceId(1), raw).unwrap().key);
        let first: Vec<_> = keys().collect();
        assert!(keys().eq(first.iter().copied()));
        assert_eq!(asked(&driver), handles.len() as u64);
        for (&raw, key) in handles.iter().zip(first) {
            assert_eq!(PoolStream::of(&*driver, DeviceId(1), raw).unwrap().key, key);
        }
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
