//! An index of free pieces by size that answers best fit in a few dozen nanoseconds.
//!
//! ```text
//! size ─► bin: 16 bins a power of two, a bit a bin, a bit a word of bins
//!         bin: entries sorted by (size, start)
//! ```
//!
//! The answer is exact: the smallest piece that is large enough, the lowest address among equals. A bin is a sorted
//! vector, because a few hundred free pieces spread over hundreds of bins leave a handful in each, and moving a handful
//! of 16-byte entries costs less than walking a tree. Vectors keep their capacity, so that a steady state allocates
//! nothing.

use crate::ids::PieceId;

/// The unit of sizes and starts.
pub(crate) const QUANTUM: u64 = 512;
const SPLIT_BITS: u32 = 4;
const SPLIT: usize = 1 << SPLIT_BITS;
const BINS: usize = 32 * SPLIT;
const WORDS: usize = BINS / 64;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Size, then start, both in quanta: the order of best fit.
    key: u64,
    piece: PieceId,
}

/// Free pieces by size.
#[derive(Debug)]
pub(crate) struct Bins {
    bins: Vec<Vec<Entry>>,
    occupied: [u64; WORDS],
    len: usize,
}

/// Where a size of that many quanta belongs.
fn bin_of(quanta: u64) -> usize {
    let log = quanta.ilog2();
    if log < SPLIT_BITS {
        return quanta as usize;
    }
    let within = (quanta >> (log - SPLIT_BITS)) as usize & (SPLIT - 1);
    ((log - SPLIT_BITS + 1) as usize) * SPLIT + within
}

fn key(size: u64, start: u64) -> u64 {
    (size / QUANTUM) << 32 | (start / QUANTUM)
}

impl Bins {
    pub(crate) fn new() -> Self {
        Bins { bins: vec![Vec::new(); BINS], occupied: [0; WORDS], len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds a piece; its size and start are multiples of [`QUANTUM`] below 2^32 of them.
    pub(crate) fn insert(&mut self, size: u64, start: u64, piece: PieceId) {
        let bin = bin_of(size / QUANTUM);
        let entry = Entry { key: key(size, start), piece };
        let entries = &mut self.bins[bin];
        let at = entries.partition_point(|other| other.key < entry.key);
        entries.insert(at, entry);
        self.occupied[bin / 64] |= 1 << (bin % 64);
        self.len += 1;
    }

    /// Takes a piece out that was added with this size and start.
    pub(crate) fn remove(&mut self, size: u64, start: u64) {
        let bin = bin_of(size / QUANTUM);
        let key = key(size, start);
        let entries = &mut self.bins[bin];
        let at = entries.partition_point(|other| other.key < key);
        debug_assert!(
            entries.get(at).is_some_and(|entry| entry.key == key),
            "a piece that is not in its bin"
        );
        self.remove_at(bin, at);
    }

    fn remove_at(&mut self, bin: usize, at: usize) -> PieceId {
        let entries = &mut self.bins[bin];
        let entry = entries.remove(at);
        if entries.is_empty() {
            self.occupied[bin / 64] &= !(1 << (bin % 64));
        }
        self.len -= 1;
        entry.piece
    }

    /// Takes out the smallest piece of at least `size`, the lowest among equals.
    pub(crate) fn take_best(&mut self, size: u64) -> Option<PieceId> {
        let (bin, at) = self.best(size)?;
        Some(self.remove_at(bin, at))
    }

    fn best(&self, size: u64) -> Option<(usize, usize)> {
        let bin = bin_of(size / QUANTUM);
        if self.occupied[bin / 64] & 1 << (bin % 64) != 0 {
            let entries = &self.bins[bin];
            let wanted = key(size, 0);
            let at = entries.partition_point(|entry| entry.key < wanted);
            if at < entries.len() {
                return Some((bin, at));
            }
        }
        self.next_occupied(bin + 1).map(|larger| (larger, 0))
    }

    fn next_occupied(&self, from: usize) -> Option<usize> {
        let mut word = from / 64;
        let mut bits = *self.occupied.get(word)? & (!0 << (from % 64));
        while bits == 0 {
            word += 1;
            bits = *self.occupied.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }

    /// Every piece, smallest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = PieceId> + '_ {
        self.bins.iter().flat_map(|bin| bin.iter().map(|entry| entry.piece))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The bins answer what an ordered set of (size, start) answers, whatever was added and removed before.
        #[test]
        fn best_fit_is_exact(program in prop::collection::vec((any::<bool>(), 1u64..1 << 22, 0u64..1 << 20), 1..300)) {
            let mut bins = Bins::new();
            let mut model = BTreeSet::new();
            for (add, size, start) in program {
                let (size, start) = (size * QUANTUM, start * QUANTUM);
                if add {
                    if model.insert((size, start)) {
                        bins.insert(size, start, PieceId::at((start / QUANTUM) as usize));
                    }
                } else {
                    let expected = model.range((size, 0)..).next().copied();
                    prop_assert_eq!(bins.take_best(size), expected.map(|(_, at)| PieceId::at((at / QUANTUM) as usize)));
                    expected.map(|found| model.remove(&found));
                }
                prop_assert_eq!(bins.len(), model.len());
            }
            for (size, start) in model {
                bins.remove(size, start);
            }
            prop_assert_eq!(bins.occupied, [0; WORDS]);
        }
    }
}
