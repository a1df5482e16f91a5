//! Conversion of requests into work: checked, ordered, priced and enqueued; copies as segments over pipes; events.
//!
//! As in CUDA, a copy between two host ranges and a copy to pageable memory return when they are done. A copy from pageable memory to a GPU
//! returns when the last byte of the source has been read, which is not before the stream reaches it; the last piece may then still be in
//! flight.
//!
//! An event of a whole context is a lane of its own, with one piece of work that waits for all other lanes: so work enqueued later does not
//! delay it, and nothing waits for it.
//!
//! Invariant: a request is checked completely before anything changes, so a refused one has no effect.

use std::sync::Arc;

use glake_device::{Address, CopyDevices, CopyRequest, Event, Refusal, Stream};
use parking_lot::Mutex;

use super::context::ContextId;
use super::denial::{Checked, Denial, refuse};
use super::event::Mark;
use super::flow::Load;
use super::kernel::{Declared, KernelRequest, Request, merged};
use super::order::{Position, VectorClock};
use super::resolve::{Piece, Use};
use super::route::End;
use super::state::{Action, Awaited, Segment, State, Work};
use super::stream::fresh_lane;
use super::timeline::{Cost, Point};

/// A checked request: memory it accesses, cost and effect.
pub(super) struct Resolved {
    pub(super) pieces: Vec<(Piece, Use)>,
    pub(super) cost: Cost<Awaited>,
    pub(super) action: Action,
    pub(super) returns: Returns,
}

/// Moment at which the enqueuing call returns.
pub(super) enum Returns {
    AtOnce,
    /// Returns when its source has been read. The action is what remains to be done then, with its duration in nanoseconds.
    Read(Action, u64),
    /// Returns when the work is done.
    Done,
}

/// Completion that a caller waits for, and the clock that the host joins afterwards.
pub(super) struct Awaiting {
    pub(super) point: Point,
    pub(super) clock: VectorClock,
}

impl State {
    /// Enqueues a request; returns the completion that the caller must wait for, if any.
    pub(super) fn enqueue(
        &mut self,
        context: ContextId,
        stream: Stream,
        request: Request,
    ) -> Checked<Option<Awaiting>> {
        let lane = self.lane(context, stream)?;
        let resolved = self.resolve(context, &request)?;
        if let Some(id) = self.streams.get(lane).and_then(|state| state.capture) {
            return self.capture(id, lane, request).map(|()| None);
        }
        let mut order = self.streams.order(lane);
        if self.strict {
            for (piece, usage) in &resolved.pieces {
                self.world.memory.check_order(piece, *usage, &order, &self.streams.seen)?;
            }
        }
        if let Cost::Value(awaited) = &resolved.cost {
            order.completes(&self.streams.flag(awaited.pointer));
        }
        let first = Position { lane, n: self.timeline.last(lane).n + 1 };
        let last = match &resolved.returns {
            Returns::Read(..) => Position { lane, n: first.n + 1 },
            Returns::AtOnce | Returns::Done => first,
        };
        let mut holds = Vec::new();
        for (piece, usage) in &resolved.pieces {
            if self.strict {
                let position = if *usage == Use::Read { first } else { last };
                self.world.memory.note_use(piece, *usage, position, &self.streams.seen);
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
        let mut clock = order.clock.clone();
        clock.see(first);
        let Resolved { cost, action, returns, .. } = resolved;
        let awaiting = match returns {
            Returns::Read(rest, time) => {
                let work = Work { context: Some(context), action, holds: Vec::new() };
                let point = self.timeline.issue(lane, after, cost, work);
                self.timeline.issue(
                    lane,
                    Vec::new(),
                    Cost::Delay(time),
                    Work { context: Some(context), action: rest, holds },
                );
                Some(Awaiting { point, clock })
            }
            Returns::Done => {
                let point =
                    self.timeline.issue(lane, after, cost, Work { context: Some(context), action, holds });
                Some(Awaiting { point, clock })
            }
            Returns::AtOnce => {
                self.timeline.issue(lane, after, cost, Work { context: Some(context), action, holds });
                None
            }
        };
        self.streams.enqueued(last, order);
        if let (Some(pointer), Some(state)) = (flag, self.streams.get(lane)) {
            let clock = state.clock.clone();
            self.streams.raise(pointer, &clock);
        }
        self.timeline.settle(&mut self.world);
        Ok(awaiting)
    }

    fn resolve(&self, context: ContextId, request: &Request) -> Checked<Resolved> {
        match request {
            Request::Copy(requests) => self.resolve_copies(context, requests),
            Request::CopyBetween(request, owners) => self.resolve_between(context, *request, *owners),
            Request::Fill { start, size, byte } => {
                let pieces = self.reachable(context, *start, size.get(), Use::Write)?;
                let places = pieces.iter().map(|piece| (piece.pointer, piece.size)).collect();
                let index = context.device.0 as usize;
                let load = Load { route: self.plumbing.local(index), bytes: size.get(), cap: f64::INFINITY };
                Ok(Resolved {
                    pieces: pieces.into_iter().map(|piece| (piece, Use::Write)).collect(),
                    cost: Cost::Flow(self.latencies[index], vec![load]),
                    action: Action::Fill(places, *byte),
                    returns: Returns::AtOnce,
                })
            }
            Request::WaitValue { address, value, compare } => {
                let pointer = self.word(context, *address, Use::Read)?;
                let awaited = Awaited { context, pointer: pointer.pointer, value: *value, compare: *compare };
                Ok(Resolved::signal(pointer, Cost::Value(awaited), Action::Nothing))
            }
            Request::WriteValue { address, value } => {
                let word = self.word(context, *address, Use::Write)?;
                let store = Action::Store { pointer: word.pointer, value: *value };
                Ok(Resolved::signal(word, Cost::None, store))
            }
            Request::Kernel(kernel) => match self.resolve_kernel(context, kernel) {
                Err(Denial::Refused(..)) if self.faults_kill => Ok(Resolved::fault(context, kernel)),
                resolved => resolved,
            },
        }
    }

    fn resolve_kernel(&self, context: ContextId, kernel: &KernelRequest) -> Checked<Resolved> {
        let (mut pieces, mut declared, mut loads) = (Vec::new(), Declared::default(), Vec::<Load>::new());
        // A kernel's loads and stores use the links of the GPU that runs it, wherever the memory is.
        let by = context.device.0 as usize;
        let own = End::Gpu { index: by, mapped: true };
        let Declared { reads, writes } = &mut declared;
        for (touches, usage, ranges) in
            [(&kernel.reads, Use::Read, reads), (&kernel.writes, Use::Write, writes)]
        {
            let mut bytes = Vec::<(End, u64)>::new();
            for (start, end) in merged(touches) {
                // Unlike a copy, a kernel may cross from one registration of host memory into the next.
                let (mut found, mut at) = (Vec::new(), start);
                while at < end {
                    let until =
                        self.world.memory.host_table.find(at).map_or(end, |(_, until)| until.min(end));
                    found.extend(self.reachable(context, Address(at), until - at, usage)?);
                    at = until;
                }
                for piece in &found {
                    match bytes.iter_mut().find(|(end, _)| *end == piece.end) {
                        Some((_, sum)) => *sum += piece.size,
                        None => bytes.push((piece.end, piece.size)),
                    }
                }
                pieces.extend(found.iter().map(|piece| (*piece, usage)));
                ranges.push((start, found));
            }
            loads.extend(bytes.into_iter().map(|(end, bytes)| {
                let (from, to) = if usage == Use::Read { (end, own) } else { (own, end) };
                let (route, cap) = self.plumbing.route(from, to, by);
                Load { route, bytes, cap }
            }));
        }
        let cost = match kernel.duration {
            Some(time) => Cost::Delay(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
            None => Cost::Flow(self.latencies[by], loads),
        };
        let action = Action::Kernel { context, declared, body: kernel.body.clone() };
        Ok(Resolved { pieces, cost, action, returns: Returns::AtOnce })
    }

    /// Resolves a range that a device can access directly, in a context.
    pub(super) fn reachable(
        &self,
        context: ContextId,
        start: Address,
        size: u64,
        usage: Use,
    ) -> Checked<Vec<Piece>> {
        let pieces = self.world.memory.resolve(context, start, size, usage)?;
        let mut at = start.0;
        for piece in &pieces {
            match piece.end {
                End::Pageable => return refuse(Address(at), Refusal::NotRegistered),
                End::Foreign { .. } => return refuse(Address(at), Refusal::NoPeerAccess),
                End::Gpu { .. } | End::Pinned => at += piece.size,
            }
        }
        Ok(pieces)
    }

    /// Resolves the word of a stream signal.
    fn word(&self, context: ContextId, address: Address, usage: Use) -> Checked<Piece> {
        if !address.0.is_multiple_of(4) {
            return refuse(address, Refusal::InvalidValue);
        }
        let pieces = self.reachable(context, address, 4, usage)?;
        pieces.first().copied().ok_or(Denial::Refused(address, Refusal::InvalidValue))
    }
}

impl Resolved {
    /// Builds the work of a kernel that accesses memory out of its context's reach.
    fn fault(context: ContextId, kernel: &KernelRequest) -> Self {
        let time = kernel.duration.unwrap_or_default();
        let cost = Cost::Delay(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        Resolved { pieces: Vec::new(), cost, action: Action::Fault(context), returns: Returns::AtOnce }
    }

    /// Builds a signal or a wait on a word. The word is not checked for order, because it establishes order.
    fn signal(word: Piece, cost: Cost<Awaited>, action: Action) -> Self {
        Resolved { pieces: vec![(word, Use::Signal)], cost, action, returns: Returns::AtOnce }
    }
}

/// Size of the driver's staging buffer: bytes of a pageable source still in flight when the call returns.
const STAGED: u64 = 64 << 10;
/// Nanoseconds until the staged bytes arrive: 64 KiB at 55 GB/s.
const LANDING: u64 = 1200;

impl State {
    /// Resolves copies by a context that can access both ends.
    pub(super) fn resolve_copies(&self, context: ContextId, requests: &[CopyRequest]) -> Checked<Resolved> {
        let memory = &self.world.memory;
        let ends = |request: &CopyRequest| {
            let sources = memory.resolve(context, request.from, request.size.get(), Use::Read)?;
            let targets = memory.resolve(context, request.to, request.size.get(), Use::Write)?;
            Ok((sources, targets))
        };
        self.resolve_ends(context, requests.iter().map(ends).collect::<Checked<_>>()?)
    }

    /// Resolves a copy between two devices, each of which can access only its own end: through the host.
    pub(super) fn resolve_between(
        &self,
        context: ContextId,
        request: CopyRequest,
        owners: CopyDevices,
    ) -> Checked<Resolved> {
        let end = |device, start, usage| -> Checked<Vec<Piece>> {
            let within = ContextId { device, ..context };
            let mut pieces = self.world.memory.resolve(within, start, request.size.get(), usage)?;
            for piece in &mut pieces {
                piece.end = piece.end.gpu().map_or(piece.end, |index| End::Foreign { index });
            }
            Ok(pieces)
        };
        let sources = end(owners.from, request.from, Use::Read)?;
        let targets = end(owners.to, request.to, Use::Write)?;
        self.resolve_ends(context, vec![(sources, targets)])
    }

    fn resolve_ends(&self, context: ContextId, copies: Vec<(Vec<Piece>, Vec<Piece>)>) -> Checked<Resolved> {
        let by = context.device.0 as usize;
        let (mut pieces, mut segments, mut loads) = (Vec::new(), Vec::new(), Vec::<Load>::new());
        let (mut reads_pageable, mut waits) = (false, false);
        for (sources, targets) in copies {
            pairs(&sources, &targets, |from, to| {
                let (route, cap) = self.plumbing.route(from.end, to.end, by);
                match loads.iter_mut().find(|load| load.route == route && load.cap == cap) {
                    Some(load) => load.bytes += from.size,
                    None => loads.push(Load { route, bytes: from.size, cap }),
                }
                segments.push(Segment { to: to.pointer, from: from.pointer, size: from.size });
                reads_pageable |= from.end == End::Pageable;
                let on_host = from.end.gpu().is_none() && to.end.gpu().is_none();
                waits |= to.end == End::Pageable || on_host;
            });
            pieces.extend(sources.into_iter().map(|piece| (piece, Use::Read)));
            pieces.extend(targets.into_iter().map(|piece| (piece, Use::Write)));
        }
        let cost = Cost::Flow(self.latencies[by], loads);
        let (action, returns) = match (waits, reads_pageable) {
            (true, _) => (Action::Copy(segments), Returns::Done),
            (false, true) => {
                let last = split_off(&mut segments, STAGED);
                let staging = Arc::new(Mutex::new(Vec::new()));
                let land = Action::Land { last: last.clone(), from: staging.clone() };
                (Action::Stage { first: segments, last, into: staging }, Returns::Read(land, LANDING))
            }
            (false, false) => (Action::Copy(segments), Returns::AtOnce),
        };
        Ok(Resolved { pieces, cost, action, returns })
    }
}

/// Splits the last `size` bytes off a list of segments.
fn split_off(segments: &mut Vec<Segment>, mut size: u64) -> Vec<Segment> {
    let mut last = Vec::new();
    while size > 0
        && let Some(mut segment) = segments.pop()
    {
        let taken = segment.size.min(size);
        size -= taken;
        segment.size -= taken;
        let (to, from) = (segment.to + segment.size, segment.from + segment.size);
        last.push(Segment { to, from, size: taken });
        if segment.size > 0 {
            segments.push(segment);
        }
    }
    last
}

/// Visits two lists of pieces of equal total length in parts that are contiguous at both ends.
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

impl State {
    pub(super) fn record_event(&mut self, context: ContextId, event: Event, stream: Stream) -> Checked<()> {
        let lane = self.lane(context, stream)?;
        self.world.events.of(context, event)?;
        let mut order = self.streams.order(lane);
        if let Some(id) = self.streams.get(lane).and_then(|state| state.capture) {
            self.intact(id)?;
            let tail = self.captures.tail(id, lane);
            self.world.events.record(event, Mark::Captured(id, tail), order.clock);
            return Ok(());
        }
        let n = self.timeline.last(lane).n + 1;
        order.clock.see(Position { lane, n });
        let record = self.world.events.record(event, Mark::Never, order.clock.clone());
        let work = Work::record(event, record);
        let after = self.implied_points(lane);
        let point = self.timeline.issue(lane, after, Cost::None, work);
        self.world.events.place(event, vec![point]);
        self.streams.enqueued(Position { lane, n }, order);
        self.timeline.settle(&mut self.world);
        Ok(())
    }

    /// Marks the end of all work of a context so far, on a new lane that waits for all others.
    pub(super) fn record_context(&mut self, context: ContextId, event: Event) -> Checked<()> {
        self.world.events.of(context, event)?;
        self.no_capture(context)?;
        let clock = self.streams.clock_of(context);
        let record = self.world.events.record(event, Mark::Never, clock);
        let after = self.points_of(context);
        let lane = fresh_lane();
        self.timeline.open(lane);
        let work = Work::record(event, record);
        let point = self.timeline.issue(lane, after, Cost::None, work);
        self.timeline.close(lane);
        self.world.events.place(event, vec![point]);
        self.timeline.settle(&mut self.world);
        Ok(())
    }

    pub(super) fn wait_event(&mut self, context: ContextId, stream: Stream, event: Event) -> Checked<()> {
        let lane = self.lane(context, stream)?;
        let marked = self.world.events.get(event)?;
        let capture = self.streams.get(lane).and_then(|state| state.capture);
        let points = match (&marked.mark, capture) {
            (Mark::Captured(id, tail), _) => {
                let (id, tail) = (*id, tail.clone());
                return self.join_capture(lane, id, tail);
            }
            (Mark::Never, _) => return Ok(()),
            (Mark::At(_), Some(_)) => {
                self.captures.invalidate(context);
                return Err(Denial::Failed(super::capture::ISOLATION));
            }
            (Mark::At(points), None) => points.clone(),
        };
        let clock = marked.clock.clone();
        self.come_after(lane, points, &clock);
        Ok(())
    }

    /// Returns whether an event has completed, which the host has then observed.
    pub(super) fn query(&mut self, context: ContextId, event: Event) -> Checked<bool> {
        let (points, clock) = self.event_points(context, event)?;
        let passed = points.iter().all(|point| self.timeline.passed(*point));
        if passed {
            self.streams.observe(&clock);
        }
        Ok(passed)
    }

    /// Returns the points that an event waits for and the work ordered before it.
    pub(super) fn event_points(
        &mut self,
        context: ContextId,
        event: Event,
    ) -> Checked<(Vec<Point>, VectorClock)> {
        let marked = self.world.events.of(context, event)?;
        match &marked.mark {
            Mark::Never => Ok(Default::default()),
            Mark::At(points) => Ok((points.clone(), marked.clock.clone())),
            Mark::Captured(..) => {
                self.captures.invalidate(context);
                refuse(Address(0), Refusal::CapturedEvent)
            }
        }
    }

    /// Returns the microseconds between two completed events.
    pub(super) fn elapsed(&self, context: ContextId, from: Event, to: Event) -> Checked<f64> {
        let time = |event| {
            let marked = self.world.events.of(context, event)?;
            match (marked.timed, &marked.mark, marked.at) {
                (true, Mark::At(_), Some(at)) => Ok(at as f64 / 1e3),
                (true, Mark::At(_), None) => Err(Denial::NotReady),
                _ => refuse(Address(0), Refusal::InvalidValue),
            }
        };
        Ok(time(to)? - time(from)?)
    }
}
