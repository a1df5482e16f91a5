//! Free primitive memory of one stream.
//!
//! Physical memory is numbered in chunks of 2 MiB. Two segments are never adjacent in that numbering, so that ranges of different segments
//! never join.
//!
//! Invariants: free ranges do not overlap; both sets hold the same ranges.

use std::collections::{BTreeMap, BTreeSet};

/// Consecutive chunks of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: u64,
    /// Length in chunks; never zero.
    pub(super) len: u64,
}

impl Range {
    pub(super) const fn end(self) -> u64 {
        self.start + self.len
    }

    /// Returns the number of chunks in both ranges.
    pub(super) fn overlap(self, other: Range) -> u64 {
        self.end().min(other.end()).saturating_sub(self.start.max(other.start))
    }

    /// Returns the first `len` chunks.
    pub(super) const fn first(self, len: u64) -> Range {
        Range { start: self.start, len }
    }
}

/// Free ranges by address and by size: the inactive primitive blocks of the paper's pPool.
#[derive(Default)]
pub(super) struct FreeRanges {
    by_start: BTreeMap<u64, u64>,
    by_len: BTreeSet<(u64, u64)>,
    total: u64,
}

impl FreeRanges {
    /// Returns the number of free chunks.
    pub(super) const fn total(&self) -> u64 {
        self.total
    }

    /// Returns the smallest range of at least `len` chunks; of equal ones, the lowest.
    pub(super) fn best_fit(&self, len: u64) -> Option<Range> {
        self.by_len.range((len, 0)..).next().map(|&(len, start)| Range { start, len })
    }

    /// Returns the largest ranges that together have `len` chunks, largest first, the last one cut to fit. `None` if fewer than `len`
    /// chunks are free.
    pub(super) fn largest(&self, len: u64) -> Option<Vec<Range>> {
        if self.total < len {
            return None;
        }
        let mut lacking = len;
        let mut taken = Vec::new();
        for &(len, start) in self.by_len.iter().rev() {
            if lacking == 0 {
                break;
            }
            let len = len.min(lacking);
            lacking -= len;
            taken.push(Range { start, len });
        }
        Some(taken)
    }

    /// Returns whether every chunk of `range` is free.
    pub(super) fn covers(&self, range: Range) -> bool {
        let mut at = range.start;
        while at < range.end() {
            match self.around(at) {
                Some(free) => at = free.end(),
                None => return false,
            }
        }
        true
    }

    /// Removes free chunks, which may span several adjacent free ranges.
    pub(super) fn take(&mut self, range: Range) {
        let mut at = range.start;
        while at < range.end() {
            let Some(free) = self.around(at) else { return debug_assert!(false, "{range:?} is not free") };
            self.forget(free);
            if free.start < at {
                self.add(Range { start: free.start, len: at - free.start });
            }
            if range.end() < free.end() {
                self.add(Range { start: range.end(), len: free.end() - range.end() });
            }
            at = free.end();
        }
    }

    /// Frees chunks as a separate range.
    pub(super) fn insert(&mut self, range: Range) {
        self.add(range);
    }

    /// Frees chunks and joins them with free neighbours.
    pub(super) fn join(&mut self, range: Range) {
        let Range { mut start, mut len } = range;
        if let Some((&before, &more)) = self.by_start.range(..start).next_back()
            && before + more == start
        {
            self.forget(Range { start: before, len: more });
            start = before;
            len += more;
        }
        if let Some(&more) = self.by_start.get(&range.end()) {
            self.forget(Range { start: range.end(), len: more });
            len += more;
        }
        self.add(Range { start, len });
    }

    /// Returns the free range that contains `chunk`.
    fn around(&self, chunk: u64) -> Option<Range> {
        let (&start, &len) = self.by_start.range(..=chunk).next_back()?;
        (chunk < start + len).then_some(Range { start, len })
    }

    fn add(&mut self, Range { start, len }: Range) {
        self.by_start.insert(start, len);
        self.by_len.insert((len, start));
        self.total += len;
    }

    fn forget(&mut self, Range { start, len }: Range) {
        self.by_start.remove(&start);
        self.by_len.remove(&(len, start));
        self.total -= len;
    }
}

#[cfg(test)]
impl FreeRanges {
    pub(super) fn all(&self) -> Vec<Range> {
        self.by_start.iter().map(|(&start, &len)| Range { start, len }).collect()
    }
}
