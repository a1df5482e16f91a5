//! The state of a simulator, behind its one lock: requests become work here.
//!
//! Invariant: a request is checked completely before anything changes, so a refused one leaves no trace.

use super::capture::{Captures, ILLEGAL_STATE, INVALIDATED, ISOLATION};
use super::clock::Ticking;
use super::denial::{Checked, Denial, refuse};
use super::event::Mark;
use super::flow::Load;
use super::kernel::{Declared, Modules};
use super::order::{Epoch, VectorClock};
use super::request::{KernelRequest, Request};
use super::resolve::{Piece, Use};
use super::route::{End, Plumbing};
use super::stream::{Streams, fresh_lane};
use super::timeline::{Cost, Point, Timeline};
use super::world::{Action, Awaited, Segment, Work, World};
use crate::{Address, CaptureState, CopyRequest, DeviceId, Event, Refusal, Stream, Touch};

#[derive(Debug)]
pub(super) struct State {
    pub(super) clock: Ticking,
    pub(super) timeline: Timeline<World>,
    pub(super) world: World,
    pub(super) streams: Streams,
    pub(super) captures: Captures,
    pub(super) modules: Modules,
    pub(super) plumbing: Plumbing,
    /// What every operation of a device takes, in nanoseconds, and how many bytes a nanosecond it copies inside.
    pub(super) paces: Vec<(u64, f64)>,
    pub(super) strict: bool,
}

/// A request, checked: what it touches, what it costs, what it does.
struct Resolved {
    pieces: Vec<(Piece, Use)>,
    cost: Cost<Awaited>,
    action: Action,
    /// Whether the caller must wait for it.
    pageable: bool,
}

impl State {
    /// Does what is due by now.
    pub(super) fn catch_up(&mut self) {
        match self.clock.read() {
            Some(now) => self.timeline.advance(now, &mut self.world),
            None => self.timeline.settle(&mut self.world),
        }
    }

    /// The lane of a stream.
    pub(super) fn lane(&mut self, device: DeviceId, stream: Stream) -> Checked<u64> {
        self.world.memory.device(device)?;
        if let Some(lane) = self.streams.lane(device, stream)? {
            return Ok(lane);
        }
        let lane = self.streams.add_per_thread(device);
        self.timeline.open(lane);
        Ok(lane)
    }

    pub(super) fn add_stream(&mut self, device: DeviceId, blocking: bool) -> Checked<Stream> {
        self.world.memory.device(device)?;
        let lane = self.streams.add(device, blocking);
        self.timeline.open(lane);
        Ok(Stream(lane))
    }

    pub(super) fn remove_stream(&mut self, device: DeviceId, stream: Stream) -> Checked<()> {
        let lane = self.lane(device, stream)?;
        if self.streams.is_default(lane) {
            return refuse(Address(0), Refusal::InvalidValue);
        }
        self.timeline.close(lane);
        self.streams.remove(lane);
        Ok(())
    }

    /// Enqueues a request; the point to wait for, where the caller must.
    pub(super) fn enqueue(
        &mut self,
        device: DeviceId,
        stream: Stream,
        request: Request,
    ) -> Checked<Option<Point>> {
        let lane = self.lane(device, stream)?;
        let resolved = self.resolve(device, &request)?;
        if let Some(id) = self.streams.get(lane).and_then(|state| state.capture) {
            return self.record(id, request).map(|()| None);
        }
        let mut clock = self.streams.clock(lane);
        if self.strict {
            for (piece, usage) in &resolved.pieces {
                self.world.memory.check_order(piece, *usage, &clock, &self.streams.seen)?;
            }
        }
        if let Cost::Value(awaited) = &resolved.cost {
            clock.join(&self.streams.flag(awaited.pointer));
        }
        let n = self.timeline.last(lane).n + 1;
        let epoch = Epoch { lane, n };
        let mut holds = Vec::new();
        for (piece, usage) in &resolved.pieces {
            if self.strict {
                self.world.memory.note_use(piece, *usage, epoch, &self.streams.seen);
            }
            if let Some(hold) = piece.hold() {
                self.world.memory.hold(hold);
                holds.push(hold);
            }
        }
        let flag = match resolved.action {
            Action::Store { pointer, .. } => Some(pointer),
            _ => None,
        };
        let after = self.implied_points(lane);
        let work = Work { action: resolved.action, holds };
        let point = self.timeline.issue(lane, after, resolved.cost, work);
        self.streams.enqueued(epoch, clock);
        if let (Some(pointer), Some(state)) = (flag, self.streams.get(lane)) {
            let clock = state.clock.clone();
            self.streams.raise(pointer, &clock);
        }
        self.timeline.settle(&mut self.world);
        Ok(resolved.pageable.then_some(point))
    }

    fn resolve(&self, device: DeviceId, request: &Request) -> Checked<Resolved> {
        match request {
            Request::Copy(requests) => self.resolve_copies(device, requests),
            Request::Fill { start, size, byte } => {
                let pieces = self.reachable(device, *start, size.get(), Use::Write)?;
                let places = pieces.iter().map(|piece| (piece.pointer, piece.size)).collect();
                let index = device.0 as usize;
                let load = Load { route: self.plumbing.local(index), bytes: size.get(), cap: f64::INFINITY };
                Ok(Resolved {
                    pieces: pieces.into_iter().map(|piece| (piece, Use::Write)).collect(),
                    cost: Cost::Flow(self.paces[index].0, vec![load]),
                    action: Action::Fill(places, *byte),
                    pageable: false,
                })
            }
            Request::WaitValue { address, value, compare } => {
                let pointer = self.word(device, *address, Use::Read)?;
                let awaited = Awaited { pointer: pointer.pointer, value: *value, compare: *compare };
                Ok(Resolved::signal(pointer, Cost::Value(awaited), Action::Nothing))
            }
            Request::WriteValue { address, value } => {
                let word = self.word(device, *address, Use::Write)?;
                let store = Action::Store { pointer: word.pointer, value: *value };
                Ok(Resolved::signal(word, Cost::None, store))
            }
            Request::Kernel(kernel) => self.resolve_kernel(device, kernel),
        }
    }

    fn resolve_copies(&self, device: DeviceId, requests: &[CopyRequest]) -> Checked<Resolved> {
        let by = device.0 as usize;
        let (mut pieces, mut segments, mut loads) = (Vec::new(), Vec::new(), Vec::<Load>::new());
        let mut pageable = false;
        for request in requests {
            let memory = &self.world.memory;
            let sources = memory.resolve(device, request.from, request.size.get(), Use::Read)?;
            let targets = memory.resolve(device, request.to, request.size.get(), Use::Write)?;
            pairs(&sources, &targets, |from, to| {
                let (route, cap) = self.plumbing.route(from.end, to.end, by);
                match loads.iter_mut().find(|load| load.route == route && load.cap == cap) {
                    Some(load) => load.bytes += from.size,
                    None => loads.push(Load { route, bytes: from.size, cap }),
                }
                segments.push(Segment { to: to.pointer, from: from.pointer, size: from.size });
            });
            pageable |= sources.iter().chain(&targets).any(|piece| piece.end == End::Pageable);
            pieces.extend(sources.into_iter().map(|piece| (piece, Use::Read)));
            pieces.extend(targets.into_iter().map(|piece| (piece, Use::Write)));
        }
        let cost = Cost::Flow(self.paces[by].0, loads);
        Ok(Resolved { pieces, cost, action: Action::Copy(segments), pageable })
    }

    fn resolve_kernel(&self, device: DeviceId, kernel: &KernelRequest) -> Checked<Resolved> {
        let (mut pieces, mut declared, mut bytes) = (Vec::new(), Vec::new(), 0_u64);
        let both = [(&kernel.reads, Use::Read), (&kernel.writes, Use::Write)];
        for (touches, usage) in both {
            for Touch { address, size } in touches {
                let found = self.reachable(device, *address, size.get(), usage)?;
                pieces.extend(found.iter().map(|piece| (*piece, usage)));
                bytes = bytes.saturating_add(size.get());
                let writable = usage == Use::Write;
                declared.push(Declared { start: address.0, size: size.get(), writable, pieces: found });
            }
        }
        let (latency, pace) = self.paces[device.0 as usize];
        let time = match kernel.duration {
            Some(time) => u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
            None => latency + (bytes as f64 / pace) as u64,
        };
        let action = Action::Kernel { device, declared, body: kernel.body.clone() };
        Ok(Resolved { pieces, cost: Cost::Delay(time), action, pageable: false })
    }

    /// A range that a device reaches by itself.
    pub(super) fn reachable(
        &self,
        device: DeviceId,
        start: Address,
        size: u64,
        usage: Use,
    ) -> Checked<Vec<Piece>> {
        let pieces = self.world.memory.resolve(device, start, size, usage)?;
        match pieces.iter().any(|piece| piece.end == End::Pageable) {
            true => refuse(start, Refusal::NotRegistered),
            false => Ok(pieces),
        }
    }

    /// A word that streams signal by.
    fn word(&self, device: DeviceId, address: Address, usage: Use) -> Checked<Piece> {
        if !address.0.is_multiple_of(4) {
            return refuse(address, Refusal::InvalidValue);
        }
        let pieces = self.reachable(device, address, 4, usage)?;
        pieces.first().copied().ok_or(Denial::Refused(address, Refusal::InvalidValue))
    }

    /// Where the lanes that this one waits for without being told to stand.
    pub(super) fn implied_points(&self, lane: u64) -> Vec<Point> {
        let points = self.streams.implied(lane).into_iter().map(|other| self.timeline.last(other));
        points.filter(|point| !self.timeline.passed(*point)).collect()
    }

    // Events.

    pub(super) fn record_event(&mut self, device: DeviceId, event: Event, stream: Stream) -> Checked<()> {
        let lane = self.lane(device, stream)?;
        self.world.events.of(device, event)?;
        let mut clock = self.streams.clock(lane);
        if let Some(id) = self.streams.get(lane).and_then(|state| state.capture) {
            self.intact(id)?;
            self.world.events.record(event, Mark::Captured(id), clock);
            return Ok(());
        }
        let n = self.timeline.last(lane).n + 1;
        clock.see(Epoch { lane, n });
        let record = self.world.events.record(event, Mark::Never, clock.clone());
        let work = Work { action: Action::Record { event, record }, holds: Vec::new() };
        let after = self.implied_points(lane);
        let point = self.timeline.issue(lane, after, Cost::None, work);
        self.world.events.place(event, vec![point]);
        self.streams.enqueued(Epoch { lane, n }, clock);
        self.timeline.settle(&mut self.world);
        Ok(())
    }

    /// Marks the end of all work of a device so far, by a lane of its own that waits for all others.
    pub(super) fn record_context(&mut self, device: DeviceId, event: Event) -> Checked<()> {
        self.world.events.of(device, event)?;
        self.no_capture(device)?;
        let clock = self.streams.clock_of(device);
        let record = self.world.events.record(event, Mark::Never, clock);
        let after = self.points_of(device);
        let lane = fresh_lane();
        self.timeline.open(lane);
        let work = Work { action: Action::Record { event, record }, holds: Vec::new() };
        let point = self.timeline.issue(lane, after, Cost::None, work);
        self.timeline.close(lane);
        self.world.events.place(event, vec![point]);
        self.timeline.settle(&mut self.world);
        Ok(())
    }

    /// Where the lanes of a device that are not idle stand.
    pub(super) fn points_of(&self, device: DeviceId) -> Vec<Point> {
        let points = self.streams.of(device).map(|(lane, _)| self.timeline.last(lane));
        points.filter(|point| !self.timeline.passed(*point)).collect()
    }

    pub(super) fn wait_event(&mut self, device: DeviceId, stream: Stream, event: Event) -> Checked<()> {
        let lane = self.lane(device, stream)?;
        let marked = self.world.events.get(event)?;
        let capture = self.streams.get(lane).and_then(|state| state.capture);
        let points = match (&marked.mark, capture) {
            (Mark::Captured(id), _) => return self.join_capture(lane, *id),
            (Mark::Never, _) => return Ok(()),
            (Mark::At(_), Some(_)) => {
                self.captures.invalidate(device);
                return Err(Denial::Failed(ISOLATION));
            }
            (Mark::At(points), None) => points.clone(),
        };
        let mut clock = self.streams.clock(lane);
        clock.join(&marked.clock);
        let mut after = self.implied_points(lane);
        after.extend(points);
        let point = self.timeline.issue(lane, after, Cost::None, Work::nothing());
        self.streams.enqueued(Epoch { lane, n: point.n }, clock);
        self.timeline.settle(&mut self.world);
        Ok(())
    }

    /// Whether an event has passed. The host has then seen it.
    pub(super) fn query(&mut self, device: DeviceId, event: Event) -> Checked<bool> {
        let (points, clock) = self.event_points(device, event)?;
        let passed = points.iter().all(|point| self.timeline.passed(*point));
        if passed {
            self.streams.observe(&clock);
        }
        Ok(passed)
    }

    /// What an event waits for, and what is ordered before it.
    pub(super) fn event_points(
        &mut self,
        device: DeviceId,
        event: Event,
    ) -> Checked<(Vec<Point>, VectorClock)> {
        let marked = self.world.events.of(device, event)?;
        match &marked.mark {
            Mark::Never => Ok(Default::default()),
            Mark::At(points) => Ok((points.clone(), marked.clock.clone())),
            Mark::Captured(_) => {
                self.captures.invalidate(device);
                refuse(Address(0), Refusal::CapturedEvent)
            }
        }
    }

    /// Microseconds between two passed events.
    pub(super) fn elapsed(&self, device: DeviceId, from: Event, to: Event) -> Checked<f64> {
        let time = |event| {
            let marked = self.world.events.of(device, event)?;
            match (marked.timed, &marked.mark, marked.at) {
                (true, Mark::At(_), Some(at)) => Ok(at as f64 / 1e3),
                (true, Mark::At(_), None) => Err(Denial::NotReady),
                _ => refuse(Address(0), Refusal::InvalidValue),
            }
        };
        Ok(time(to)? - time(from)?)
    }

    // Captures.

    pub(super) fn begin_capture(&mut self, device: DeviceId, stream: Stream) -> Checked<()> {
        let lane = self.lane(device, stream)?;
        let Some(state) = self.streams.get_mut(lane) else { return Ok(()) };
        if state.capture.is_some() || matches!(stream, Stream(0) | Stream::LEGACY) {
            return Err(Denial::Failed(ILLEGAL_STATE));
        }
        state.capture = Some(self.captures.begin(device, lane));
        Ok(())
    }

    pub(super) fn end_capture(&mut self, device: DeviceId, stream: Stream) -> Checked<super::capture::Graph> {
        let lane = self.lane(device, stream)?;
        let id = self.streams.get(lane).and_then(|state| state.capture);
        let begun_here = |id: &u64| self.captures.get(*id).is_some_and(|capture| capture.origin == lane);
        let Some(capture) = id.filter(begun_here).and_then(|id| self.captures.end(id)) else {
            return Err(Denial::Failed(ILLEGAL_STATE));
        };
        for lane in &capture.lanes {
            if let Some(state) = self.streams.get_mut(*lane) {
                state.capture = None;
            }
        }
        if capture.broken { Err(Denial::Failed(INVALIDATED)) } else { Ok(capture.graph) }
    }

    pub(super) fn capture_state(&mut self, device: DeviceId, stream: Stream) -> Checked<CaptureState> {
        let lane = self.lane(device, stream)?;
        let id = self.streams.get(lane).and_then(|state| state.capture);
        Ok(match id.and_then(|id| Some((id, self.captures.get(id)?))) {
            None => CaptureState::None,
            Some((_, capture)) if capture.broken => CaptureState::Invalidated,
            Some((id, _)) => CaptureState::Active(id),
        })
    }

    /// Refuses and breaks the capture if the lane is recorded.
    pub(super) fn not_capturing(&mut self, lane: u64) -> Checked<()> {
        match self.streams.get(lane) {
            Some(state) if state.capture.is_some() => {
                let device = state.device;
                self.captures.invalidate(device);
                Err(Denial::Capturing)
            }
            _ => Ok(()),
        }
    }

    /// Refuses and breaks captures if a device has any.
    pub(super) fn no_capture(&mut self, device: DeviceId) -> Checked<()> {
        if self.captures.invalidate(device) { Err(Denial::Capturing) } else { Ok(()) }
    }

    fn intact(&self, id: u64) -> Checked<()> {
        match self.captures.get(id) {
            Some(capture) if !capture.broken => Ok(()),
            _ => Err(Denial::Failed(INVALIDATED)),
        }
    }

    fn record(&mut self, id: u64, request: Request) -> Checked<()> {
        self.intact(id)?;
        if let Some(capture) = self.captures.get_mut(id) {
            capture.graph.requests.push(request);
        }
        Ok(())
    }

    fn join_capture(&mut self, lane: u64, id: u64) -> Checked<()> {
        if self.captures.get(id).is_none() {
            return refuse(Address(0), Refusal::CapturedEvent);
        }
        self.intact(id)?;
        let Some(state) = self.streams.get_mut(lane) else { return Ok(()) };
        match state.capture {
            Some(other) if other == id => {}
            Some(_) => return Err(Denial::Failed(ISOLATION)),
            None => {
                state.capture = Some(id);
                if let Some(capture) = self.captures.get_mut(id) {
                    capture.lanes.push(lane);
                }
            }
        }
        Ok(())
    }
}

impl Resolved {
    /// A word that is signalled by: not checked for order, since it makes order.
    fn signal(word: Piece, cost: Cost<Awaited>, action: Action) -> Self {
        Resolved { pieces: vec![(word, Use::Signal)], cost, action, pageable: false }
    }
}

/// Visits two lists of pieces of equal length in parts that lie in one piece at both ends.
fn pairs(sources: &[Piece], targets: &[Piece], mut visit: impl FnMut(&Piece, &Piece)) {
    let (mut sources, mut targets) = (sources.iter().copied(), targets.iter().copied());
    let (mut from, mut to) = (sources.next(), targets.next());
    while let (Some(source), Some(target)) = (from, to) {
        let size = source.size.min(target.size);
        let (head, rest) = source.split(size);
        from = if rest.size > 0 { Some(rest) } else { sources.next() };
        let (target_head, rest) = target.split(size);
        to = if rest.size > 0 { Some(rest) } else { targets.next() };
        visit(&head, &target_head);
    }
}
