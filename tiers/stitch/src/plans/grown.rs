//! New extents of a plan: named when the plan is made, mapped or dropped when it ends.

use glake_units::Bytes;

use crate::free_list::Class;
use crate::heap::Heap;
use crate::ids::{DomainId, ExtentId, PieceId};
use crate::piece::State;
use crate::plan::Step;

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
        heap.home.zone(self.class).give_back(self.start, self.size);
        heap.tallies.planned -= self.size;
    }
}
