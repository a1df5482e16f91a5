//! Free list: the free pieces of one owner, indexed by size for best fit, and by age if another stream may wait for their completion
//! points.
//!
//! Ages are notes in the order of frees, made only if more than one stream could take the pieces. A piece that leaves does not search for
//! its note: the note is found void when its turn comes. So a free costs one write at the end of a queue.
//!
//! Invariant: while ages are kept, every piece in the free list has a note with its completion point or an older one.

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

use slab::Slab;

use crate::bins::Bins;
use crate::ids::{DomainId, FreeListId, Move, PieceId, PointNumber, StreamKey};
use crate::piece::Pieces;
use crate::room;
use crate::stats::Inactive;

/// Ratio of notes to pieces above which the notes are rebuilt; seldom enough to cost a free next to nothing.
const VOID_TIMES: usize = 4;
const VOID_MORE: usize = 256;

/// Owner of the pieces of a free list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A stream that freed the pieces: it may reuse them at once, other streams after the completion point.
    Stream(StreamKey),
    /// Available to any stream: the completion points have passed.
    Anyone,
    /// No stream before the completion point: other streams used the pieces.
    Nobody,
    /// A stream that freed the pieces while holds on them were pending: it may reuse them behind a wait for the holds if there is no other
    /// memory, and freely once the holds have passed.
    Held(StreamKey),
    /// No stream while the extents of the pieces are not resident.
    Evicted,
}

/// Size class of the pieces of a free list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Pieces for blocks above [`crate::SMALL_LIMIT`].
    Large,
    /// Slabs as a whole.
    Slabs,
    /// Pieces for blocks inside slabs.
    Small,
}

#[derive(Debug)]
pub(crate) struct FreeList {
    pub(crate) domain: DomainId,
    pub(crate) class: Class,
    pub(crate) owner: Owner,
    /// Last move covered by the stream's latest completion edge.
    pub(crate) edge: Move,
    pub(crate) bins: Bins,
    /// Total bytes of the pieces.
    pub(crate) bytes: u64,
    /// List of the stream's held pieces, for its large pieces and slabs.
    pub(crate) held: FreeListId,
    ages: Option<VecDeque<Age>>,
    /// Figures of the pieces when they were last added up.
    sums: FreeSums,
}

/// Figures of free pieces for the statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FreeSums {
    /// Ranges of the small pool in partly free extents.
    pub(crate) inactive_small: Inactive,
    /// Ranges of the large pool in partly free extents.
    pub(crate) inactive_large: Inactive,
    /// Bytes pending on a stream of a domain with several.
    pub(crate) stream: u64,
    /// Other bytes in whole extents.
    pub(crate) soft: u64,
}

impl FreeSums {
    /// Replaces a part of the sums by another.
    pub(crate) fn replace(&mut self, before: &FreeSums, after: &FreeSums) {
        for (sum, before, after) in [
            (&mut self.inactive_small, before.inactive_small, after.inactive_small),
            (&mut self.inactive_large, before.inactive_large, after.inactive_large),
        ] {
            sum.ranges = sum.ranges + after.ranges - before.ranges;
            sum.bytes = sum.bytes.saturating_add(after.bytes).saturating_sub(before.bytes);
        }
        self.stream = self.stream + after.stream - before.stream;
        self.soft = self.soft + after.soft - before.soft;
    }
}

/// Note that a piece entered the free list with a completion point; void once the piece has left or entered again.
#[derive(Clone, Copy, Debug)]
struct Age {
    point: PointNumber,
    piece: PieceId,
}

impl FreeList {
    pub(crate) fn new(domain: DomainId, class: Class, owner: Owner) -> Self {
        let ages = matches!(owner, Owner::Nobody | Owner::Held(_)).then(VecDeque::new);
        let (edge, held) = (Move(0), FreeListId::NONE);
        let sums = FreeSums::default();
        FreeList { domain, class, owner, edge, bins: Bins::new(), bytes: 0, held, ages, sums }
    }

    /// Creates the free list of a stream; `held` is the list of its held pieces.
    pub(crate) fn of_stream(domain: DomainId, class: Class, stream: StreamKey, held: FreeListId) -> Self {
        FreeList { held, ..FreeList::new(domain, class, Owner::Stream(stream)) }
    }

    /// Returns the owning stream, if any.
    pub(crate) fn stream(&self) -> Option<StreamKey> {
        match self.owner {
            Owner::Stream(stream) => Some(stream),
            Owner::Anyone | Owner::Nobody | Owner::Held(_) | Owner::Evicted => None,
        }
    }

    /// Starts to keep ages, so that [`FreeList::next_passed`] reports passed pieces.
    pub(crate) fn keep_ages(&mut self, pieces: &Pieces) {
        if self.ages.is_none() {
            self.ages = Some(VecDeque::new());
            self.renew_ages(pieces);
        }
    }

    /// Rebuilds the notes within their capacity.
    fn renew_ages(&mut self, pieces: &Pieces) {
        let Some(ages) = &mut self.ages else { return };
        ages.clear();
        ages.extend(self.bins.unsorted().map(|piece| Age { point: pieces[piece].point, piece }));
        ages.make_contiguous().sort_unstable_by_key(|age| age.point);
    }

    /// Makes room for the pieces that frees add until the next call.
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
            // The piece was free before: the rest of a piece that was cut, or part of an extent that became resident.
            Some(last) if last.point > age.point => {
                ages.insert(ages.partition_point(|other| other.point <= age.point), age);
            }
            _ => ages.push_back(age),
        }
        if ages.len() > VOID_TIMES * self.bins.len() + VOID_MORE {
            self.renew_ages(pieces);
        }
    }

    /// Removes a free piece.
    pub(crate) fn remove(&mut self, pieces: &mut Pieces, id: PieceId) {
        pieces.take_from_list(id);
        let piece = &pieces[id];
        self.bins.remove(piece.size, piece.start);
        self.bytes -= piece.size;
    }

    /// Takes `size` bytes off the front of the best-fitting piece as a new piece; the rest stays in the free list.
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

    /// Returns the oldest piece whose completion point has passed. Each piece is reported once; the caller removes it.
    fn next_passed(&mut self, this: FreeListId, pieces: &Pieces, passed: PointNumber) -> Option<PieceId> {
        let ages = self.ages.as_mut()?;
        while let Some(age) = ages.pop_front_if(|age| age.point <= passed) {
            if pieces.is_in(age.piece, this) && pieces[age.piece].point <= passed {
                return Some(age.piece);
            }
        }
        None
    }

    /// Returns the figures of the pieces when they were last added up.
    pub(crate) fn sums(&self) -> &FreeSums {
        &self.sums
    }

    /// Returns the oldest completion point that has not passed.
    pub(crate) fn oldest_pending(&self, pieces: &Pieces, passed: PointNumber) -> Option<PointNumber> {
        self.bins.unsorted().map(|id| pieces[id].point).filter(|&point| point > passed).min()
    }
}

/// Free lists of a device.
///
/// A list that was borrowed for a change is marked and queued. [`FreeLists::make_room`], [`FreeLists::sums`] and [`FreeLists::aged`] visit the
/// queued lists only, because there may be thousands of lists.
#[derive(Debug, Default)]
pub(crate) struct FreeLists {
    lists: Slab<FreeList>,
    /// Queues that contain each list, as bits.
    marks: Vec<u8>,
    /// Lists that may need room.
    narrow: Vec<FreeListId>,
    /// Lists whose figures may be out of date.
    changed: Vec<FreeListId>,
    /// Lists that may have ages.
    aged: Vec<FreeListId>,
    /// Sum of the lists' figures.
    sums: FreeSums,
}

const NARROW: u8 = 1;
const CHANGED: u8 = 2;
const AGED: u8 = 4;
const ALL: u8 = NARROW | CHANGED | AGED;

impl Index<FreeListId> for FreeLists {
    type Output = FreeList;

    #[inline]
    fn index(&self, id: FreeListId) -> &FreeList {
        &self.lists[id.index()]
    }
}

impl IndexMut<FreeListId> for FreeLists {
    #[inline]
    fn index_mut(&mut self, id: FreeListId) -> &mut FreeList {
        if self.marks[id.index()] != ALL {
            self.mark(id);
        }
        &mut self.lists[id.index()]
    }
}

impl FreeLists {
    /// Adds an empty free list.
    pub(crate) fn add(&mut self, list: FreeList) -> FreeListId {
        let id = FreeListId::at(self.lists.insert(list));
        if self.marks.len() <= id.index() {
            self.marks.resize(id.index() + 1, 0);
            // Each list is queued once at most, so that marking a list never allocates.
            for queue in [&mut self.narrow, &mut self.changed, &mut self.aged] {
                queue.reserve(self.marks.len() - queue.len());
            }
        }
        self.mark(id);
        id
    }

    /// Queues a list: its pieces, or the streams or points that its figures depend on, may have changed.
    #[cold]
    pub(crate) fn mark(&mut self, id: FreeListId) {
        let marks = std::mem::replace(&mut self.marks[id.index()], ALL);
        let queues = [(NARROW, &mut self.narrow), (CHANGED, &mut self.changed), (AGED, &mut self.aged)];
        for (_, queue) in queues.into_iter().filter(|(mark, _)| marks & mark == 0) {
            queue.push(id);
        }
    }

    /// Removes a free list, which must be empty.
    pub(crate) fn forget(&mut self, id: FreeListId) {
        let list = self.lists.remove(id.index());
        self.sums.replace(&list.sums, &FreeSums::default());
    }

    /// Returns a free list that may have been removed.
    pub(crate) fn get(&self, id: FreeListId) -> Option<&FreeList> {
        self.lists.get(id.index())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (FreeListId, &FreeList)> {
        self.lists.iter().map(|(index, list)| (FreeListId::at(index), list))
    }

    /// Calls [`FreeList::make_room`] for each list that changed since the last call.
    pub(crate) fn make_room(&mut self) {
        for id in self.narrow.drain(..) {
            self.marks[id.index()] &= !NARROW;
            if let Some(list) = self.lists.get_mut(id.index()) {
                list.make_room();
            }
        }
    }

    /// Returns the figures of all free pieces. Calls `sums_of` for each list that changed since the last call; if it returns true, the
    /// figures change with the next completion point.
    pub(crate) fn sums(&mut self, sums_of: impl Fn(&FreeList) -> (FreeSums, bool)) -> FreeSums {
        let (lists, marks, sums) = (&mut self.lists, &mut self.marks, &mut self.sums);
        self.changed.retain(|&id| {
            let mut changes = false;
            if let Some(list) = lists.get_mut(id.index()) {
                let (now, pending) = sums_of(list);
                sums.replace(&list.sums, &now);
                list.sums = now;
                changes = pending;
            }
            marks[id.index()] &= if changes { !0 } else { !CHANGED };
            changes
        });
        *sums
    }

    /// Returns the domains of the lists with ages.
    pub(crate) fn aged(&mut self) -> Vec<DomainId> {
        let (lists, marks) = (&self.lists, &mut self.marks);
        let mut domains = Vec::new();
        self.aged.retain(|&id| {
            let list = lists.get(id.index());
            let aged = list.filter(|list| list.ages.as_ref().is_some_and(|ages| !ages.is_empty()));
            domains.extend(aged.map(|list| list.domain));
            marks[id.index()] &= if aged.is_some() { !0 } else { !AGED };
            aged.is_some()
        });
        domains.sort_unstable();
        domains.dedup();
        domains
    }

    /// Returns the oldest piece of a list whose completion point has passed ([`FreeList::next_passed`]).
    pub(crate) fn next_passed(
        &mut self,
        id: FreeListId,
        pieces: &Pieces,
        passed: PointNumber,
    ) -> Option<PieceId> {
        let oldest = self.lists[id.index()].ages.as_ref()?.front()?;
        // A list that has none is not borrowed for a change.
        if oldest.point > passed { None } else { self[id].next_passed(id, pieces, passed) }
    }

    /// Returns the kept figures, and whether those of a list may be out of date.
    pub(crate) fn kept(&self) -> (FreeSums, impl Fn(FreeListId) -> bool) {
        (self.sums, |id: FreeListId| self.marks[id.index()] & CHANGED != 0)
    }

    /// Puts a free piece into the list that it names.
    pub(crate) fn insert(&mut self, pieces: &mut Pieces, piece: PieceId) {
        self[pieces[piece].list].insert(pieces, piece);
    }

    /// Removes a free piece from its list.
    pub(crate) fn remove(&mut self, pieces: &mut Pieces, piece: PieceId) {
        self[pieces[piece].list].remove(pieces, piece);
    }

    /// Returns the owner of the list that a piece names.
    pub(crate) fn owner_of(&self, pieces: &Pieces, piece: PieceId) -> Owner {
        self[pieces[piece].list].owner
    }
}
