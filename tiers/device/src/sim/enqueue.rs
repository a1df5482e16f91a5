//! Requests become work here: checked, ordered, priced, enqueued.
//!
//! Invariant: a request is checked completely before anything changes, so a refused one leaves no trace.

use super::denial::{Checked, Denial, refuse};
use super::flow::Load;
use super::kernel::{Declared, merged};
use super::order::Epoch;
use super::request::{KernelRequest, Request};
use super::resolve::{Piece, Use};
use super::route::End;
use super::state::State;
use super::timeline::{Cost, Point};
use super::world::{Action, Awaited, Segment, Work};
use crate::{Address, CopyRequest, DeviceId, Refusal, Stream};

/// A request, checked: what it touches, what it costs, what it does.
struct Resolved {
    pieces: Vec<(Piece, Use)>,
    cost: Cost<Awaited>,
    action: Action,
    /// Whether the caller must wait for it.
    pageable: bool,
}

impl State {
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
            return self.capture(id, request).map(|()| None);
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
        self.streams.enqueued(epoch, order);
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
        let (mut pieces, mut declared, mut bytes) = (Vec::new(), Declared::default(), 0_u64);
        let Declared { reads, writes } = &mut declared;
        for (touches, usage, ranges) in
            [(&kernel.reads, Use::Read, reads), (&kernel.writes, Use::Write, writes)]
        {
            for (start, end) in merged(touches) {
                let found = self.reachable(device, Address(start), end - start, usage)?;
                pieces.extend(found.iter().map(|piece| (*piece, usage)));
                bytes = bytes.saturating_add(end - start);
                ranges.push((start, found));
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
