//! The fast path: a free piece that fits is there. No driver call, no heap allocation, nothing but arithmetic.

use glake_units::Bytes;
use smallvec::SmallVec;

use super::{Allocator, SMALL_LIMIT, packed};
use crate::domain::StreamLanes;
use crate::ids::{LaneId, Move, PieceId};
use crate::live::Live;
use crate::piece::State;
use crate::plan::{Grant, Request};

impl Allocator {
    /// Hands out a free piece that fits, or nothing: then [`Allocator::plan`] says what it takes.
    #[inline]
    pub fn take(&mut self, request: &Request) -> Option<Grant> {
        let domain =
            self.domains.get(request.domain).filter(|domain| !domain.is_released() && !domain.sealed)?;
        let lanes = domain.lanes_of(request.stream)?;
        let size = packed(request.size);
        if size <= SMALL_LIMIT.get() {
            self.take_small(lanes, domain.passed_slabs, size, request.size.get())
        } else {
            let (passed, aliases) = (domain.passed_large, !domain.aliases.is_empty());
            let own = self.lanes[lanes.large.index()].take_best(&mut self.pieces, size);
            let piece = match own {
                Some(piece) => piece,
                // An alias may hold enough of the stream's own: the slow path looks, before it takes what others could.
                None if aliases && self.lanes[lanes.large.index()].bytes >= size => return None,
                None => self.lanes[passed.index()].take_best(&mut self.pieces, size)?,
            };
            Some(self.hand_out(piece, State::Live, lanes.large, request.size.get()))
        }
    }

    /// A stream takes its own pieces first, then passed ones: what it could use itself it leaves to nobody else, and what
    /// anyone could use it leaves to the others.
    fn take_from(&mut self, own: LaneId, passed: LaneId, size: u64) -> Option<PieceId> {
        let found = self.lanes[own.index()].take_best(&mut self.pieces, size);
        found.or_else(|| self.lanes[passed.index()].take_best(&mut self.pieces, size))
    }

    #[inline]
    pub(super) fn take_small(
        &mut self,
        lanes: StreamLanes,
        passed_slabs: LaneId,
        size: u64,
        requested: u64,
    ) -> Option<Grant> {
        let piece = match self.lanes[lanes.small.index()].take_best(&mut self.pieces, size) {
            Some(piece) => piece,
            None => {
                let slab = self.take_from(lanes.slabs, passed_slabs, self.settings.slab.get())?;
                self.open_slab(slab, lanes);
                self.lanes[lanes.small.index()].take_best(&mut self.pieces, size)?
            }
        };
        Some(self.hand_out(piece, State::Live, lanes.small, requested))
    }

    /// Makes a slab of a piece: a segment of its own with one free piece.
    pub(super) fn open_slab(&mut self, slab: PieceId, lanes: StreamLanes) {
        let outer = &mut self.pieces[slab];
        outer.state = State::Slab;
        outer.lane = lanes.slabs;
        let (start, size, epoch, moved) = (outer.start, outer.size, outer.epoch, outer.moved);
        let (first, inner, _) = self.pieces.segment(start, size, State::Free);
        self.pieces[slab].inside = first;
        let piece = &mut self.pieces[inner];
        piece.slab = slab;
        piece.lane = lanes.small;
        piece.epoch = epoch;
        piece.moved = moved;
        self.lanes[lanes.small.index()].insert(&mut self.pieces, inner);
    }

    /// Hands out a piece that is in no lane.
    #[inline]
    pub(super) fn hand_out(&mut self, id: PieceId, state: State, lane: LaneId, requested: u64) -> Grant {
        let piece = &mut self.pieces[id];
        piece.state = state;
        piece.lane = lane;
        piece.requested = requested;
        piece.recorded = false;
        let moved = piece.moved > Move::default() && piece.epoch > self.passed;
        let (start, size, small) = (piece.start, piece.size, piece.slab != PieceId::NONE);
        let edge = moved && self.needs_edge(id, lane);
        self.live.insert(start, Live::Piece(id));
        self.stats.handed_out(small, size, requested);
        self.stats.counters.edges += u64::from(edge);
        Grant { offset: Bytes::new(start), size: Bytes::new(size), edge, waits: SmallVec::new() }
    }

    /// Whether bytes that were last used at another address need a completion edge on the stream that takes them: not
    /// where it has passed one since.
    fn needs_edge(&mut self, id: PieceId, lane: LaneId) -> bool {
        let lane = &mut self.lanes[lane.index()];
        let needs = self.pieces[id].moved.is_after(lane.edge);
        if needs {
            lane.edge = self.moves;
        }
        needs
    }
}
