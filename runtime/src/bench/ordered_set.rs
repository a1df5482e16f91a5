//! What the hot path is compared with: a best fit on an ordered set, as allocators of this kind usually have it.
//!
//! Free pieces are in a set by size, then address; live blocks in a hash map by address; all pieces are linked with
//! their neighbours, split at 512 bytes and joined when freed. It keeps no statistics, takes no lock and knows no
//! streams: what it leaves out is in its favour.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

use super::BenchError;
use super::measure::Allocates;

const QUANTUM: u64 = 512;
/// No piece.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Piece {
    start: u64,
    size: u64,
    before: u32,
    after: u32,
    free: bool,
}

/// A best fit allocator of one range of addresses.
#[derive(Debug)]
pub(super) struct OrderedSet {
    pieces: Vec<Piece>,
    /// Places in `pieces` that nothing is in.
    spare: Vec<u32>,
    free: BTreeSet<(u64, u64, u32)>,
    live: FxHashMap<u64, u32>,
}

impl OrderedSet {
    pub(super) fn new(size: u64) -> Self {
        let whole = Piece { start: 0, size, before: NONE, after: NONE, free: true };
        OrderedSet {
            pieces: vec![whole],
            spare: Vec::new(),
            free: BTreeSet::from([(size, 0, 0)]),
            live: FxHashMap::default(),
        }
    }

    fn take(&mut self, size: u64) -> Option<u64> {
        let size = size.max(1).next_multiple_of(QUANTUM);
        let &found = self.free.range((size, 0, 0)..).next()?;
        self.free.remove(&found);
        let (_, start, id) = found;
        let piece = &mut self.pieces[id as usize];
        piece.free = false;
        let (left, after) = (piece.size - size, piece.after);
        if left > 0 {
            piece.size = size;
            let rest = Piece { start: start + size, size: left, before: id, after, free: true };
            let rest_id = self.add(rest);
            self.pieces[id as usize].after = rest_id;
            if after != NONE {
                self.pieces[after as usize].before = rest_id;
            }
            self.free.insert((left, rest.start, rest_id));
        }
        self.live.insert(start, id);
        Some(start)
    }

    fn give(&mut self, start: u64) -> Option<()> {
        let mut id = self.live.remove(&start)?;
        let Piece { before, after, .. } = self.pieces[id as usize];
        if after != NONE && self.pieces[after as usize].free {
            self.join(id, after);
        }
        if before != NONE && self.pieces[before as usize].free {
            self.join(before, id);
            id = before;
        }
        let piece = &mut self.pieces[id as usize];
        piece.free = true;
        self.free.insert((piece.size, piece.start, id));
        Some(())
    }

    /// Joins a piece with the one after it; those of them that are free leave the set.
    fn join(&mut self, first: u32, second: u32) {
        for id in [first, second] {
            let piece = self.pieces[id as usize];
            if piece.free {
                self.free.remove(&(piece.size, piece.start, id));
            }
        }
        let Piece { size, after, .. } = self.pieces[second as usize];
        let piece = &mut self.pieces[first as usize];
        piece.size += size;
        piece.after = after;
        if after != NONE {
            self.pieces[after as usize].before = first;
        }
        self.spare.push(second);
    }

    fn add(&mut self, piece: Piece) -> u32 {
        match self.spare.pop() {
            Some(id) => {
                self.pieces[id as usize] = piece;
                id
            }
            None => {
                self.pieces.push(piece);
                u32::try_from(self.pieces.len() - 1).unwrap_or(NONE)
            }
        }
    }
}

impl Allocates for OrderedSet {
    fn malloc(&mut self, size: u64, _: usize) -> Result<u64, BenchError> {
        self.take(size).ok_or(BenchError::SetFull)
    }

    fn free(&mut self, at: u64) -> Result<(), BenchError> {
        self.give(at).ok_or(BenchError::SetFull)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::SplitMix;

    #[test]
    fn blocks_never_overlap_and_everything_joins_again() {
        let (mut set, mut random) = (OrderedSet::new(64 << 20), SplitMix::new(5));
        let mut live: Vec<(u64, u64)> = Vec::new();
        for _ in 0..20_000 {
            if live.len() > 100 || (random.below(2) == 0 && !live.is_empty()) {
                let (start, _) = live.swap_remove(random.below(live.len()));
                set.give(start).unwrap();
                continue;
            }
            let size = 1 + random.below(200_000) as u64;
            let start = set.take(size).unwrap();
            assert!(live.iter().all(|&(other, length)| start + size <= other || other + length <= start));
            live.push((start, size));
        }
        live.iter().for_each(|&(start, _)| set.give(start).unwrap());
        assert_eq!(
            set.free.iter().map(|&(size, start, _)| (size, start)).collect::<Vec<_>>(),
            [(64 << 20, 0)]
        );
        assert!(set.give(0).is_none() && set.take(65 << 20).is_none());
    }
}
