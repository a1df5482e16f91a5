//! Blocks of torch's allocator: neighbours in a segment are linked by address, and unused blocks are kept in ordered sets.
//!
//! ```text
//! segment   ┌ used ┬──── free ────┬ used ┬──── unmapped ────┐     prev/next links
//!           └──────┴──────────────┴──────┴──────────────────┘
//! pool      free: by (size, address)      unmapped: by address
//! ```
//!
//! Invariants: the blocks of a segment tile it; no two neighbours are both free or both unmapped; a block is in its pool's set if and only
//! if it is free (or unmapped).

use std::collections::{BTreeMap, BTreeSet};

use super::rules::Class;
use crate::trace::StreamIndex;

/// Index of a block in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(u32);

impl Place {
    /// Lowest index, for range searches.
    pub(super) const FIRST: Place = Place(0);
}

/// Index of a pool in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pool(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Used,
    Free,
    /// Address space without physical memory.
    Unmapped,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) state: State,
    pub(super) pool: Pool,
    pub(super) prev: Option<Place>,
    pub(super) next: Option<Place>,
}

#[derive(Default)]
pub(super) struct Sets {
    /// Free blocks, ordered by size, then address.
    pub(super) free: BTreeSet<(u64, u64, Place)>,
    /// Unmapped blocks, ordered by address.
    pub(super) unmapped: BTreeSet<(u64, Place)>,
}

/// All blocks of an allocator, used or not.
#[derive(Default)]
pub(super) struct Blocks {
    blocks: Vec<Block>,
    spare: Vec<Place>,
    pools: Vec<Sets>,
    by_name: BTreeMap<(StreamIndex, Class), Pool>,
}

impl Blocks {
    /// Returns the pool of a stream and class; creates an empty one if there is none.
    pub(super) fn pool(&mut self, stream: StreamIndex, class: Class) -> Pool {
        *self.by_name.entry((stream, class)).or_insert_with(|| {
            self.pools.push(Sets::default());
            Pool(index(self.pools.len() - 1))
        })
    }

    /// Returns all pools with their class.
    pub(super) fn pools(&self) -> Vec<(Pool, Class)> {
        self.by_name.iter().map(|(&(_, class), &pool)| (pool, class)).collect()
    }

    pub(super) fn get(&self, place: Place) -> &Block {
        &self.blocks[place.0 as usize]
    }

    pub(super) fn sets(&self, pool: Pool) -> &Sets {
        &self.pools[pool.0 as usize]
    }

    /// Adds a segment as a single used block, which is in no set.
    pub(super) fn segment(&mut self, pool: Pool, address: u64, size: u64) -> Place {
        self.add(Block { address, size, state: State::Used, pool, prev: None, next: None })
    }

    /// Removes a segment that consists of one block.
    pub(super) fn forget(&mut self, place: Place) {
        self.set_state(place, State::Used);
        self.spare.push(place);
    }

    /// Moves a block to the set of its new state. Neighbours are not joined.
    pub(super) fn set_state(&mut self, place: Place, state: State) {
        let Block { address, size, state: before, pool, .. } = *self.get(place);
        let sets = &mut self.pools[pool.0 as usize];
        match before {
            State::Used => false,
            State::Free => sets.free.remove(&(size, address, place)),
            State::Unmapped => sets.unmapped.remove(&(address, place)),
        };
        match state {
            State::Used => false,
            State::Free => sets.free.insert((size, address, place)),
            State::Unmapped => sets.unmapped.insert((address, place)),
        };
        self.blocks[place.0 as usize].state = state;
    }

    /// Splits a used block: it keeps its first `size` bytes, and the rest becomes a block in state `rest`.
    pub(super) fn split(&mut self, place: Place, size: u64, rest: State) -> Place {
        let whole = *self.get(place);
        let cut = self.add(Block {
            address: whole.address + size,
            size: whole.size - size,
            state: State::Used,
            pool: whole.pool,
            prev: Some(place),
            next: whole.next,
        });
        if let Some(next) = whole.next {
            self.blocks[next.0 as usize].prev = Some(cut);
        }
        let first = &mut self.blocks[place.0 as usize];
        first.size = size;
        first.next = Some(cut);
        self.set_state(cut, rest);
        cut
    }

    /// Changes a used block to `state` and joins it with neighbours in the same state.
    pub(super) fn give_back(&mut self, place: Place, state: State) {
        let Block { prev, next, .. } = *self.get(place);
        if let Some(prev) = prev.filter(|&prev| self.get(prev).state == state) {
            self.set_state(prev, State::Used);
            let Block { address, size, prev: before, .. } = *self.get(prev);
            let joined = &mut self.blocks[place.0 as usize];
            joined.address = address;
            joined.size += size;
            joined.prev = before;
            if let Some(before) = before {
                self.blocks[before.0 as usize].next = Some(place);
            }
            self.spare.push(prev);
        }
        if let Some(next) = next.filter(|&next| self.get(next).state == state) {
            self.set_state(next, State::Used);
            let Block { size, next: after, .. } = *self.get(next);
            let joined = &mut self.blocks[place.0 as usize];
            joined.size += size;
            joined.next = after;
            if let Some(after) = after {
                self.blocks[after.0 as usize].prev = Some(place);
            }
            self.spare.push(next);
        }
        self.set_state(place, state);
    }

    fn add(&mut self, block: Block) -> Place {
        if let Some(place) = self.spare.pop() {
            self.blocks[place.0 as usize] = block;
            return place;
        }
        self.blocks.push(block);
        Place(index(self.blocks.len() - 1))
    }
}

/// Converts an arena index to 32 bits: a trace has fewer than 2^32 blocks, and a model at most two per block of the trace and per segment.
#[allow(clippy::cast_possible_truncation)]
const fn index(place: usize) -> u32 {
    place as u32
}

#[cfg(test)]
impl Blocks {
    /// Panics if an invariant does not hold. Returns the number of bytes that are used or free.
    pub(super) fn check(&self) -> u64 {
        let spare: BTreeSet<Place> = self.spare.iter().copied().collect();
        let mut mapped = 0;
        let mut in_sets = 0;
        for place in (0..index(self.blocks.len())).map(Place).filter(|place| !spare.contains(place)) {
            let block = self.get(place);
            let sets = self.sets(block.pool);
            match block.state {
                State::Used => {}
                State::Free => assert!(sets.free.contains(&(block.size, block.address, place))),
                State::Unmapped => assert!(sets.unmapped.contains(&(block.address, place))),
            }
            in_sets += usize::from(block.state != State::Used);
            mapped += if block.state == State::Unmapped { 0 } else { block.size };
            if let Some(next) = block.next {
                let after = self.get(next);
                assert_eq!(after.address, block.address + block.size, "neighbours touch");
                assert_eq!(after.prev, Some(place));
                assert!(block.state == State::Used || block.state != after.state, "neighbours are joined");
            }
        }
        assert_eq!(in_sets, self.pools.iter().map(|s| s.free.len() + s.unmapped.len()).sum::<usize>());
        mapped
    }
}
