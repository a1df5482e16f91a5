//! Completion points: moments by which everything enqueued before, on any stream of a context, is known to be done.
//!
//! Every completion point has a sequence number, drawn before its events are recorded. A mark draws the number that the next completion
//! point will get: a completion point of at least that number covers all work enqueued before the mark. Both draws are read-modify-writes
//! of one atomic, so that a mark that is not covered is never taken for covered.
//!
//! A device's completion points do not cover work that accesses its memory from another context. Internal work of that kind that is not
//! joined into the device's context is registered ([`CompletionEvents::outside`]) and becomes part of the device's completion points until
//! it is done. A mark of such work is shared by the points that wait for it. No lock is held during such a wait: the thread that records
//! the next point may have to enqueue the awaited work.
//!
//! A device without a context has no work: a completion point covers it without an event. [`CompletionEvents::release_context`] releases a
//! context, because events are created in it: once all work there is done, they have completed and are destroyed too, even if points still
//! hold their cells.
//!
//! ```text
//!   RecordedPoint ─► Cell ◄─ all, idle             a cell holds its event until the device's context is released;
//!            [event]                          a completion point that finds its cell empty has completed there
//! ```

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use hold::Holds;
use parking_lot::{Mutex, RwLock};

use super::DeviceSet;
use crate::{
    Address, CaptureState, DeviceId, Driver, DriverError, Event, EventKind, Refusal, Result, Stream,
    StreamId, Verb,
};

pub use hold::{CaptureHold, SeenCapture, may_ask, this_thread};

mod hold;
#[cfg(test)]
mod tests;

/// Sequence number of completion points and marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence(u64);

/// Proof that all work enqueued on some devices before some moment is done. Proofs never expire.
#[derive(Clone, Copy, Debug)]
pub struct CompletionProof {
    source: u64,
    sequence: Sequence,
    devices: DeviceSet,
}

/// Completion clock of a driver, shared by all users of its memory.
#[derive(Debug)]
pub struct CompletionEvents {
    driver: Arc<dyn Driver>,
    source: u64,
    sequence: AtomicU64,
    /// Events by device. In steady state none is created or destroyed.
    events: Mutex<HashMap<DeviceId, Events>>,
    /// Devices whose contexts are being released and where nothing is recorded: the bits of a [`DeviceSet`].
    quiet: AtomicU64,
    /// Captures that are open or about to begin. Held for reading while events are recorded, which would invalidate a capture that began in
    /// between.
    holds: RwLock<Holds>,
    /// Whether the driver has an event for a whole context.
    whole: AtomicBool,
    known: Mutex<HashMap<DeviceId, Vec<Stream>>>,
    /// Work on a device's memory that its own context does not wait for, by the device that owns the memory.
    outside: Outside,
}

/// A recorded completion point; dropping it returns its events.
#[derive(Debug)]
pub struct RecordedPoint {
    completion_events: Arc<CompletionEvents>,
    sequence: Sequence,
    devices: DeviceSet,
    pending: Vec<Arc<Cell>>,
    /// Work that the devices' contexts do not wait for.
    outside: Vec<Mark>,
}

impl Sequence {
    /// The lowest number, covered by any completion point.
    pub const START: Sequence = Sequence(0);

    /// Returns the number, for callers that store it in a number of their own.
    pub fn get(self) -> u64 {
        self.0
    }
}

impl CompletionProof {
    /// Returns the sequence number: everything marked with it or a lower one is done.
    pub fn sequence(&self) -> Sequence {
        self.sequence
    }

    /// Returns the devices that the proof is about.
    pub fn devices(&self) -> DeviceSet {
        self.devices
    }

    /// Returns whether all work enqueued on `devices` before the mark is done.
    pub fn covers(&self, mark: Sequence, devices: DeviceSet) -> bool {
        mark <= self.sequence && devices.is_subset(self.devices)
    }
}

impl CompletionEvents {
    /// Creates the clock of a driver. Two clocks of one driver do not accept each other's proofs.
    pub fn new(driver: Arc<dyn Driver>) -> Arc<Self> {
        static SOURCES: AtomicU64 = AtomicU64::new(0);
        Arc::new(CompletionEvents {
            driver,
            source: SOURCES.fetch_add(1, Ordering::Relaxed),
            sequence: AtomicU64::new(0),
            events: Mutex::default(),
            quiet: AtomicU64::new(0),
            holds: RwLock::default(),
            whole: AtomicBool::new(true),
            known: Mutex::default(),
            outside: Outside::default(),
        })
    }

    /// Returns the driver of this clock.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Marks the present: work enqueued before this call is done once a completion point of the returned number has completed.
    pub fn mark(&self) -> Sequence {
        // A read-modify-write instead of a load: see the module's description.
        Sequence(self.sequence.fetch_add(0, Ordering::AcqRel) + 1)
    }

    /// Records a completion point on each of `devices`: 0.14 us each on an H200. A device without a context has no work to wait for and
    /// gets no event.
    ///
    /// # Errors
    /// [`DriverError::Capturing`] while a [`CaptureHold`] lives (without any driver call) and while a capture that was seen is open.
    pub fn record(self: &Arc<Self>, devices: DeviceSet) -> Result<RecordedPoint> {
        let _none = self.unheld(Verb::EventRecordContext)?;
        let sequence = self.advance();
        let mut point = RecordedPoint {
            completion_events: self.clone(),
            sequence,
            devices,
            pending: Vec::new(),
            outside: Vec::new(),
        };
        for device in devices.iter() {
            point.outside.extend(self.outside.pending(device));
            if self.is_quiet(device) {
                // Its events are about to be destroyed.
                self.driver.context_synchronize(device)?;
            } else if self.driver.has_context(device)? {
                self.record_on(device, &mut point.pending)?;
            }
        }
        Ok(point)
    }

    /// Records an event on a stream whose handle may be stale.
    ///
    /// # Errors
    /// [`DriverError::Capturing`] while a capture is open or about to begin; [`DriverError::is_gone`] if the handle names no stream or
    /// another one; any error of the driver.
    pub fn record_event(&self, event: &OwnedEvent, stream: Stream, id: StreamId) -> Result<()> {
        let verb = Verb::EventRecord;
        let _none = self.unheld(verb)?;
        if self.driver.stream_id(event.device(), stream)? != id {
            let reason = Refusal::UnknownHandle;
            return Err(DriverError::Refused { verb, address: Address(0), reason });
        }
        self.check_uncaptured(event.device(), stream)?;
        event.record(stream)
    }

    /// Releases the driver's hold on a device's context, with all events of this clock there, once its work is done.
    ///
    /// # Errors
    /// [`DriverError::Capturing`] while a [`CaptureHold`] lives. [`DriverError::ContextInUse`] while others' streams, events,
    /// modules or memory live there; [`DriverError::NotReady`] while calls run in it. The context stays, as it does where this
    /// fails in another way.
    pub fn release_context(&self, device: DeviceId) -> Result<()> {
        self.outside.sweep();
        let quiet = Quiet::begin(self, device)?;
        // After this every earlier record there has completed, and `quiet` prevents new ones.
        self.driver.context_synchronize(device)?;
        let Events { all, idle } = self.events.lock().remove(&device).unwrap_or_default();
        drop(idle);
        let kept: Vec<Arc<Cell>> = all.into_iter().filter(|cell| !cell.empty()).collect();
        let released = self.driver.release_context(device);
        if !kept.is_empty() {
            self.events.lock().entry(device).or_default().all.extend(kept);
        }
        drop(quiet);
        released
    }

    /// Waits for all work of the devices, without events. CUDA allows it at any time.
    pub fn synchronize(&self, devices: DeviceSet) -> Result<CompletionProof> {
        let sequence = self.advance();
        for device in devices.iter() {
            self.outside.pending(device).iter().try_for_each(Mark::wait)?;
            self.driver.context_synchronize(device)?;
        }
        Ok(CompletionProof { source: self.source, sequence, devices })
    }

    /// Registers internal work on memory of some GPUs that was enqueued on a stream. The completion points of the stream's own device cover
    /// it anyway; those of the other GPUs, whose contexts do not wait for the stream, cover it from now on. While the stream is captured
    /// nothing is registered: a graph runs whenever it is launched.
    ///
    /// # Errors
    /// Any error of the driver; the work is done then, or its device is lost.
    pub fn enqueued_on(&self, memory: DeviceSet, (device, stream): (DeviceId, Stream)) -> Result<()> {
        let elsewhere = memory.without(DeviceSet::of(device));
        // If the query fails, recording the mark or the wait below reports the error.
        let captured = |state| matches!(state, Ok(CaptureState::Active(_) | CaptureState::Invalidated));
        if elsewhere.is_empty() || captured(self.driver.capture_state(device, stream)) {
            return Ok(());
        }
        for memory in elsewhere.iter() {
            let marked = OwnedEvent::new(&self.driver, device, EventKind::Plain)
                .and_then(|event| event.record(stream).map(|()| event));
            match marked {
                Ok(event) => self.outside(memory, event),
                Err(_) => self.driver.stream_synchronize(device, stream)?,
            }
        }
        Ok(())
    }

    /// Registers internal work on memory of `memory` that was enqueued in another context and ends where `done` was recorded. The
    /// completion points and waits of `memory` include it until it is done.
    pub fn outside(&self, memory: DeviceId, done: OwnedEvent) {
        self.outside.add(memory, done);
    }

    /// Returns the trivial proof: everything marked [`Sequence::START`] is done, on every device.
    pub fn start(&self) -> CompletionProof {
        CompletionProof { source: self.source, sequence: Sequence::START, devices: DeviceSet::ALL }
    }

    /// Registers a stream. If the driver has no event for a whole context (before CUDA 12.5), a completion point is an event on each
    /// registered stream and on the legacy one, and work on other streams is not covered.
    pub fn know(&self, device: DeviceId, stream: Stream) {
        let mut known = self.known.lock();
        let streams = known.entry(device).or_default();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    /// Removes a registered stream that is about to be destroyed.
    pub fn forget(&self, device: DeviceId, stream: Stream) {
        if let Some(streams) = self.known.lock().get_mut(&device) {
            streams.retain(|known| *known != stream);
        }
    }

    /// Returns whether a proof comes from this clock.
    pub(super) fn gave(&self, passed: &CompletionProof) -> bool {
        passed.source == self.source
    }

    fn advance(&self) -> Sequence {
        Sequence(self.sequence.fetch_add(1, Ordering::AcqRel) + 1)
    }

    fn record_on(&self, device: DeviceId, pending: &mut Vec<Arc<Cell>>) -> Result<()> {
        if self.whole.load(Ordering::Relaxed) {
            let cell = self.cell(device)?;
            match cell.with(OwnedEvent::record_context) {
                Err(DriverError::Unsupported { .. }) => {
                    self.give_back(cell);
                    self.whole.store(false, Ordering::Relaxed);
                }
                Ok(()) => {
                    pending.push(cell);
                    return Ok(());
                }
                Err(error) => {
                    self.give_back(cell);
                    return Err(error);
                }
            }
        }
        let mut streams = self.known.lock().get(&device).cloned().unwrap_or_default();
        streams.push(Stream::LEGACY);
        for stream in streams {
            match self.record_stream(device, stream, pending) {
                Err(error) if error.is_gone() && stream != Stream::LEGACY => {
                    // Work of the destroyed stream may still run, and no event can mark its end.
                    self.driver.context_synchronize(device)?;
                    self.forget(device, stream);
                }
                recorded => recorded?,
            }
        }
        Ok(())
    }

    fn record_stream(&self, device: DeviceId, stream: Stream, pending: &mut Vec<Arc<Cell>>) -> Result<()> {
        self.check_uncaptured(device, stream)?;
        let cell = self.cell(device)?;
        match cell.with(|event| event.record(stream)) {
            Ok(()) => {
                pending.push(cell);
                Ok(())
            }
            Err(error) => {
                self.give_back(cell);
                Err(error)
            }
        }
    }

    fn check_uncaptured(&self, device: DeviceId, stream: Stream) -> Result<()> {
        match self.driver.capture_state(device, stream)? {
            CaptureState::None => Ok(()),
            _ => Err(DriverError::Capturing { verb: Verb::EventRecord, code: DriverError::CAPTURING }),
        }
    }

    /// Returns a cell with an event and no other owner.
    fn cell(&self, device: DeviceId) -> Result<Arc<Cell>> {
        while let Some(idle) = self.events.lock().get_mut(&device).and_then(|events| events.idle.pop()) {
            // A cell may have become idle while its context was being released.
            if idle.event.lock().is_some() {
                return Ok(idle);
            }
        }
        let event = OwnedEvent::new(&self.driver, device, EventKind::Plain)?;
        let cell = Arc::new(Cell { device, event: Mutex::new(Some(event)) });
        self.events.lock().entry(device).or_default().all.push(cell.clone());
        Ok(cell)
    }

    /// Returns a cell for reuse, unless its event was destroyed.
    fn give_back(&self, cell: Arc<Cell>) {
        // Lock order everywhere: the table, then a cell.
        let mut events = self.events.lock();
        if cell.event.lock().is_some() {
            events.entry(cell.device).or_default().idle.push(cell);
        }
    }

    fn is_quiet(&self, device: DeviceId) -> bool {
        DeviceSet::from_bits(self.quiet.load(Ordering::Relaxed)).contains(device)
    }
}

impl RecordedPoint {
    /// Returns the sequence number of the point.
    pub fn sequence(&self) -> Sequence {
        self.sequence
    }

    /// Returns the proof if the point has completed. Never waits.
    pub fn poll(&mut self) -> Result<Option<CompletionProof>> {
        while let Some(mark) = self.outside.last() {
            if !mark.is_done()? {
                return Ok(None);
            }
            self.outside.pop();
        }
        while let Some(cell) = self.pending.last() {
            if !cell.is_passed()? {
                return Ok(None);
            }
            self.pop();
        }
        Ok(Some(self.passed()))
    }

    /// Blocks the calling thread until the point completes and returns the proof.
    pub fn wait(&mut self) -> Result<CompletionProof> {
        while let Some(mark) = self.outside.last() {
            mark.wait()?;
            self.outside.pop();
        }
        while let Some(cell) = self.pending.last() {
            cell.wait()?;
            self.pop();
        }
        Ok(self.passed())
    }

    fn passed(&self) -> CompletionProof {
        CompletionProof {
            source: self.completion_events.source,
            sequence: self.sequence,
            devices: self.devices,
        }
    }

    fn pop(&mut self) {
        if let Some(cell) = self.pending.pop() {
            self.completion_events.give_back(cell);
        }
    }
}

impl Drop for RecordedPoint {
    fn drop(&mut self) {
        while !self.pending.is_empty() {
            self.pop();
        }
    }
}

/// Events of one device, in use or idle.
#[derive(Debug, Default)]
struct Events {
    all: Vec<Arc<Cell>>,
    /// Cells available for the next completion points.
    idle: Vec<Arc<Cell>>,
}

/// Slot of an event, emptied when its context is released.
#[derive(Debug)]
struct Cell {
    device: DeviceId,
    event: Mutex<Option<OwnedEvent>>,
}

impl Cell {
    fn with(&self, mark: impl FnOnce(&OwnedEvent) -> Result<()>) -> Result<()> {
        match &*self.event.lock() {
            Some(event) => mark(event),
            None => Err(DriverError::NotReady { verb: Verb::EventRecord }),
        }
    }

    /// Returns whether the event has completed; true if its context was released.
    fn is_passed(&self) -> Result<bool> {
        self.event.lock().as_ref().map_or(Ok(true), OwnedEvent::is_passed)
    }

    fn wait(&self) -> Result<()> {
        self.event.lock().as_ref().map_or(Ok(()), OwnedEvent::synchronize)
    }

    /// Destroys the completed event. Returns false while another thread queries it.
    fn empty(&self) -> bool {
        match self.event.try_lock() {
            Some(mut event) => {
                *event = None;
                true
            }
            None => false,
        }
    }
}

/// Guard during which no event is created or recorded on a device.
#[derive(Debug)]
struct Quiet<'a> {
    completion_events: &'a CompletionEvents,
    device: DeviceId,
}

impl<'a> Quiet<'a> {
    fn begin(completion_events: &'a CompletionEvents, device: DeviceId) -> Result<Quiet<'a>> {
        let verb = Verb::ReleaseContext;
        completion_events.sweep_holds();
        // The write lock waits for threads that are recording.
        let holds = completion_events.holds.write();
        let bit = DeviceSet::of(device).bits();
        if holds.is_any() {
            return Err(DriverError::Capturing { verb, code: DriverError::CAPTURING });
        }
        match completion_events.quiet.fetch_or(bit, Ordering::Relaxed) & bit {
            0 => Ok(Quiet { completion_events, device }),
            _ => Err(DriverError::NotReady { verb }),
        }
    }
}

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        self.completion_events.quiet.fetch_and(!DeviceSet::of(self.device).bits(), Ordering::Relaxed);
    }
}

/// Number of new marks after which finished ones are swept: rarely enough to cost next to nothing.
const MORE: usize = 32;

/// Marks by the device that owns the memory.
#[derive(Debug, Default)]
struct Outside(Mutex<HashMap<DeviceId, DeviceMarks>>);

#[derive(Debug, Default)]
struct DeviceMarks {
    all: Vec<Mark>,
    /// Marks that were pending after the last sweep.
    left: usize,
}

/// End of work on the memory of another device.
#[derive(Clone, Debug)]
struct Mark(Arc<OwnedEvent>);

impl Outside {
    /// Adds the end of work on a device's memory.
    fn add(&self, memory: DeviceId, end: OwnedEvent) {
        let is_long = {
            let mut table = self.0.lock();
            let marks = table.entry(memory).or_default();
            marks.all.push(Mark(Arc::new(end)));
            marks.all.len() > 2 * marks.left + MORE
        };
        if is_long {
            drop(self.pending(memory));
        }
    }

    /// Returns the marks not known to be done and forgets the others.
    fn pending(&self, memory: DeviceId) -> Vec<Mark> {
        let Some(marks) = self.0.lock().get(&memory).map(|marks| marks.all.clone()) else {
            return Vec::new();
        };
        let is_done = |mark: &Mark| mark.is_done().unwrap_or(false);
        let (done, left): (Vec<_>, Vec<_>) = marks.into_iter().partition(is_done);
        if let Some(marks) = self.0.lock().get_mut(&memory) {
            marks.all.retain(|mark| !done.iter().any(|done| Arc::ptr_eq(&done.0, &mark.0)));
            marks.left = left.len();
        }
        left
    }

    /// Forgets marks whose work is done.
    fn sweep(&self) {
        let devices: Vec<DeviceId> = self.0.lock().keys().copied().collect();
        devices.into_iter().for_each(|device| drop(self.pending(device)));
    }
}

impl Mark {
    fn is_done(&self) -> Result<bool> {
        self.0.is_passed().or_else(|error| is_over(&error).then_some(true).ok_or(error))
    }

    fn wait(&self) -> Result<()> {
        self.0.synchronize().or_else(|error| is_over(&error).then_some(()).ok_or(error))
    }
}

/// Returns whether the context of a mark is lost or gone, so that none of its work runs any more.
fn is_over(error: &DriverError) -> bool {
    error.is_sticky() || error.is_gone()
}

/// Owner of an event of a device's context.
#[derive(Debug)]
pub struct OwnedEvent {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    event: Event,
}

impl OwnedEvent {
    /// Creates an event in a device's context.
    pub fn new(driver: &Arc<dyn Driver>, device: DeviceId, kind: EventKind) -> Result<Self> {
        let event = driver.event_create(device, kind)?;
        Ok(OwnedEvent { driver: driver.clone(), device, event })
    }

    /// Returns the raw event, for waits of streams. It is valid while this owner lives.
    pub fn id(&self) -> Event {
        self.event
    }

    /// Returns the device whose context the event belongs to.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Records the event on a stream.
    pub fn record(&self, stream: Stream) -> Result<()> {
        self.driver.event_record(self.device, self.event, stream)
    }

    /// Records the event for its whole context.
    pub fn record_context(&self) -> Result<()> {
        self.driver.event_record_context(self.device, self.event)
    }

    /// Returns whether the event has completed.
    pub fn is_passed(&self) -> Result<bool> {
        self.driver.event_query(self.device, self.event)
    }

    /// Blocks the calling thread until the event completes, asleep if it is [`EventKind::Sleeping`].
    pub fn synchronize(&self) -> Result<()> {
        self.driver.event_synchronize(self.device, self.event)
    }

    /// Returns the microseconds since another event; both must be timed and completed.
    pub fn since(&self, from: &OwnedEvent) -> Result<f64> {
        self.driver.event_elapsed(self.device, from.event, self.event)
    }
}

impl Drop for OwnedEvent {
    fn drop(&mut self) {
        // SAFETY: the event is alive and this owner's; waits already enqueued on it stay valid (CUDA keeps a
        // destroyed event until it has completed). If this fails, the event stays with its context.
        let _ = unsafe { self.driver.event_destroy(self.device, self.event) };
    }
}
