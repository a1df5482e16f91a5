//! The fast path: a free piece that fits is there. No driver call, no heap allocation, nothing but arithmetic.

use glake_units::Bytes;
use smallvec::SmallVec;

use super::{Allocator, SMALL_LIMIT, packed};
use crate::domain::StreamLists;
use crate::ids::{FreeListId, Move, PieceId};
use crate::live::Live;
use crate::piece::State;
use crate::plan::{Grant, Request};

impl Allocator {
    /// Hands out a free piece that fits, or nothing: then [`Allocator::plan`] says what it takes.
    #[inline]
    pub fn take(&mut self, request: &Request) -> Option<Grant> {
        let domain =
            self.domains.get(request.domain).filter(|domain| !domain.is_released() && !domain.sealed)?;
        let lists = domain.lists_of(request.stream)?;
        let size = packed(request.size);
        if size <= SMALL_LIMIT.get() {
            self.take_small(lists, domain.passed_slabs, size, request.size.get())
        } else {
            let (passed, aliases) = (domain.passed_large, !domain.aliases.is_empty());
            let own = self.lists[lists.large.index()].take_best(&mut self.pieces, size);
            let piece = match own {
                Some(piece) => piece,
                // An alias may hold enough of the stream's own: the slow path looks, before it takes what others could.
                None if aliases && self.lists[lists.large.index()].bytes >= size => return None,
                None => self.lists[passed.index()].take_best(&mut self.pieces, size)?,
            };
            Some(self.hand_out(piece, State::Live, lists.large, request.size.get()))
        }
    }

    /// A stream takes its own pieces first, then passed ones: what it could use itself it leaves to nobody else, and what
    /// anyone could use it leaves to the others.
    fn take_from(&mut self, own: FreeListId, passed: FreeListId, size: u64) -> Option<PieceId> {
        let found = self.lists[own.index()].take_best(&mut self.pieces, size);
        found.or_else(|| self.lists[passed.index()].take_best(&mut self.pieces, size))
    }

    #[inline]
    pub(super) fn take_small(
        &mut self,
        lists: StreamLists,
        passed_slabs: FreeListId,
        size: u64,
        requested: u64,
    ) -> Option<Grant> {
        let piece = match self.lists[lists.small.index()].take_best(&mut self.pieces, size) {
            Some(piece) => piece,
            None => {
                let slab = self.take_from(lists.slabs, passed_slabs, self.settings.slab.get())?;
                self.open_slab(slab, lists);
                self.lists[lists.small.index()].take_best(&mut self.pieces, size)?
            }
        };
        Some(self.hand_out(piece, State::Live, lists.small, requested))
    }

    /// Makes a slab of a piece: a segment of its own with one free piece.
    pub(super) fn open_slab(&mut self, slab: PieceId, lists: StreamLists) {
        let outer = &mut self.pieces[slab];
        outer.state = State::Slab;
        outer.list = lists.slabs;
        let (start, size, epoch, moved) = (outer.start, outer.size, outer.epoch, outer.moved);
        let (first, inner, _) = self.pieces.segment(start, size, State::Free);
        self.pieces[slab].inside = first;
        let piece = &mut self.pieces[inner];
        piece.slab = slab;
        piece.list = lists.small;
        piece.epoch = epoch;
        piece.moved = moved;
        self.lists[lists.small.index()].insert(&mut self.pieces, inner);
    }

    /// Hands out a piece that is in no free list.
    #[inline]
    pub(super) fn hand_out(&mut self, id: PieceId, state: State, list: FreeListId, requested: u64) -> Grant {
        let piece = &mut self.pieces[id];
        piece.state = state;
        piece.list = list;
        piece.requested = requested;
        piece.recorded = false;
        let moved = piece.moved > Move::default() && piece.epoch > self.passed;
        let (start, size, small) = (piece.start, piece.size, piece.slab != PieceId::NONE);
        let edge = moved && self.needs_edge(id, list);
        self.live.insert(start, Live::Piece(id));
        self.stats.handed_out(small, size, requested);
        self.stats.counters.edges += u64::from(edge);
        Grant { offset: Bytes::new(start), size: Bytes::new(size), edge, waits: SmallVec::new() }
    }

    /// Whether bytes that were last used at another address need a completion edge on the stream that takes them: not
    /// where it has passed one since.
    fn needs_edge(&mut self, id: PieceId, list: FreeListId) -> bool {
        let list = &mut self.lists[list.index()];
        let needs = self.pieces[id].moved.is_after(list.edge);
        if needs {
            list.edge = self.moves;
        }
        needs
    }
}
