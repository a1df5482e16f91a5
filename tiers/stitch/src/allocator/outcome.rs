//! Reserving pieces for a plan, and what its commit or abort makes of them.

use glake_units::Bytes;
use smallvec::SmallVec;

use super::Allocator;
use super::miss::Want;
use super::trim::Release;
use crate::alias::Alias;
use crate::free_list::Class;
use crate::ids::{AliasId, DomainId, Epoch, ExtentId, FreeListId, Move, PieceId, PlanId};
use crate::piece::State;
use crate::plan::Grant;
use crate::run::Run;

/// What a reserved range was before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Former {
    pub(super) size: u64,
    pub(super) list: FreeListId,
    pub(super) epoch: Epoch,
    pub(super) moved: Move,
}

/// A home range taken out of its free lists as one piece.
#[derive(Debug)]
pub(super) struct Carved {
    pub(super) piece: PieceId,
    /// What it was made of, in order.
    pub(super) former: SmallVec<[Former; 2]>,
}

/// New extents of a plan.
#[derive(Debug)]
pub(super) struct Grown {
    pub(super) start: u64,
    pub(super) size: u64,
    pub(super) extents: Vec<ExtentId>,
    pub(super) domain: DomainId,
    pub(super) class: Class,
    /// How much of its start the block takes.
    pub(super) used: u64,
}

/// A plan whose steps the driver is executing.
#[derive(Debug)]
pub(super) enum Pending {
    /// A large block at home, begun by what is carved and continued by what is grown.
    Extended { want: Want, carved: Option<Carved>, grown: Grown },
    /// A large block in a new alias; the grown range is the part at `grown_at`.
    Stitched { want: Want, alias: Alias, offset: u64, carved: Vec<Carved>, grown: Option<(usize, Grown)> },
    /// Slabs for a stream.
    Slabs { list: FreeListId, grown: Grown },
    /// Extents and aliases going back to the driver.
    Released(Release),
}

impl Pending {
    /// Whose block it is for; what goes back to the driver is counted as its domain's until then.
    fn domain(&self) -> Option<DomainId> {
        match self {
            Pending::Extended { want, .. } | Pending::Stitched { want, .. } => Some(want.domain),
            Pending::Slabs { grown, .. } => Some(grown.domain),
            Pending::Released(_) => None,
        }
    }
}

impl Allocator {
    /// Takes `from..to` out of a run as one piece that is in no free list.
    pub(super) fn carve(&mut self, run: &Run, from: u64, to: u64) -> Carved {
        let mut id = run.first;
        while self.pieces[id].end() <= from {
            id = self.pieces[id].next;
        }
        let mut former = SmallVec::new();
        let mut whole = PieceId::NONE;
        loop {
            let list = self.pieces[id].list;
            self.lists[list.index()].remove(&mut self.pieces, id);
            if self.pieces[id].start < from {
                let front = id;
                id = self.pieces.split(front, from - self.pieces[front].start);
                self.lists[list.index()].insert(&mut self.pieces, front);
            }
            if self.pieces[id].end() > to {
                let rest = self.pieces.split(id, to - self.pieces[id].start);
                self.lists[list.index()].insert(&mut self.pieces, rest);
            }
            let piece = &mut self.pieces[id];
            piece.state = State::Part;
            former.push(Former { size: piece.size, list, epoch: piece.epoch, moved: piece.moved });
            let (end, next) = (piece.end(), piece.next);
            if whole == PieceId::NONE {
                whole = id;
            } else {
                self.inherit(whole, id);
                self.pieces.absorb_next(whole);
            }
            if end == to {
                return Carved { piece: whole, former };
            }
            id = next;
        }
    }

    /// Puts a carved range back as it was.
    pub(super) fn put_back(&mut self, carved: Carved) {
        let mut id = carved.piece;
        let mut pieces = SmallVec::<[PieceId; 4]>::new();
        for former in &carved.former {
            let rest = (self.pieces[id].size > former.size).then(|| self.pieces.split(id, former.size));
            // It may have been released meanwhile.
            let released = self.domains[self.lists[former.list.index()].domain].released;
            let piece = &mut self.pieces[id];
            piece.list = former.list;
            piece.epoch = former.epoch.max(released.unwrap_or_default());
            piece.moved = former.moved;
            pieces.push(id);
            id = rest.unwrap_or(id);
        }
        for id in pieces {
            self.give(id);
        }
    }

    pub(super) fn pend(&mut self, pending: Pending) -> PlanId {
        if let Some(domain) = pending.domain() {
            self.domains[domain].plans += 1;
        }
        PlanId::at(self.plans.insert(pending))
    }

    /// A plan for a block of a domain is over: nothing more of it comes.
    fn end_plan(&mut self, domain: DomainId) {
        self.domains[domain].plans -= 1;
        self.drop_if_done(domain);
    }

    /// The driver has done a plan's steps: makes it true. A plan for a block returns it.
    pub fn commit(&mut self, plan: PlanId) -> Option<Grant> {
        let pending = self.plans.try_remove(plan.index())?;
        let domain = pending.domain();
        let grant = match pending {
            Pending::Extended { want, carved, grown } => Some(self.commit_extended(&want, carved, &grown)),
            Pending::Stitched { want, alias, offset, carved, grown } => {
                Some(self.commit_stitched(&want, alias, offset, carved, grown))
            }
            Pending::Slabs { list, grown } => {
                let piece = self.arrive(&grown);
                self.pieces[piece].list = list;
                self.give(piece);
                None
            }
            Pending::Released(release) => {
                self.commit_release(release);
                None
            }
        };
        domain.into_iter().for_each(|domain| self.end_plan(domain));
        grant
    }

    /// The driver could not do a plan's steps and has undone those that it did: everything is as before.
    pub fn abort(&mut self, plan: PlanId) {
        let Some(pending) = self.plans.try_remove(plan.index()) else { return };
        let domain = pending.domain();
        match pending {
            Pending::Extended { carved, grown, .. } => {
                carved.into_iter().for_each(|carved| self.put_back(carved));
                self.depart(&grown);
            }
            Pending::Stitched { alias, carved, grown, .. } => {
                carved.into_iter().for_each(|carved| self.put_back(carved));
                grown.iter().for_each(|(_, grown)| self.depart(grown));
                self.elsewhere.give_back(alias.start, alias.size);
            }
            Pending::Slabs { grown, .. } => self.depart(&grown),
            Pending::Released(release) => self.abort_release(release),
        }
        domain.into_iter().for_each(|domain| self.end_plan(domain));
    }

    fn commit_extended(&mut self, want: &Want, carved: Option<Carved>, grown: &Grown) -> Grant {
        let tail = self.arrive(grown);
        self.pieces[tail].list = want.lists.large;
        if grown.used < grown.size {
            let rest = self.pieces.split(tail, grown.used);
            self.give(rest);
        }
        let carved = match carved {
            Some(carved) => {
                self.pieces.absorb_next(carved.piece);
                carved
            }
            None => Carved { piece: tail, former: SmallVec::new() },
        };
        self.hand_out_carved(want, carved)
    }

    fn commit_stitched(
        &mut self,
        want: &Want,
        alias: Alias,
        offset: u64,
        mut carved: Vec<Carved>,
        grown: Option<(usize, Grown)>,
    ) -> Grant {
        if let Some((at, grown)) = grown {
            let piece = self.arrive(&grown);
            self.pieces[piece].list = want.lists.large;
            if grown.used < grown.size {
                let rest = self.pieces.split(piece, grown.used);
                self.give(rest);
            }
            self.pieces[piece].state = State::Part;
            carved.insert(at, Carved { piece, former: SmallVec::new() });
        }
        self.stats.counters.stitches += 1;
        self.stats.counters.extent_maps += alias.extents.len() as u64;
        let id = self.add_alias(alias);
        self.hand_out_stitched(want, id, offset, carved)
    }

    /// Makes an alias that is mapped one of its domain's, idle.
    pub(super) fn add_alias(&mut self, alias: Alias) -> AliasId {
        let (domain, extents, size) = (alias.domain, alias.extents.clone(), Bytes::new(alias.size));
        let id = self.aliases.insert(alias);
        for extent in &extents {
            self.extents[*extent].aliases.push(id);
        }
        self.domains[domain].aliases.push(id);
        self.stats.alias_bytes = self.stats.alias_bytes.saturating_add(size);
        let idle = &mut self.stats.idle_alias_bytes;
        *idle = idle.saturating_add(size);
        self.stats.mappings += self.mapped_in(&self.aliases[id]);
        id
    }

    /// New extents are mapped: they become one piece of home, in no free list.
    fn arrive(&mut self, grown: &Grown) -> PieceId {
        let piece = self.add_piece(grown.start, grown.size, grown.domain, State::Part);
        // As everything of a domain that was released meanwhile.
        self.pieces[piece].epoch = self.domains[grown.domain].released.unwrap_or_default();
        let count = grown.extents.len() as u64;
        if grown.class == Class::Large {
            self.live.reach(grown.start + grown.size);
        }
        self.planned -= grown.size;
        self.domains[grown.domain].extents += grown.extents.len();
        for pool in self.stats.pools(grown.class == Class::Slabs) {
            pool.reserved.add(grown.size);
            pool.extents.add(count);
        }
        self.stats.mappings += count;
        self.stats.counters.extent_maps += count;
        self.stats.counters.extents_created += count;
        piece
    }

    /// New extents will not come.
    fn depart(&mut self, grown: &Grown) {
        for extent in &grown.extents {
            self.extents.remove(*extent);
        }
        self.zone(grown.class).give_back(grown.start, grown.size);
        self.planned -= grown.size;
    }
}
