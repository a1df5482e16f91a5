//! Pieces: runs of bytes at home, linked in the order of their addresses.
//!
//! ```text
//! segment:  edge ⇄ live ⇄ free ⇄ live ⇄ free ⇄ edge          (extents of one domain, side by side)
//! ```
//!
//! Invariants: the pieces of a segment cover it without gap or overlap. An edge has size 0 and never changes, so every other piece has two
//! neighbours. A free piece is in exactly one free list.

use crate::ids::{FreeListId, Move, PieceId, PointNumber};
use crate::room;

/// State of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// End of a segment; no piece lies beyond it.
    Edge,
    /// Free, in its free list.
    Free,
    /// Live block at home.
    Live,
    /// Part of a stitched block, or reserved by a plan.
    Part,
    /// Open slab, which contains pieces of its own.
    Slab,
    /// Unused table entry, linked by `next` into the list of vacant ids.
    Vacant,
}

/// A piece, in one cache line: a malloc and a free touch half a dozen of them across the table.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(crate) struct Piece {
    pub(crate) start: u64,
    pub(crate) size: u64,
    /// Completion point of the last use, if free.
    pub(crate) point: PointNumber,
    /// Requested size, if live; number of blocks that the piece completes, if free and withheld.
    pub(crate) requested: u64,
    pub(crate) prev: PieceId,
    pub(crate) next: PieceId,
    /// Free list that contains the piece, if free; that it returns to, if live.
    pub(crate) list: FreeListId,
    /// Free list after the completion point has passed, if free and withheld.
    pub(crate) returns_to: FreeListId,
    /// Slab that contains the piece.
    pub(crate) slab: PieceId,
    /// First edge inside, if the piece is a slab.
    pub(crate) inside: PieceId,
    pub(crate) state: State,
    /// Last use of any byte at another address than home's, if free.
    pub(crate) moved: Move,
    /// Whether other streams use the block, if live.
    pub(crate) recorded: bool,
}

impl Piece {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.size
    }

    fn blank(start: u64, size: u64, state: State) -> Self {
        Piece {
            start,
            size,
            point: PointNumber(0),
            requested: 0,
            prev: PieceId::NONE,
            next: PieceId::NONE,
            list: FreeListId::NONE,
            returns_to: FreeListId::NONE,
            slab: PieceId::NONE,
            inside: PieceId::NONE,
            state,
            moved: Move(0),
            recorded: false,
        }
    }
}

/// Table of all pieces of a device. It links its vacant ids itself, so that an access checks one bound and no tag.
#[derive(Debug)]
pub(crate) struct Pieces {
    table: Vec<Piece>,
    /// Free list of each piece, or none. Kept beside the pieces: whether a freed piece merges with its neighbours is then decided by two
    /// words of a small table instead of two cold cache lines.
    within: Vec<FreeListId>,
    /// Most recently vacated id.
    vacant: PieceId,
}

impl Default for Pieces {
    fn default() -> Self {
        Pieces { table: Vec::new(), within: Vec::new(), vacant: PieceId::NONE }
    }
}

impl std::ops::Index<PieceId> for Pieces {
    type Output = Piece;

    #[inline]
    fn index(&self, id: PieceId) -> &Piece {
        &self.table[id.index()]
    }
}

impl std::ops::IndexMut<PieceId> for Pieces {
    #[inline]
    fn index_mut(&mut self, id: PieceId) -> &mut Piece {
        &mut self.table[id.index()]
    }
}

impl Pieces {
    /// Creates a segment of one piece between two edges; returns the first edge, the piece and the last edge.
    pub(crate) fn segment(&mut self, start: u64, size: u64, state: State) -> (PieceId, PieceId, PieceId) {
        let first = self.insert(Piece::blank(start, 0, State::Edge));
        let piece = self.insert(Piece::blank(start, size, state));
        let last = self.insert(Piece::blank(start + size, 0, State::Edge));
        self.link(first, piece);
        self.link(piece, last);
        (first, piece, last)
    }

    pub(crate) fn link(&mut self, left: PieceId, right: PieceId) {
        self[left].next = right;
        self[right].prev = left;
    }

    /// Splits a piece in no free list after `size` bytes; the rest is a new piece with the same properties.
    pub(crate) fn split(&mut self, id: PieceId, size: u64) -> PieceId {
        let piece = &mut self[id];
        let mut rest = piece.clone();
        rest.start += size;
        rest.size -= size;
        piece.size = size;
        rest.prev = id;
        let next = rest.next;
        let rest = self.insert(rest);
        self[id].next = rest;
        self[next].prev = rest;
        rest
    }

    /// Splits `size` bytes off the front of a piece as a new piece with the same properties; the rest keeps its id.
    #[inline]
    pub(crate) fn split_front(&mut self, id: PieceId, size: u64) -> PieceId {
        let piece = &mut self[id];
        let mut front = piece.clone();
        front.size = size;
        front.next = id;
        piece.start += size;
        piece.size -= size;
        let prev = front.prev;
        let front = self.insert(front);
        self[id].prev = front;
        self[prev].next = front;
        front
    }

    /// Makes room for the pieces that hits and frees add until the next call.
    pub(crate) fn make_room(&mut self) {
        room::make(self.table.len(), self.table.capacity(), room::OF_DEVICE, |more| self.table.reserve(more));
        room::make(self.within.len(), self.within.capacity(), room::OF_DEVICE, |more| {
            self.within.reserve(more)
        });
    }

    #[inline]
    fn insert(&mut self, piece: Piece) -> PieceId {
        let id = self.vacant;
        if let Some(place) = self.table.get_mut(id.index()) {
            self.vacant = place.next;
            *place = piece;
            return id;
        }
        self.table.push(piece);
        self.within.push(FreeListId::NONE);
        PieceId::at(self.table.len() - 1)
    }

    /// Marks a piece as a member of the free list that it names.
    #[inline]
    pub(crate) fn add_to_list(&mut self, id: PieceId) {
        self.within[id.index()] = self[id].list;
    }

    /// Marks a piece as a member of no free list.
    #[inline]
    pub(crate) fn take_from_list(&mut self, id: PieceId) {
        self.within[id.index()] = FreeListId::NONE;
    }

    /// Returns whether a piece is free and in this free list.
    #[inline]
    pub(crate) fn is_in(&self, id: PieceId, list: FreeListId) -> bool {
        self.within[id.index()] == list
    }

    /// Merges the last use of `from` into `into`: the later point, and the later move.
    #[inline]
    pub(crate) fn inherit(&mut self, into: PieceId, from: PieceId) {
        let (point, moved) = (self[from].point, self[from].moved);
        let piece = &mut self[into];
        piece.point = piece.point.max(point);
        piece.moved = piece.moved.max(moved);
    }

    /// Appends a piece to its left neighbour, which then covers both; without one, the piece is the first.
    pub(crate) fn append(&mut self, left: PieceId, id: PieceId) -> PieceId {
        if left == PieceId::NONE {
            return id;
        }
        self.inherit(left, id);
        self.absorb_next(left);
        left
    }

    /// Extends `left` over its right neighbour, which is in no free list and is removed.
    #[inline]
    pub(crate) fn absorb_next(&mut self, left: PieceId) {
        let right = self[left].next;
        let (size, next) = (self[right].size, self[right].next);
        self.forget(right);
        let piece = &mut self[left];
        piece.size += size;
        piece.next = next;
        self[next].prev = left;
    }

    /// Iterates over all free lists that pieces are in, return to, or go to later.
    pub(crate) fn lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        let there = self.table.iter().filter(|piece| piece.state != State::Vacant);
        there.flat_map(|piece| [piece.list, piece.returns_to])
    }

    /// Creates an unlinked edge at `at`.
    pub(crate) fn edge(&mut self, at: u64) -> PieceId {
        self.insert(Piece::blank(at, 0, State::Edge))
    }

    /// Removes a piece without touching its neighbours.
    #[inline]
    pub(crate) fn forget(&mut self, id: PieceId) {
        let vacant = std::mem::replace(&mut self.vacant, id);
        let piece = &mut self[id];
        debug_assert_ne!(piece.state, State::Vacant, "a piece goes once");
        piece.state = State::Vacant;
        piece.next = vacant;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_one_cache_line() {
        assert_eq!(size_of::<Piece>(), 64);
    }
}
