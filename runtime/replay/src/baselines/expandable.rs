//! Model of torch's allocator with `expandable_segments:True`.
//!
//! Source: the note "Expandable segments" in c10/cuda/CUDACachingAllocator.cpp and torch's documentation, "Optimizing memory usage". Each
//! pair of stream and class has one segment of address space, slightly larger than the device's memory. Memory is mapped into it page by
//! page: 2 MiB pages for small requests, 20 MiB pages for large ones.
//!
//! - A block is chosen by best fit, as by default. One difference: a block that ends where unmapped space begins counts with that space, so
//! that a slightly larger block in the middle is preferred. Every remainder of 512 bytes or more is split off.
//! - If there is no such block, pages are mapped at the lowest unmapped range with enough room, extended by the free block right before it.
//! - If the device refuses, the allocator waits for pending frees, unmaps all pages that lie entirely within free blocks, and retries once.
//!
//! The limit is the device's memory. (A memory fraction would refuse slightly earlier: torch compares the fraction with its reserved memory
//! plus the segment that the default allocator would take.)

use glake_units::Bytes;

use super::blocks::{Block, Blocks, Place, Pool, State};
use super::costs::Costs;
use super::live::Live;
use super::rules::{self, Class};
use crate::trace::{BlockId, StreamIndex};
use crate::{Counters, Refusal, Subject};

/// Address space of a segment on an unlimited device: more than any trace needs.
const UNBOUNDED: u64 = 1 << 47;

/// Model of torch's allocator with expandable segments.
pub struct Expandable {
    blocks: Blocks,
    live: Live<Place>,
    reserved: u64,
    limit: Bytes,
    /// Address of the next segment.
    frontier: u64,
    costs: Costs,
}

impl Expandable {
    /// Creates an allocator on a device with `limit` bytes of memory; [`Bytes::MAX`] means unlimited.
    pub fn new(limit: Bytes) -> Self {
        Expandable {
            blocks: Blocks::default(),
            live: Live::new(),
            reserved: 0,
            limit,
            frontier: 0,
            costs: Costs::default(),
        }
    }

    fn best_fit(&mut self, pool: Pool, size: u64) -> Option<Place> {
        let mut fitting = self.blocks.sets(pool).free.range((size, 0, Place::FIRST)..);
        let &(_, _, mut best) = fitting.next()?;
        for &(_, _, next) in fitting {
            if self.expandable_size(next) >= self.expandable_size(best) {
                break;
            }
            best = next;
        }
        self.blocks.set_state(best, State::Used);
        Some(best)
    }

    /// Returns the size of a free block plus that of the unmapped space right behind it.
    fn expandable_size(&self, place: Place) -> u64 {
        let block = self.blocks.get(place);
        let behind =
            block.next.map(|next| self.blocks.get(next)).filter(|next| next.state == State::Unmapped);
        block.size + behind.map_or(0, |next| next.size)
    }

    /// Makes a used block of at least `size` bytes by mapping pages. If the device refuses, pages that are already mapped remain as free
    /// blocks.
    fn expand(&mut self, pool: Pool, class: Class, size: u64) -> Option<Place> {
        let mut place = self.room(pool, class, size);
        if self.blocks.get(place).state == State::Unmapped {
            let part = self.blocks.get(place).size.min(size);
            self.map(place, class, part)?;
        }
        while self.blocks.get(place).size < size {
            let lacking = size - self.blocks.get(place).size;
            let next = self.blocks.get(place).next?;
            let part = self.blocks.get(next).size.min(lacking);
            self.map(next, class, part)?;
            place = next;
        }
        self.blocks.set_state(place, State::Used);
        Some(place)
    }

    /// Returns the lowest run of unmapped space and free blocks that is long enough, or a new segment.
    fn room(&mut self, pool: Pool, class: Class, size: u64) -> Place {
        for &(_, unmapped) in &self.blocks.sets(pool).unmapped {
            let before = self.blocks.get(unmapped).prev;
            let first = before.filter(|&prev| self.blocks.get(prev).state == State::Free).unwrap_or(unmapped);
            let mut run = 0;
            let mut at = Some(first);
            while let Some(block) = at.map(|place| self.blocks.get(place)) {
                if block.state == State::Used || run >= size {
                    break;
                }
                run += block.size;
                at = block.next;
            }
            if run >= size {
                return first;
            }
        }
        // Torch reserves 1 1/8 of the device's memory, for pages that are unmapped at the beginning and mapped again at the end.
        let space = match self.limit {
            Bytes::MAX => UNBOUNDED,
            limit => limit.get().saturating_add(limit.get() / 8).max(size),
        };
        let space = space.next_multiple_of(page(class));
        let place = self.blocks.segment(pool, self.frontier, space);
        self.frontier += space;
        self.blocks.set_state(place, State::Unmapped);
        place
    }

    /// Maps whole pages over the first `size` bytes of unmapped space, which becomes free and joins its free neighbours: `place` then
    /// denotes the joined block.
    fn map(&mut self, place: Place, class: Class, size: u64) -> Option<()> {
        let mapped = size.next_multiple_of(page(class));
        let reserved = self.reserved.checked_add(mapped)?;
        if reserved > self.limit.get() {
            return None;
        }
        self.reserved = reserved;
        self.costs.create(mapped / page(class));
        self.costs.map(mapped / page(class));
        self.blocks.set_state(place, State::Used);
        if mapped < self.blocks.get(place).size {
            self.blocks.split(place, mapped, State::Unmapped);
        }
        self.blocks.give_back(place, State::Free);
        Some(())
    }

    /// Completes all pending frees and returns the pages that lie entirely within free blocks.
    fn release_cached(&mut self) {
        for place in self.live.take_requested() {
            self.blocks.give_back(place, State::Free);
        }
        for (pool, class) in self.blocks.pools() {
            let free: Vec<Place> = self.blocks.sets(pool).free.iter().map(|&(_, _, place)| place).collect();
            for place in free {
                self.unmap(place, class);
            }
        }
    }

    fn unmap(&mut self, place: Place, class: Class) {
        let page = page(class);
        let Block { address, size, .. } = *self.blocks.get(place);
        let begin = address.next_multiple_of(page);
        let end = (address + size) / page * page;
        if begin >= end {
            return;
        }
        self.reserved -= end - begin;
        self.costs.unmap((end - begin) / page);
        self.costs.release((end - begin) / page);
        self.blocks.set_state(place, State::Used);
        let pages = if address < begin {
            let pages = self.blocks.split(place, begin - address, State::Used);
            self.blocks.set_state(place, State::Free);
            pages
        } else {
            place
        };
        if end < address + size {
            self.blocks.split(pages, end - begin, State::Free);
        }
        self.blocks.give_back(pages, State::Unmapped);
    }
}

impl Subject for Expandable {
    fn allocate(
        &mut self,
        block: BlockId,
        bytes: Bytes,
        stream: StreamIndex,
        _now_us: u64,
    ) -> Result<(), Refusal> {
        let size = rules::rounded(bytes);
        let class = Class::of(size);
        let pool = self.blocks.pool(stream, class);
        let found = self.best_fit(pool, size).or_else(|| self.expand(pool, class, size)).or_else(|| {
            self.release_cached();
            self.expand(pool, class, size)
        });
        let Some(place) = found else {
            let (reserved, limit) = (self.reserved(), self.limit);
            return Err(Refusal::OutOfMemory { wanted: bytes, reserved, limit });
        };
        if self.blocks.get(place).size - size >= rules::GRAIN {
            self.blocks.split(place, size, State::Free);
        }
        self.live.insert(block, place);
        Ok(())
    }

    fn free_requested(&mut self, block: BlockId, _now_us: u64) -> Result<(), Refusal> {
        self.live.request(block);
        Ok(())
    }

    fn free_completed(&mut self, block: BlockId, _now_us: u64) -> Result<(), Refusal> {
        if let Some(place) = self.live.take(block) {
            self.blocks.give_back(place, State::Free);
        }
        Ok(())
    }

    fn reserved(&self) -> Bytes {
        Bytes::new(self.reserved)
    }

    fn counters(&self) -> Counters {
        self.costs.counters()
    }
}

const fn page(class: Class) -> u64 {
    match class {
        Class::Small => rules::SMALL_BUFFER,
        Class::Large => rules::LARGE_BUFFER,
    }
}

#[cfg(test)]
impl Expandable {
    pub(super) fn check(&self) {
        assert_eq!(self.blocks.check(), self.reserved);
    }

    pub(super) fn span(&self, block: BlockId) -> Option<(u64, u64)> {
        self.live.get(block).map(|place| self.blocks.get(place)).map(|block| (block.address, block.size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn allocate(model: &mut Expandable, block: u32, mib: u64) -> Result<u64, Refusal> {
        model.allocate(BlockId(block), Bytes::mib(mib), StreamIndex(0), 0)?;
        model.check();
        Ok(model.span(BlockId(block)).unwrap().0 / MIB)
    }

    fn free(model: &mut Expandable, block: u32) {
        model.free_completed(BlockId(block), 0).unwrap();
        model.check();
    }

    #[test]
    fn grows_at_the_end_of_its_one_segment() {
        let mut model = Expandable::new(Bytes::MAX);
        assert_eq!(allocate(&mut model, 0, 30).unwrap(), 0);
        assert_eq!(model.reserved(), Bytes::mib(40));
        // 10 MiB are free at the end: 20 more are mapped behind them.
        assert_eq!(allocate(&mut model, 1, 25).unwrap(), 30);
        assert_eq!(model.reserved(), Bytes::mib(60));
        free(&mut model, 0);
        // The hole of 30 MiB fits exactly; the end of 5 MiB would have to grow.
        assert_eq!(allocate(&mut model, 2, 30).unwrap(), 0);
        assert_eq!(model.reserved(), Bytes::mib(60));
    }

    #[test]
    fn a_larger_hole_is_preferred_to_the_expandable_end() {
        let mut model = Expandable::new(Bytes::MAX);
        for (block, mib) in [(0, 15), (1, 5), (2, 12)] {
            allocate(&mut model, block, mib).unwrap();
        }
        free(&mut model, 0);
        // Free: 15 MiB at 0, and 8 MiB at 32 which ends where unmapped space begins.
        assert_eq!(allocate(&mut model, 3, 6).unwrap(), 0);
    }

    #[test]
    fn free_pages_move_to_where_they_are_needed() {
        let mut model = Expandable::new(Bytes::mib(100));
        for block in 0..4 {
            allocate(&mut model, block, 20).unwrap();
        }
        free(&mut model, 0);
        free(&mut model, 2);
        // 20 MiB at 0 and 20 at 40 are free and 20 more available, but not 40 in one piece: the pages at 0 and 40 are
        // returned. The 112 MiB of address space have no room for 60: a second segment.
        assert_eq!(allocate(&mut model, 4, 60).unwrap(), 120);
        assert_eq!(model.reserved(), Bytes::mib(100));
        assert!(matches!(allocate(&mut model, 5, 20), Err(Refusal::OutOfMemory { .. })));
    }
}
