//! Extents that are evicted and refilled: their addresses stay taken and their blocks live, and what is free in them is handed
//! out to nobody meanwhile.
//!
//! ```text
//!  Resident ──begin_evict──► Moving ──finish_evict──► Evicted ──refill_made──► Moving ──finish_refill──► Resident
//!      ▲                       │
//!      └─────finish_refill─────┘  nothing was given up
//! ```
//!
//! Invariants: a free piece lies in the free list of evicted pieces exactly where its extent is not resident, and then inside that
//! one extent; what counts as reserved are the extents that are resident or moving; an alias over a moving extent is not unmapped, so
//! that an extent keeps its addresses while the driver works on them.

use glake_units::Bytes;

use super::Allocator;
use crate::error::StitchError;
use crate::extent::Presence;
use crate::free_list::{Class, Owner};
use crate::ids::{DomainId, ExtentId, FreeListId, PieceId};
use crate::piece::State;

impl Allocator {
    /// Begins to evict an extent: from now on nothing of it is handed out.
    ///
    /// # Errors
    /// [`StitchError::WrongPresence`] where it is not resident; [`StitchError::Withheld`] where blocks were freed in it that other
    /// streams may still use. Nothing has changed then.
    pub fn begin_evict(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        self.in_presence(extent, Presence::Resident)?;
        let (start, end) = (self.extents[extent].start, self.extents[extent].end());
        let idle: Vec<PieceId> =
            self.free_in(start, end).into_iter().filter(|&id| self.is_idle_slab(id)).collect();
        self.dissolve_slabs(&idle);
        let free = self.free_in(start, end);
        if free.iter().any(|&id| self.list_owner_of(id) == Owner::Nobody) {
            return Err(StitchError::Withheld { extent });
        }
        for id in free {
            self.put_free_evicted(id, start, end);
        }
        let live = self.live_in(extent);
        let leaving = &mut self.extents[extent];
        leaving.live = live;
        leaving.presence = Presence::Moving;
        self.not_resident += 1;
        Ok(())
    }

    /// All of a moving extent is mapped again, or still: its free bytes can be handed out.
    ///
    /// # Errors
    /// [`StitchError::WrongPresence`].
    pub fn finish_refill(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        self.in_presence(extent, Presence::Moving)?;
        let (start, end) = (self.extents[extent].start, self.extents[extent].end());
        self.extents[extent].presence = Presence::Resident;
        self.not_resident -= 1;
        for id in self.free_in(start, end) {
            let list = self.pieces[id].list;
            self.lists[list.index()].remove(&mut self.pieces, id);
            let piece = &mut self.pieces[id];
            piece.list = std::mem::replace(&mut piece.returns_to, FreeListId::NONE);
            self.give(id);
        }
        Ok(())
    }

    /// A moving extent is mapped nowhere any more, and its memory released.
    ///
    /// # Errors
    /// [`StitchError::WrongPresence`].
    pub fn finish_evict(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        self.in_presence(extent, Presence::Moving)?;
        let (size, small, mappings) = self.account(extent);
        self.extents[extent].presence = Presence::Evicted;
        for pool in self.stats.pools(small) {
            pool.reserved.sub(size);
            pool.extents.sub(1);
        }
        self.stats.mappings -= mappings;
        self.stats.counters.extents_released += 1;
        Ok(())
    }

    /// Sets a part of the limit aside for an evicted extent, until [`Allocator::refill_made`].
    ///
    /// # Errors
    /// [`StitchError::OutOfMemory`] where the limit does not allow it; [`StitchError::WrongPresence`].
    pub fn begin_refill(&mut self, extent: ExtentId) -> Result<(), StitchError> {
        self.in_presence(extent, Presence::Evicted)?;
        let size = self.extents[extent].size;
        if self.reserved() + size > self.settings.limit.get() {
            return Err(StitchError::OutOfMemory {
                wanted: Bytes::new(size),
                reserved: Bytes::new(self.reserved()),
                limit: self.settings.limit,
                free: Bytes::new(self.free_bytes()),
                stitchable: Bytes::new(self.stitchable_bytes()),
            });
        }
        self.planned += size;
        Ok(())
    }

    /// Ends [`Allocator::begin_refill`]: the driver has made the memory, and the extent moves; or it has not.
    pub fn refill_made(&mut self, extent: ExtentId, made: bool) {
        let (size, small, mappings) = self.account(extent);
        self.planned -= size;
        if !made {
            return;
        }
        self.extents[extent].presence = Presence::Moving;
        for pool in self.stats.pools(small) {
            pool.reserved.add(size);
            pool.extents.add(1);
        }
        self.stats.mappings += mappings;
        self.stats.counters.extents_created += 1;
        self.stats.counters.extent_maps += mappings;
    }

    /// The extents in which the last live block was freed while they were not resident, since the last call: what was kept of
    /// them is worth nothing.
    #[inline]
    pub fn take_emptied(&mut self) -> Vec<ExtentId> {
        if self.emptied.is_empty() { Vec::new() } else { std::mem::take(&mut self.emptied) }
    }

    /// Whether all extents of a domain are resident.
    pub(super) fn all_resident(&self, domain: DomainId) -> Result<(), StitchError> {
        let is_evicted =
            |extent: &crate::extent::Extent| extent.domain == domain && extent.presence != Presence::Resident;
        if self.not_resident > 0 && self.extents.iter().any(|(_, extent)| is_evicted(extent)) {
            return Err(StitchError::Away { domain });
        }
        Ok(())
    }

    /// Whether a range of home touches an extent that is not resident.
    #[inline]
    pub(super) fn is_apart(&self, start: u64, end: u64) -> bool {
        self.not_resident > 0 && self.touches_elsewhere(start, end)
    }

    #[cold]
    fn touches_elsewhere(&self, start: u64, end: u64) -> bool {
        self.extents.touching(start, end).any(|extent| self.extents[extent].presence != Presence::Resident)
    }

    /// Frees a piece that is in no free list, part by part: what lies in extents that are resident goes into the free list that it names, the
    /// rest is kept for when they are back.
    #[cold]
    pub(super) fn give_apart(&mut self, id: PieceId) {
        let mut next = Some(id);
        while let Some(id) = next {
            let (start, end) = (self.pieces[id].start, self.pieces[id].end());
            let extent = self.extents.at(start);
            let cut = self.extents[extent].end();
            next = (cut < end).then(|| self.pieces.split(id, cut - start));
            if self.extents[extent].presence == Presence::Resident {
                self.give(id);
                continue;
            }
            self.put_evicted(id);
            let emptied = &mut self.extents[extent];
            emptied.live -= cut.min(end) - start;
            let domain = &self.domains[emptied.domain];
            if emptied.live == 0 && (domain.is_released() || !domain.options.is_private()) {
                self.emptied.push(extent);
            }
        }
    }

    /// Bytes in live blocks of extents for which no memory is held.
    pub(super) fn live_evicted(&self) -> u64 {
        if self.not_resident == 0 {
            return 0;
        }
        let evicted = self.extents.iter().filter(|(_, extent)| extent.presence == Presence::Evicted);
        evicted.map(|(_, extent)| extent.live).sum()
    }

    /// Whether an extent is evicted, and nothing at all in it is live to be refilled for.
    pub(super) fn is_forgettable(&self, id: ExtentId) -> bool {
        let extent = &self.extents[id];
        let whole = |&piece: &PieceId| {
            let piece = &self.pieces[piece];
            extent.start <= piece.start && piece.end() <= extent.end()
        };
        extent.presence == Presence::Evicted
            && extent.live == 0
            && self.aliases_are_done(id)
            && self.outer_in(extent.start, extent.end()).iter().all(whole)
    }

    /// Forgets an evicted extent that holds nothing live; its addresses can be taken again.
    pub(super) fn forget_extent(&mut self, id: ExtentId) {
        let (start, end) = (self.extents[id].start, self.extents[id].end());
        let free = self.free_in(start, end);
        for &piece in &free {
            let list = self.pieces[piece].list;
            self.lists[list.index()].remove(&mut self.pieces, piece);
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
        self.not_resident -= 1;
        self.zone(extent.class).give_back(start, end - start);
        self.domains[extent.domain].extents -= 1;
        self.drop_if_done(extent.domain);
    }

    /// Moves what a free piece has inside a range to the free list of what is evicted; the rest stays in its free list.
    fn put_free_evicted(&mut self, mut id: PieceId, start: u64, end: u64) {
        let list = self.pieces[id].list;
        self.lists[list.index()].remove(&mut self.pieces, id);
        if self.pieces[id].start < start {
            let front = id;
            id = self.pieces.split(front, start - self.pieces[front].start);
            self.lists[list.index()].insert(&mut self.pieces, front);
        }
        if self.pieces[id].end() > end {
            let rest = self.pieces.split(id, end - self.pieces[id].start);
            self.lists[list.index()].insert(&mut self.pieces, rest);
        }
        self.put_evicted(id);
    }

    /// Puts a piece that is in no free list among the evicted, for the free list that it names.
    fn put_evicted(&mut self, id: PieceId) {
        let list = &self.lists[self.pieces[id].list.index()];
        let domain = &self.domains[list.domain];
        let evicted = if list.class == Class::Small { domain.evicted_small } else { domain.evicted_large };
        let piece = &mut self.pieces[id];
        piece.state = State::Free;
        piece.returns_to = std::mem::replace(&mut piece.list, evicted);
        self.lists[evicted.index()].insert(&mut self.pieces, id);
    }

    fn list_owner_of(&self, id: PieceId) -> Owner {
        self.lists[self.pieces[id].list.index()].owner
    }

    /// An extent's size, whether it is of slabs, and how many mappings it has when it is resident.
    fn account(&self, id: ExtentId) -> (u64, bool, u64) {
        let extent = &self.extents[id];
        (extent.size, extent.class == Class::Slabs, 1 + extent.aliases.len() as u64)
    }

    fn in_presence(&self, extent: ExtentId, wanted: Presence) -> Result<(), StitchError> {
        let presence = self.presence(extent);
        if presence == Some(wanted) {
            return Ok(());
        }
        Err(StitchError::WrongPresence { extent, presence })
    }
}
