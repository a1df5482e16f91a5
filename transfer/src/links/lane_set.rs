//! Lane set: the lanes assigned to one program stream, one on every ready GPU, with the work in flight there.
//!
//! Invariants:
//! - Only the stream that owns a lane set enqueues on its lanes, under the lane set's lock, so that its copies keep their order.
//! - A lane set changes owners only after all its lanes were found idle, so that no copy waits for another stream's.
//! - A lane whose work could not be joined is never used again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use glake_device::owned::{DeviceSet, OwnedEvent, StreamRef};
use glake_device::{DeviceId, Driver, EventKind, StreamId};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::links::lane::{Lane, Ring, TargetSide};
use crate::links::ledger::{Carried, Ledger, Path};
use crate::links::unjoined::End;
use crate::paths::{Direction, PathGraph, Shares};
use crate::{Result, UserStream};

/// Lanes by relay, and events in the primary contexts of the program's GPUs. The engine's thread adds them.
#[derive(Debug)]
pub(crate) struct LaneSet {
    lanes: Box<[OnceLock<Lane>]>,
    /// Fork events on the owner's stream, indexed by its device.
    marks: Box<[OnceLock<StreamMarks>]>,
    /// Targets' sides, indexed by target and relay.
    sides: Box<[OnceLock<TargetSide>]>,
    /// Copy of the owner in the state, readable without the lock; 0: no owner.
    owner: AtomicU64,
    /// Lanes with work that could not be joined and is not known to be complete, as [`DeviceSet`] bits.
    unjoined: AtomicU64,
    /// Last known ends of these lanes' streams: their own two and those of the targets' sides.
    ends: Mutex<FxHashMap<DeviceId, Vec<End>>>,
    ledger: Arc<Ledger>,
    pub(crate) state: Mutex<LaneSetState>,
}

/// Events recorded on a program stream.
#[derive(Debug)]
pub(crate) struct StreamMarks {
    /// Fork of a copy.
    pub(crate) fork: OwnedEvent,
    /// Timed events before and after a copy.
    pub(crate) clock: [OwnedEvent; 2],
}

/// State that changes with each copy.
#[derive(Debug)]
pub(crate) struct LaneSetState {
    ledger: Arc<Ledger>,
    /// Whether the lane set is out of use, because its relays are suspended.
    retired: bool,
    /// Program stream that owns the lane set.
    pub(crate) owner: Option<StreamId>,
    /// Number of copies so far.
    pub(crate) serial: u64,
    /// Lanes with work not known to be complete.
    busy: DeviceSet,
    broken: DeviceSet,
    polled: Option<Instant>,
    /// Time of the last poll of other streams' copies.
    looked: Option<Instant>,
    flights: Box<[Flight]>,
    /// Bytes in flight on the owner's own stream over the target's link.
    own: Option<Carried>,
    /// Copy being timed.
    pub(crate) sample: Option<Sample>,
}

/// Timed copy before its join.
#[derive(Debug)]
pub(crate) struct Begun {
    pub(crate) graph: Arc<PathGraph>,
    /// Number of copies begun on other streams by then.
    pub(crate) others: u64,
    /// Start of the current period without pinning.
    pub(crate) unpinned: u64,
}

/// Timed copy.
#[derive(Debug)]
pub(crate) struct Sample {
    /// GPU of its stream, and GPU of its memory.
    pub(crate) on: DeviceId,
    pub(crate) direction: Direction,
    pub(crate) shares: Shares,
    pub(crate) begun: Begun,
}

/// Receiver of the timed copies of lane sets.
pub(crate) trait Observe: std::fmt::Debug + Send + Sync {
    /// Evaluates the timed copy of a lane set, if any. Called when all of its lanes are idle.
    fn observe(&self, lane_set: &LaneSet, state: &mut LaneSetState);
}

/// Part of a copy on a lane.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Part {
    pub(crate) carried: Option<Carried>,
    /// Zero-staging bytes of the part, by direction.
    pub(crate) crossing: [Bytes; 2],
    /// Path and bytes between the events of the lane's clock.
    pub(crate) timed: Option<(Path, Bytes)>,
}

/// Work in flight on a lane.
#[derive(Debug, Default)]
struct Flight {
    /// Number of parts that are not known to have arrived.
    parts: u64,
    /// Serial number of the first of these parts.
    since: u64,
    /// Bytes in flight of the last copy. Copies of one stream run one after another, so earlier ones do not count.
    carried: Option<Carried>,
    /// Zero-staging bytes of all parts not known to have arrived, by direction.
    crossing: [Bytes; 2],
    ring: Option<Ring>,
    /// Slot size of the ring's last use, and index of its next slot.
    slots: (Bytes, usize),
    timed: Option<(Path, Bytes)>,
    turn: u64,
}

/// Number of parts of a lane among which one is timed.
const TIMED: u64 = 16;
/// Minimum time between polls for arrivals by small copies.
const PAUSE: Duration = Duration::from_millis(1);

impl LaneSet {
    pub(crate) fn new(devices: usize, ledger: &Arc<Ledger>) -> LaneSet {
        LaneSet {
            lanes: (0..devices).map(|_| OnceLock::new()).collect(),
            marks: (0..devices).map(|_| OnceLock::new()).collect(),
            sides: (0..devices * devices).map(|_| OnceLock::new()).collect(),
            owner: AtomicU64::new(0),
            unjoined: AtomicU64::new(0),
            ends: Mutex::default(),
            ledger: ledger.clone(),
            state: Mutex::new(LaneSetState {
                ledger: ledger.clone(),
                retired: false,
                owner: None,
                serial: 0,
                busy: DeviceSet::EMPTY,
                broken: DeviceSet::EMPTY,
                polled: None,
                looked: None,
                flights: (0..devices).map(|_| Flight::default()).collect(),
                own: None,
                sample: None,
            }),
        }
    }

    pub(crate) fn lane(&self, device: DeviceId) -> Option<&Lane> {
        self.lanes.get(index(device)?)?.get()
    }

    /// Returns whether the set has lanes of any of `devices`.
    pub(crate) fn is_of(&self, devices: DeviceSet) -> bool {
        devices.iter().any(|device| self.lane(device).is_some())
    }

    pub(crate) fn marks(&self, device: DeviceId) -> Option<&StreamMarks> {
        self.marks.get(index(device)?)?.get()
    }

    /// Returns a target's side of a relay's slots.
    pub(crate) fn side(&self, target: DeviceId, relay: DeviceId) -> Option<&TargetSide> {
        self.sides.get(self.place(target, relay)?)?.get()
    }

    /// Returns whether a stream owns the set, without locking it. May be outdated.
    pub(crate) fn is_of_stream(&self, stream: StreamId) -> bool {
        self.owner.load(Ordering::Acquire) == owner_bits(Some(stream))
    }

    /// Sets the owner and returns the previous one. The caller holds the lock.
    pub(crate) fn set_owner(&self, state: &mut LaneSetState, owner: Option<StreamId>) -> Option<StreamId> {
        self.owner.store(owner_bits(owner), Ordering::Release);
        std::mem::replace(&mut state.owner, owner)
    }

    /// Records that a lane's work could not be joined.
    pub(crate) fn leave_unjoined(&self, device: DeviceId) {
        let lane = DeviceSet::of(device).bits();
        if self.unjoined.fetch_or(lane, Ordering::AcqRel) & lane == 0 {
            self.ledger.leave_unjoined();
        }
    }

    /// Returns whether all unjoined work has completed. If a stream is given, makes it wait for the rest.
    ///
    /// # Errors
    /// The driver's: some work still cannot be joined.
    pub(crate) fn settle(&self, on: Option<StreamRef<'_>>) -> Result<bool> {
        let mut is_all = true;
        for device in DeviceSet::from_bits(self.unjoined.load(Ordering::Acquire)).iter() {
            is_all &= self.settle_lane(device, on)?;
        }
        Ok(is_all)
    }

    /// Like [`LaneSet::settle`] for one lane: its two streams and the targets' streams for its slots, any of which may outlive the other's
    /// GPU.
    fn settle_lane(&self, device: DeviceId, on: Option<StreamRef<'_>>) -> Result<bool> {
        let Some(lane) = self.lane(device) else { return Ok(true) };
        let targets = (0_u32..).map(DeviceId).take(self.lanes.len());
        let sides = targets.map(|target| self.side(target, device).map(|side| (&side.stream, &side.end)));
        let own = [(&lane.stream, &lane.done), (&lane.second.stream, &lane.second.done)];
        let mut ends = self.ends.lock();
        let ends = ends.entry(device).or_default();
        ends.resize(own.len() + self.lanes.len(), End::Open);
        let mut is_all = true;
        for (end, (stream, event)) in ends
            .iter_mut()
            .zip(own.into_iter().map(Some).chain(sides))
            .filter_map(|(end, of)| Some((end, of?)))
        {
            is_all &= end.settle(stream, event, on)?;
        }
        let bit = DeviceSet::of(device).bits();
        if is_all && self.unjoined.fetch_and(!bit, Ordering::AcqRel) & bit != 0 {
            self.ledger.end_unjoined();
        }
        Ok(is_all)
    }

    /// Returns whether a lane has unjoined work that is not known to be complete.
    fn is_unjoined(&self, device: DeviceId) -> bool {
        DeviceSet::from_bits(self.unjoined.load(Ordering::Acquire)).contains(device)
            && !matches!(self.settle_lane(device, None), Ok(true))
    }

    /// Adds a lane, unless it exists.
    pub(crate) fn add_lane(&self, device: DeviceId, lane: Lane) {
        if let Some(place) = index(device).and_then(|index| self.lanes.get(index)) {
            let _ = place.set(lane);
        }
    }

    /// Adds the events for streams of a device, unless they exist.
    pub(crate) fn add_marks(&self, device: DeviceId, marks: StreamMarks) {
        if let Some(place) = index(device).and_then(|index| self.marks.get(index)) {
            let _ = place.set(marks);
        }
    }

    /// Adds a target's side, unless it exists.
    pub(crate) fn add_side(&self, target: DeviceId, relay: DeviceId, side: TargetSide) {
        if let Some(place) = self.place(target, relay).and_then(|place| self.sides.get(place)) {
            let _ = place.set(side);
        }
    }

    fn place(&self, target: DeviceId, relay: DeviceId) -> Option<usize> {
        let (target, relay) = (index(target)?, index(relay)?);
        (relay < self.lanes.len()).then_some(target * self.lanes.len() + relay)
    }
}

impl Begun {
    /// Ends a timed copy at its join; the time is known once the join has passed.
    pub(crate) fn end(
        self,
        lane_set: &LaneSet,
        state: &mut LaneSetState,
        (on, direction): (UserStream, Direction),
        shares: &Shares,
    ) {
        if lane_set.marks(on.device).is_some_and(|marks| marks.clock[1].record(on.raw).is_ok()) {
            let shares = shares.clone();
            state.sample = Some(Sample { on: on.device, direction, shares, begun: self });
        }
    }
}

impl StreamMarks {
    /// Creates the events in the primary context of a device.
    pub(crate) fn new(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<StreamMarks> {
        let event = |kind| OwnedEvent::new(driver, device, kind);
        let clock = [event(EventKind::Timed)?, event(EventKind::Timed)?];
        Ok(StreamMarks { fork: event(EventKind::Plain)?, clock })
    }
}

/// Encodes an owner; 0 stands for none, since stream IDs count up from 1 and down from the maximum.
fn owner_bits(owner: Option<StreamId>) -> u64 {
    owner.map_or(0, |stream| stream.0)
}

impl LaneSetState {
    /// Polls the lanes for completed work. Returns relays found lost, which the caller must fence. Never blocks. Lanes of `kept` keep their
    /// slots for further parts of the current copy.
    pub(crate) fn poll(&mut self, lane_set: &LaneSet, kept: DeviceSet, observer: &dyn Observe) -> DeviceSet {
        let mut lost = DeviceSet::EMPTY;
        for device in self.busy.iter() {
            let Some(lane) = lane_set.lane(device) else { continue };
            // What its event says is of an earlier copy; and of a GPU that is lost the target's side may have more to do.
            if lane_set.is_unjoined(device) {
                continue;
            }
            if self.ledger.relays.is_fenced(device) {
                self.forget(device);
                continue;
            }
            match lane.done.is_passed() {
                Ok(true) => self.arrived(lane, kept.contains(device)),
                Err(error) if error.is_sticky() => lost = lost.union(DeviceSet::of(device)),
                // An answer that says nothing: asked again by the next copy.
                Ok(false) | Err(_) => {}
            }
        }
        if self.busy.is_empty() {
            if let Some(own) = self.own.take() {
                self.ledger.end(own);
            }
            observer.observe(lane_set, self);
        }
        lost
    }

    /// Returns the lanes with work not known to be complete.
    pub(crate) fn busy(&self) -> DeviceSet {
        self.busy
    }

    /// Returns whether all work is known to be complete.
    pub(crate) fn is_idle(&self) -> bool {
        self.busy.is_empty()
    }

    /// Returns whether the set has bytes in flight that count for other copies.
    pub(crate) fn carries(&self) -> bool {
        !self.is_idle() || self.own.is_some()
    }

    /// Takes the set out of use. It must be idle.
    pub(crate) fn retire(&mut self) {
        self.withdraw();
        (self.retired, self.sample) = (true, None);
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired
    }

    /// Returns the lanes that must not be used.
    pub(crate) fn broken(&self) -> DeviceSet {
        self.broken
    }

    /// Removes the set's bytes in flight from the load: a copy does not run concurrently with earlier ones of its own stream.
    pub(crate) fn withdraw(&mut self) {
        for device in self.busy.iter() {
            if let Some(carried) = self.flight(device).and_then(|flight| flight.carried.take()) {
                self.ledger.end(carried);
            }
        }
        if let Some(own) = self.own.take() {
            self.ledger.end(own);
        }
    }

    /// Adds a part of the current copy to a lane. Relays have counted it, and the lane's done event is recorded behind it.
    pub(crate) fn add_part(&mut self, device: DeviceId, part: Part) {
        self.busy = self.busy.union(DeviceSet::of(device));
        let serial = self.serial;
        let Some(flight) = self.flight(device) else { return };
        if flight.parts == 0 {
            flight.since = serial;
        }
        flight.parts += 1;
        for (all, more) in flight.crossing.iter_mut().zip(part.crossing) {
            *all = all.saturating_add(more);
        }
        flight.timed = flight.timed.take().or(part.timed);
        if let Some(earlier) = std::mem::replace(&mut flight.carried, part.carried) {
            self.ledger.end(earlier);
        }
    }

    /// Adds a part of the current copy on the owner's own stream.
    pub(crate) fn carry_own(&mut self, carried: Carried) {
        if let Some(earlier) = self.own.replace(carried) {
            self.ledger.end(earlier);
        }
    }

    /// Returns whether to time the next part of a lane.
    pub(crate) fn times(&mut self, device: DeviceId) -> bool {
        self.flight(device).is_some_and(|flight| {
            flight.turn += 1;
            flight.timed.is_none() && flight.turn % TIMED == 1
        })
    }

    /// Returns whether no copy is being timed as a whole.
    pub(crate) fn is_clock_free(&self) -> bool {
        self.sample.is_none()
    }

    /// Returns whether the next poll is due: querying an event costs as much as issuing a copy.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        let due = !self.busy.is_empty() && self.polled.is_none_or(|polled| now - polled >= PAUSE);
        if due {
            self.polled = Some(now);
        }
        due
    }

    /// Returns whether a poll of other streams' copies is due, which may query many lanes.
    pub(crate) fn looks_around(&mut self, now: Instant) -> bool {
        let due = self.looked.is_none_or(|looked| now - looked >= PAUSE);
        if due {
            self.looked = Some(now);
        }
        due
    }

    /// Returns the zero-staging bytes in flight that the owner's own copies have on a relay. They are in stream order with a new copy.
    pub(crate) fn crossing(&self, relay: DeviceId, direction: Direction) -> Bytes {
        let flight = index(relay).and_then(|index| self.flights.get(index));
        flight.map_or(Bytes::ZERO, |flight| flight.crossing[direction.index()])
    }

    fn end_crossing(&mut self, relay: DeviceId) {
        let crossing = self.flight(relay).map(|flight| std::mem::take(&mut flight.crossing));
        for (direction, size) in Direction::BOTH.into_iter().zip(crossing.unwrap_or_default()) {
            self.ledger.crossings.end(relay, direction, size);
        }
    }

    /// Takes the ring that the lane already uses, or a free one. Returns whether the lane has one now.
    pub(crate) fn take_ring(&mut self, relay: DeviceId) -> bool {
        let Some(flight) = index(relay).and_then(|index| self.flights.get_mut(index)) else { return false };
        if flight.ring.is_none() {
            flight.ring = self.ledger.relays.take_ring(relay);
        }
        flight.ring.is_some()
    }

    /// Returns the ring of a lane.
    pub(crate) fn ring(&self, relay: DeviceId) -> Option<&Ring> {
        self.flights.get(index(relay)?)?.ring.as_ref()
    }

    /// Prepares a lane's ring for a copy with `slots` slots of `size`. Returns the index of the first slot, and whether the layout is
    /// unchanged. If it is, an unordered copy waits only for the event of a slot's last user before filling it; otherwise for all work of
    /// the lane.
    pub(crate) fn lay_out(&mut self, relay: DeviceId, size: Bytes, slots: usize) -> (usize, bool) {
        let Some(flight) = self.flight(relay) else { return (0, false) };
        let (before, next) = std::mem::replace(&mut flight.slots, (size, 0));
        let same = before == size && next < slots;
        (if same { next } else { 0 }, same)
    }

    /// Sets the index of a lane's next slot.
    pub(crate) fn next_slot(&mut self, relay: DeviceId, next: usize) {
        if let Some(flight) = self.flight(relay) {
            flight.slots.1 = next;
        }
    }

    /// Invalidates a lane's slot layout: the next unordered copy waits for all work of the lane.
    pub(crate) fn forget_layout(&mut self, relay: DeviceId) {
        if let Some(flight) = self.flight(relay) {
            flight.slots = (Bytes::ZERO, 0);
        }
    }

    /// Returns the rings that idle lanes do not need.
    pub(crate) fn give_rings(&mut self, relays: DeviceSet) {
        for relay in relays.without(self.busy).iter() {
            if let Some(ring) = self.flight(relay).and_then(|flight| flight.ring.take()) {
                self.ledger.relays.give_ring(relay, ring);
            }
        }
    }

    /// Marks a lane whose work cannot be joined: it and its resources are never used again.
    pub(crate) fn break_lane(&mut self, device: DeviceId) {
        self.broken = self.broken.union(DeviceSet::of(device));
    }

    /// Marks the parts lost with a relay as arrived after a blocking copy repeated them, unless the loss was already reported.
    pub(crate) fn make_good(&mut self, relay: DeviceId, owner: StreamId, serial: u64) {
        if self.owner != Some(owner) {
            return;
        }
        if let Some(flight) = self.flight(relay).filter(|flight| flight.parts > 0 && flight.since <= serial) {
            flight.parts -= 1;
            self.ledger.relays.confirm(relay, 1);
        }
    }

    /// Handles the completion of all work of a lane.
    fn arrived(&mut self, lane: &Lane, kept: bool) {
        let device = lane.stream.device();
        self.busy = self.busy.without(DeviceSet::of(device));
        let kept = kept || self.broken.contains(device);
        self.end_crossing(device);
        let Some(flight) = index(device).and_then(|index| self.flights.get_mut(index)) else { return };
        self.ledger.relays.confirm(device, std::mem::take(&mut flight.parts));
        if let Some(carried) = flight.carried.take() {
            self.ledger.end(carried);
        }
        if let Some(ring) = flight.ring.take_if(|_| !kept) {
            self.ledger.relays.give_ring(device, ring);
        }
        if let Some((path, size)) = flight.timed.take()
            && let Ok(micros) = lane.clock[1].since(&lane.clock[0])
        {
            self.ledger.counters.timed(path, size, micros);
        }
    }

    /// Drops the work of a lane whose relay is lost and whose parts are reported elsewhere, with its slots.
    fn forget(&mut self, device: DeviceId) {
        self.busy = self.busy.without(DeviceSet::of(device));
        self.end_crossing(device);
        if let Some(flight) = self.flight(device) {
            (flight.parts, flight.timed) = (0, None);
            if let Some(carried) = flight.carried.take() {
                self.ledger.end(carried);
            }
        }
    }

    fn flight(&mut self, device: DeviceId) -> Option<&mut Flight> {
        self.flights.get_mut(index(device)?)
    }
}

fn index(device: DeviceId) -> Option<usize> {
    usize::try_from(device.0).ok()
}
