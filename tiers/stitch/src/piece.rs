//! Pieces: runs of bytes at home, linked in the order of their addresses. With the index of live blocks by their start offset, and runs of
//! free pieces.
//!
//! ```text
//! segment:  edge ⇄ live ⇄ free ⇄ live ⇄ free ⇄ edge          (extents of one domain, side by side)
//! ```
//!
//! Invariants: the pieces of a segment cover it without gap or overlap. An edge has size 0 and never changes, so every other piece has two
//! neighbours. A free piece is in exactly one free list.
//!
//! ```text
//! home:  stretch of 1 MiB ─► a piece      a large block is longer than that, so at most one begins in a stretch
//! slabs, aliases ──────────► hash table
//! ```
//!
//! The table of stretches answers with one memory access and no hashing: most bytes, and most calls of a training run, are in large blocks.
//! It stores pieces and not their starts: the caller reads the piece next anyway, and a table half as large is twice as often in the cache.

use rustc_hash::FxHashMap;

use crate::ids::{FreeListId, Move, PieceId, PointNumber};
use crate::{SMALL_LIMIT, room};

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

/// Kind of a live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Live {
    Piece(PieceId),
    /// Index of a stitched block.
    Stitched(u32),
}

/// Live blocks of a device.
#[derive(Debug)]
pub(crate) struct LiveBlocks {
    /// End of home; offsets below it are large blocks.
    home_end: u64,
    /// Piece of the block that begins in each stretch, or none.
    stretches: Vec<PieceId>,
    others: FxHashMap<u64, Live>,
    at_home: usize,
}

#[allow(clippy::cast_possible_truncation)] // home is at most 2^40 bytes
const fn stretch_of(offset: u64) -> usize {
    (offset / SMALL_LIMIT.get()) as usize
}

impl LiveBlocks {
    pub(crate) fn new(home_end: u64) -> Self {
        LiveBlocks { home_end, stretches: Vec::new(), others: FxHashMap::default(), at_home: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.at_home + self.others.len()
    }

    /// Makes room for blocks up to `end`, to which home is now mapped, so that no hit has to.
    pub(crate) fn reach(&mut self, end: u64) {
        let stretches = stretch_of(end.min(self.home_end)) + 1;
        if stretches > self.stretches.len() {
            self.stretches.resize(stretches, PieceId::NONE);
        }
    }

    /// Makes room for the small blocks that hits add until the next call.
    pub(crate) fn make_room(&mut self) {
        room::make(self.others.len(), self.others.capacity(), room::OF_DEVICE, |more| {
            self.others.reserve(more)
        });
    }

    /// Adds a live block.
    #[inline]
    pub(crate) fn insert(&mut self, offset: u64, live: Live) {
        match live {
            Live::Piece(piece) if offset < self.home_end => {
                let stretch = stretch_of(offset);
                if stretch >= self.stretches.len() {
                    self.reach(offset);
                }
                let slot = &mut self.stretches[stretch];
                debug_assert_eq!(*slot, PieceId::NONE, "a stretch with two large blocks");
                *slot = piece;
                self.at_home += 1;
            }
            _ => {
                self.others.insert(offset, live);
            }
        }
    }

    #[inline]
    pub(crate) fn remove(&mut self, offset: u64, pieces: &Pieces) -> Option<Live> {
        if offset >= self.home_end {
            return self.others.remove(&offset);
        }
        let slot = self.stretches.get_mut(stretch_of(offset))?;
        let piece = begins_at(*slot, offset, pieces)?;
        *slot = PieceId::NONE;
        self.at_home -= 1;
        Some(Live::Piece(piece))
    }

    pub(crate) fn get(&self, offset: u64, pieces: &Pieces) -> Option<Live> {
        if offset >= self.home_end {
            return self.others.get(&offset).copied();
        }
        let piece = *self.stretches.get(stretch_of(offset))?;
        begins_at(piece, offset, pieces).map(Live::Piece)
    }

    /// Returns the last large block that begins at or before an offset of home; walks back over stretches without one.
    pub(crate) fn last_at_home(&self, offset: u64, pieces: &Pieces) -> Option<PieceId> {
        let upto = self.stretches.len().min(stretch_of(offset) + 1);
        let blocks = self.stretches[..upto].iter().rev().copied().filter(|&piece| piece != PieceId::NONE);
        blocks.into_iter().find(|&piece| pieces[piece].start <= offset)
    }

    /// Iterates over all live blocks in no particular order.
    pub(crate) fn iter<'a>(&'a self, pieces: &'a Pieces) -> impl Iterator<Item = (u64, Live)> + 'a {
        let home = self.stretches.iter().copied().filter(|&piece| piece != PieceId::NONE);
        let home = home.map(|piece| (pieces[piece].start, Live::Piece(piece)));
        home.chain(self.others.iter().map(|(&offset, &live)| (offset, live)))
    }
}

#[inline]
fn begins_at(piece: PieceId, offset: u64, pieces: &Pieces) -> Option<PieceId> {
    (piece != PieceId::NONE && pieces[piece].start == offset).then_some(piece)
}

/// A run of free pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Piece that begins at `start`.
    pub(crate) first: PieceId,
}

impl Run {
    pub(crate) fn size(&self) -> u64 {
        self.end - self.start
    }
}

/// Joins free ranges (start, end, piece) that touch into runs, in address order.
pub(crate) fn join_runs(mut ranges: Vec<Run>) -> Vec<Run> {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, run| {
        let touches = run.end == next.start;
        if touches {
            run.end = next.end;
        }
        touches
    });
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_one_cache_line() {
        assert_eq!(size_of::<Piece>(), 64);
    }
}

#[cfg(test)]
mod live_tests {
    use super::*;
    use crate::bins::QUANTUM;
    use crate::piece::State;

    const MIB: u64 = 1 << 20;

    #[test]
    fn finds_only_blocks_that_begin_at_the_offset() {
        let (mut live, mut pieces) = (LiveBlocks::new(1 << 30), Pieces::default());
        let offsets = [0, 2 * MIB - QUANTUM, 6 * MIB, 1 << 30, (1 << 30) + QUANTUM];
        let blocks = offsets.map(|offset| (offset, pieces.segment(offset, 2 * MIB, State::Live).1));
        for (offset, piece) in blocks {
            live.insert(offset, Live::Piece(piece));
        }
        live.insert(1 << 40, Live::Stitched(7));
        assert_eq!(live.len(), 6);
        for (offset, block) in
            [(0, 0), (2 * MIB - QUANTUM - 1, 0), (2 * MIB, 1), (6 * MIB - 1, 1), (6 * MIB, 2), (180 * MIB, 2)]
        {
            assert_eq!(live.last_at_home(offset, &pieces), Some(blocks[block].1), "{offset}");
        }
        for wrong in [1, 100, QUANTUM, MIB, 2 * MIB, 4 * MIB, 6 * MIB + 1, (1 << 30) + 1, 1 << 41, u64::MAX] {
            assert_eq!(live.get(wrong, &pieces), None, "{wrong}");
            assert_eq!(live.remove(wrong, &pieces), None, "{wrong}");
        }
        assert_eq!(live.iter(&pieces).filter(|block| offsets.contains(&block.0)).count(), 5);
        for (offset, piece) in blocks {
            assert_eq!(live.remove(offset, &pieces), Some(Live::Piece(piece)));
            assert_eq!(live.remove(offset, &pieces), None, "a double free");
        }
        assert_eq!(live.remove(1 << 40, &pieces), Some(Live::Stitched(7)));
        assert_eq!((live.len(), live.iter(&pieces).count()), (0, 0));
    }
}
