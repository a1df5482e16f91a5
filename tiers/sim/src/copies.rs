//! Resolution of copies into work: segments, pipes and time of return.
//!
//! As in CUDA, a copy between two host ranges and a copy to pageable memory return when they are done. A copy from pageable memory to a GPU
//! returns when the last byte of the source has been read, which is not before the stream reaches it; the last piece may then still be in
//! flight.

use std::sync::Arc;

use parking_lot::Mutex;

use super::context::ContextId;
use super::denial::Checked;
use super::enqueue::{Resolved, Returns};
use super::flow::Load;
use super::resolve::{Piece, Use};
use super::route::End;
use super::state::State;
use super::timeline::Cost;
use super::world::{Action, Segment};
use glake_device::{CopyDevices, CopyRequest};

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
