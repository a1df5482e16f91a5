//! New extents of a plan: named when the plan is made, mapped or given up when it ends.

use glake_units::Bytes;

use crate::free_list::Class;
use crate::heap::Heap;
use crate::ids::{DomainId, ExtentId, PieceId};
use crate::piece::State;
use crate::plan::Step;

/// Extents side by side at home.
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

impl Grown {
    /// Names new extents in a range that its zone has set aside.
    pub(super) fn new(heap: &mut Heap, start: u64, sizes: &[u64], domain: DomainId, class: Class) -> Self {
        let size: u64 = sizes.iter().sum();
        let extents = heap.home.add_extents(start, sizes, domain, class);
        heap.tallies.planned += size;
        Grown { start, size, extents, domain, class, used: 0 }
    }

    /// The steps that make it.
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

    /// They are mapped: they become one piece of home, in no free list.
    pub(super) fn arrive(&self, heap: &mut Heap) -> PieceId {
        let piece = heap.home.add_piece(self.start, self.size, self.domain, State::Part);
        // As everything of a domain that was released meanwhile.
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

    /// As [`Grown::arrive`], where what the block does not take is free for a stream.
    pub(super) fn arrive_for(&self, heap: &mut Heap, list: crate::ids::FreeListId) -> PieceId {
        let piece = self.arrive(heap);
        heap.home.pieces[piece].list = list;
        if self.used < self.size {
            let rest = heap.home.pieces.split(piece, self.used);
            heap.home.give(rest);
        }
        piece
    }

    /// They will not come.
    pub(super) fn depart(&self, heap: &mut Heap) {
        for extent in &self.extents {
            heap.home.extents.remove(*extent);
        }
        heap.home.zone(self.class).give_back(self.start, self.size);
        heap.tallies.planned -= self.size;
    }
}
