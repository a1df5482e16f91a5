//! Slabs: pieces of home that contain the blocks of small requests. A slab opens on demand and closes once it is entirely free.

use super::Home;
use crate::domain::StreamLists;
use crate::free_list::{Class, Owner};
use crate::ids::{DomainId, PieceId};
use crate::piece::State;

impl Home {
    /// Opens a slab in a piece: a segment of its own with one free piece.
    pub(crate) fn open_slab(&mut self, slab: PieceId, lists: StreamLists) {
        let outer = &mut self.pieces[slab];
        outer.state = State::Slab;
        outer.list = lists.slabs;
        let (start, size, point, moved) = (outer.start, outer.size, outer.point, outer.moved);
        let (first, inner, _) = self.pieces.segment(start, size, State::Free);
        self.pieces[slab].inside = first;
        let piece = &mut self.pieces[inner];
        piece.slab = slab;
        piece.list = lists.small;
        piece.point = point;
        piece.moved = moved;
        self.lists[lists.small].insert(&mut self.pieces, inner);
    }

    /// Closes a slab if `id`, in no free list, covers it. The stream's last free slab stays open, so that alternating frees and requests do
    /// not open a slab each time.
    pub(super) fn close_slab(&mut self, id: PieceId) -> bool {
        let (size, slab, list) = (self.pieces[id].size, self.pieces[id].slab, self.pieces[id].list);
        let list = &self.lists[list];
        let keep = list.bytes == 0 && !self.domains[list.domain].is_released();
        if size != self.pieces[slab].size || keep {
            return false;
        }
        self.dissolve_slab(id);
        true
    }

    /// Turns a slab with one free piece, in no free list, back into a free piece of its zone.
    fn dissolve_slab(&mut self, id: PieceId) {
        let (slab, point, moved) = (self.pieces[id].slab, self.pieces[id].point, self.pieces[id].moved);
        let (first, last) = (self.pieces[id].prev, self.pieces[id].next);
        for gone in [first, id, last] {
            self.pieces.forget(gone);
        }
        let outer = &mut self.pieces[slab];
        outer.point = point;
        outer.moved = moved;
        self.give(slab);
    }

    /// Closes slabs whose single piece is free and in a free list.
    pub(crate) fn dissolve_slabs(&mut self, idle: &[PieceId]) {
        for &id in idle {
            self.lists.remove(&mut self.pieces, id);
            self.dissolve_slab(id);
        }
    }

    /// Closes the entirely free slabs that were kept open for their stream: of one domain, or of all.
    pub(crate) fn dissolve_idle_slabs(&mut self, of: Option<DomainId>) {
        let small = self.lists.iter().map(|(_, list)| list).filter(|list| list.class == Class::Small);
        let small = small.filter(|list| of.is_none_or(|domain| list.domain == domain));
        let free = small.flat_map(|list| list.bins.iter());
        let idle: Vec<PieceId> = free.filter(|&id| self.is_idle_slab(id)).collect();
        self.dissolve_slabs(&idle);
    }

    /// Returns whether a free piece covers a slab and some stream may take it.
    pub(crate) fn is_idle_slab(&self, id: PieceId) -> bool {
        let piece = &self.pieces[id];
        let takes = !matches!(self.lists[piece.list].owner, Owner::Nobody | Owner::Evicted);
        takes && piece.slab != PieceId::NONE && piece.size == self.pieces[piece.slab].size
    }
}
