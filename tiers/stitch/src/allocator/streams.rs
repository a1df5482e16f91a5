//! Streams come and go, and nobody says when one is gone: what it leaves behind becomes others', and its free lists are forgotten.

use rustc_hash::FxHashSet;

use super::Allocator;
use super::miss::Want;
use super::outcome::{Carved, Pending};
use crate::domain::{MANY, StreamLists};
use crate::ids::{DomainId, FreeListId, PieceId, StreamKey};
use crate::settings::Borrow;

impl Allocator {
    /// The free lists of a stream, made at first sight.
    pub(super) fn lists_for(&mut self, id: DomainId, stream: StreamKey) -> StreamLists {
        if let Some(known) = self.domains[id].lists_of(stream) {
            return known;
        }
        if self.domains[id].streams.len() >= self.domains[id].most_streams {
            self.forget_streams(id);
        }
        self.domains[id].add_stream(id, stream, &mut self.lists, &self.pieces)
    }

    /// Whether streams of a domain may take what others freed, once that has passed.
    pub(super) fn is_lending(&self, id: DomainId) -> bool {
        let domain = &self.domains[id];
        domain.options.lend && self.settings.borrow != Borrow::Off && domain.streams.len() > 1
    }

    /// Gives up the slabs that other streams keep open though all of each is free, and has passed; whether there was one.
    pub(super) fn take_idle_slabs(&mut self, id: DomainId) -> bool {
        if !self.is_lending(id) {
            return false;
        }
        let slab = self.settings.slab.get();
        let small = self.domains[id].streams.iter().map(|lists| &self.lists[lists.small.index()]);
        let open = small.filter(|list| list.bytes >= slab).flat_map(|list| list.bins.iter());
        let idle = |piece: &PieceId| self.pieces[*piece].epoch <= self.passed && self.is_idle_slab(*piece);
        let idle: Vec<PieceId> = open.filter(idle).collect();
        self.dissolve_slabs(&idle);
        self.settle(id);
        !idle.is_empty()
    }

    /// Forgets the streams of a domain of which nothing is left: no free piece, no live block that would come back to them.
    fn forget_streams(&mut self, id: DomainId) {
        let mut used: FxHashSet<FreeListId> = self.pieces.lists().collect();
        used.extend(self.stitched.iter().flat_map(|(_, block)| [block.list, block.slabs]));
        used.extend(self.plans.iter().flat_map(|(_, pending)| pending.lists()));
        let domain = &mut self.domains[id];
        let lists = &mut self.lists;
        domain.streams.retain(|stream| {
            let own = [stream.large, stream.slabs, stream.small];
            let stays = own.iter().any(|list| used.contains(list));
            if !stays {
                own.iter().for_each(|list| drop(lists.remove(list.index())));
            }
            stays
        });
        // Looked for again when there are twice as many: each costs a look at every piece.
        domain.most_streams = MANY.max(2 * domain.streams.len());
    }
}

impl Pending {
    /// The free lists that its pieces come from or go to.
    fn lists(&self) -> Vec<FreeListId> {
        match self {
            Pending::Extended { want, carved, .. } => of_block(want, carved.iter()),
            Pending::Stitched { want, carved, .. } => of_block(want, carved.iter()),
            Pending::Slabs { list, .. } => vec![*list],
            Pending::Released(release) => release.lists().collect(),
        }
    }
}

fn of_block<'a>(want: &Want, carved: impl Iterator<Item = &'a Carved>) -> Vec<FreeListId> {
    let StreamLists { large, slabs, small, .. } = want.lists;
    let former = carved.flat_map(|carved| carved.former.iter().map(|former| former.list));
    former.chain([large, slabs, small]).collect()
}
