//! Free bytes in extents that are not resident: kept apart, and returned once the extent is resident again.

use super::Home;
use crate::error::StitchError;
use crate::extent::ExtentState;
use crate::free_list::{Class, Owner};
use crate::ids::{ExtentId, FreeListId, PieceId};
use crate::piece::State;

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
        self.zone(extent.class).give_back(start, end - start);
        self.domains[extent.domain].held -= end - start;
        self.drop_if_done(extent.domain);
    }
}
