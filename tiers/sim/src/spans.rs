//! Free ranges of a file: best fit, lowest address first, neighbours merged.
//!
//! Invariant: free ranges neither overlap nor touch, and both indexes hold the same ones.

use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug)]
pub(super) struct Spans {
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl Spans {
    /// Creates the list with `0..total` free.
    pub(super) fn new(total: u64) -> Self {
        let mut spans = Spans { by_start: BTreeMap::new(), by_size: BTreeSet::new() };
        spans.insert(0, total);
        spans
    }

    /// Takes `size` bytes out of the smallest free range that is large enough.
    pub(super) fn take(&mut self, size: u64) -> Option<u64> {
        let &(found, start) = self.by_size.range((size, 0)..).next()?;
        self.remove(start, found);
        if found > size {
            self.insert(start + size, found - size);
        }
        Some(start)
    }

    /// Returns a range that was taken.
    pub(super) fn give(&mut self, start: u64, size: u64) {
        let (mut start, mut size) = (start, size);
        if let Some((&before, &length)) = self.by_start.range(..start).next_back()
            && before + length == start
        {
            self.remove(before, length);
            (start, size) = (before, length + size);
        }
        if let Some(&length) = self.by_start.get(&(start + size)) {
            self.remove(start + size, length);
            size += length;
        }
        self.insert(start, size);
    }

    fn insert(&mut self, start: u64, size: u64) {
        self.by_start.insert(start, size);
        self.by_size.insert((size, start));
    }

    fn remove(&mut self, start: u64, size: u64) {
        self.by_start.remove(&start);
        self.by_size.remove(&(size, start));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_best_fit_and_merges() {
        let mut spans = Spans::new(100);
        let taken: Vec<u64> = [10, 20, 10, 60].iter().map(|size| spans.take(*size).unwrap()).collect();
        assert_eq!(taken, [0, 10, 30, 40]);
        assert_eq!(spans.take(1), None);
        spans.give(10, 20);
        spans.give(40, 60);
        assert_eq!(spans.take(15), Some(10));
        assert_eq!(spans.take(60), Some(40));
        spans.give(40, 60);
        spans.give(10, 15);
        spans.give(30, 10);
        spans.give(0, 10);
        assert_eq!(spans.take(100), Some(0));
    }
}
