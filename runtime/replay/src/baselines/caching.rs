//! Model of torch's own allocator with its default configuration.
//!
//! Source: the note at the head of c10/cuda/CUDACachingAllocator.cpp, and torch's documentation, "CUDA semantics, memory management". A
//! request is served from the smallest free block of its stream and class that is large enough, and a large enough remainder is split off.
//! If there is no such block, the allocator takes a segment from the device. A freed block joins its free neighbours in the segment and
//! stays with its stream. If the device refuses, the allocator waits for pending frees, returns all segments that are entirely free, and
//! retries once.

use glake_units::Bytes;

use super::blocks::{Blocks, Place, Pool, State};
use super::costs::Costs;
use super::live::Live;
use super::rules::{self, Class};
use crate::trace::{BlockId, StreamIndex};
use crate::{Counters, Refusal, Subject};

/// Model of torch's caching allocator.
pub struct Caching {
    blocks: Blocks,
    live: Live<Place>,
    reserved: u64,
    limit: Bytes,
    /// Address of the next segment: the driver returns ascending addresses.
    frontier: u64,
    costs: Costs,
}

impl Caching {
    /// Creates an allocator on a device with `limit` bytes of memory; [`Bytes::MAX`] means unlimited.
    pub fn new(limit: Bytes) -> Self {
        Caching {
            blocks: Blocks::default(),
            live: Live::new(),
            reserved: 0,
            limit,
            frontier: rules::SMALL_BUFFER,
            costs: Costs::default(),
        }
    }

    /// Changes the size of the device's memory.
    pub(super) const fn set_limit(&mut self, limit: Bytes) {
        self.limit = limit;
    }

    fn best_fit(&mut self, pool: Pool, size: u64) -> Option<Place> {
        let &(_, _, place) = self.blocks.sets(pool).free.range((size, 0, Place::FIRST)..).next()?;
        self.blocks.set_state(place, State::Used);
        Some(place)
    }

    fn segment(&mut self, pool: Pool, size: u64) -> Option<Place> {
        let reserved = self.reserved.checked_add(size)?;
        if reserved > self.limit.get() {
            return None;
        }
        self.costs.malloc();
        self.reserved = reserved;
        let address = self.frontier;
        self.frontier += size.next_multiple_of(rules::SMALL_BUFFER);
        Some(self.blocks.segment(pool, address, size))
    }

    /// Completes all pending frees and returns segments that are entirely free to the device.
    pub(super) fn release_cached(&mut self) {
        for place in self.live.take_requested() {
            self.blocks.give_back(place, State::Free);
        }
        for (pool, _) in self.blocks.pools() {
            let whole = |place: &Place| {
                let block = self.blocks.get(*place);
                block.prev.is_none() && block.next.is_none()
            };
            let segments: Vec<Place> =
                self.blocks.sets(pool).free.iter().map(|&(_, _, place)| place).filter(whole).collect();
            for place in segments {
                self.reserved -= self.blocks.get(place).size;
                self.blocks.forget(place);
                self.costs.free();
            }
        }
    }
}

impl Subject for Caching {
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
        let segment = rules::segment(size);
        let found = self.best_fit(pool, size).or_else(|| self.segment(pool, segment)).or_else(|| {
            self.release_cached();
            self.segment(pool, segment)
        });
        let Some(place) = found else {
            let (reserved, limit) = (self.reserved(), self.limit);
            return Err(Refusal::OutOfMemory { wanted: bytes, reserved, limit });
        };
        if rules::splits(class, self.blocks.get(place).size - size) {
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

#[cfg(test)]
impl Caching {
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

    fn allocate(model: &mut Caching, block: u32, bytes: Bytes, stream: u16) -> Result<Bytes, Refusal> {
        model.allocate(BlockId(block), bytes, StreamIndex(stream), 0)?;
        model.check();
        Ok(model.reserved())
    }

    fn free(model: &mut Caching, block: u32) {
        model.free_completed(BlockId(block), 0).unwrap();
        model.check();
    }

    #[test]
    fn segments_are_of_three_kinds_and_of_one_stream() {
        let mut model = Caching::new(Bytes::MAX);
        assert_eq!(allocate(&mut model, 0, Bytes::new(1), 0).unwrap(), Bytes::mib(2));
        assert_eq!(allocate(&mut model, 1, Bytes::mib(1), 0).unwrap(), Bytes::mib(2));
        assert_eq!(allocate(&mut model, 2, Bytes::mib(3), 0).unwrap(), Bytes::mib(22));
        assert_eq!(allocate(&mut model, 3, Bytes::mib(11), 0).unwrap(), Bytes::mib(22), "the rest of the 20");
        assert_eq!(allocate(&mut model, 4, Bytes::mib(11), 0).unwrap(), Bytes::mib(34));
        free(&mut model, 4);
        assert_eq!(allocate(&mut model, 5, Bytes::mib(11), 1).unwrap(), Bytes::mib(46), "another stream");
        assert_eq!(allocate(&mut model, 6, Bytes::mib(11), 0).unwrap(), Bytes::mib(46), "its own");
    }

    #[test]
    fn a_rest_of_at_most_1_mib_stays_with_its_block() {
        let mut model = Caching::new(Bytes::MAX);
        allocate(&mut model, 0, Bytes::mib(20), 0).unwrap();
        free(&mut model, 0);
        allocate(&mut model, 1, Bytes::mib(19), 0).unwrap();
        assert_eq!(model.span(BlockId(1)), Some((2 << 20, 20 << 20)));
    }

    #[test]
    fn whole_free_segments_are_given_back_when_the_device_refuses() {
        let mut model = Caching::new(Bytes::mib(64));
        for block in 0..3 {
            allocate(&mut model, block, Bytes::mib(20), 0).unwrap();
        }
        free(&mut model, 0);
        model.free_requested(BlockId(1), 0).unwrap();
        assert_eq!(allocate(&mut model, 3, Bytes::mib(40), 0).unwrap(), Bytes::mib(60), "pending frees too");
        free(&mut model, 1);
        let refused = allocate(&mut model, 4, Bytes::mib(20), 0).unwrap_err();
        assert!(matches!(refused, Refusal::OutOfMemory { wanted, .. } if wanted == Bytes::mib(20)));
    }
}
