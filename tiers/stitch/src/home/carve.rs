//! Ranges taken out of home's free lists: carved for a plan or a block and put back unchanged, or kept apart while their extent is not
//! resident.
//!
//! Slabs: pieces of home that contain the blocks of small requests. A slab opens on demand and closes once it is entirely free.

use smallvec::SmallVec;

use super::Home;
use crate::domain::StreamLists;
use crate::error::StitchError;
use crate::extent::ExtentState;
use crate::free_list::{Class, Owner};
use crate::ids::{DomainId, ExtentId, FreeListId, Move, PieceId, PointNumber};
use crate::piece::{Run, State};

/// State of a piece before it was carved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Former {
    pub(crate) size: u64,
    pub(crate) list: FreeListId,
    pub(crate) point: PointNumber,
    pub(crate) moved: Move,
    /// Free list that a held or withheld piece goes to later.
    pub(crate) returns_to: FreeListId,
}

/// A home range taken out of its free lists as one piece.
#[derive(Debug)]
pub(crate) struct Carved {
    pub(crate) piece: PieceId,
    /// Earlier state of the pieces that it was made of, in order.
    pub(crate) former: SmallVec<[Former; 2]>,
}

impl Home {
    /// Carves `from..to` out of a run as one piece in no free list.
    pub(crate) fn carve(&mut self, run: &Run, from: u64, to: u64) -> Carved {
        let mut id = run.first;
        while self.pieces[id].end() <= from {
            id = self.pieces[id].next;
        }
        let mut former = SmallVec::new();
        let mut whole = PieceId::NONE;
        loop {
            id = self.cut_out(id, from, to);
            let piece = &mut self.pieces[id];
            piece.state = State::Part;
            former.push(Former {
                size: piece.size,
                list: piece.list,
                point: piece.point,
                moved: piece.moved,
                returns_to: piece.returns_to,
            });
            let (end, next) = (piece.end(), piece.next);
            whole = self.pieces.append(whole, id);
            if end == to {
                return Carved { piece: whole, former };
            }
            id = next;
        }
    }

    /// Takes the part of a free piece inside a range out of its free list as a piece of its own; the rest stays. If a withheld piece is
    /// cut, the part that stays completes its blocks.
    pub(crate) fn cut_out(&mut self, id: PieceId, from: u64, to: u64) -> PieceId {
        let mut id = id;
        self.lists.remove(&mut self.pieces, id);
        if self.pieces[id].start < from {
            let front = id;
            id = self.pieces.split(front, from - self.pieces[front].start);
            self.lists.insert(&mut self.pieces, front);
            self.pieces[id].requested = 0;
        }
        if self.pieces[id].end() > to {
            let rest = self.pieces.split(id, to - self.pieces[id].start);
            self.lists.insert(&mut self.pieces, rest);
            self.pieces[id].requested = 0;
        }
        id
    }

    /// Carves several home ranges (start, size) out of the runs that contain them.
    pub(crate) fn carve_all(&mut self, runs: &[Run], ranges: &[(u64, u64)]) -> Vec<Carved> {
        let carve = |&(start, size): &(u64, u64)| {
            let run = runs.get(runs.partition_point(|run| run.end <= start))?;
            Some(self.carve(run, start, start + size))
        };
        ranges.iter().filter_map(carve).collect()
    }

    /// Puts a carved range back in its earlier state.
    pub(crate) fn put_back(&mut self, carved: Carved) {
        let mut id = carved.piece;
        let mut pieces = SmallVec::<[(PieceId, bool); 4]>::new();
        for former in &carved.former {
            let rest = (self.pieces[id].size > former.size).then(|| self.pieces.split(id, former.size));
            // The domain may have been released meanwhile.
            let released = self.domains[self.lists[former.list].domain].released;
            let is_held = matches!(self.lists[former.list].owner, Owner::Held(_));
            let piece = &mut self.pieces[id];
            piece.list = if is_held { former.returns_to } else { former.list };
            piece.point = former.point.max(released.unwrap_or_default());
            piece.moved = former.moved;
            pieces.push((id, is_held));
            id = rest.unwrap_or(id);
        }
        for (id, is_held) in pieces {
            if is_held {
                self.hold_back(id);
            } else {
                self.give(id);
            }
        }
    }
}

impl Home {
    /// Takes all free bytes of a resident extent out of circulation; the extent is moving from now on.
    ///
    /// # Errors
    /// [`StitchError::Withheld`] if other streams may still use blocks freed in the extent. Nothing has changed then.
    pub(crate) fn set_apart(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        let (start, end) = (self.extents[extent].start, self.extents[extent].end());
        let idle: Vec<PieceId> =
            self.free_in(start, end).into_iter().filter(|&id| self.is_idle_slab(id)).collect();
        self.dissolve_slabs(&idle);
        let free = self.free_in(start, end);
        let is_used = |id| matches!(self.lists.owner_of(&self.pieces, id), Owner::Nobody | Owner::Held(_));
        if free.iter().any(|&id| is_used(id)) {
            return Err(StitchError::Withheld { extent });
        }
        for id in free {
            let id = self.cut_out(id, start, end);
            self.put_evicted(id);
        }
        self.extents[extent].live = self.live_in(extent);
        self.extents.set_state(extent, ExtentState::Moving);
        Ok(())
    }

    /// Makes a moving extent resident and returns its free bytes to their lists.
    pub(crate) fn join_again(&mut self, extent: ExtentId) {
        let (start, end) = (self.extents[extent].start, self.extents[extent].end());
        self.extents.set_state(extent, ExtentState::Resident);
        for id in self.free_in(start, end) {
            self.lists.remove(&mut self.pieces, id);
            let piece = &mut self.pieces[id];
            piece.list = std::mem::replace(&mut piece.returns_to, FreeListId::NONE);
            self.give(id);
        }
    }

    /// Frees a piece in no free list, part by part. Resident parts go into the free list that the piece names; other parts wait for their
    /// extent. With `withheld`, resident parts wait for other streams, and the given number of blocks completes with the first part.
    /// Returns the waiting ranges.
    #[cold]
    pub(crate) fn give_apart(&mut self, id: PieceId, mut withheld: Option<u64>) -> Vec<(u64, u64)> {
        let (mut next, mut waiting) = (Some(id), Vec::new());
        while let Some(id) = next {
            let (start, end) = (self.pieces[id].start, self.pieces[id].end());
            let extent = self.extents.at(start);
            let cut = self.extents[extent].end();
            next = (cut < end).then(|| self.pieces.split(id, cut - start));
            if self.extents[extent].state == ExtentState::Resident {
                match &mut withheld {
                    Some(blocks) => {
                        waiting.push((start, cut.min(end)));
                        self.withhold(id, std::mem::take(blocks));
                    }
                    None => self.give(id),
                }
                continue;
            }
            self.put_evicted(id);
            let keeps_all = self.domains[self.extents[extent].domain].is_held();
            self.extents.freed_apart(extent, cut.min(end) - start, keeps_all);
        }
        waiting
    }

    /// Puts a piece in no free list among the evicted pieces of its domain.
    fn put_evicted(&mut self, id: PieceId) {
        let list = &self.lists[self.pieces[id].list];
        let domain = &self.domains[list.domain];
        let evicted = if list.class == Class::Small { domain.evicted_small } else { domain.evicted_large };
        let piece = &mut self.pieces[id];
        piece.state = State::Free;
        piece.returns_to = std::mem::replace(&mut piece.list, evicted);
        self.lists[evicted].insert(&mut self.pieces, id);
    }

    /// Returns whether an extent is evicted and contains no live bytes that a refill would be for.
    pub(crate) fn is_forgettable(&self, id: ExtentId) -> bool {
        let extent = &self.extents[id];
        let whole = |&piece: &PieceId| {
            let piece = &self.pieces[piece];
            extent.start <= piece.start && piece.end() <= extent.end()
        };
        extent.state == ExtentState::Evicted
            && extent.live == 0
            && self.outer_in(extent.start, extent.end()).iter().all(whole)
    }

    /// Forgets an evicted extent without live bytes; its addresses can be reused.
    pub(crate) fn forget_extent(&mut self, id: ExtentId) {
        let (start, end) = (self.extents[id].start, self.extents[id].end());
        for piece in self.free_in(start, end) {
            self.lists.remove(&mut self.pieces, piece);
        }
        let outer = self.outer_in(start, end);
        for &piece in &outer {
            if self.pieces[piece].state == State::Slab {
                let mut inner = self.pieces[piece].inside;
                while inner != PieceId::NONE {
                    let next = self.pieces[inner].next;
                    self.pieces.forget(inner);
                    inner = next;
                }
            }
            self.pieces[piece].state = State::Part;
        }
        let Some(&whole) = outer.first() else { return };
        outer.iter().skip(1).for_each(|_| self.pieces.absorb_next(whole));
        self.remove_piece(whole);
        let extent = self.extents.remove(id);
        self.unreserve(extent.domain, extent.class, start, end - start);
        self.domains[extent.domain].held -= end - start;
        self.drop_if_done(extent.domain);
    }
}

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
