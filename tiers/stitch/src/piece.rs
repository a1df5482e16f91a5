//! Runs of bytes at home, linked in the order of their addresses.
//!
//! ```text
//! segment:  edge ⇄ live ⇄ free ⇄ live ⇄ free ⇄ edge          (extents of one domain, side by side)
//! ```
//!
//! Invariants: the pieces of a segment cover it without gap or overlap; an edge has size 0 and never changes; so every
//! other piece has two neighbours. A free piece is in exactly one free list.

use crate::ids::{FreeListId, Move, PieceId, PointNumber};
use crate::room;

/// What a piece is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The end of a segment: nothing lies beyond it.
    Edge,
    /// In its free list.
    Free,
    /// Handed out, whole, at home.
    Live,
    /// Handed out as a part of a stitched block, or reserved by a plan.
    Part,
    /// Handed out as a slab, which holds pieces of its own.
    Slab,
    /// No piece: a name to be given again, in a list by `next`.
    Vacant,
}

/// One cache line: a malloc and a free touch half a dozen of these all over the table.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(crate) struct Piece {
    pub(crate) start: u64,
    pub(crate) size: u64,
    /// Free: the completion point that covers its last use.
    pub(crate) point: PointNumber,
    /// Live: what was asked for. Free and nobody's: how many blocks it completes.
    pub(crate) requested: u64,
    pub(crate) prev: PieceId,
    pub(crate) next: PieceId,
    /// Free: the free list that it is in. Live: the free list that it goes back to.
    pub(crate) list: FreeListId,
    /// Free and nobody's: the free list that it goes to once its completion point has passed.
    pub(crate) returns_to: FreeListId,
    /// The slab that this is a piece of.
    pub(crate) slab: PieceId,
    /// Slab: the first edge of what lies in it.
    pub(crate) inside: PieceId,
    pub(crate) state: State,
    /// Free: the last time that some of its bytes were used at another address than home's.
    pub(crate) moved: Move,
    /// Live: other streams use it.
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

/// All pieces of a device. The table keeps its vacant names itself, so that an access checks one bound and no tag.
#[derive(Debug)]
pub(crate) struct Pieces {
    table: Vec<Piece>,
    /// The free list that each is in, or none. Beside the pieces: whether a freed one merges with its neighbours is then asked of
    /// two words in a small table, and not of two cache lines that are seldom at hand.
    within: Vec<FreeListId>,
    /// The name that was given back last.
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
    /// A segment of one piece between two edges; returns the first edge, the piece and the last edge.
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

    /// Cuts a piece that is in no free list after `size` bytes; the rest is a new piece with the same properties.
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

    /// Cuts `size` bytes off the front of a piece as a new piece with the same properties; the rest keeps its name.
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

    /// Makes room for the pieces that hits and frees add until this is asked again.
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

    /// A piece comes into the free list that it names.
    #[inline]
    pub(crate) fn add_to_list(&mut self, id: PieceId) {
        self.within[id.index()] = self[id].list;
    }

    /// A piece is in no free list any more.
    #[inline]
    pub(crate) fn take_from_list(&mut self, id: PieceId) {
        self.within[id.index()] = FreeListId::NONE;
    }

    /// Whether a piece is free and in this free list.
    #[inline]
    pub(crate) fn is_in(&self, id: PieceId, list: FreeListId) -> bool {
        self.within[id.index()] == list
    }

    /// `into` was last used when either of the two was, and where.
    #[inline]
    pub(crate) fn inherit(&mut self, into: PieceId, from: PieceId) {
        let (point, moved) = (self[from].point, self[from].moved);
        let piece = &mut self[into];
        piece.point = piece.point.max(point);
        piece.moved = piece.moved.max(moved);
    }

    /// Adds a piece to the one on its left, which covers both then; where there is none on the left, the piece is the first.
    pub(crate) fn append(&mut self, left: PieceId, id: PieceId) -> PieceId {
        if left == PieceId::NONE {
            return id;
        }
        self.inherit(left, id);
        self.absorb_next(left);
        left
    }

    /// Makes `left` cover its right neighbour too, which is in no free list and goes.
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

    /// Every free list that a piece is in, goes back to, or goes to later.
    pub(crate) fn lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        let there = self.table.iter().filter(|piece| piece.state != State::Vacant);
        there.flat_map(|piece| [piece.list, piece.returns_to])
    }

    /// An edge at `at`, linked to nothing yet.
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
