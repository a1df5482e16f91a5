//! State that a plan sets aside while the driver executes its steps, and its commit or abort.

use smallvec::SmallVec;

use super::grown::Grown;
use super::release::Release;
use crate::alias::Alias;
use crate::aliases::Aliases;
use crate::domain::StreamLists;
use crate::heap::Heap;
use crate::home::Carved;
use crate::ids::{DomainId, FreeListId};
use crate::piece::State;
use crate::plan::Grant;
use crate::want::Want;

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
