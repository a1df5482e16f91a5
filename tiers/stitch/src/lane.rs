//! The free pieces that one taker has in common: by size for best fit, by age for epochs.
//!
//! Invariant: the order of age is the order of epochs, oldest first, so that what has passed is a prefix.

use crate::bins::Bins;
use crate::ids::{DomainId, Epoch, Move, PieceId, StreamKey};
use crate::piece::Pieces;

/// Whose pieces these are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taker {
    /// Freed by blocks of this stream: its own at once, anyone's after the epoch.
    Stream(StreamKey),
    /// Their epochs have passed: anyone's.
    Anyone,
    /// Nobody's before the epoch: other streams used them.
    Nobody,
}

/// What the pieces of a lane are cut for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Blocks above [`crate::SMALL_LIMIT`].
    Large,
    /// Whole slabs.
    Slabs,
    /// Blocks inside slabs.
    Small,
}

#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) domain: DomainId,
    pub(crate) class: Class,
    pub(crate) taker: Taker,
    /// The last move that the stream's latest completion edge covers.
    pub(crate) edge: Move,
    pub(crate) bins: Bins,
    oldest: PieceId,
    newest: PieceId,
    /// All that lies in it.
    pub(crate) bytes: u64,
}

impl Lane {
    pub(crate) fn new(domain: DomainId, class: Class, taker: Taker) -> Self {
        Lane {
            domain,
            class,
            taker,
            edge: Move(0),
            bins: Bins::new(),
            oldest: PieceId::NONE,
            newest: PieceId::NONE,
            bytes: 0,
        }
    }

    pub(crate) fn oldest(&self) -> PieceId {
        self.oldest
    }

    /// Adds a free piece; where its epoch is not the newest it is put in order.
    pub(crate) fn insert(&mut self, pieces: &mut Pieces, id: PieceId) {
        let epoch = pieces[id].epoch;
        let mut older = self.newest;
        while older != PieceId::NONE && pieces[older].epoch > epoch {
            older = pieces[older].older;
        }
        self.insert_after(pieces, id, older);
    }

    fn insert_after(&mut self, pieces: &mut Pieces, id: PieceId, older: PieceId) {
        let newer = if older == PieceId::NONE { self.oldest } else { pieces[older].newer };
        let piece = &mut pieces[id];
        piece.older = older;
        piece.newer = newer;
        self.bins.insert(piece.size, piece.start, id);
        self.bytes += piece.size;
        if older == PieceId::NONE {
            self.oldest = id
        } else {
            pieces[older].newer = id
        }
        if newer == PieceId::NONE { self.newest = id } else { pieces[newer].older = id }
    }

    /// Takes a free piece out.
    pub(crate) fn remove(&mut self, pieces: &mut Pieces, id: PieceId) {
        let piece = &pieces[id];
        self.bins.remove(piece.size, piece.start);
        self.bytes -= piece.size;
        self.unlink(pieces, id);
    }

    fn unlink(&mut self, pieces: &mut Pieces, id: PieceId) {
        let (older, newer) = (pieces[id].older, pieces[id].newer);
        if older == PieceId::NONE {
            self.oldest = newer
        } else {
            pieces[older].newer = newer
        }
        if newer == PieceId::NONE { self.newest = older } else { pieces[newer].older = older }
    }

    /// Takes `size` bytes off the front of the best piece for it; what is left stays in the lane, at its age.
    pub(crate) fn take_best(&mut self, pieces: &mut Pieces, size: u64) -> Option<PieceId> {
        let id = self.bins.take_best(size)?;
        let older = pieces[id].older;
        self.bytes -= pieces[id].size;
        self.unlink(pieces, id);
        if pieces[id].size > size {
            let rest = pieces.split(id, size);
            self.insert_after(pieces, rest, older);
        }
        Some(id)
    }

    /// The oldest epoch that has not passed.
    pub(crate) fn oldest_pending(&self, pieces: &Pieces, passed: Epoch) -> Option<Epoch> {
        let mut id = self.oldest;
        while id != PieceId::NONE && pieces[id].epoch <= passed {
            id = pieces[id].newer;
        }
        (id != PieceId::NONE).then(|| pieces[id].epoch)
    }

    /// The oldest piece, where its epoch has passed.
    pub(crate) fn oldest_passed(&self, pieces: &Pieces, passed: Epoch) -> Option<PieceId> {
        (self.oldest != PieceId::NONE && pieces[self.oldest].epoch <= passed).then_some(self.oldest)
    }
}
