//! Streams for offload copies: one for each direction and GPU.
//!
//! ```text
//! program:  … work ─ fork                    a fork: recorded and waited for in one step, under the queue's lock
//! queue:            └─ [mark] ─ start ─ copy, over every link ─ end
//! ```
//!
//! The time between a copy's two events is its run time: waits for the program's work or for a mark come before the first. The copies of a
//! queue run one after another, so that their sum is the time in which the queue moved bytes. Querying a copy's time costs the host more
//! than enqueuing it, so only a sample of small copies is timed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::{Digesting, Digests, OwnedEvent, OwnedStream, Span};
use glake_device::{DeviceId, Driver, EventKind, StreamId};
use glake_transfer::paths::Direction;
use glake_transfer::{CopyHandle, CopyOptions, Engine, UserStream};
use glake_units::Bytes;
use rustc_hash::FxHashMap;

use super::super::device_registry::DeviceRegistry;
use super::super::{ProcessError, Result};
use super::entries::Away;
use super::host_memory::HostRange;
use crate::sync::Mutex;

/// Maximum number of copies timed at once; for further ones only bytes are counted.
const MOST: usize = 4096;
/// Size below which a copy is small, so that only a sample is timed.
const SMALL: Bytes = Bytes::mib(4);
const ONE_IN: u64 = 8;
/// Number of used events checked before another is created, which bounds their total.
const LOOKS: usize = 8;

/// Bytes and times that a queue has moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) copies: u64,
    pub(super) bytes: Bytes,
    /// Bytes of the finished, timed copies; `busy` is their run time.
    pub(super) timed: Bytes,
    pub(super) busy: Duration,
}

/// A timed copy between its two events.
#[derive(Debug)]
struct Running {
    start: Arc<OwnedEvent>,
    end: Arc<OwnedEvent>,
    size: Bytes,
}

/// Queue of one direction of a GPU.
#[derive(Debug)]
pub(super) struct Queue {
    engine: Arc<Engine>,
    driver: Arc<dyn Driver>,
    on: UserStream,
    stream: OwnedStream,
    /// Fork event of the queue's own device; a fork from another device's stream uses an event of that device.
    fork: OwnedEvent,
    running: VecDeque<Running>,
    /// Used events, which may be reused once no other holder exists.
    events: VecDeque<Arc<OwnedEvent>>,
    moved: Moved,
}

impl Queue {
    fn new(registry: &DeviceRegistry, device: DeviceId) -> Result<Queue> {
        let engine = registry.engine()?.clone();
        let driver = registry.completion_events.driver().clone();
        let stream = OwnedStream::new(&driver, device)?;
        let on = UserStream::of(&*driver, device, stream.id())?;
        let fork = OwnedEvent::new(&driver, device, EventKind::Plain)?;
        // If a driver has no event for a whole context, completion points cover the known streams.
        registry.completion_events.know(device, stream.id());
        let (running, events, moved) = Default::default();
        Ok(Queue { engine, driver, on, stream, fork, running, events, moved })
    }

    /// Enqueues a copy to the host after the work on a stream of the program so far.
    ///
    /// # Errors
    /// The driver's error; enqueued work is finished then.
    pub(super) fn copy_out(
        &mut self,
        behind: UserStream,
        to: &HostRange,
        from: &Span,
    ) -> Result<(Arc<OwnedEvent>, Vec<CopyHandle>)> {
        self.fork(behind)?;
        if let Some(mark) = &to.mark {
            self.stream.wait_for(mark.event.id())?;
        }
        self.copy(&to.beside(from))
    }

    /// Enqueues a digest of bytes after the work on a stream of the program so far.
    ///
    /// # Errors
    /// The driver's error; enqueued work is finished then.
    pub(super) fn digest(&mut self, behind: UserStream, digests: &Digests, from: &Span) -> Result<Digesting> {
        self.fork(behind)?;
        let enqueued = digests.enqueue(self.on.raw, std::slice::from_ref(from)).map(Digesting::let_go);
        Ok(enqueued.inspect_err(|_| self.finish())?)
    }

    /// Makes the next copy wait for the work on a stream of the program so far.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn follow(&mut self, behind: UserStream) -> Result<()> {
        self.fork(behind)
    }

    /// Makes the next copy wait for an event.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn wait_for(&self, event: &OwnedEvent) -> Result<()> {
        Ok(self.stream.wait_for(event.id())?)
    }

    /// Returns an event behind the copies enqueued so far.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn mark(&mut self) -> Result<Arc<OwnedEvent>> {
        let event = self.event()?;
        event.record(self.on.raw)?;
        Ok(event)
    }

    /// Enqueues a copy from the host after the copy out and the work on a stream of the program so far. Returns its number too.
    ///
    /// # Errors
    /// As [`Queue::copy_out`].
    pub(super) fn copy_in(
        &mut self,
        behind: UserStream,
        to: &Span,
        away: &Away,
    ) -> Result<(Arc<OwnedEvent>, u64, Vec<CopyHandle>)> {
        self.fork(behind)?;
        self.stream.wait_for(away.out.id())?;
        let pairs = away.taken.beside(to).into_iter();
        let (event, handles) = self.copy(&pairs.map(|(host, gpu)| (gpu, host)).collect::<Vec<_>>())?;
        Ok((event, self.moved.copies, handles))
    }

    /// Returns the stream on which the copies run.
    pub(super) fn id(&self) -> StreamId {
        self.on.id
    }

    /// Returns the raw handle of the stream.
    #[cfg(test)]
    #[cfg(not(schedules))]
    pub(super) fn stream(&self) -> glake_device::Stream {
        self.on.raw
    }

    /// Waits on the host for enqueued work after a failure, whose progress is unknown. Errors are ignored: the device is lost then.
    pub(super) fn finish(&mut self) {
        let _lost = self.stream.synchronize();
    }

    /// Returns the bytes and times moved so far.
    pub(super) fn moved(&mut self) -> Moved {
        self.poll();
        self.moved
    }

    fn fork(&mut self, behind: UserStream) -> Result<()> {
        if behind.device == self.on.device {
            self.fork.record(behind.raw)?;
            self.stream.wait_for(self.fork.id())?;
            return Ok(());
        }
        let fork = OwnedEvent::new(&self.driver, behind.device, EventKind::Plain)?;
        fork.record(behind.raw)?;
        Ok(self.stream.wait_for(fork.id())?)
    }

    /// Enqueues one copy in parts, each from the second span to the first. Returns its end and the parts that use relays.
    fn copy(&mut self, parts: &[(Span, Span)]) -> Result<(Arc<OwnedEvent>, Vec<CopyHandle>)> {
        let size: Bytes = parts.iter().map(|(to, _)| to.size()).sum();
        let start = self.start(size)?;
        let end = self.event()?;
        // The end of all parts is recorded below.
        let options = CopyOptions { waited: false, ..CopyOptions::default() };
        let copies = parts.iter().map(|(to, from)| self.engine.copy(to, from, self.on, options));
        let copies = copies.filter(|copied| copied.as_ref().map_or(true, CopyHandle::is_split));
        let copied: std::result::Result<Vec<CopyHandle>, _> = copies.collect();
        let marked = copied.map_err(ProcessError::from).and_then(|handles| {
            end.record(self.on.raw)?;
            Ok(handles)
        });
        let handles = match marked {
            Ok(handles) => handles,
            Err(error) => {
                self.finish();
                return Err(error);
            }
        };
        self.moved.copies += 1;
        self.moved.bytes = self.moved.bytes.saturating_add(size);
        if let Some(start) = start {
            self.running.push_back(Running { start, end: end.clone(), size });
        }
        Ok((end, handles))
    }

    /// Records a start event for a copy of `size` bytes if it is timed.
    fn start(&mut self, size: Bytes) -> Result<Option<Arc<OwnedEvent>>> {
        if size < SMALL && !self.moved.copies.is_multiple_of(ONE_IN) {
            return Ok(None);
        }
        self.poll();
        if self.running.len() >= MOST {
            return Ok(None);
        }
        let start = self.event()?;
        start.record(self.on.raw)?;
        Ok(Some(start))
    }

    /// Returns an event without another holder.
    fn event(&mut self) -> Result<Arc<OwnedEvent>> {
        // The oldest event is the likeliest to be unused.
        for _ in 0..LOOKS.min(self.events.len()) {
            self.events.rotate_left(1);
            if let Some(event) = self.events.back().filter(|event| Arc::strong_count(event) == 1) {
                return Ok(event.clone());
            }
        }
        let event = Arc::new(OwnedEvent::new(&self.driver, self.on.device, EventKind::Timed)?);
        self.events.push_back(event.clone());
        Ok(event)
    }

    /// Reads the times of finished copies. Unknown times are no error.
    fn poll(&mut self) {
        while let Some(Running { start, end, size }) =
            self.running.pop_front_if(|running| !matches!(running.end.is_passed(), Ok(false)))
        {
            if let Ok(micros) = end.since(&start) {
                self.moved.timed = self.moved.timed.saturating_add(size);
                self.moved.busy += Duration::from_secs_f64(micros.max(0.0) / 1e6);
            }
        }
    }
}

/// Queues of a process, created at first use.
#[derive(Debug)]
pub(super) struct Queues {
    registry: Arc<DeviceRegistry>,
    queues: Mutex<FxHashMap<(DeviceId, Direction), SharedQueue>>,
}

/// A queue with its lock, held while a copy is enqueued so that its waits come first.
pub(super) type SharedQueue = Arc<Mutex<Queue>>;

impl Queues {
    pub(super) fn new(registry: &Arc<DeviceRegistry>) -> Queues {
        Queues { registry: registry.clone(), queues: Mutex::default() }
    }

    pub(super) fn driver(&self) -> &dyn Driver {
        &**self.registry.completion_events.driver()
    }

    /// Returns the queue of a device.
    ///
    /// # Errors
    /// Errors of creating the engine, a stream or an event.
    pub(super) fn of(&self, device: DeviceId, direction: Direction) -> Result<SharedQueue> {
        let mut queues = self.queues.lock();
        if let Some(queue) = queues.get(&(device, direction)) {
            return Ok(queue.clone());
        }
        let queue = Arc::new(Mutex::new(Queue::new(&self.registry, device)?));
        queues.insert((device, direction), queue.clone());
        Ok(queue)
    }

    /// Returns the bytes that a device's queue has moved; `None` if there is no queue.
    pub(super) fn moved_of(&self, device: DeviceId, direction: Direction) -> Option<Moved> {
        let queue = self.queues.lock().get(&(device, direction)).cloned()?;
        (!self.registry.is_stopped()).then(|| queue.lock().moved())
    }

    /// Returns the bytes that all queues of a direction have moved.
    pub(super) fn moved(&self, direction: Direction) -> Moved {
        let queues: Vec<_> = self.queues.lock().iter().map(|(key, queue)| (*key, queue.clone())).collect();
        let mut all = Moved::default();
        for (_, queue) in queues.into_iter().filter(|((_, way), _)| *way == direction) {
            // Asks the driver whether copies are over.
            let mut queue = queue.lock();
            let one = if self.registry.is_stopped() { queue.moved } else { queue.moved() };
            all.copies += one.copies;
            all.bytes = all.bytes.saturating_add(one.bytes);
            all.timed = all.timed.saturating_add(one.timed);
            all.busy += one.busy;
        }
        all
    }
}
