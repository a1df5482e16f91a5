//! Conversion of requests into work: checked, ordered, priced and enqueued.
//!
//! Invariant: a request is checked completely before anything changes, so a refused one has no effect.

use super::context::ContextId;
use super::denial::{Checked, Denial, refuse};
use super::flow::Load;
use super::kernel::{Declared, merged};
use super::order::{Position, VectorClock};
use super::request::{KernelRequest, Request};
use super::resolve::{Piece, Use};
use super::route::End;
use super::state::State;
use super::timeline::{Cost, Point};
use super::world::{Action, Awaited, Work};
use glake_device::{Address, Refusal, Stream};

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
