//! Plans: driver work for a miss or a release, with everything set aside until it ends.
//!
//! ```text
//! Miss ─────► Draft ──add──► Plan ──► the driver ──► commit: a block, or memory released
//! Trim ─────►                                   └─► abort: state as before
//! ```
//!
//! Invariant: a pending plan names its domain, which lives until the plan ends; everything that the plan needs is in no free list.
//!
//! New extents are named when the plan is made, and mapped or dropped when it ends.

use glake_units::Bytes;
use slab::Slab;
use smallvec::SmallVec;

use crate::alias::{Alias, Aliases};
use crate::domain::StreamLists;
use crate::free_list::Class;
use crate::heap::{Heap, Want};
use crate::home::Carved;
use crate::ids::{DomainId, ExtentId, FreeListId, PieceId, PlanId};
use crate::piece::State;
use crate::plan::{Grant, Plan, Step, Stitch};

pub(crate) use miss::{Answer, Miss};
pub(crate) use trim::Trim;

mod miss;
mod selection;
mod trim;

/// A plan without an id.
#[derive(Debug)]
pub(crate) struct Draft {
    pending: Pending,
    steps: Vec<Step>,
    stitch: Option<Stitch>,
}

/// Plans that are neither committed nor aborted.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    table: Slab<Pending>,
}

impl Plans {
    /// Registers a plan under a new id; its domain stays until it ends.
    pub(crate) fn add(&mut self, draft: Draft, heap: &mut Heap) -> Plan {
        let Draft { pending, steps, stitch } = draft;
        if let Some(domain) = pending.domain() {
            heap.home.domains[domain].plans += 1;
        }
        Plan { id: PlanId::at(self.table.insert(pending)), steps, stitch }
    }

    /// Applies a plan whose steps the driver has executed. Returns the block if the plan was for one.
    pub(crate) fn commit(&mut self, plan: PlanId, heap: &mut Heap, aliases: &mut Aliases) -> Option<Grant> {
        let pending = self.table.try_remove(plan.index())?;
        let domain = pending.domain();
        let grant = pending.commit(heap, aliases);
        end(domain, heap);
        heap.home.make_room();
        grant
    }

    /// Rolls back a plan that the driver could not execute.
    pub(crate) fn abort(&mut self, plan: PlanId, heap: &mut Heap, aliases: &mut Aliases) {
        let Some(pending) = self.table.try_remove(plan.index()) else { return };
        let domain = pending.domain();
        pending.abort(heap, aliases);
        end(domain, heap);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Iterates over the free lists that pieces of plans come from or go to.
    pub(crate) fn lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        self.table.iter().flat_map(|(_, pending)| pending.lists())
    }
}

/// Ends a plan's claim on its domain, which may go if it is released and empty.
fn end(domain: Option<DomainId>, heap: &mut Heap) {
    if let Some(domain) = domain {
        heap.home.domains[domain].plans -= 1;
        heap.home.drop_if_done(domain);
    }
}

/// A large block in a new alias.
#[derive(Debug)]
pub(super) struct NewAlias {
    pub(super) want: Want,
    pub(super) alias: Alias,
    /// Start of the block in the alias.
    pub(super) offset: u64,
    pub(super) carved: Vec<Carved>,
    /// New memory, and its position among the carved ranges.
    pub(super) grown: Option<(usize, Grown)>,
}

/// A plan whose steps the driver is executing.
#[derive(Debug)]
pub(super) enum Pending {
    /// Large block at home: carved memory continued by new memory.
    Extended { want: Want, carved: Option<Carved>, grown: Grown },
    /// Large block in a new alias.
    Stitched(NewAlias),
    /// New slabs for a stream.
    Slabs { list: FreeListId, grown: Grown },
    /// Extents and aliases to be returned to the driver.
    Released(Release),
}

impl Pending {
    /// Returns the domain of the block that the plan is for; `None` for a release, whose memory counts as its domain's until the commit.
    pub(super) fn domain(&self) -> Option<DomainId> {
        match self {
            Pending::Extended { want, .. } => Some(want.domain),
            Pending::Stitched(new) => Some(new.want.domain),
            Pending::Slabs { grown, .. } => Some(grown.domain),
            Pending::Released(_) => None,
        }
    }

    /// Returns the free lists that its pieces come from or go to.
    pub(super) fn lists(&self) -> Vec<FreeListId> {
        match self {
            Pending::Extended { want, carved, .. } => of_block(want, carved.iter()),
            Pending::Stitched(new) => of_block(&new.want, new.carved.iter()),
            Pending::Slabs { list, .. } => vec![*list],
            Pending::Released(release) => release.lists().collect(),
        }
    }

    /// Applies the plan after the driver has executed its steps. Returns the block if the plan was for one.
    pub(super) fn commit(self, heap: &mut Heap, aliases: &mut Aliases) -> Option<Grant> {
        match self {
            Pending::Extended { want, carved, grown } => {
                let tail = grown.arrive_for(heap, want.lists.large);
                let carved = carved.inspect(|carved| heap.home.pieces.absorb_next(carved.piece));
                let carved = carved.unwrap_or_else(|| Carved { piece: tail, former: SmallVec::new() });
                Some(heap.hand_out_carved(&want, carved))
            }
            Pending::Stitched(new) => Some(new.commit(heap, aliases)),
            Pending::Slabs { list, grown } => {
                let piece = grown.arrive(heap);
                heap.home.pieces[piece].list = list;
                heap.home.give(piece);
                None
            }
            Pending::Released(release) => {
                release.commit(heap, aliases);
                None
            }
        }
    }

    /// Rolls the plan back after the driver undid its steps.
    pub(super) fn abort(self, heap: &mut Heap, aliases: &mut Aliases) {
        match self {
            Pending::Extended { carved, grown, .. } => {
                carved.into_iter().for_each(|carved| heap.put_back(carved));
                grown.depart(heap);
            }
            Pending::Stitched(NewAlias { alias, carved, grown, .. }) => {
                carved.into_iter().for_each(|carved| heap.put_back(carved));
                grown.iter().for_each(|(_, grown)| grown.depart(heap));
                aliases.zone.give_back(alias.start, alias.size);
            }
            Pending::Slabs { grown, .. } => grown.depart(heap),
            Pending::Released(release) => release.abort(heap, aliases),
        }
    }
}

impl NewAlias {
    fn commit(self, heap: &mut Heap, aliases: &mut Aliases) -> Grant {
        let NewAlias { want, alias, offset, mut carved, grown } = self;
        if let Some((at, grown)) = grown {
            let piece = grown.arrive_for(heap, want.lists.large);
            heap.home.pieces[piece].state = State::Part;
            carved.insert(at, Carved { piece, former: SmallVec::new() });
        }
        heap.tallies.counters.stitches += 1;
        heap.tallies.counters.extent_maps += alias.extents.len() as u64;
        let id = aliases.add(alias, heap);
        aliases.hand_out(heap, &want, id, offset, carved)
    }
}

fn of_block<'a>(want: &Want, carved: impl Iterator<Item = &'a Carved>) -> Vec<FreeListId> {
    let StreamLists { large, slabs, small, held, .. } = want.lists;
    let former = carved.flat_map(|carved| carved.former.iter().map(|former| former.list));
    former.chain([large, slabs, small, held]).collect()
}

/// New extents side by side at home.
#[derive(Debug)]
pub(super) struct Grown {
    pub(super) start: u64,
    pub(super) size: u64,
    pub(super) extents: Vec<ExtentId>,
    pub(super) domain: DomainId,
    pub(super) class: Class,
    /// Bytes at the start that the block takes.
    pub(super) used: u64,
}

impl Grown {
    /// Names new extents in a range that their zone has reserved.
    pub(super) fn new(heap: &mut Heap, start: u64, sizes: &[u64], domain: DomainId, class: Class) -> Self {
        let size: u64 = sizes.iter().sum();
        let extents = heap.home.add_extents(start, sizes, domain, class);
        heap.tallies.planned += size;
        Grown { start, size, extents, domain, class, used: 0 }
    }

    /// Returns the steps that create and map the extents.
    pub(super) fn steps(&self, heap: &Heap) -> Vec<Step> {
        let mut steps = Vec::with_capacity(2 * self.extents.len() + 1);
        for &extent in &self.extents {
            let (offset, size) = heap.home.extents.bounds(extent);
            steps.push(Step::Create { extent, size, domain: self.domain });
            steps.push(Step::Map { extent, offset, size });
        }
        let (offset, size) = (Bytes::new(self.start), Bytes::new(self.size));
        steps.push(Step::Access { offset, size, domain: self.domain });
        steps
    }

    /// Adds the mapped extents to home as one piece in no free list.
    pub(super) fn arrive(&self, heap: &mut Heap) -> PieceId {
        let piece = heap.home.add_piece(self.start, self.size, self.domain, State::Part);
        // If the domain was released meanwhile, new memory waits for its completion point too.
        heap.home.pieces[piece].point = heap.home.domains[self.domain].released.unwrap_or_default();
        let count = self.extents.len() as u64;
        if self.class == Class::Large {
            heap.home.live.reach(self.start + self.size);
        }
        heap.home.domains[self.domain].held += self.size;
        heap.tallies.planned -= self.size;
        heap.tallies.add_extents(self.class == Class::Slabs, count, self.size);
        heap.tallies.add_mappings(count);
        piece
    }

    /// Adds the mapped extents to home; the part that the block does not take becomes free for a stream.
    pub(super) fn arrive_for(&self, heap: &mut Heap, list: crate::ids::FreeListId) -> PieceId {
        let piece = self.arrive(heap);
        heap.home.pieces[piece].list = list;
        if self.used < self.size {
            let rest = heap.home.pieces.split(piece, self.used);
            heap.home.give(rest);
        }
        piece
    }

    /// Drops the extents, which could not be made.
    pub(super) fn depart(&self, heap: &mut Heap) {
        for extent in &self.extents {
            heap.home.extents.remove(*extent);
        }
        heap.home.unreserve(self.domain, self.class, self.start, self.size);
        heap.tallies.planned -= self.size;
    }
}

/// Memory and mappings that a plan releases.
#[derive(Debug, Default)]
pub(super) struct Release {
    pub(super) ranges: Vec<Carved>,
    pub(super) aliases: Vec<Alias>,
    /// Evicted extents without live bytes.
    pub(super) forgotten: Vec<ExtentId>,
}

impl Release {
    /// Iterates over the free lists that its ranges came from.
    pub(super) fn lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        self.ranges.iter().flat_map(|range| range.former.iter().map(|former| former.list))
    }

    /// Removes the released memory from the books.
    pub(super) fn commit(self, heap: &mut Heap, aliases: &mut Aliases) {
        for alias in self.aliases {
            aliases.zone.give_back(alias.start, alias.size);
            heap.tallies.counters.aliases_collected += 1;
        }
        self.forgotten.into_iter().for_each(|extent| heap.home.forget_extent(extent));
        let home = &mut heap.home;
        for range in self.ranges {
            let (start, end) = (home.pieces[range.piece].start, home.pieces[range.piece].end());
            home.remove_piece(range.piece);
            let extents: Vec<ExtentId> = home.extents.touching(start, end).collect();
            let Some(&first) = extents.first() else { continue };
            let (class, domain) = (home.extents[first].class, home.extents[first].domain);
            for &extent in &extents {
                home.extents.remove(extent);
            }
            home.unreserve(domain, class, start, end - start);
            let count = extents.len() as u64;
            heap.tallies.mappings -= count;
            heap.tallies.remove_extents(class == Class::Slabs, count, end - start);
            home.domains[domain].held -= end - start;
            home.drop_if_done(domain);
        }
    }

    /// Puts everything back in its earlier state.
    pub(super) fn abort(self, heap: &mut Heap, aliases: &mut Aliases) {
        self.ranges.into_iter().for_each(|range| heap.home.put_back(range));
        for mut alias in self.aliases {
            // The domain may have been released meanwhile: a replay of its graph may still use the addresses.
            alias.point = alias.point.max(heap.home.domains[alias.domain].released.unwrap_or_default());
            aliases.add(alias, heap);
        }
    }
}
