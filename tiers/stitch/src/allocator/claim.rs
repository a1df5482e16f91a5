//! Blocks made live again at an address of before: what a private pool's checkpoint is restored with.
//!
//! ```text
//! checkpoint:  [ a ][ b ]      [ c ]          live then
//! now:         [ a ]     [    d    ]          live now
//! restore:     a stays, d is freed, b and c are claimed
//! ```
//!
//! A claim is no use of memory: the bytes are what they were, and whoever claims them says that their work on them is in
//! order. What others may still do with them is remembered: then the block is treated as recorded on another stream.

use glake_units::Bytes;
use rustc_hash::FxHashMap;

use super::{Allocator, LiveBlock, SMALL_LIMIT};
use crate::bins::QUANTUM;
use crate::error::{Obstacle, StitchError};
use crate::free_list::Owner;
use crate::ids::{DomainId, FreeListId, Move, PieceId, StreamKey};
use crate::live::Live;
use crate::piece::State;

/// A block to be made live at home, at one place and no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Where it shall begin, from the start of the reservation.
    pub offset: Bytes,
    /// How long it shall be: a multiple of 512.
    pub size: Bytes,
    /// What it is asked for: not more.
    pub requested: Bytes,
    /// The stream that it shall go back to.
    pub stream: StreamKey,
    /// Small blocks: where the slab begins that is opened for it, if that is known.
    pub slab: Option<Bytes>,
}

/// What a restore has done. A block that was live then and is live now stays, and is in both lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Live before.
    pub freed: Vec<LiveBlock>,
    /// Live after.
    pub claimed: Vec<LiveBlock>,
}

/// Whether a slab is opened over bytes that another stream may still use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pending {
    Refused,
    /// Nobody has used them since they were checked.
    Fine,
}

impl Allocator {
    /// The live blocks of a domain, as [`Allocator::restore`] takes them.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`]; [`StitchError::NotClaimable`] where one is stitched: such an address cannot be had
    /// back.
    pub fn checkpoint(&self, domain: DomainId) -> Result<Vec<Claim>, StitchError> {
        self.domain(domain)?;
        let blocks = self.blocks_of(domain);
        blocks.iter().map(|block| self.claim_of(block)).collect()
    }

    /// The claim that brings a live block back.
    fn claim_of(&self, block: &LiveBlock) -> Result<Claim, StitchError> {
        let LiveBlock { offset, size, requested, stream, .. } = *block;
        let Some(Live::Piece(id)) = self.live.get(offset.get(), &self.pieces) else {
            return Err(not_claimable(offset, size, Obstacle::Stitched));
        };
        let slab = self.pieces[id].slab;
        let slab = (slab != PieceId::NONE).then(|| Bytes::new(self.pieces[slab].start));
        Ok(Claim { offset, size, requested, stream, slab })
    }

    /// Makes exactly the blocks of a checkpoint live in a domain: frees what is live now, claims what was live then.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`], [`StitchError::Away`], or [`StitchError::NotClaimable`] for a block whose memory is not the domain's any
    /// more; the same blocks as before are live then.
    pub fn restore(&mut self, domain: DomainId, checkpoint: &[Claim]) -> Result<Restored, StitchError> {
        self.all_resident(domain)?;
        let now = self.checkpoint(domain)?;
        let freed = self.blocks_of(domain);
        let by_offset = |claims: &[Claim]| -> FxHashMap<Bytes, Claim> {
            claims.iter().map(|claim| (claim.offset, *claim)).collect()
        };
        let (then, before) = (by_offset(checkpoint), by_offset(&now));
        let goes: Vec<Claim> =
            now.into_iter().filter(|block| then.get(&block.offset) != Some(block)).collect();
        let comes = checkpoint.iter().filter(|block| before.get(&block.offset) != Some(block));
        self.free_all(domain, &goes);
        let mut done = Vec::new();
        for claim in comes {
            if let Err(error) = self.claim(domain, claim) {
                self.free_all(domain, &done);
                for claim in &goes {
                    let again = self.claim_at(domain, claim, Pending::Fine);
                    debug_assert!(again.is_ok(), "it was live a moment ago: {again:?}");
                }
                return Err(error);
            }
            done.push(*claim);
        }
        Ok(Restored { freed, claimed: self.blocks_of(domain) })
    }

    fn free_all(&mut self, domain: DomainId, claims: &[Claim]) {
        for claim in claims {
            let freed = self.free(claim.offset);
            debug_assert!(freed.is_ok(), "it is live");
        }
        self.dissolve_idle_slabs(Some(domain));
    }

    /// Makes a block live at one place of a domain, where all of its bytes are free, whoever could take them. No stream is
    /// made to wait.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`], [`StitchError::Away`], or [`StitchError::NotClaimable`], which says why; nothing has changed.
    pub fn claim(&mut self, domain: DomainId, claim: &Claim) -> Result<(), StitchError> {
        self.domain(domain)?;
        self.all_resident(domain)?;
        self.claim_at(domain, claim, Pending::Refused)
    }

    fn claim_at(&mut self, domain: DomainId, claim: &Claim, pending: Pending) -> Result<(), StitchError> {
        let (from, size) = (claim.offset.get(), claim.size.get());
        let refused = |obstacle| not_claimable(claim.offset, claim.size, obstacle);
        let small = size <= SMALL_LIMIT.get();
        if !(from | size).is_multiple_of(QUANTUM) || size == 0 || claim.requested > claim.size {
            return Err(refused(Obstacle::Misplaced));
        }
        let edge = self.segments.last_at(from).ok_or_else(|| refused(Obstacle::OtherMemory))?;
        let first = self.piece_from(edge, from).ok_or_else(|| refused(Obstacle::OtherMemory))?;
        if self.extents[self.extents.at(from)].domain != domain {
            return Err(refused(Obstacle::OtherMemory));
        }
        if small != (from >= self.slab_zone) {
            return Err(refused(Obstacle::Misplaced));
        }
        let to = from.saturating_add(size);
        if !small {
            self.check_free(first, to).map_err(refused)?;
            let lists = self.lists_for(domain, claim.stream);
            let (piece, shared) = self.extract(first, from, to, claim.stream);
            self.hand_out_claimed(piece, lists.large, claim.requested, shared);
            return Ok(());
        }
        if self.pieces[first].state != State::Slab {
            self.reopen_slab(domain, first, claim, pending).map_err(refused)?;
        }
        let slab = self.piece_from(edge, from).filter(|&id| self.pieces[id].state == State::Slab);
        let slab = slab.ok_or_else(|| refused(Obstacle::InUse))?;
        let theirs = self.lists[self.pieces[slab].list.index()].owner != Owner::Stream(claim.stream);
        if theirs || to > self.pieces[slab].end() {
            return Err(refused(Obstacle::OtherSlab));
        }
        let inside = self.piece_from(self.pieces[slab].inside, from);
        let inside = inside.ok_or_else(|| refused(Obstacle::InUse))?;
        self.check_free(inside, to).map_err(refused)?;
        let lists = self.lists_for(domain, claim.stream);
        let (piece, shared) = self.extract(inside, from, to, claim.stream);
        self.hand_out_claimed(piece, lists.small, claim.requested, shared);
        Ok(())
    }

    /// Makes a slab of free bytes around a claim, where it was or else where the free run is cut into slabs.
    fn reopen_slab(
        &mut self,
        domain: DomainId,
        first: PieceId,
        claim: &Claim,
        pending: Pending,
    ) -> Result<(), Obstacle> {
        let (from, size, slab) = (claim.offset.get(), claim.size.get(), self.settings.slab.get());
        let free = self.pieces[first].start;
        let start = claim.slab.map_or(from - (from.saturating_sub(free)) % slab, Bytes::get);
        let end = start.saturating_add(slab);
        if start > from || from.saturating_add(size) > end || !start.is_multiple_of(QUANTUM) {
            return Err(Obstacle::OtherSlab);
        }
        let mut first = first;
        while self.pieces[first].start > start {
            first = self.pieces[first].prev;
            self.check_free(first, self.pieces[first].end())?;
        }
        self.check_free(first, end)?;
        if pending == Pending::Refused && self.is_shared(first, end, claim.stream) {
            return Err(Obstacle::Pending);
        }
        let lists = self.lists_for(domain, claim.stream);
        let (piece, _) = self.extract(first, start, end, claim.stream);
        self.open_slab(piece, lists);
        Ok(())
    }

    /// Whether all pieces from one on are free up to an offset.
    fn check_free(&self, first: PieceId, to: u64) -> Result<(), Obstacle> {
        let mut id = first;
        loop {
            match self.pieces[id].state {
                State::Free if self.pieces[id].end() >= to => return Ok(()),
                State::Free => id = self.pieces[id].next,
                State::Edge => return Err(Obstacle::OtherMemory),
                _ => return Err(Obstacle::InUse),
            }
        }
    }

    /// Whether others than a stream may still use free pieces, or it at another address.
    fn is_shared(&self, first: PieceId, to: u64, stream: StreamKey) -> bool {
        let mut id = first;
        loop {
            let piece = &self.pieces[id];
            let own = self.lists[piece.list.index()].owner == Owner::Stream(stream);
            if piece.epoch > self.passed && (!own || piece.moved > Move::default()) {
                return true;
            }
            if piece.end() >= to {
                return false;
            }
            id = piece.next;
        }
    }

    /// Takes a range out of free pieces as one piece in no free list, and says whether it is shared.
    fn extract(&mut self, first: PieceId, from: u64, to: u64, stream: StreamKey) -> (PieceId, bool) {
        let shared = self.is_shared(first, to, stream);
        let (mut id, mut whole) = (first, PieceId::NONE);
        loop {
            let list = self.pieces[id].list;
            self.lists[list.index()].remove(&mut self.pieces, id);
            // Of a withheld piece that is cut, the part that stays completes its blocks.
            let withheld = self.lists[list.index()].owner == Owner::Nobody;
            if self.pieces[id].start < from {
                let front = id;
                id = self.pieces.split(front, from - self.pieces[front].start);
                self.lists[list.index()].insert(&mut self.pieces, front);
                self.pieces[id].requested = 0;
            }
            if self.pieces[id].end() > to {
                let rest = self.pieces.split(id, to - self.pieces[id].start);
                self.lists[list.index()].insert(&mut self.pieces, rest);
                self.pieces[id].requested = 0;
            }
            let piece = &mut self.pieces[id];
            piece.state = State::Part;
            let (small, blocks, size) = (piece.slab != PieceId::NONE, piece.requested, piece.size);
            let (end, next) = (piece.end(), piece.next);
            if withheld {
                self.stats.completed(small, blocks, size);
            }
            if whole == PieceId::NONE {
                whole = id;
            } else {
                self.inherit(whole, id);
                self.pieces.absorb_next(whole);
            }
            if end == to {
                return (whole, shared);
            }
            id = next;
        }
    }

    fn hand_out_claimed(&mut self, piece: PieceId, list: FreeListId, requested: Bytes, shared: bool) {
        self.pieces[piece].moved = Move::default();
        self.hand_out(piece, State::Live, list, requested.get());
        self.pieces[piece].recorded = shared;
    }
}

fn not_claimable(offset: Bytes, wanted: Bytes, obstacle: Obstacle) -> StitchError {
    StitchError::NotClaimable { offset, wanted, obstacle }
}
