//! Free ranges of memory chunks, best fit, joined when they are returned (pure).
//!
//! A range is returned with a *mark* that its next owner must wait for. Joined ranges keep the later mark.

use std::collections::BTreeMap;

/// Granularity of sizes and offsets.
pub(super) const QUANTUM: u64 = 512;
/// Minimum size of a part, except the last one: a copy of a part must be worth its call.
pub(super) const LEAST_PART: u64 = 4 << 20;

/// An allocated part of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Taken {
    pub(super) chunk: usize,
    pub(super) offset: u64,
    pub(super) size: u64,
}

#[derive(Clone, Debug)]
struct Free<M> {
    size: u64,
    mark: Option<M>,
}

/// Free ranges by chunk and offset.
#[derive(Debug)]
pub(super) struct Ranges<M> {
    free: BTreeMap<(usize, u64), Free<M>>,
}

impl<M> Default for Ranges<M> {
    fn default() -> Self {
        Ranges { free: BTreeMap::new() }
    }
}

impl<M: Clone + Ord> Ranges<M> {
    /// Adds a new chunk that is entirely free.
    pub(super) fn add(&mut self, chunk: usize, size: u64) {
        self.free.insert((chunk, 0), Free { size, mark: None });
    }

    /// Takes the front of the smallest range that is large enough; among equals the one returned first.
    pub(super) fn take(&mut self, size: u64) -> Option<(Taken, Option<M>)> {
        let size = rounded(size)?;
        let fitting = self.free.iter().filter(|(_, free)| free.size >= size);
        let (&(chunk, offset), _) =
            fitting.min_by(|(_, one), (_, other)| (one.size, &one.mark).cmp(&(other.size, &other.mark)))?;
        let Free { size: whole, mark } = self.free.remove(&(chunk, offset))?;
        if whole > size {
            self.free.insert((chunk, offset + size), Free { size: whole - size, mark: mark.clone() });
        }
        Some((Taken { chunk, offset, size }, mark))
    }

    /// Takes `size` bytes in one range or, if none is large enough, in several, largest first, so that the ends of chunks are used too.
    pub(super) fn take_parts(&mut self, size: u64) -> Option<(Vec<Taken>, Option<M>)> {
        if let Some((taken, mark)) = self.take(size) {
            return Some((vec![taken], mark));
        }
        if self.missing(size)? > 0 {
            return None;
        }
        let (mut parts, mut last, mut left) = (Vec::new(), None, rounded(size)?);
        while left > 0
            && let Some(most) = self.free.values().map(|free| free.size).max()
            && let Some((part, mark)) = self.take(left.min(most))
        {
            left -= part.size;
            last = last.max(mark);
            parts.push(part);
        }
        Some((parts, last))
    }

    /// Returns the bytes that must become free, in one range, before `size` bytes can be taken; 0 if none are missing.
    pub(super) fn missing(&self, size: u64) -> Option<u64> {
        let size = rounded(size)?;
        let large = |free: &&Free<M>| free.size >= LEAST_PART;
        let free = self.free.values().filter(large).map(|free| free.size).sum();
        let fits = self.free.values().any(|free| free.size >= size);
        Some(match size.saturating_sub(free) {
            _ if fits => 0,
            _ if size < LEAST_PART => size,
            0 => 0,
            missing => missing.max(LEAST_PART),
        })
    }

    /// Returns a range to the free ones.
    pub(super) fn put(&mut self, taken: Taken, mark: Option<M>) {
        let Taken { chunk, mut offset, size } = taken;
        let mut free = Free { size, mark };
        if let Some(next) = self.free.remove(&(chunk, offset + size)) {
            free = Free { size: size + next.size, mark: free.mark.max(next.mark) };
        }
        let before = self.free.range(..(chunk, offset)).next_back();
        let before = before.filter(|(at, before)| at.0 == chunk && at.1 + before.size == offset);
        if let Some((&at, _)) = before
            && let Some(before) = self.free.remove(&at)
        {
            offset = at.1;
            free = Free { size: before.size + free.size, mark: before.mark.max(free.mark) };
        }
        self.free.insert((chunk, offset), free);
    }

    /// Removes a chunk of this size if it is entirely free.
    pub(super) fn remove(&mut self, chunk: usize, size: u64) -> bool {
        let is_whole = self.free.get(&(chunk, 0)).is_some_and(|free| free.size == size);
        is_whole && self.free.remove(&(chunk, 0)).is_some()
    }

    /// Returns the free bytes in total.
    pub(super) fn total(&self) -> u64 {
        self.free.values().map(|free| free.size).sum()
    }
}

/// Rounds a size up to the granularity; `None` on overflow.
pub(super) fn rounded(size: u64) -> Option<u64> {
    size.max(1).checked_next_multiple_of(QUANTUM)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_least_that_is_enough_is_taken_and_what_touches_is_joined() {
        let mut ranges = Ranges::<u64>::default();
        ranges.add(0, 8192);
        ranges.add(1, 4096);
        let (small, mark) = ranges.take(100).unwrap();
        assert_eq!((small, mark), (Taken { chunk: 1, offset: 0, size: 512 }, None));
        let (large, _) = ranges.take(8192).unwrap();
        assert_eq!(large.chunk, 0);
        assert!(ranges.take(4096).is_none());
        ranges.put(small, Some(7));
        assert_eq!(ranges.take(4096).unwrap().1, Some(7), "all of it is behind the mark");
        ranges.put(large, Some(3));
        assert!(!ranges.remove(0, 4096) && ranges.remove(0, 8192) && !ranges.remove(1, 4096));
        assert_eq!(ranges.total(), 0);
    }

    proptest! {
        /// Parts add up to the requested size, and `missing` is 0 whenever a request succeeds.
        #[test]
        fn parts_are_as_much_as_was_asked_for(sizes in prop::collection::vec(1u64..40 << 20, 1..40), returned in any::<prop::sample::Index>()) {
            let (mut ranges, mut held) = (Ranges::<usize>::default(), Vec::new());
            (0..3).for_each(|chunk| ranges.add(chunk, (16 << 20) * (chunk as u64 + 1)));
            for size in sizes {
                let (missing, before) = (ranges.missing(size).unwrap(), ranges.total());
                let Some((parts, _)) = ranges.take_parts(size) else {
                    prop_assert!(missing > 0);
                    // Adding the missing bytes suffices.
                    let chunk = 10 + held.len();
                    ranges.add(chunk, rounded(missing).unwrap());
                    let (parts, _) = ranges.take_parts(size).unwrap();
                    held.push(parts);
                    continue;
                };
                let taken: u64 = parts.iter().map(|part| part.size).sum();
                prop_assert_eq!((missing, taken, before - ranges.total()), (0, rounded(size).unwrap(), taken));
                let short = parts.iter().filter(|part| part.size < LEAST_PART).count();
                prop_assert!(short <= 1);
                held.push(parts);
                if held.len() > 4 {
                    held.swap_remove(returned.index(held.len())).into_iter().for_each(|part| ranges.put(part, Some(1)));
                }
            }
        }

        /// Allocated ranges never overlap, and the mark of a byte is at least that of its previous owner.
        #[test]
        fn what_is_taken_is_nobody_else_s(program in prop::collection::vec((any::<bool>(), 1u64..5000, any::<prop::sample::Index>()), 1..200)) {
            let (mut ranges, mut bytes) = (Ranges::<usize>::default(), vec![[None::<usize>; 32]; 3]);
            (0..3).for_each(|chunk| ranges.add(chunk, 32 * QUANTUM));
            let mut held: Vec<Taken> = Vec::new();
            let cells = |taken: &Taken| (taken.offset / QUANTUM) as usize..((taken.offset + taken.size) / QUANTUM) as usize;
            for (now, (takes, size, which)) in program.into_iter().enumerate() {
                if takes {
                    let Some((taken, mark)) = ranges.take(size) else { continue };
                    prop_assert!(taken.size >= size && taken.offset + taken.size <= 32 * QUANTUM);
                    for other in held.iter().filter(|other| other.chunk == taken.chunk) {
                        prop_assert!(other.offset + other.size <= taken.offset || taken.offset + taken.size <= other.offset);
                    }
                    prop_assert!(bytes[taken.chunk][cells(&taken)].iter().all(|last| *last <= mark));
                    held.push(taken);
                } else if !held.is_empty() {
                    let taken = held.swap_remove(which.index(held.len()));
                    bytes[taken.chunk][cells(&taken)].fill(Some(now));
                    ranges.put(taken, Some(now));
                }
            }
            held.into_iter().for_each(|taken| ranges.put(taken, None));
            prop_assert!((0..3).all(|chunk| ranges.remove(chunk, 32 * QUANTUM)));
        }
    }
}
