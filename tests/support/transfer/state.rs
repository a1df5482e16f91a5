//! State of a random program: its streams with the order that events give them, and its memory ranges with their expected contents.

use std::sync::Arc;

use glake_device::owned::{DeviceSet, Flag, OwnedEvent, OwnedStream, Span, StreamRef};
use glake_device::{Address, Compare, DeviceId, Driver, EventKind, KernelMemory, Stream, Touch};
use glake_sim::Simulator;
use glake_tiers::PoolStream;
use glake_transfer::UserStream;
use glake_units::Bytes;

/// A step, by lane and its position in the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) lane: usize,
    pub(super) step: u64,
}

#[derive(Debug)]
pub(super) struct Lane {
    driver: Arc<dyn Driver>,
    pub(super) user: UserStream,
    pub(super) pool: PoolStream,
    /// For each lane, the number of its steps that precede the next step of this lane.
    known: Vec<u64>,
    event: OwnedEvent,
    /// Flag that holds the stream back while its value is below `shut`.
    gate: Flag,
    shut: u32,
    /// Bit mask of the lanes held back that this lane depends on.
    pub(super) waits: u64,
    _stream: Option<OwnedStream>,
}

#[allow(clippy::unwrap_used)]
impl Lane {
    /// Creates a lane on a new stream, or on a default stream of the device.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        device: DeviceId,
        default: Option<Stream>,
        count: usize,
        gate: Flag,
    ) -> Lane {
        let own = default.is_none().then(|| OwnedStream::new(driver, device).unwrap());
        let raw = default.or(own.as_ref().map(OwnedStream::id)).unwrap();
        Lane {
            driver: driver.clone(),
            user: UserStream::of(&**driver, device, raw).unwrap(),
            pool: PoolStream::of(&**driver, device, raw).unwrap(),
            known: vec![0; count],
            event: OwnedEvent::new(driver, device, EventKind::Plain).unwrap(),
            gate,
            shut: 0,
            waits: 0,
            _stream: own,
        }
    }

    /// Begins a step of the lane with this index.
    pub(super) fn step(&mut self, index: usize) -> Use {
        self.known[index] += 1;
        Use { lane: index, step: self.known[index] }
    }

    /// Returns whether the next step of this lane is ordered after `other`.
    pub(super) fn is_after(&self, other: Use) -> bool {
        self.known[other.lane] >= other.step
    }

    /// Orders the next step of this lane after all work enqueued on `other`.
    pub(super) fn follow(&mut self, driver: &dyn Driver, other: &Lane) {
        other.event.record(other.user.raw).unwrap();
        driver.stream_wait_event(self.user.device, self.user.raw, other.event.id()).unwrap();
        self.waits |= other.waits;
        for (mine, theirs) in self.known.iter_mut().zip(&other.known) {
            *mine = (*mine).max(*theirs);
        }
    }

    /// Holds back the work enqueued from now on until [`Lane::let_go`].
    pub(super) fn hold(&mut self) {
        self.shut += 1;
        let on = StreamRef::new(&*self.driver, self.user.device, self.user.raw);
        self.gate.await_on(on, self.shut, Compare::AtLeast).unwrap();
    }

    pub(super) fn let_go(&mut self) {
        self.gate.set(self.shut);
    }
}

/// Distance of the marks in bytes: every part of a copy that takes its own path has some.
const STRIDE: usize = 64 << 10;
const LENGTH: usize = 64;

#[derive(Debug)]
pub(super) struct Place {
    pub(super) span: Span,
    /// Seed of the pattern that the place holds once its last write completes. `None`: its bytes are unknown.
    pub(super) seed: Option<u64>,
    pub(super) wrote: Option<Use>,
    pub(super) read: Vec<Use>,
}

impl Place {
    pub(super) fn new(span: Span) -> Place {
        Place { span, seed: None, wrote: None, read: Vec::new() }
    }

    /// Returns the uses that must precede a write to the place.
    pub(super) fn before_writing(&self) -> Vec<Use> {
        self.wrote.into_iter().chain(self.read.iter().copied()).collect()
    }

    pub(super) fn written(&mut self, by: Use, seed: Option<u64>) {
        self.wrote = Some(by);
        self.read.clear();
        self.seed = seed;
    }

    pub(super) fn read_by(&mut self, by: Use) {
        self.read.retain(|earlier| earlier.lane != by.lane);
        self.read.push(by);
    }

    pub(super) fn touch(&self) -> Touch {
        Touch { address: self.span.start(), size: self.span.size() }
    }
}

/// Writes a pattern from a kernel.
pub(super) fn mark(memory: &mut dyn KernelMemory, touch: Touch, seed: u64) {
    for at in (0..touch.size.get()).step_by(STRIDE) {
        // The next wait reports an invalid access.
        let _ = memory.write(Address(touch.address.0 + at), &pattern(seed, at));
    }
}

/// Returns whether memory holds a pattern.
pub(super) fn is_marked(read: &mut dyn FnMut(Address, &mut [u8]) -> bool, touch: Touch, seed: u64) -> bool {
    let mut found = [0; LENGTH];
    let mut offsets = (0..touch.size.get()).step_by(STRIDE);
    offsets.all(|at| read(Address(touch.address.0 + at), &mut found) && found == pattern(seed, at))
}

/// Writes a pattern into host memory.
pub(super) fn mark_bytes(bytes: &mut [u8], seed: u64) {
    for (at, part) in bytes.chunks_mut(STRIDE).enumerate() {
        let length = part.len().min(LENGTH);
        part[..length].copy_from_slice(&pattern(seed, (at * STRIDE) as u64)[..length]);
    }
}

/// Returns whether host memory holds a pattern.
pub(super) fn are_marked(bytes: &[u8], seed: u64) -> bool {
    let mut parts = bytes.chunks(STRIDE).enumerate();
    parts.all(|(at, part)| {
        let length = part.len().min(LENGTH);
        part[..length] == pattern(seed, (at * STRIDE) as u64)[..length]
    })
}

fn pattern(seed: u64, at: u64) -> [u8; LENGTH] {
    let mut word = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at;
    std::array::from_fn(|_| {
        word = (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word.to_be_bytes()[0]
    })
}

#[derive(Debug)]
pub(super) struct Plain {
    sim: Arc<Simulator>,
    start: Address,
    pub(super) place: Place,
}

#[allow(clippy::unwrap_used)]
impl Plain {
    pub(super) fn new(sim: &Arc<Simulator>, device: DeviceId, size: Bytes) -> Plain {
        let start = sim.plain_alloc(device, size).unwrap();
        let place = Place::new(sim.span(start, size, DeviceSet::of(device)).unwrap());
        Plain { sim: sim.clone(), start, place }
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // A refusal is seen in what is left at the end.
        let _ = self.sim.plain_free(self.start);
    }
}
