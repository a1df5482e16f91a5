//! Streams of a program: the stream and device of a handle, and streams created by this library.
//!
//! ```text
//! handle ─► StreamHandles ─► PoolStream          with_default_of: device of the default handles, for one call of a thread
//!        └► its device, whether it is captured   MadeStreams: for programs without the CUDA runtime
//! ```
//!
//! Invariant: the device that a thread sets for default handles applies to that one call only.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use glake_device::owned::{DeviceSet, OwnedEvent, OwnedStream};
use glake_device::{Address, CaptureState, DeviceId, Driver, EventKind, Stream, StreamId};
use glake_stitch::StreamKey;
use glake_tiers::PoolStream;
use glake_transfer::UserStream;
use handles::StreamHandles;

use super::device::{DeviceMemory, Started};
use super::device_registry::DeviceRegistry;
use super::{ProcessError, Result};
use crate::sync::Mutex;

mod handles;

thread_local! {
    /// Device of the default handles during the thread's current call; `None` means the current device.
    static DEFAULT_OF: Cell<Option<DeviceId>> = const { Cell::new(None) };
}

/// Guard that restores the previous device of the default handles.
struct Back(Option<DeviceId>);

impl Drop for Back {
    fn drop(&mut self) {
        DEFAULT_OF.set(self.0);
    }
}

/// Returns whether a handle is a default one, which exists on each device.
fn is_default(raw: Stream) -> bool {
    matches!(raw, Stream(0) | Stream::LEGACY | Stream::PER_THREAD)
}

/// Returns the device of a default handle if the current call sets one.
fn default_of(raw: Stream) -> Option<DeviceId> {
    DEFAULT_OF.get().filter(|_| is_default(raw))
}

/// Streams of a program.
#[derive(Debug)]
pub struct Streams {
    handles: StreamHandles,
    made: MadeStreams,
    registry: Arc<DeviceRegistry>,
}

impl Streams {
    pub(super) fn new(registry: &Arc<DeviceRegistry>) -> Streams {
        Streams { handles: StreamHandles::new(), made: MadeStreams::default(), registry: registry.clone() }
    }

    /// Creates a non-blocking stream of a device, for programs without the CUDA runtime; programs on the simulated device have no other
    /// source.
    ///
    /// # Errors
    /// The driver's error.
    pub fn create(&self, device: i64) -> Result<Stream> {
        Ok(self.made.create(self.driver(), self.registry.device(device)?.id())?)
    }

    /// Waits on the host until the work of a stream is done; without a device, of the stream's own.
    ///
    /// # Errors
    /// The driver's error.
    pub fn synchronize(&self, device: Option<i64>, raw: Stream) -> Result<()> {
        let device = match device {
            Some(device) => self.registry.device(device)?.id(),
            None => self.driver().stream_device(raw)?,
        };
        Ok(self.driver().stream_synchronize(device, raw)?)
    }

    /// Destroys a stream of [`Streams::create`]; its enqueued work still completes.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if this library did not make the stream.
    pub fn destroy(&self, device: i64, raw: Stream) -> Result<()> {
        let device = self.registry.device(device)?.id();
        if !self.made.destroy(device, raw) {
            return Err(ProcessError::invalid(format!(
                "{device} has no stream {:#x} that this library made",
                raw.0
            )));
        }
        self.registry.completion_events.forget(device, raw);
        if let Some(stream) = self.handles.forget(device, raw)
            && let Some(engine) = self.registry.engine.made()
        {
            engine.forget_stream(stream);
        }
        Ok(())
    }

    /// Returns the device of a stream handle. Default handles belong to the thread's current device, or to the one set by
    /// [`Streams::with_default_of`].
    ///
    /// # Errors
    /// The driver's error.
    pub fn device_of(&self, raw: Stream) -> Result<DeviceId> {
        match default_of(raw) {
            Some(device) => Ok(device),
            None => Ok(self.driver().stream_device(raw)?),
        }
    }

    /// Runs `call` with the default handles set to the streams of `device`, if one is given.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`]: the call was not made.
    pub fn with_default_of<T>(&self, device: Option<DeviceId>, call: impl FnOnce() -> T) -> Result<T> {
        let Some(device) = device else { return Ok(call()) };
        self.registry.device(i64::from(device.0))?;
        let _back = Back(DEFAULT_OF.replace(Some(device)));
        Ok(call())
    }

    /// Returns the device in whose primary context this thread's copies on a stream run; `None` if the current context or the stream's is
    /// another one. The driver makes such copies, and the link of that GPU serves only its own copies from then on.
    ///
    /// # Errors
    /// The driver's error.
    #[inline]
    pub(super) fn primary_of(&self, raw: Stream) -> Result<Option<DeviceId>> {
        if let Some(device) = default_of(raw) {
            return Ok(Some(device));
        }
        let primary = self.driver().primary_of(raw)?;
        if primary.is_none()
            && let (Some(engine), Ok(device)) =
                (self.registry.engine.made(), self.driver().stream_device(raw))
        {
            engine.leave_to_program(device);
        }
        Ok(primary)
    }

    /// Enqueues work of one device in the order of another device's stream: after its earlier work and before its later work.
    ///
    /// # Errors
    /// The error of `enqueue` or the driver; enqueued work is finished then.
    pub(super) fn beside(
        &self,
        device: DeviceId,
        raw: Stream,
        enqueue: impl FnOnce(Stream) -> Result<()>,
    ) -> Result<()> {
        let (on, driver) = (self.user(raw)?, self.driver());
        let fork = || -> glake_device::Result<(OwnedStream, OwnedEvent)> {
            let fork = OwnedEvent::new(driver, on.device, EventKind::Plain)?;
            fork.record(raw)?;
            let lane = OwnedStream::new(driver, device)?;
            lane.wait_for(fork.id())?;
            Ok((lane, OwnedEvent::new(driver, device, EventKind::Plain)?))
        };
        let (lane, join) = fork()?;
        enqueue(lane.id())?;
        let joined = join
            .record(lane.id())
            .and_then(|()| driver.stream_wait_event(on.device, raw, join.id()))
            .or_else(|_| lane.synchronize());
        Ok(joined?)
    }

    /// Returns the stream of a handle for the calling thread.
    #[inline]
    pub(super) fn of(
        &self,
        driver: &dyn Driver,
        device: DeviceId,
        raw: Stream,
    ) -> glake_device::Result<PoolStream> {
        self.handles.of(driver, device, raw)
    }

    /// Returns the handle by which a stream was used first.
    pub(super) fn handle(&self, key: StreamKey) -> Option<Stream> {
        self.handles.handle(key)
    }

    /// Records that work on a stream uses a block of a device's pool. For a stream of another device, that device is watched too, because
    /// the pool's own completion points do not cover its work. Work in a context other than its device's primary one is covered by none.
    ///
    /// # Errors
    /// The driver's error for an invalid handle; the block counts as used by some stream then.
    pub(super) fn record(&self, started: &Started, address: Address, raw: Stream) -> Result<()> {
        let pool = &started.pool;
        let devices = self.devices_of(pool.device(), raw).inspect_err(|_| {
            pool.record_stream(address, PoolStream::UNKNOWN);
        })?;
        for device in devices.iter() {
            pool.peer_access().watch(device)?;
            // A captured stream, or one of such a context, does not reveal which one it is.
            let stream = self.handles.of(&**self.driver(), device, raw).unwrap_or(PoolStream::UNKNOWN);
            pool.record_stream(address, stream);
        }
        Ok(())
    }

    /// Returns the devices that a handle may mean when it uses memory of `memory`. A default handle may mean that device or the current
    /// one, because callers name no device.
    fn devices_of(&self, memory: DeviceId, raw: Stream) -> Result<DeviceSet> {
        let own = DeviceSet::of(memory);
        if self.registry.devices.len() == 1 {
            return Ok(own);
        }
        if is_default(raw) {
            return Ok(DeviceSet::of(self.device_of(raw)?).union(own));
        }
        let others = self.registry.devices.iter().map(DeviceMemory::id);
        let known = [memory].into_iter().chain(others).find(|device| self.handles.knows(*device, raw));
        Ok(DeviceSet::of(known.map_or_else(|| self.driver().stream_device(raw), Ok)?))
    }

    /// Returns the device and the id of a stream handle.
    pub(super) fn user(&self, raw: Stream) -> Result<UserStream> {
        let device = self.device_of(raw)?;
        let stream = self.handles.of(&**self.driver(), device, raw)?;
        Ok(UserStream { device, raw, id: StreamId(stream.key.0) })
    }

    /// Returns whether a stream is captured into a graph.
    pub(super) fn is_captured(&self, on: UserStream) -> Result<bool> {
        Ok(self.driver().capture_state(on.device, on.raw)? != CaptureState::None)
    }

    fn driver(&self) -> &Arc<dyn Driver> {
        self.registry.completion_events.driver()
    }
}

#[cfg(test)]
#[cfg(not(schedules))]
mod tests {
    use std::time::Duration;

    use glake_sim::Clock;
    use glake_units::Bytes;

    use super::super::fixture::Parts;
    use super::*;

    #[test]
    fn a_stream_that_was_made_here_is_destroyed_once() {
        let parts = Parts::new();
        let raw = parts.streams.create(1).unwrap();
        assert_eq!(parts.streams.device_of(raw).unwrap(), DeviceId(1));
        let key = parts.streams.user(raw).unwrap().id;
        assert_eq!(parts.streams.handle(StreamKey(key.0)), Some(raw));
        parts.streams.synchronize(None, raw).unwrap();
        assert!(parts.streams.destroy(0, raw).is_err(), "of another device");
        parts.streams.destroy(1, raw).unwrap();
        assert!(matches!(parts.streams.destroy(1, raw), Err(ref error) if error.says("has no stream")));
        assert!(matches!(parts.streams.create(2), Err(ProcessError::NoSuchDevice { device: 2, count: 2 })));
    }

    #[test]
    fn the_default_handles_are_a_device_s_for_one_call() {
        let parts = Parts::new();
        let device_of = |raw| parts.streams.device_of(raw).unwrap().0;
        let inner =
            |device| parts.streams.with_default_of(Some(DeviceId(device)), || device_of(Stream(0))).unwrap();
        let both = parts.streams.with_default_of(Some(DeviceId(1)), || {
            let before = device_of(Stream::PER_THREAD);
            (before, inner(0), device_of(Stream::LEGACY))
        });
        assert_eq!(both.unwrap(), (1, 0, 1));
        assert_eq!(device_of(Stream(0)), 0);
        let own = parts.streams.create(0).unwrap();
        let named = parts.streams.with_default_of(Some(DeviceId(1)), || device_of(own));
        assert_eq!(named.unwrap(), 0, "a handle that names a stream is that stream's");
        let mut called = false;
        assert!(parts.streams.with_default_of(Some(DeviceId(7)), || called = true).is_err() && !called);
    }

    const BUSY: Duration = Duration::from_millis(50);

    /// Creates a stream of a device and keeps it busy with a kernel.
    fn busy(parts: &Parts, device: u32, raw: Stream) -> Stream {
        parts.sim.enqueue_kernel(DeviceId(device), raw, &[], &[], BUSY, |_| {}).unwrap();
        raw
    }

    /// Frees a recorded block of the second GPU and returns whether its memory is held back until the running work is done.
    fn waits(parts: &Parts, raw: Stream) -> bool {
        let started = parts.registry.started(parts.registry.device(1).unwrap()).unwrap();
        started.stop();
        let block = parts.block(1, Bytes::mib(32));
        parts.streams.record(started, block, raw).unwrap();
        let begin = parts.sim.now();
        started.pool.free(block).unwrap();
        // Its own stream asks first, then any other.
        let again = parts.block(1, Bytes::mib(32));
        let is_early = again == block && parts.sim.now() < begin + BUSY;
        started.pool.free(again).unwrap();
        started.pool.settle().unwrap();
        let is_late = parts.sim.now() >= begin + BUSY;
        started.pool.trim(Bytes::ZERO).unwrap();
        assert_eq!(started.pool.reserved(), Bytes::ZERO);
        !is_early && is_late
    }

    #[test]
    fn memory_waits_for_streams_of_every_device() {
        let parts = || Parts::with(Clock::Virtual);
        for device in [0, 1] {
            let parts = parts();
            let raw = parts.streams.create(device.into()).unwrap();
            assert!(waits(&parts, busy(&parts, device, raw)), "a stream of GPU {device}");
            assert!(waits(&parts, busy(&parts, device, raw)), "a known stream of GPU {device}");
        }
        // The current device is the first one; the block's is the second.
        for raw in [Stream(0), Stream::LEGACY, Stream::PER_THREAD] {
            for device in [0, 1] {
                let parts = parts();
                busy(&parts, device, raw);
                assert!(waits(&parts, raw), "{raw:?} of GPU {device}");
            }
        }
    }

    #[test]
    fn a_stream_that_does_not_say_which_it_is_counts_as_another() {
        let parts = Parts::with(Clock::Virtual);
        let driver = parts.streams.driver().clone();
        let ours = OwnedStream::new(&driver.own_contexts().unwrap(), DeviceId(1)).unwrap();
        busy(&parts, 1, parts.streams.create(1).unwrap());
        assert!(waits(&parts, ours.id()), "of another context");
        drop(ours);
    }

    #[test]
    fn a_handle_that_names_no_stream_is_told_of_and_the_block_waits() {
        let parts = Parts::with(Clock::Virtual);
        let started = parts.registry.started(parts.registry.device(1).unwrap()).unwrap();
        started.stop();
        let block = parts.block(1, Bytes::mib(32));
        busy(&parts, 1, parts.streams.create(1).unwrap());
        assert!(parts.streams.record(started, block, Stream(0x7777)).is_err());
        started.pool.free(block).unwrap();
        assert_ne!(parts.block(1, Bytes::mib(32)), block);
    }
}

/// Table of the created streams that exist.
#[derive(Debug, Default)]
pub(super) struct MadeStreams {
    streams: Mutex<HashMap<(DeviceId, Stream), OwnedStream>>,
}

impl MadeStreams {
    pub(super) fn create(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> glake_device::Result<Stream> {
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
