//! The free pieces that one owner has in common: by size for best fit, and by age where somebody waits for completion points.
//!
//! Ages are notes in the order of frees, made only where more than one stream could take the pieces. Nothing is looked up
//! when a piece leaves: its note is found void when its turn comes. So a free costs one write at the end of a queue.
//!
//! Invariant: while ages are kept, every piece in the free list has a note with its completion point or an older one.

use std::collections::VecDeque;

use crate::bins::Bins;
use crate::ids::{DomainId, FreeListId, Move, PieceId, PointNumber, StreamKey};
use crate::piece::Pieces;
use crate::room;

/// Notes are made anew when there are so many times more of them than pieces, and so many more: seldom enough to cost a
/// free next to nothing.
const VOID_TIMES: usize = 4;
const VOID_MORE: usize = 256;

/// Whose pieces these are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// Freed by blocks of this stream: its own at once, anyone's after the completion point.
    Stream(StreamKey),
    /// Their completion points have passed: anyone's.
    Anyone,
    /// Nobody's before the completion point: other streams used them.
    Nobody,
    /// Freed by blocks of this stream while holds on them had not passed: its own behind a wait for these, where there is no other
    /// memory for it, and its own as any other once they have passed.
    Held(StreamKey),
    /// Nobody's while their extents are not resident.
    Evicted,
}

/// What the pieces of a free list are cut for.
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
pub(crate) struct FreeList {
    pub(crate) domain: DomainId,
    pub(crate) class: Class,
    pub(crate) owner: Owner,
    /// The last move that the stream's latest completion edge covers.
    pub(crate) edge: Move,
    pub(crate) bins: Bins,
    /// All that lies in it.
    pub(crate) bytes: u64,
    /// Of a stream's large pieces and slabs: where what is held of them waits.
    pub(crate) held: FreeListId,
    ages: Option<VecDeque<Age>>,
}

/// A note that a piece came into the free list with a completion point; void once the piece has gone, or came again later.
#[derive(Clone, Copy, Debug)]
struct Age {
    point: PointNumber,
    piece: PieceId,
}

impl FreeList {
    pub(crate) fn new(domain: DomainId, class: Class, owner: Owner) -> Self {
        let ages = matches!(owner, Owner::Nobody | Owner::Held(_)).then(VecDeque::new);
        let (edge, held) = (Move(0), FreeListId::NONE);
        FreeList { domain, class, owner, edge, bins: Bins::new(), bytes: 0, held, ages }
    }

    /// A stream's, with where what is held of it waits.
    pub(crate) fn of_stream(domain: DomainId, class: Class, stream: StreamKey, held: FreeListId) -> Self {
        FreeList { held, ..FreeList::new(domain, class, Owner::Stream(stream)) }
    }

    /// Whose it is, if it is a stream's.
    pub(crate) fn stream(&self) -> Option<StreamKey> {
        match self.owner {
            Owner::Stream(stream) => Some(stream),
            Owner::Anyone | Owner::Nobody | Owner::Held(_) | Owner::Evicted => None,
        }
    }

    /// From now on what has passed is told by [`FreeList::next_passed`].
    pub(crate) fn keep_ages(&mut self, pieces: &Pieces) {
        if self.ages.is_none() {
            self.ages = Some(VecDeque::new());
            self.renew_ages(pieces);
        }
    }

    /// Makes the notes anew, in the room that they have.
    fn renew_ages(&mut self, pieces: &Pieces) {
        let Some(ages) = &mut self.ages else { return };
        ages.clear();
        ages.extend(self.bins.unsorted().map(|piece| Age { point: pieces[piece].point, piece }));
        ages.make_contiguous().sort_unstable_by_key(|age| age.point);
    }

    /// Makes room for what frees add until this is asked again.
    pub(crate) fn make_room(&mut self) {
        self.bins.make_room();
        if let Some(ages) = &mut self.ages {
            room::make(ages.len(), ages.capacity(), room::OF_LIST, |more| ages.reserve(more));
        }
    }

    /// Adds a free piece.
    pub(crate) fn insert(&mut self, pieces: &mut Pieces, id: PieceId) {
        pieces.add_to_list(id);
        let piece = &pieces[id];
        self.bins.insert(piece.size, piece.start, id);
        self.bytes += piece.size;
        let Some(ages) = &mut self.ages else { return };
        let age = Age { point: piece.point, piece: id };
        match ages.back() {
            // It was free before: what is left of a piece that was cut, or of an extent that came back.
            Some(last) if last.point > age.point => {
                ages.insert(ages.partition_point(|other| other.point <= age.point), age);
            }
            _ => ages.push_back(age),
        }
        if ages.len() > VOID_TIMES * self.bins.len() + VOID_MORE {
            self.renew_ages(pieces);
        }
    }

    /// Takes a free piece out.
    pub(crate) fn remove(&mut self, pieces: &mut Pieces, id: PieceId) {
        pieces.take_from_list(id);
        let piece = &pieces[id];
        self.bins.remove(piece.size, piece.start);
        self.bytes -= piece.size;
    }

    /// Takes `size` bytes off the front of the best piece for it, as a new piece; what is left stays in the free list.
    pub(crate) fn take_best(&mut self, pieces: &mut Pieces, size: u64) -> Option<PieceId> {
        let (id, found) = self.bins.take_best(size)?;
        self.bytes -= size;
        if found == size {
            pieces.take_from_list(id);
            return Some(id);
        }
        let front = pieces.split_front(id, size);
        let rest = &pieces[id];
        self.bins.insert(rest.size, rest.start, id);
        Some(front)
    }

    /// A piece whose completion point has passed: the oldest first. Each is told once; the caller takes it out.
    pub(crate) fn next_passed(
        &mut self,
        this: FreeListId,
        pieces: &Pieces,
        passed: PointNumber,
    ) -> Option<PieceId> {
        let ages = self.ages.as_mut()?;
        while let Some(age) = ages.pop_front_if(|age| age.point <= passed) {
            if pieces.is_in(age.piece, this) && pieces[age.piece].point <= passed {
                return Some(age.piece);
            }
        }
        None
    }

    /// The oldest completion point that has not passed.
    pub(crate) fn oldest_pending(&self, pieces: &Pieces, passed: PointNumber) -> Option<PointNumber> {
        self.bins.unsorted().map(|id| pieces[id].point).filter(|&point| point > passed).min()
    }
}
