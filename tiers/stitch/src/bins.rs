//! An index of free pieces by size that answers best-fit queries in a few nanoseconds.
//!
//! ```text
//! size ─► bin: 64 bins a power of two, a bit a bin, a bit a word of bins ─► its entries (see bin.rs)
//! ```
//!
//! The answer is exact: the smallest piece that is large enough, the lowest address among equals. The bins are fine enough that a few
//! hundred free pieces leave a handful in each. Only bins in use have entries, side by side. Bins keep their capacity, so that a steady
//! state allocates nothing.

use crate::bin::{At, Bin, Entry, PLACES, Rooms};
use crate::ids::PieceId;

/// Unit of sizes and starts, in bytes.
pub(crate) const QUANTUM: u64 = 512;
const SPLIT_BITS: u32 = 6;
const SPLIT: usize = 1 << SPLIT_BITS;
/// Number of words of bins: one for each power of two up to 2^32 quanta; sizes below [`SPLIT`] share the first.
const WORDS: usize = 33 - SPLIT_BITS as usize;
const BINS: usize = WORDS * SPLIT;
/// Marker of a bin that was never used.
const UNUSED: u16 = u16::MAX;

/// Free pieces indexed by size.
#[derive(Debug)]
pub(crate) struct Bins {
    /// Bins that have been used.
    bins: Vec<Bin>,
    /// Index into `bins` for each bin number, or [`UNUSED`].
    used: Vec<u16>,
    rooms: Rooms,
    occupied: [u64; WORDS],
    /// Bit set of the words that are not 0.
    words: u32,
    len: usize,
}

/// Returns the bin number of a size in quanta.
#[inline]
fn bin_of(quanta: u64) -> usize {
    let log = quanta.ilog2();
    if log < SPLIT_BITS {
        return as_index(quanta);
    }
    let within = as_index(quanta >> (log - SPLIT_BITS)) & (SPLIT - 1);
    ((log - SPLIT_BITS + 1) as usize) * SPLIT + within
}

/// Converts a number below [`BINS`], or one of which only the low bits count, to an index.
#[allow(clippy::cast_possible_truncation)]
const fn as_index(number: u64) -> usize {
    number as usize
}

#[inline]
fn key(size: u64, start: u64) -> u64 {
    (size / QUANTUM) << 32 | (start / QUANTUM)
}

impl Bins {
    pub(crate) fn new() -> Self {
        // Capacity for all bins: it costs addresses, and memory only once touched, and no hit ever reallocates.
        Bins {
            bins: Vec::with_capacity(BINS),
            used: vec![UNUSED; BINS],
            rooms: Rooms::default(),
            occupied: [0; WORDS],
            words: 0,
            len: 0,
        }
    }

    /// Makes room for the entries that frees add until the next call.
    pub(crate) fn make_room(&mut self) {
        // While all pieces fit in the places of one bin, no bin overflows.
        if self.len >= PLACES {
            self.rooms.make_room();
        }
        if std::mem::take(&mut self.rooms.crowded) {
            self.bins.iter_mut().for_each(Bin::make_room);
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Adds a free piece. Size and start must be multiples of [`QUANTUM`] below 2^32 quanta.
    #[inline]
    pub(crate) fn insert(&mut self, size: u64, start: u64, piece: PieceId) {
        let bin = bin_of(size / QUANTUM);
        let mut slot = self.used[bin];
        if slot == UNUSED {
            slot = self.first_use(bin);
        }
        self.bins[usize::from(slot)].insert(Entry { key: key(size, start), piece }, &mut self.rooms);
        self.occupied[bin / SPLIT] |= 1 << (bin % SPLIT);
        self.words |= 1 << (bin / SPLIT);
        self.len += 1;
    }

    #[cold]
    #[inline(never)]
    fn first_use(&mut self, bin: usize) -> u16 {
        #[allow(clippy::cast_possible_truncation)] // there are fewer than 2^16
        let slot = self.bins.len() as u16;
        self.bins.push(Bin::new());
        self.used[bin] = slot;
        slot
    }

    /// Removes the piece that was added with this size and start.
    #[inline]
    pub(crate) fn remove(&mut self, size: u64, start: u64) {
        let bin = bin_of(size / QUANTUM);
        let slot = usize::from(self.used[bin]);
        let found = self.bins[slot].find(key(size, start));
        debug_assert!(found.is_some(), "a piece that is not in its bin");
        if let Some(at) = found {
            self.take_at(bin, at);
        }
    }

    #[inline]
    fn take_at(&mut self, bin: usize, at: At) -> Entry {
        let entries = &mut self.bins[usize::from(self.used[bin])];
        let entry = entries.take(at, &mut self.rooms);
        // Branch-free: whether the bin becomes empty is unpredictable.
        let word = &mut self.occupied[bin / SPLIT];
        *word &= !(u64::from(entries.is_empty()) << (bin % SPLIT));
        self.words &= !(u32::from(*word == 0) << (bin / SPLIT));
        self.len -= 1;
        entry
    }

    /// Removes the smallest piece of at least `size` bytes, the lowest address among equals. Returns the piece and its size.
    #[inline]
    pub(crate) fn take_best(&mut self, size: u64) -> Option<(PieceId, u64)> {
        let (bin, at) = self.best(size)?;
        let entry = self.take_at(bin, at);
        Some((entry.piece, (entry.key >> 32) * QUANTUM))
    }

    #[inline]
    fn best(&self, size: u64) -> Option<(usize, At)> {
        let bin = bin_of(size / QUANTUM);
        let mut nearest = self.next_occupied(bin)?;
        if nearest == bin {
            if let Some(at) = self.bins[usize::from(self.used[bin])].best(key(size, 0)) {
                return Some((bin, at));
            }
            nearest = self.next_occupied(bin + 1)?;
        }
        self.bins[usize::from(self.used[nearest])].best(0).map(|at| (nearest, at))
    }

    #[inline]
    fn next_occupied(&self, from: usize) -> Option<usize> {
        let word = from / SPLIT;
        let bits = *self.occupied.get(word)? & (!0 << (from % SPLIT));
        if bits != 0 {
            return Some(word * SPLIT + bits.trailing_zeros() as usize);
        }
        let words = self.words & (!1 << word);
        let word = words.trailing_zeros() as usize;
        Some(word * SPLIT + self.occupied.get(word)?.trailing_zeros() as usize)
    }

    /// Iterates over the pieces, smallest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = PieceId> + '_ {
        let used = self.used.iter().filter(|&&slot| slot != UNUSED);
        used.flat_map(|&slot| self.bins[usize::from(slot)].sorted())
    }

    /// Iterates over the pieces in no particular order.
    pub(crate) fn unsorted(&self) -> impl Iterator<Item = PieceId> + '_ {
        self.bins.iter().flat_map(Bin::iter)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The bins agree with an ordered set of (size, start) after any additions and removals, with few pieces a bin and with overflow.
        #[test]
        fn best_fit_is_exact(
            few in any::<bool>(),
            program in prop::collection::vec((0..3, 1u64..1 << 22, 0u64..1 << 20), 1..300),
        ) {
            let mut program = program;
            if few {
                program.iter_mut().for_each(|(_, size, _)| *size = 7 + *size % 3 * 70);
            }
            let mut bins = Bins::new();
            let mut model = BTreeSet::new();
            for (add, size, start) in program {
                let (size, start) = (size * QUANTUM, start * QUANTUM);
                if add > 0 {
                    if model.insert((size, start)) {
                        bins.insert(size, start, PieceId::at((start / QUANTUM) as usize));
                    }
                } else {
                    let expected = model.range((size, 0)..).next().copied();
                    prop_assert_eq!(bins.take_best(size), expected.map(|(large, at)| (PieceId::at((at / QUANTUM) as usize), large)));
                    expected.map(|found| model.remove(&found));
                }
                prop_assert_eq!(bins.len(), model.len());
            }
            for (size, start) in model {
                bins.remove(size, start);
            }
            prop_assert_eq!((bins.occupied, bins.words), ([0; WORDS], 0));
        }
    }
}
