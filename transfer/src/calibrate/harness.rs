//! Calibration trials: their resources and the measurement of one. The resources are streams and events of every GPU, peer-accessible
//! memory on every GPU, and pinned host memory.
//!
//! ```text
//!   source  ███ a pattern ███      a place a leg, moved on a little each trial; nothing writes it
//!   sink    ░░░░░░░░░░░░░░░░░      the same places, for copies from GPUs
//!   a GPU   ░░ inbox ░░░░░░░░ │ ███ outbox: the pattern ███ │ slots
//! ```
//!
//! The byte pattern identifies the source of a copy: every 64-bit word is unique.
//!
//! The legs of a trial are forked from a stream of the first leg's target and joined to it, as in a copy. The stream is idle at
//! the fork, so that no lane waits.

use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::{
    self, Buffer, CompletionEvents, DeviceSet, OwnedEvent, OwnedStream, Pages, Registration, Span,
};
use glake_device::{DeviceId, Driver, DriverError, EventKind, Stream};
use glake_units::{Bytes, Micros};
use tracing::warn;

use super::position;
use crate::Result;
use crate::paths::trials::{Leg, Trial};
use crate::paths::{Direction, MANY_RELAYS, Way};

/// Distance between the memory of two legs. Not a power of two, so that links reading memory in step do not conflict.
const APART: Bytes = Bytes::kib(1084);
/// Distance by which each trial moves its memory, and the number of trials before it wraps around.
const SHIFT: (Bytes, u64) = (Bytes::kib(4), 64);
/// Number and size of the slots in a relay's memory through which copies are staged.
pub(super) const SLOTS: usize = 4;
pub(super) const SLOT: Bytes = Bytes::mib(2);
/// Number and size of the parts compared in a large copy, spread evenly from its beginning to its end.
const PARTS: u64 = 16;
const PART: Bytes = Bytes::kib(16);
/// Threads that touch and fill pinned memory.
const THREADS: usize = 16;
/// Bytes pinned to estimate the speed of pinning.
const SAMPLE: Bytes = Bytes::mib(8);
/// Minimum leg size, even if pinning it exceeds the time limit.
const LEAST: Bytes = Bytes::mib(4);

/// Streams and events of one GPU.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) device: DeviceId,
    /// Stream on which the GPU's trials begin and end, and on which it relays.
    pub(super) stream: OwnedStream,
    /// Stream that forwards staged bytes.
    pub(super) second: OwnedStream,
    pub(super) begun: OwnedEvent,
    pub(super) ended: OwnedEvent,
    pub(super) fork: OwnedEvent,
    pub(super) done: OwnedEvent,
    /// Events of each slot: filled, drained.
    pub(super) slots: Vec<(OwnedEvent, OwnedEvent)>,
}

/// Lanes of the GPUs, and the GPUs without one.
#[derive(Debug)]
pub(super) struct Lanes {
    lanes: Vec<Lane>,
    failed: DeviceSet,
}

/// Resources shared by all trials.
#[derive(Debug)]
pub(super) struct Harness {
    pub(super) driver: Arc<dyn Driver>,
    lanes: Vec<Lane>,
    devices: Vec<DeviceId>,
    /// Indexed like the lanes.
    memory: Vec<Arc<Buffer>>,
    source: Arc<Registration>,
    sink: Arc<Registration>,
    largest: Bytes,
    /// Size of one inbox or outbox.
    size: Bytes,
    failed: DeviceSet,
}

impl Lanes {
    /// Creates the contexts of all GPUs concurrently.
    ///
    /// # Errors
    /// What the driver answered for the first GPU, where no GPU has a lane.
    pub(super) fn new(
        completion_events: &Arc<CompletionEvents>,
        devices: impl Iterator<Item = DeviceId>,
    ) -> Result<Lanes> {
        let driver = completion_events.driver();
        let made = at_once(devices, |device| Lane::new(driver, device))?;
        let (lanes, failed) = parted(made, "has no streams")?;
        Ok(Lanes { lanes, failed })
    }

    pub(super) fn failed(&self) -> DeviceSet {
        self.failed
    }
}

impl Lane {
    fn new(driver: &Arc<dyn Driver>, device: DeviceId) -> std::result::Result<Lane, DriverError> {
        let event = |kind| OwnedEvent::new(driver, device, kind);
        let slot = |_| Ok((event(EventKind::Plain)?, event(EventKind::Plain)?));
        Ok(Lane {
            device,
            stream: OwnedStream::new(driver, device)?,
            second: OwnedStream::new(driver, device)?,
            begun: event(EventKind::Timed)?,
            ended: event(EventKind::Timed)?,
            fork: event(EventKind::Plain)?,
            done: event(EventKind::Plain)?,
            slots: (0..SLOTS).map(slot).collect::<std::result::Result<_, _>>()?,
        })
    }

    /// Waits for all work enqueued on the lane.
    pub(super) fn synchronize(&self) -> std::result::Result<(), Fault> {
        let waited = self.stream.synchronize().and_then(|()| self.second.synchronize());
        waited.map_err(|error| Fault { device: self.device, error })
    }
}

impl Harness {
    /// Allocates memory for trials with one leg per GPU: `wanted` bytes, or fewer if that would take longer than `time`.
    ///
    /// # Errors
    /// What pinning answers; what the driver answered for the first GPU, where none has memory.
    pub(super) fn new(
        completion_events: &Arc<CompletionEvents>,
        lanes: Lanes,
        wanted: Bytes,
        time: Duration,
        clock: &dyn Fn() -> Duration,
    ) -> Result<Harness> {
        let driver = completion_events.driver().clone();
        let Lanes { lanes, failed } = lanes;
        let threads = std::thread::available_parallelism().map_or(1, |count| count.get().min(THREADS));
        let places = lanes.len() as u64;
        let since = clock();
        fill(&mut Registration::new(completion_events, Pages::new(SAMPLE, threads)?)?, threads);
        let sample = clock().saturating_sub(since);
        let largest = affordable(wanted, sample, time, 2 * places);
        let shifts = SHIFT.0.get() * SHIFT.1;
        let place = largest.get().saturating_add(APART.get());
        let size = Bytes::new(place.saturating_mul(places).saturating_add(shifts));
        let mut source = Registration::new(completion_events, Pages::new(size, threads)?)?;
        fill(&mut source, threads);
        let source = Arc::new(source);
        let sink = Arc::new(Registration::new(completion_events, Pages::new(size, threads)?)?);
        let all: DeviceSet = lanes.iter().map(|lane| lane.device).collect();
        let made = at_once(lanes.iter().map(|lane| lane.device), |device| {
            let whole = Bytes::new(2 * size.get() + SLOT.get() * SLOTS as u64);
            let memory = Arc::new(reachable(completion_events, device, whole, all)?);
            let lane = lanes.iter().find(|lane| lane.device == device);
            if let (Some(lane), Some(outbox), Some(from)) =
                (lane, memory.span(size, size), Span::pinned(&source, Bytes::ZERO, size))
            {
                owned::copy(&*driver, device, lane.stream.id(), &outbox, &from)?;
                lane.stream.synchronize()?;
            }
            Ok(memory)
        })?;
        let (memory, without) = parted(made, "has no memory for trials")?;
        let lanes: Vec<Lane> = lanes.into_iter().filter(|lane| !without.contains(lane.device)).collect();
        Ok(Harness {
            driver,
            devices: lanes.iter().map(|lane| lane.device).collect(),
            lanes,
            memory,
            source,
            sink,
            largest,
            size,
            failed: failed.union(without),
        })
    }

    pub(super) fn failed(&self) -> DeviceSet {
        self.failed
    }

    /// Returns the largest leg size that the memory allows.
    pub(super) fn largest(&self) -> Bytes {
        self.largest
    }

    pub(super) fn lane(&self, device: DeviceId) -> Option<&Lane> {
        self.lanes.get(position(&self.devices, device)?)
    }

    fn memory(&self, device: DeviceId) -> Option<&Arc<Buffer>> {
        self.memory.get(position(&self.devices, device)?)
    }

    /// Returns whether the memory is sufficient for a trial.
    pub(super) fn holds(&self, trial: &Trial) -> bool {
        let held = |leg: &Leg| {
            let touched = self.end(leg.target, Bytes::ZERO, leg.size);
            self.lane(leg.relay).is_some()
                && touched.is_some_and(|span| span.reach().contains(leg.relay))
                && leg.size <= self.largest
        };
        !trial.legs.is_empty() && trial.legs.len() <= self.lanes.len() && trial.legs.iter().all(held)
    }

    /// Returns destination and source of a leg. `index` is its position in the trial; `turn` counts trials.
    pub(super) fn ends(
        &self,
        direction: Direction,
        leg: &Leg,
        index: usize,
        turn: u64,
    ) -> Option<(Span, Span)> {
        let at = self.place(index, turn);
        match direction {
            Direction::ToGpu => {
                Some((self.end(leg.target, at, leg.size)?, Span::pinned(&self.source, at, leg.size)?))
            }
            Direction::FromGpu => Some((
                Span::pinned(&self.sink, at, leg.size)?,
                self.end(leg.target, Bytes::new(self.size.get() + at.get()), leg.size)?,
            )),
        }
    }

    /// Returns the first `size` bytes of a slot of a relay.
    pub(super) fn slot(&self, relay: DeviceId, slot: usize, size: Bytes) -> Option<Span> {
        let at = Bytes::new(2 * self.size.get() + SLOT.get() * slot as u64);
        self.end(relay, at, size.min(SLOT))
    }

    fn end(&self, device: DeviceId, at: Bytes, size: Bytes) -> Option<Span> {
        self.memory(device)?.span(at, size)
    }

    fn place(&self, index: usize, turn: u64) -> Bytes {
        let place = self.largest.get() + APART.get();
        Bytes::new(place * index as u64 + SHIFT.0.get() * (turn % SHIFT.1))
    }

    /// Returns whether a trial with one zero-staging relay delivered the bytes of the pattern; `true` for all other trials. Small copies
    /// are compared whole.
    pub(super) fn is_right(&self, trial: &Trial, turn: u64) -> std::result::Result<bool, Fault> {
        let [leg] = &trial.legs[..] else { return Ok(true) };
        if leg.way != Way::ZeroStaging {
            return Ok(true);
        }
        let at = self.place(0, turn);
        let mut found = vec![0_u8; bytes(PART)];
        for offset in parts(leg.size) {
            let size = PART.min(leg.size.saturating_sub(offset));
            let from = bytes(at) + bytes(offset);
            let Some(expected) = self.source.as_slice().get(from..from + bytes(size)) else {
                return Ok(false);
            };
            let found = match trial.direction {
                Direction::FromGpu => self.sink.as_slice().get(from..from + bytes(size)),
                Direction::ToGpu => {
                    let found = &mut found[..bytes(size)];
                    let Some(memory) = self.memory(leg.target) else { return Ok(false) };
                    let place = Bytes::new(at.get() + offset.get());
                    memory.read(place, found).map_err(|error| Fault { device: leg.target, error })?;
                    Some(&*found)
                }
            };
            if found != Some(expected) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Returns the largest leg size for which `legs` legs can be pinned within `time`, extrapolated from the time of one sample.
fn affordable(wanted: Bytes, sample: Duration, time: Duration, legs: u64) -> Bytes {
    if sample.is_zero() {
        return wanted;
    }
    let samples = u64::try_from(time.as_nanos() / sample.as_nanos()).unwrap_or(u64::MAX);
    let leg = Bytes::new(SAMPLE.get().saturating_mul(samples) / legs.max(1));
    wanted.min(leg.max(LEAST))
}

/// Returns the offsets of the compared parts: all parts of a small copy, evenly spread ones of a large copy.
fn parts(size: Bytes) -> impl Iterator<Item = Bytes> {
    let all = size.get().div_ceil(PART.get());
    let count = all.min(PARTS);
    let last = size.get().saturating_sub(PART.get());
    (0..count).map(move |index| {
        Bytes::new(if all <= PARTS { index * PART.get() } else { last * index / (count - 1) })
    })
}

/// Allocates memory that all other GPUs can access, or as many of them as support it.
fn reachable(
    completion_events: &Arc<CompletionEvents>,
    device: DeviceId,
    size: Bytes,
    all: DeviceSet,
) -> std::result::Result<Buffer, DriverError> {
    let denied = match Buffer::new(completion_events, device, size, all) {
        Ok(memory) => return Ok(memory),
        Err(denied) => denied,
    };
    let reaches =
        |peer: &DeviceId| Buffer::new(completion_events, device, Bytes::new(1), DeviceSet::of(*peer)).is_ok();
    let others = all.without(DeviceSet::of(device));
    let some: DeviceSet = others.iter().filter(reaches).collect();
    if some == others { Err(denied) } else { Buffer::new(completion_events, device, size, some) }
}

/// Runs `make` for all devices concurrently, one thread each: most of the time is spent in the driver.
fn at_once<T: Send>(
    devices: impl Iterator<Item = DeviceId>,
    make: impl Fn(DeviceId) -> std::result::Result<T, DriverError> + Sync,
) -> Result<Vec<(DeviceId, std::result::Result<T, DriverError>)>> {
    let make = &make;
    std::thread::scope(|scope| {
        let spawn = |device| {
            let thread = std::thread::Builder::new().name("glake-calibrate".to_owned());
            let made = thread.spawn_scoped(scope, move || make(device));
            made.map(|made| (device, made)).map_err(crate::TransferError::NoThread)
        };
        let threads = devices.map(spawn).collect::<Result<Vec<_>>>()?;
        let end = |(device, thread): (DeviceId, std::thread::ScopedJoinHandle<'_, _>)| {
            (device, thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        };
        Ok(threads.into_iter().map(end).collect())
    })
}

/// Separates the results from the devices that failed.
fn parted<T>(
    made: Vec<(DeviceId, std::result::Result<T, DriverError>)>,
    what: &'static str,
) -> Result<(Vec<T>, DeviceSet)> {
    let (mut things, mut failed, mut first) = (Vec::new(), DeviceSet::EMPTY, None);
    for (device, made) in made {
        match made {
            Ok(thing) => things.push(thing),
            Err(error) => {
                warn!(target: "glake::transfer", %device, %error, "{what}: it is left out of the calibration");
                failed = failed.union(DeviceSet::of(device));
                first = first.or(Some(error));
            }
        }
    }
    match first {
        Some(error) if things.is_empty() => Err(error.into()),
        _ => Ok((things, failed)),
    }
}

fn bytes(size: Bytes) -> usize {
    usize::try_from(size.get()).unwrap_or(usize::MAX)
}

/// Bytes that one thread fills at a time.
const FILL_PART: usize = 4 << 20;

/// Fills memory with the pattern, using `threads` threads.
pub(super) fn fill(memory: &mut Registration, threads: usize) {
    let bytes = memory.as_mut_slice();
    let share = bytes.len().div_ceil(threads.max(1)).next_multiple_of(FILL_PART);
    std::thread::scope(|scope| {
        for (index, part) in bytes.chunks_mut(share).enumerate() {
            scope.spawn(move || {
                let first = (index * share / 8) as u64;
                for (word, place) in (first..).zip(part.chunks_exact_mut(8)) {
                    place.copy_from_slice(&mix(word).to_le_bytes());
                }
            });
        }
    });
}

/// Mixing step of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators), a bijection.
fn mix(word: u64) -> u64 {
    let mut z = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// GPU that failed during a trial, with the error.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) device: DeviceId,
    pub(super) error: DriverError,
}

type Outcome<T> = std::result::Result<T, Fault>;

/// Returns the median time from fork to join of a trial, after one warm-up run. All work has completed on return, also after an error.
pub(super) fn measure(harness: &Harness, trial: &Trial, turn: u64) -> Outcome<Micros> {
    let mut times = Vec::new();
    for run in 0..=trial.repeats {
        let took = once(harness, trial, turn);
        let ended = lanes(harness, trial).map(Lane::synchronize).fold(Ok(()), std::result::Result::and);
        let took = took.and_then(|took| ended.map(|()| took))?;
        if run > 0 {
            times.push(took);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(Micros(times.get(times.len() / 2).copied().unwrap_or(f64::NAN)))
}

fn lanes<'a>(harness: &'a Harness, trial: &'a Trial) -> impl Iterator<Item = &'a Lane> {
    let targets = trial.legs.first().and_then(|leg| harness.lane(leg.target));
    let relays = trial.legs.iter().filter_map(|leg| harness.lane(leg.relay));
    targets.into_iter().chain(relays)
}

/// Returns the microseconds of one run.
fn once(harness: &Harness, trial: &Trial, turn: u64) -> Outcome<f64> {
    let Some(home) = trial.legs.first().and_then(|leg| harness.lane(leg.target)) else { return Ok(f64::NAN) };
    let at_home = |error| Fault { device: home.device, error };
    let stream = home.stream.id();
    home.begun.record(stream).map_err(at_home)?;
    let relayed = trial.legs.iter().filter(|leg| leg.relay != home.device).count();
    if relayed > 0 {
        home.fork.record(stream).map_err(at_home)?;
    }
    for (index, leg) in trial.legs.iter().enumerate() {
        let (Some(lane), Some(ends)) =
            (harness.lane(leg.relay), harness.ends(trial.direction, leg, index, turn))
        else {
            return Ok(f64::NAN);
        };
        let forked = |error| Fault { device: lane.device, error };
        if lane.device != home.device && relayed < MANY_RELAYS {
            lane.stream.wait_for(home.fork.id()).map_err(forked)?;
        }
        let last = enqueue(harness, lane, leg, &ends).map_err(forked)?;
        if lane.device != home.device {
            lane.done.record(last).map_err(forked)?;
        }
    }
    for lane in trial.legs.iter().filter_map(|leg| harness.lane(leg.relay)) {
        if lane.device != home.device {
            home.stream.wait_for(lane.done.id()).map_err(at_home)?;
        }
    }
    home.ended.record(stream).map_err(at_home)?;
    home.ended.synchronize().map_err(at_home)?;
    home.ended.since(&home.begun).map_err(at_home)
}

/// Enqueues a leg on its relay's lane. Returns the stream of its last operation.
fn enqueue(
    harness: &Harness,
    lane: &Lane,
    leg: &Leg,
    (to, from): &(Span, Span),
) -> glake_device::Result<Stream> {
    match leg.way {
        Way::Direct | Way::ZeroStaging => {
            owned::copy(&*harness.driver, lane.device, lane.stream.id(), to, from)?;
            Ok(lane.stream.id())
        }
        Way::Staged => staged(harness, lane, to, from),
    }
}

/// Enqueues a staged leg: one stream fills the relay's slots, the other one drains them.
fn staged(harness: &Harness, lane: &Lane, to: &Span, from: &Span) -> glake_device::Result<Stream> {
    let (fill, drain) = (lane.stream.id(), lane.second.id());
    let mut offset = Bytes::ZERO;
    let mut turn = 0;
    while offset < from.size() {
        let size = SLOT.min(from.size().saturating_sub(offset));
        let slot = turn % lane.slots.len().max(1);
        let (Some((filled, drained)), Some(buffer), Some(to), Some(from)) = (
            lane.slots.get(slot),
            harness.slot(lane.device, slot, size),
            to.part(offset, size),
            from.part(offset, size),
        ) else {
            break;
        };
        if turn >= lane.slots.len() {
            lane.stream.wait_for(drained.id())?;
        }
        owned::copy(&*harness.driver, lane.device, fill, &buffer, &from)?;
        filled.record(fill)?;
        lane.second.wait_for(filled.id())?;
        owned::copy(&*harness.driver, lane.device, drain, &to, &buffer)?;
        drained.record(drain)?;
        offset = offset.saturating_add(size);
        turn += 1;
    }
    Ok(drain)
}
