//! What happens to a block's bytes after it is freed, and how they become another stream's.

use glake_units::Bytes;

use super::Allocator;
use crate::error::StitchError;
use crate::free_list::{Class, Owner};
use crate::ids::{DomainId, Epoch, FreeListId, Move, PieceId, StreamKey};
use crate::live::Live;
use crate::piece::State;

impl Allocator {
    /// Takes a block back. Its own stream may have its bytes at once, others after the open epoch has passed.
    ///
    /// Returns the block's size.
    ///
    /// # Errors
    /// [`StitchError::UnknownBlock`] where no live block begins; nothing changes then.
    pub fn free(&mut self, offset: Bytes) -> Result<Bytes, StitchError> {
        let live =
            self.live.remove(offset.get(), &self.pieces).ok_or(StitchError::UnknownBlock { offset })?;
        self.uncovered = true;
        match live {
            Live::Piece(id) => Ok(self.free_piece(id)),
            Live::Stitched(index) => Ok(self.free_stitched(index)),
        }
    }

    fn free_piece(&mut self, id: PieceId) -> Bytes {
        let piece = &mut self.pieces[id];
        let (size, requested, recorded) = (piece.size, piece.requested, piece.recorded);
        let small = piece.slab != PieceId::NONE;
        piece.epoch = self.open;
        piece.moved = Move::default();
        let (start, end) = (piece.start, piece.end());
        let apart = self.is_apart(start, end);
        let recorded = recorded && !apart;
        self.stats.freed(small, size, requested, recorded);
        if apart {
            self.give_apart(id);
        } else if recorded {
            self.withhold(id, 1);
        } else {
            self.give(id);
        }
        Bytes::new(size)
    }

    fn free_stitched(&mut self, index: u32) -> Bytes {
        let block = self.stitched.remove(index as usize);
        let alias = &mut self.aliases[block.alias];
        alias.blocks -= 1;
        alias.epoch = self.open;
        if alias.is_idle() {
            let idle = &mut self.stats.idle_alias_bytes;
            *idle = idle.saturating_add(Bytes::new(alias.size));
        }
        let apart = block.parts.iter().any(|&part| {
            let piece = &self.pieces[part];
            self.is_apart(piece.start, piece.end())
        });
        // Nothing can use a block of which a part is not there.
        let recorded = block.recorded && !apart;
        self.stats.freed(false, block.size, block.requested, recorded);
        self.moves = self.moves.next();
        let mut blocks = 1;
        for part in block.parts {
            let piece = &mut self.pieces[part];
            piece.epoch = self.open;
            piece.moved = self.moves;
            piece.list = if piece.start < self.slab_zone { block.list } else { block.slabs };
            if apart {
                self.give_apart(part);
            } else if recorded {
                self.withhold(part, std::mem::take(&mut blocks));
            } else {
                self.give(part);
            }
        }
        Bytes::new(block.size)
    }

    /// Keeps a freed piece from everybody until its epoch has passed; `blocks` are complete with it.
    fn withhold(&mut self, id: PieceId, blocks: u64) {
        let limbo = self.limbo_of(self.pieces[id].list);
        let piece = &mut self.pieces[id];
        piece.state = State::Free;
        piece.requested = blocks;
        piece.returns_to = std::mem::replace(&mut piece.list, limbo);
        self.lists[limbo.index()].insert(&mut self.pieces, id);
    }

    fn limbo_of(&self, list: FreeListId) -> FreeListId {
        let list = &self.lists[list.index()];
        let domain = &self.domains[list.domain];
        if list.class == Class::Small { domain.limbo_small } else { domain.limbo_large }
    }

    /// Another stream uses a block. A block that begins nowhere is ignored, as torch does with foreign pointers.
    ///
    /// Returns whether there was such a block.
    pub fn record_stream(&mut self, offset: Bytes, stream: StreamKey) -> bool {
        let Some(live) = self.live.get(offset.get(), &self.pieces) else { return false };
        let list = match live {
            Live::Piece(id) => self.pieces[id].list,
            Live::Stitched(index) => self.stitched[index as usize].list,
        };
        if self.lists[list.index()].owner != Owner::Stream(stream) {
            match live {
                Live::Piece(id) => self.pieces[id].recorded = true,
                Live::Stitched(index) => self.stitched[index as usize].recorded = true,
            }
        }
        true
    }

    /// Puts a piece that is in no free list into the one it names, merged with its neighbours there.
    pub(super) fn give(&mut self, id: PieceId) {
        let piece = &mut self.pieces[id];
        piece.state = State::Free;
        let (list, prev, next) = (piece.list, piece.prev, piece.next);
        // Both are read before the first branch on either: two cache misses at a time instead of one after the other.
        let (behind, in_front) = (self.pieces.is_in(next, list), self.pieces.is_in(prev, list));
        if behind {
            self.lists[list.index()].remove(&mut self.pieces, next);
            self.inherit(id, next);
            self.pieces.absorb_next(id);
        }
        let id = if in_front {
            self.lists[list.index()].remove(&mut self.pieces, prev);
            self.inherit(prev, id);
            self.pieces.absorb_next(prev);
            prev
        } else {
            id
        };
        if self.pieces[id].slab == PieceId::NONE || !self.close_slab(id) {
            self.lists[list.index()].insert(&mut self.pieces, id);
        }
    }

    pub(super) fn inherit(&mut self, into: PieceId, from: PieceId) {
        let (epoch, moved) = (self.pieces[from].epoch, self.pieces[from].moved);
        let piece = &mut self.pieces[into];
        piece.epoch = piece.epoch.max(epoch);
        piece.moved = piece.moved.max(moved);
    }

    /// Gives a slab back to the stream's slabs where `id`, in no free list, is all of it; the last free one stays open, so
    /// that a program which frees and asks again does not open one each time.
    fn close_slab(&mut self, id: PieceId) -> bool {
        let (size, slab, list) = (self.pieces[id].size, self.pieces[id].slab, self.pieces[id].list);
        let keep = self.lists[list.index()].bytes == 0 && !self.is_released(self.lists[list.index()].domain);
        if size != self.pieces[slab].size || keep {
            return false;
        }
        self.dissolve_slab(id);
        true
    }

    /// Turns a slab whose one piece is free, and in no free list, back into a free piece of its zone.
    pub(super) fn dissolve_slab(&mut self, id: PieceId) {
        let (slab, epoch, moved) = (self.pieces[id].slab, self.pieces[id].epoch, self.pieces[id].moved);
        let (first, last) = (self.pieces[id].prev, self.pieces[id].next);
        for gone in [first, id, last] {
            self.pieces.forget(gone);
        }
        let outer = &mut self.pieces[slab];
        outer.epoch = epoch;
        outer.moved = moved;
        self.give(slab);
    }

    fn is_released(&self, domain: DomainId) -> bool {
        self.domains[domain].is_released()
    }

    /// Moves what has passed to where more streams may take it: at once where it was nobody's, and where there is more
    /// than one stream to take it.
    pub(super) fn settle(&mut self, id: DomainId) {
        let domain = &mut self.domains[id];
        let (limbos, passed_large, passed_slabs) =
            ([domain.limbo_large, domain.limbo_small], domain.passed_large, domain.passed_slabs);
        let streams = domain.streams.clone();
        let lend = self.is_lending(id);
        for limbo in limbos {
            while let Some(piece) = self.lists[limbo.index()].next_passed(limbo, &self.pieces, self.passed) {
                self.lists[limbo.index()].remove(&mut self.pieces, piece);
                let withheld = &mut self.pieces[piece];
                withheld.list = withheld.returns_to;
                let (small, blocks, size) =
                    (withheld.slab != PieceId::NONE, withheld.requested, withheld.size);
                self.stats.completed(small, blocks, size);
                self.give(piece);
            }
        }
        if !lend {
            return;
        }
        for lists in streams {
            for (from, to) in [(lists.large, passed_large), (lists.slabs, passed_slabs)] {
                while let Some(piece) = self.lists[from.index()].next_passed(from, &self.pieces, self.passed)
                {
                    self.lists[from.index()].remove(&mut self.pieces, piece);
                    let passed = &mut self.pieces[piece];
                    passed.list = to;
                    passed.epoch = Epoch(0);
                    passed.moved = Move::default();
                    self.give(piece);
                }
            }
        }
    }

    /// Gives every piece of a free list the open epoch.
    pub(super) fn renew(&mut self, list: FreeListId) {
        let mut ids = Vec::new();
        ids.extend(self.lists[list.index()].bins.iter());
        for id in ids {
            self.lists[list.index()].remove(&mut self.pieces, id);
            self.pieces[id].epoch = self.open;
            self.lists[list.index()].insert(&mut self.pieces, id);
        }
    }
}
