//! What one stream of the program has for its copies: a lane on every GPU that is ready, and what is under way there.
//!
//! Invariants:
//! - Only the stream that owns a lane set enqueues on its lanes, under the lane set's lock, so that its copies keep its order.
//! - A lane set changes hands only when all its lanes were seen idle. So no copy waits for another stream's.
//! - A lane whose work could not be joined is never used again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use glake_device::owned::{DeviceSet, OwnedEvent, StreamRef};
use glake_device::{DeviceId, Driver, EventKind, StreamId};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::Result;
use crate::engine::counters::Path;
use crate::engine::lane::Lane;
use crate::engine::ledger::{Carried, Ledger};
use crate::kinds::foreign::slots::Ring;
use crate::kinds::foreign::target::TargetSide;
use crate::links::unjoined::End;
use crate::paths::Direction;
use crate::traffic::Traffic;
use crate::traffic::drift::Sample;

/// Lanes by relay, and what is in the primary contexts of the program's GPUs; the thread that makes relays ready adds them.
#[derive(Debug)]
pub(crate) struct LaneSet {
    lanes: Box<[OnceLock<Lane>]>,
    /// Of the owner's stream, by its device.
    marks: Box<[OnceLock<StreamMarks>]>,
    /// By target and relay.
    sides: Box<[OnceLock<TargetSide>]>,
    /// Whose copies these are, as its state says: for those who need not wait for its lock then. 0: nobody's.
    owner: AtomicU64,
    /// Lanes with work that no stream could be made to wait for, and that was not seen done. The bits of a [`DeviceSet`].
    unjoined: AtomicU64,
    /// What is known of the ends of such lanes' streams: their own two, and those of the targets' sides.
    ends: Mutex<FxHashMap<DeviceId, Vec<End>>>,
    ledger: Arc<Ledger>,
    pub(crate) state: Mutex<LaneSetState>,
}

/// Events that are recorded on a stream of the program.
#[derive(Debug)]
pub(crate) struct StreamMarks {
    /// Where a copy forks.
    pub(crate) fork: OwnedEvent,
    /// Before and after a copy that is timed.
    pub(crate) clock: [OwnedEvent; 2],
}

/// What changes with each copy.
#[derive(Debug)]
pub(crate) struct LaneSetState {
    ledger: Arc<Ledger>,
    /// Whether it is out of use for ever: its relays rest.
    retired: bool,
    /// Whose copies these are; nobody's at first.
    pub(crate) owner: Option<StreamId>,
    /// Copies so far.
    pub(crate) serial: u64,
    /// Lanes with work that was not seen done.
    busy: DeviceSet,
    broken: DeviceSet,
    polled: Option<Instant>,
    /// When it was last looked what others have under way.
    looked: Option<Instant>,
    flights: Box<[Flight]>,
    /// What goes over the target's link on the owner's own stream.
    own: Option<Carried>,
    /// A copy that is timed.
    pub(crate) sample: Option<Sample>,
}

/// What a copy has put on a lane.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Part {
    pub(crate) carried: Option<Carried>,
    /// What of it the lane copies with no staging, by direction.
    pub(crate) crossing: [Bytes; 2],
    /// What stands between the events of the lane's clock.
    pub(crate) timed: Option<(Path, Bytes)>,
}

/// What is under way on a lane.
#[derive(Debug, Default)]
struct Flight {
    /// Parts that relays count as not seen to arrive.
    parts: u64,
    /// The first of them.
    since: u64,
    /// What others should reckon with: the last copy's, for those of one stream run one after another.
    carried: Option<Carried>,
    /// What of all parts that were not seen done is copied with no staging, by direction.
    crossing: [Bytes; 2],
    ring: Option<Ring>,
    /// How the ring was used last: how large its slots were, and which of them is next.
    slots: (Bytes, usize),
    timed: Option<(Path, Bytes)>,
    turn: u64,
}

/// One part of so many on a lane is timed.
const TIMED: u64 = 16;
/// Small copies do not ask more often what has arrived.
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

    /// Whether it has lanes of these relays.
    pub(crate) fn is_of(&self, devices: DeviceSet) -> bool {
        devices.iter().any(|device| self.lane(device).is_some())
    }

    pub(crate) fn marks(&self, device: DeviceId) -> Option<&StreamMarks> {
        self.marks.get(index(device)?)?.get()
    }

    /// What it has on a target for the slots of a relay.
    pub(crate) fn side(&self, target: DeviceId, relay: DeviceId) -> Option<&TargetSide> {
        self.sides.get(self.place(target, relay)?)?.get()
    }

    /// Whether a stream's copies are on it, as last seen: takes no lock.
    pub(crate) fn is_of_stream(&self, stream: StreamId) -> bool {
        self.owner.load(Ordering::Acquire) == owner_bits(Some(stream))
    }

    /// Says whose copies are on it from now on; under its lock.
    pub(crate) fn set_owner(&self, state: &mut LaneSetState, owner: Option<StreamId>) -> Option<StreamId> {
        self.owner.store(owner_bits(owner), Ordering::Release);
        std::mem::replace(&mut state.owner, owner)
    }

    /// A lane's work could not be joined.
    pub(crate) fn leave_unjoined(&self, device: DeviceId) {
        let lane = DeviceSet::of(device).bits();
        if self.unjoined.fetch_or(lane, Ordering::AcqRel) & lane == 0 {
            self.ledger.leave_unjoined();
        }
    }

    /// Whether all work that could not be joined is over; a stream that is given waits for what is not.
    ///
    /// # Errors
    /// The driver's: something still cannot be joined.
    pub(crate) fn settle(&self, on: Option<StreamRef<'_>>) -> Result<bool> {
        let mut is_all = true;
        for device in DeviceSet::from_bits(self.unjoined.load(Ordering::Acquire)).iter() {
            is_all &= self.settle_lane(device, on)?;
        }
        Ok(is_all)
    }

    /// The same of one lane: of its two streams, and of those that targets have for its slots, each of which may outlive another's GPU.
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

    /// Whether a lane has work that could not be joined, and is not over.
    fn is_unjoined(&self, device: DeviceId) -> bool {
        DeviceSet::from_bits(self.unjoined.load(Ordering::Acquire)).contains(device)
            && !matches!(self.settle_lane(device, None), Ok(true))
    }

    /// Adds a lane; one that is there stays.
    pub(crate) fn add_lane(&self, device: DeviceId, lane: Lane) {
        if let Some(place) = index(device).and_then(|index| self.lanes.get(index)) {
            let _ = place.set(lane);
        }
    }

    /// Adds the events for streams of a device; those that are there stay.
    pub(crate) fn add_marks(&self, device: DeviceId, marks: StreamMarks) {
        if let Some(place) = index(device).and_then(|index| self.marks.get(index)) {
            let _ = place.set(marks);
        }
    }

    /// Adds a target's side; one that is there stays.
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

impl StreamMarks {
    /// In the primary context of a device.
    pub(crate) fn new(driver: &Arc<dyn Driver>, device: DeviceId) -> Result<StreamMarks> {
        let event = |kind| OwnedEvent::new(driver, device, kind);
        let clock = [event(EventKind::Timed)?, event(EventKind::Timed)?];
        Ok(StreamMarks { fork: event(EventKind::Plain)?, clock })
    }
}

/// 0 is nobody's: streams count from 1 up, and from the end down.
fn owner_bits(owner: Option<StreamId>) -> u64 {
    owner.map_or(0, |stream| stream.0)
}

impl LaneSetState {
    /// Looks which lanes are idle by now; the relays that are found lost are the caller's to fence. Never waits. Lanes of `kept`
    /// have more work of the copy at hand, and keep their slots.
    pub(crate) fn poll(&mut self, lane_set: &LaneSet, kept: DeviceSet, traffic: &Traffic) -> DeviceSet {
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
            traffic.observe(lane_set, self);
        }
        lost
    }

    /// Lanes with work that was not seen done.
    pub(crate) fn busy(&self) -> DeviceSet {
        self.busy
    }

    /// Whether there is none.
    pub(crate) fn is_idle(&self) -> bool {
        self.busy.is_empty()
    }

    /// Whether others reckon with any.
    pub(crate) fn carries(&self) -> bool {
        !self.is_idle() || self.own.is_some()
    }

    /// It is out of use from now on. There is no work on it.
    pub(crate) fn retire(&mut self) {
        self.withdraw();
        (self.retired, self.sample) = (true, None);
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired
    }

    /// Lanes that must not be used.
    pub(crate) fn broken(&self) -> DeviceSet {
        self.broken
    }

    /// Takes what this lane set carries out of what copies reckon with: a copy does not run beside those before it on its own
    /// stream.
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

    /// A lane has a part of the copy at hand, which relays have counted; its done event stands behind it.
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

    /// The owner's own stream has a part of the copy at hand.
    pub(crate) fn carry_own(&mut self, carried: Carried) {
        if let Some(earlier) = self.own.replace(carried) {
            self.ledger.end(earlier);
        }
    }

    /// Whether the next part on a lane is to be timed.
    pub(crate) fn times(&mut self, device: DeviceId) -> bool {
        self.flight(device).is_some_and(|flight| {
            flight.turn += 1;
            flight.timed.is_none() && flight.turn % TIMED == 1
        })
    }

    /// Whether no copy is timed as a whole.
    pub(crate) fn is_clock_free(&self) -> bool {
        self.sample.is_none()
    }

    /// Whether it is time to look again: asking for an event costs as much as issuing a copy.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        let due = !self.busy.is_empty() && self.polled.is_none_or(|polled| now - polled >= PAUSE);
        if due {
            self.polled = Some(now);
        }
        due
    }

    /// Whether it is time to look what others have under way, of which so many lanes may have to be asked.
    pub(crate) fn looks_around(&mut self, now: Instant) -> bool {
        let due = self.looked.is_none_or(|looked| now - looked >= PAUSE);
        if due {
            self.looked = Some(now);
        }
        due
    }

    /// What its own copies have a relay copy with no staging, in a direction: they are in the order of their stream.
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

    /// Takes the slots that this lane set's lane works with already, or free ones; true where it has some now.
    pub(crate) fn take_ring(&mut self, relay: DeviceId) -> bool {
        let Some(flight) = index(relay).and_then(|index| self.flights.get_mut(index)) else { return false };
        if flight.ring.is_none() {
            flight.ring = self.ledger.relays.take_ring(relay);
        }
        flight.ring.is_some()
    }

    /// The slots of a lane.
    pub(crate) fn ring(&self, relay: DeviceId) -> Option<&Ring> {
        self.flights.get(index(relay)?)?.ring.as_ref()
    }

    /// A copy is about to use a lane's slots, of this size and so many: which of them is the first, and whether they lie as before. Then, of an
    /// unordered copy, whoever fills one waits for the event of who emptied it last; else for all that the lane has.
    pub(crate) fn lay_out(&mut self, relay: DeviceId, size: Bytes, slots: usize) -> (usize, bool) {
        let Some(flight) = self.flight(relay) else { return (0, false) };
        let (before, next) = std::mem::replace(&mut flight.slots, (size, 0));
        let same = before == size && next < slots;
        (if same { next } else { 0 }, same)
    }

    /// Which of a lane's slots is the next one's.
    pub(crate) fn next_slot(&mut self, relay: DeviceId, next: usize) {
        if let Some(flight) = self.flight(relay) {
            flight.slots.1 = next;
        }
    }

    /// The events of a lane's slots do not say any more who uses them: the next unordered copy waits for all that the lane has.
    pub(crate) fn forget_layout(&mut self, relay: DeviceId) {
        if let Some(flight) = self.flight(relay) {
            flight.slots = (Bytes::ZERO, 0);
        }
    }

    /// Gives back the slots that idle lanes do not need.
    pub(crate) fn give_rings(&mut self, relays: DeviceSet) {
        for relay in relays.without(self.busy).iter() {
            if let Some(ring) = self.flight(relay).and_then(|flight| flight.ring.take()) {
                self.ledger.relays.give_ring(relay, ring);
            }
        }
    }

    /// The lane's work cannot be joined: it is never used again, nor what it uses.
    pub(crate) fn break_lane(&mut self, device: DeviceId) {
        self.broken = self.broken.union(DeviceSet::of(device));
    }

    /// A copy that was waited for makes good what its relay lost: it counts as arrived, unless it was told of already.
    pub(crate) fn make_good(&mut self, relay: DeviceId, owner: StreamId, serial: u64) {
        if self.owner != Some(owner) {
            return;
        }
        if let Some(flight) = self.flight(relay).filter(|flight| flight.parts > 0 && flight.since <= serial) {
            flight.parts -= 1;
            self.ledger.relays.confirm(relay, 1);
        }
    }

    /// All work of a lane is done.
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

    /// A lane's relay is lost, and its parts are told of elsewhere. Its slots go with it.
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
