//! Claims: a block made live at one fixed place of home.
//!
//! A claim does not use memory: the bytes keep their contents, and the caller guarantees that its work on them is ordered. Pending work of
//! other streams on them is remembered: the block is then treated as recorded on another stream.

use glake_units::Bytes;

use super::{Heap, SMALL_LIMIT};
use crate::bins::QUANTUM;
use crate::domain::StreamLists;
use crate::error::{Obstacle, StitchError};
use crate::free_list::Owner;
use crate::ids::{DomainId, FreeListId, Move, PieceId, StreamKey};
use crate::piece::State;
use crate::view::Claim;

/// Policy for a slab to be opened over bytes that another stream may still use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pending {
    Refused,
    /// Accepts the slab: no stream has used the bytes since they were checked.
    Fine,
}

/// The place of a claim.
#[derive(Debug)]
pub(crate) struct Placement<'a> {
    heap: &'a mut Heap,
    domain: DomainId,
    claim: &'a Claim,
    /// First byte of the claim, and the end behind its last byte.
    from: u64,
    to: u64,
}

impl<'a> Placement<'a> {
    /// Creates the placement of a claim in an existing domain.
    pub(crate) fn new(heap: &'a mut Heap, domain: DomainId, claim: &'a Claim) -> Self {
        let from = claim.offset.get();
        Placement { heap, domain, claim, from, to: from.saturating_add(claim.size.get()) }
    }

    /// Makes the block live.
    ///
    /// # Errors
    /// [`StitchError::NotClaimable`]; nothing has changed then.
    pub(crate) fn fill(mut self, pending: Pending) -> Result<(), StitchError> {
        let (offset, wanted) = (self.claim.offset, self.claim.size);
        self.try_fill(pending).map_err(|obstacle| StitchError::NotClaimable { offset, wanted, obstacle })
    }

    fn try_fill(&mut self, pending: Pending) -> Result<(), Obstacle> {
        let (from, to, size) = (self.from, self.to, self.claim.size.get());
        let small = size <= SMALL_LIMIT.get();
        if !(from | size).is_multiple_of(QUANTUM) || size == 0 || self.claim.requested > self.claim.size {
            return Err(Obstacle::Misplaced);
        }
        let home = &self.heap.home;
        let edge = home.segments.last_at(from).ok_or(Obstacle::OtherMemory)?;
        let first = home.piece_from(edge, from).ok_or(Obstacle::OtherMemory)?;
        if home.extents[home.extents.at(from)].domain != self.domain {
            return Err(Obstacle::OtherMemory);
        }
        if small != (from >= home.slab_zone) {
            return Err(Obstacle::Misplaced);
        }
        if !small {
            self.check_free(first, to)?;
            let lists = self.lists();
            self.hand_out(first, lists.large);
            return Ok(());
        }
        if home.pieces[first].state != State::Slab {
            self.reopen_slab(first, pending)?;
        }
        let home = &self.heap.home;
        let slab = home.piece_from(edge, from).filter(|&id| home.pieces[id].state == State::Slab);
        let slab = slab.ok_or(Obstacle::InUse)?;
        let theirs = home.lists.owner_of(&home.pieces, slab) != Owner::Stream(self.claim.stream);
        if theirs || to > home.pieces[slab].end() {
            return Err(Obstacle::OtherSlab);
        }
        let inside = home.piece_from(home.pieces[slab].inside, from).ok_or(Obstacle::InUse)?;
        self.check_free(inside, to)?;
        let lists = self.lists();
        self.hand_out(inside, lists.small);
        Ok(())
    }

    fn lists(&mut self) -> StreamLists {
        self.heap.home.lists_for(self.domain, self.claim.stream)
    }

    /// Opens a slab of free bytes around a claim, at its earlier position if known, else at a slab boundary of the free run.
    fn reopen_slab(&mut self, first: PieceId, pending: Pending) -> Result<(), Obstacle> {
        let (from, slab, home) = (self.from, self.heap.slab, &self.heap.home);
        let free = home.pieces[first].start;
        let start = self.claim.slab.map_or(from - (from.saturating_sub(free)) % slab, Bytes::get);
        let end = start.saturating_add(slab);
        if start > from || self.to > end || !start.is_multiple_of(QUANTUM) {
            return Err(Obstacle::OtherSlab);
        }
        let mut first = first;
        while home.pieces[first].start > start {
            first = home.pieces[first].prev;
            self.check_free(first, home.pieces[first].end())?;
        }
        self.check_free(first, end)?;
        if pending == Pending::Refused && self.is_shared(first, end) {
            return Err(Obstacle::Pending);
        }
        let lists = self.lists();
        let piece = self.extract(first, start, end);
        self.heap.home.open_slab(piece, lists);
        Ok(())
    }

    /// Checks that all pieces from `first` up to an offset are free.
    fn check_free(&self, first: PieceId, to: u64) -> Result<(), Obstacle> {
        let pieces = &self.heap.home.pieces;
        let mut id = first;
        loop {
            match pieces[id].state {
                State::Free if pieces[id].end() >= to => return Ok(()),
                State::Free => id = pieces[id].next,
                State::Edge => return Err(Obstacle::OtherMemory),
                _ => return Err(Obstacle::InUse),
            }
        }
    }

    /// Returns whether other streams may still use the free pieces, or the same stream at another address.
    fn is_shared(&self, first: PieceId, to: u64) -> bool {
        let home = &self.heap.home;
        let mut id = first;
        loop {
            let piece = &home.pieces[id];
            let own = home.lists.owner_of(&home.pieces, id) == Owner::Stream(self.claim.stream);
            if self.heap.points.is_pending(piece.point) && (!own || piece.moved > Move::default()) {
                return true;
            }
            if piece.end() >= to {
                return false;
            }
            id = piece.next;
        }
    }

    /// Extracts a range from free pieces as one piece in no free list.
    fn extract(&mut self, first: PieceId, from: u64, to: u64) -> PieceId {
        let home = &mut self.heap.home;
        let (mut id, mut whole) = (first, PieceId::NONE);
        loop {
            let owner = home.lists.owner_of(&home.pieces, id);
            let withheld = owner == Owner::Nobody;
            let held = withheld || matches!(owner, Owner::Held(_));
            id = home.cut_out(id, from, to);
            let piece = &mut home.pieces[id];
            piece.state = State::Part;
            let (start, end, next) = (piece.start, piece.end(), piece.next);
            if held {
                self.heap.holds.take(start, end);
            }
            if withheld {
                self.heap.tallies.completed(piece.slab != PieceId::NONE, piece.requested, piece.size);
            }
            whole = home.pieces.append(whole, id);
            if end == to {
                return whole;
            }
            id = next;
        }
    }

    /// Hands out the claim's bytes, which are all free.
    fn hand_out(&mut self, first: PieceId, list: FreeListId) {
        let shared = self.is_shared(first, self.to);
        let piece = self.extract(first, self.from, self.to);
        self.heap.home.pieces[piece].moved = Move::default();
        self.heap.hand_out(piece, State::Live, list, self.claim.requested.get());
        if shared {
            self.heap.home.pieces[piece].recorded = true;
            self.heap.holds.record(self.from, StreamKey::UNKNOWN);
        }
    }
}
