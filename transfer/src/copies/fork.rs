//! Fork of one copy from the user's stream onto several lanes, and the join back.
//!
//! ```text
//!   mark    records the fork event on the user's stream
//!   enter   makes a lane wait for it, once; not if it has passed already, or if no earlier work touches the memory
//!   send    enqueues a copy on a lane; false: nothing was enqueued, the part needs another path
//!   join    makes the user's stream wait for every lane that was entered
//! ```
//!
//! Invariants:
//! - Every lane that was entered is joined, whatever fails in between: by an event, or by a wait on the host. If neither works, the call
//!   returns an error and the lane is never used again; all later copies join it until its work has completed.
//! - Parts are counted with their relay before they are enqueued.
//! - No call enqueues more than [`MOST_WAITING`] operations on a stream behind a fork that the user's stream has not reached: the driver's
//!   queues are bounded, and a call that finds one full blocks until the program's earlier work completes.

use glake_device::owned::{DeviceSet, OwnedStream, Piece, Span, StreamRef};
use glake_device::{DeviceId, DriverError, Event};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::copies::shared::Shared;
use crate::links::lane::{Lane, TargetSide};
use crate::links::lane_set::{LaneSet, LaneSetState, Part, StreamMarks};
use crate::links::ledger::Path;
use crate::links::unjoined::twice;
use crate::paths::Way;
use crate::traffic::prioritized::Prioritized;
use crate::{Result, UserStream};

/// Maximum number of operations enqueued on a stream behind an event that has not passed. The driver's queues hold about 1,000.
pub(crate) const MOST_WAITING: u32 = 256;
/// Operations of a slice: the wait for its barrier and the copy.
const SLICE_OPERATIONS: u32 = 2;
/// Operations of an unsliced part: the copy, closing its barrier, and timing it.
const PART_OPERATIONS: u32 = 4;
/// Maximum slice size. Larger slices delay other copies for too long.
const LARGEST: Bytes = Bytes::mib(4);
const PAGE: Bytes = Bytes::kib(4);

/// A copy between its fork and its join.
pub(crate) struct Fork<'a> {
    shared: &'a Shared,
    lane_set: &'a LaneSet,
    pub(crate) state: &'a mut LaneSetState,
    on: UserStream,
    /// Event that lanes wait for; `None` if the user's stream has reached the fork or no wait is needed.
    event: Option<Event>,
    /// Whether lanes may still run earlier copies, because they did not wait for a fork.
    pub(crate) is_unordered: bool,
    entered: DeviceSet,
    /// Entered lanes whose second stream has work too.
    second: DeviceSet,
    /// Entered lanes that stage their part through slots, each with the GPU at the other side.
    through_slots: SmallVec<[(DeviceId, DeviceId); 8]>,
    /// Number of operations enqueued on each lane and on the user's stream (`None`).
    enqueued: SmallVec<[(Option<DeviceId>, u32); 8]>,
    /// Relays found lost during this copy.
    dead: DeviceSet,
    parts: SmallVec<[(DeviceId, Part); 8]>,
    prioritized: Prioritized<'a>,
}

impl<'a> Fork<'a> {
    /// Begins a fork behind `event`, or without a wait.
    pub(crate) fn begin(
        shared: &'a Shared,
        lane_set: &'a LaneSet,
        state: &'a mut LaneSetState,
        on: UserStream,
        event: Option<Event>,
    ) -> Fork<'a> {
        state.serial += 1;
        shared.traffic.begin();
        let none = DeviceSet::EMPTY;
        Fork {
            shared,
            lane_set,
            state,
            on,
            event,
            is_unordered: event.is_none(),
            entered: none,
            second: none,
            through_slots: SmallVec::new(),
            enqueued: SmallVec::new(),
            dead: none,
            parts: SmallVec::new(),
            prioritized: Prioritized::alone(),
        }
    }

    /// Records the fork event on a stream; `None` if the lane set has no event for the stream's device yet.
    ///
    /// # Errors
    /// The driver's: nothing is enqueued.
    pub(crate) fn mark(lane_set: &LaneSet, on: UserStream) -> Result<Option<Event>> {
        let Some(marks) = lane_set.marks(on.device) else { return Ok(None) };
        marks.fork.record(on.raw)?;
        Ok(Some(marks.fork.id()))
    }

    /// Checks whether the user's stream has already reached the fork. The query takes as long as one lane's wait.
    pub(crate) fn look(&mut self) {
        let marks = self.lane_set.marks(self.on.device);
        let passed = |marks: &StreamMarks| matches!(marks.fork.is_passed(), Ok(true));
        self.event = self.event.filter(|_| !marks.is_some_and(passed));
    }

    /// Returns whether `operations` more may be enqueued on a lane, or on the user's stream (`None`).
    #[must_use]
    pub(crate) fn has_room(&mut self, lane: Option<DeviceId>, operations: u32) -> bool {
        let index = match self.enqueued.iter().position(|(of, _)| *of == lane) {
            Some(index) => index,
            None => {
                self.enqueued.push((lane, 0));
                self.enqueued.len() - 1
            }
        };
        let count = self.enqueued[index].1.saturating_add(operations);
        // Where lanes do not wait for the fork it is not known whether their streams have come to it.
        if count > MOST_WAITING && (self.event.is_some() || self.is_unordered) {
            self.look();
            if self.event.is_some() || self.is_unordered {
                return false;
            }
        }
        self.enqueued[index].1 = count;
        true
    }

    /// Returns the user's stream for driver calls.
    fn own(&self) -> StreamRef<'a> {
        self.on.of_driver(&**self.shared.contexts.driver())
    }

    /// Takes turns with other copies on `links`.
    pub(crate) fn take(&mut self, mut prioritized: Prioritized<'a>, links: impl Iterator<Item = DeviceId>) {
        if prioritized.is_foreground() {
            self.look();
            // What waits for nothing on its own stream waits for nothing at all, and may shut barriers before its streams can.
            // Of an unordered copy that is not known: it never asks.
            if self.event.is_none() && !self.is_unordered {
                prioritized.shut_now(links);
            }
        }
        self.prioritized = prioritized;
    }

    /// Returns the maximum size of one driver copy.
    pub(crate) fn slice(&self) -> Bytes {
        self.prioritized.slice()
    }

    /// Returns the slice size for parts of up to `part` bytes. If the user's stream has not reached the fork, slices are larger, so that a
    /// whole part fits into the queue if possible.
    pub(crate) fn slice_for(&mut self, part: Bytes) -> Bytes {
        let slice = self.prioritized.slice();
        let few = Bytes::new(part.get() / u64::from(MOST_WAITING / SLICE_OPERATIONS));
        if few < slice {
            return slice;
        }
        self.look();
        match self.event {
            None if !self.is_unordered => slice,
            _ => few.align_up(PAGE).unwrap_or(few).min(LARGEST).max(slice),
        }
    }

    /// Waits for the turn of a part or slice on a lane. Returns `false` if it must not be enqueued there.
    #[must_use]
    pub(crate) fn is_turn(&mut self, on: StreamRef<'_>) -> bool {
        match self.prioritized.before(on) {
            Ok(()) => true,
            Err(error) => {
                self.blame(on.device(), &error);
                false
            }
        }
    }

    /// Returns whether parts are enqueued slice by slice.
    pub(crate) fn is_background(&self) -> bool {
        self.prioritized.is_background()
    }

    /// Enqueues one copy on the lane of a path. Returns `false` if it was not enqueued and needs another path.
    #[must_use]
    pub(crate) fn send(&mut self, path: Path, to: &Span, from: &Span) -> bool {
        self.carry(path, to.size(), |on| on.copy(to, from))
    }

    /// Like [`Fork::send`], for a piece of a block.
    #[must_use]
    pub(crate) fn send_piece(&mut self, path: Path, piece: &Piece<'_>) -> bool {
        self.carry(path, piece.size(), |on| on.copy_piece(piece))
    }

    fn carry(
        &mut self,
        path: Path,
        size: Bytes,
        enqueue: impl FnOnce(StreamRef<'_>) -> glake_device::Result<()>,
    ) -> bool {
        let Some(lane) = self.fork_lane(path.relay) else { return false };
        let (device, on) = (path.relay, lane.stream.of());
        let operations = if self.is_background() { SLICE_OPERATIONS } else { PART_OPERATIONS };
        if !self.has_room(Some(device), operations) {
            return false;
        }
        // A part whose time is not taken is as good as one whose time is.
        let timed =
            !self.is_background() && self.state.times(device) && lane.clock[0].record(on.id()).is_ok();
        if !self.is_turn(on) {
            return false;
        }
        if let Err(error) = enqueue(on) {
            self.blame(device, &error);
            return false;
        }
        self.sent(path, size, 1);
        if path.way == Way::ZeroStaging {
            self.shared.ledger.crossings.begin(device, path.direction, size);
            let crossing = &mut self.part(device).crossing[path.direction.index()];
            *crossing = crossing.saturating_add(size);
        }
        if timed && lane.clock[1].record(on.id()).is_ok() {
            self.part(device).timed = Some((path, size));
        }
        true
    }

    /// Enqueues one copy on the user's own stream. Returns `false` if it was not enqueued.
    #[must_use]
    pub(crate) fn send_own(&mut self, path: Path, to: &Span, from: &Span) -> bool {
        self.carry_own(path, to.size(), |on| on.copy(to, from))
    }

    /// Like [`Fork::send_own`], for a piece of a block.
    #[must_use]
    pub(crate) fn send_own_piece(&mut self, path: Path, piece: &Piece<'_>) -> bool {
        self.carry_own(path, piece.size(), |on| on.copy_piece(piece))
    }

    fn carry_own(
        &mut self,
        path: Path,
        size: Bytes,
        enqueue: impl FnOnce(StreamRef<'_>) -> glake_device::Result<()>,
    ) -> bool {
        if !self.has_room(None, SLICE_OPERATIONS) {
            return false;
        }
        let on = self.own();
        let enqueued = self.prioritized.before(on).and_then(|()| enqueue(on));
        self.prioritized.after(on);
        if let Err(error) = enqueued {
            tracing::debug!(target: "glake::transfer", %error, "a part of a copy is asked for again");
            return false;
        }
        self.shared.ledger.counters.sent(path, size, 1);
        if !self.is_background() {
            self.state.carry_own(self.shared.ledger.begin(path, size));
        }
        true
    }

    /// Waits for the turn of parts on the user's own stream, whose device's link they use. Returns `false` if they must not be enqueued.
    #[must_use]
    pub(crate) fn is_own_turn(&mut self) -> bool {
        let on = self.own();
        self.prioritized.before(on).is_ok()
    }

    /// Ends the turn of parts on the user's own stream. Called only if some were enqueued: the link may belong to a lane of the copy
    /// otherwise.
    pub(crate) fn end_own_turn(&mut self) {
        let on = self.own();
        self.prioritized.after(on);
    }

    /// Returns the lanes that wait for the fork.
    pub(crate) fn forked(&self) -> DeviceSet {
        self.entered
    }

    /// Returns the stream of a lane, for work that is then reported to [`Fork::sent`]; `None` if the lane is unusable.
    pub(crate) fn stream(&mut self, device: DeviceId) -> Option<&'a OwnedStream> {
        self.fork_lane(device).map(|lane| &lane.stream)
    }

    /// Returns both streams of a lane.
    pub(crate) fn streams(&mut self, device: DeviceId) -> Option<[&'a OwnedStream; 2]> {
        let lane = self.fork_lane(device)?;
        let second = &lane.second;
        if !self.second.contains(device) {
            if let Some(Err(error)) = self.event.map(|event| second.stream.wait_for(event)) {
                self.blame(device, &error);
                return None;
            }
            self.second = self.second.union(DeviceSet::of(device));
        }
        Some([&lane.stream, &second.stream])
    }

    /// Returns a relay's lane and a target's side of it, both behind the fork, for a staged part.
    pub(crate) fn both_sides(
        &mut self,
        target: DeviceId,
        relay: DeviceId,
    ) -> Option<(&'a OwnedStream, &'a TargetSide)> {
        let side = self.lane_set.side(target, relay)?;
        let lane = self.fork_lane(relay)?;
        if let Some(Err(error)) = self.event.map(|event| side.stream.wait_for(event)) {
            self.blame(target, &error);
            return None;
        }
        self.through_slots.push((relay, target));
        Some((&lane.stream, side))
    }

    /// Makes a lane's stream and a target's side of it wait for all work of earlier copies there. Returns `false` if either wait fails.
    #[must_use]
    pub(crate) fn follow(&mut self, device: DeviceId, side: &TargetSide) -> bool {
        let Some(lane) = self.lane_set.lane(device) else { return false };
        [&lane.stream, &side.stream].into_iter().all(|stream| {
            let waited = stream.wait_for(lane.done.id());
            waited.inspect_err(|error| self.blame(stream.device(), error)).is_ok()
        })
    }

    /// Orders later work on a lane's second stream after the current work on its first.
    pub(crate) fn stagger(&self, device: DeviceId) -> glake_device::Result<()> {
        let Some(lane) = self.lane_set.lane(device) else { return Ok(()) };
        let second = &lane.second;
        // The join records it anew, on the second stream.
        second.done.record(lane.stream.id())?;
        second.stream.wait_for(second.done.id())
    }

    /// Records that `size` bytes were enqueued on a lane in `slices` driver copies.
    pub(crate) fn sent(&mut self, path: Path, size: Bytes, slices: u64) {
        self.shared.ledger.counters.sent(path, size, slices);
        // Nobody reckons with what gives way.
        if self.is_background() {
            return;
        }
        let carried = self.shared.ledger.begin(path, size);
        let part = self.part(path.relay);
        part.carried = Some(part.carried.map_or(carried, |earlier| earlier.and(carried)));
    }

    /// Polls the lanes' earlier copies before their events are recorded again.
    pub(crate) fn poll(&mut self) {
        let lost = self.state.poll(self.lane_set, self.entered, &*self.shared.traffic);
        lost.iter().for_each(|device| self.lose(device));
    }

    /// Handles a failed operation on a lane: fences the relay if it is lost.
    pub(crate) fn blame(&mut self, device: DeviceId, error: &DriverError) {
        tracing::debug!(target: "glake::transfer", relay = %device, %error, "a part of a copy goes another way");
        if error.is_sticky() {
            self.lose(device);
        }
    }

    fn lose(&mut self, device: DeviceId) {
        // The part of this copy goes another way: it is no loss.
        if self.entered.contains(device) && !self.dead.contains(device) {
            self.shared.ledger.relays.confirm(device, 1);
        }
        self.shared.ledger.relays.fence(device);
        self.dead = self.dead.union(DeviceSet::of(device));
    }

    /// Makes the user's stream wait for all lanes. Returns the relays found lost; their parts must be copied again.
    ///
    /// # Errors
    /// A lane could be joined by no means; the others are.
    pub(crate) fn join(mut self) -> Result<DeviceSet> {
        self.join_all()?;
        self.prioritized.end(self.own());
        Ok(self.dead)
    }

    fn join_all(&mut self) -> Result<()> {
        let mut outcome = Ok(());
        for device in self.entered.iter() {
            let Some(lane) = self.lane_set.lane(device) else { continue };
            if let Err(error) = self.join_lane(lane) {
                self.state.break_lane(device);
                self.lane_set.leave_unjoined(device);
                outcome = Err(error);
            }
            // Behind the join: nobody waits for it.
            self.prioritized.after(lane.stream.of());
            let part = std::mem::take(self.part(device));
            self.state.add_part(device, part);
        }
        self.entered = DeviceSet::EMPTY;
        outcome
    }

    /// Returns this copy's state on a lane.
    fn part(&mut self, device: DeviceId) -> &mut Part {
        let index = match self.parts.iter().position(|(of, _)| *of == device) {
            Some(index) => index,
            None => {
                self.parts.push((device, Part::default()));
                self.parts.len() - 1
            }
        };
        &mut self.parts[index].1
    }

    fn join_lane(&mut self, lane: &Lane) -> Result<()> {
        let device = lane.stream.device();
        let chained = match self.second.contains(device) {
            true => {
                let second = &lane.second;
                let chained = twice(|| second.done.record(second.stream.id()))
                    .and_then(|()| twice(|| lane.stream.wait_for(second.done.id())));
                chained.or_else(|_| self.wait_on_host(device, second.stream.synchronize()))
            }
            false => Ok(()),
        };
        // What the target's side does is a part of the lane: its slots are used until then.
        let target = self.through_slots.iter().find(|(relay, _)| *relay == device).map(|(_, target)| *target);
        // The ends of unordered copies stand on the lane's second stream, in their order, those of the targets' sides too: the first stream
        // goes on filling slots meanwhile.
        let (last, ahead) = match self.is_unordered.then(|| self.stagger(device)) {
            None => (&lane.stream, Ok(())),
            Some(Ok(())) => (&lane.second.stream, Ok(())),
            Some(Err(_)) => {
                let behind = twice(|| lane.stream.wait_for(lane.done.id()));
                let behind = behind.or_else(|_| self.wait_on_host(device, lane.second.stream.synchronize()));
                (&lane.stream, behind)
            }
        };
        let staged = match target.and_then(|target| self.lane_set.side(target, device)) {
            Some(side) => twice(|| side.end.record(side.stream.id()))
                .and_then(|()| twice(|| last.wait_for(side.end.id())))
                .or_else(|_| self.wait_on_host(side.stream.device(), side.stream.synchronize())),
            None => Ok(()),
        };
        let on = self.on;
        let joined = twice(|| lane.done.record(last.id())).and_then(|()| {
            twice(|| self.shared.contexts.driver().stream_wait_event(on.device, on.raw, lane.done.id()))
        });
        // The error itself may be that of the user's device. A relay that is lost did not wait for the target's side.
        let joined = joined.or_else(|_| {
            let side = target.and_then(|target| self.lane_set.side(target, device));
            let waited = self.wait_on_host(device, last.synchronize());
            let beside = side.map(|side| self.wait_on_host(side.stream.device(), side.stream.synchronize()));
            waited.and(beside.unwrap_or(Ok(())))
        });
        chained.and(ahead).and(staged).and(joined)
    }

    /// Handles a wait on the host in place of a join: the work is done, or its relay is lost and runs no more of it.
    fn wait_on_host(&mut self, device: DeviceId, waited: glake_device::Result<()>) -> Result<()> {
        match waited {
            Err(error) if error.is_sticky() => {
                self.blame(device, &error);
                Ok(())
            }
            waited => Ok(waited?),
        }
    }

    /// Returns the lane of a GPU, ordered behind the fork.
    fn fork_lane(&mut self, device: DeviceId) -> Option<&'a Lane> {
        let lane = self.lane_set.lane(device)?;
        if self.entered.contains(device) {
            return (!self.dead.contains(device)).then_some(lane);
        }
        // The GPU's own work would wait for another GPU's stream.
        if lane.is_primary && device != self.on.device {
            return None;
        }
        if self.state.broken().contains(device) || !self.shared.ledger.relays.begin(device) {
            return None;
        }
        if let Some(Err(error)) = self.event.map(|event| lane.stream.wait_for(event)) {
            self.shared.ledger.relays.confirm(device, 1);
            self.blame(device, &error);
            return None;
        }
        self.entered = self.entered.union(DeviceSet::of(device));
        Some(lane)
    }
}

impl Drop for Fork<'_> {
    fn drop(&mut self) {
        // Nothing is entered after a join. What cannot be joined here was told by nobody before, and its lane is not used again.
        let _ = self.join_all();
    }
}
