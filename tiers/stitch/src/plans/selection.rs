//! Selection of the free ranges of a new alias, and of the new memory among them.

use crate::extent::Extents;
use crate::piece::Run;

/// Home ranges in alias order, with the new memory to be grown among them.
#[derive(Debug)]
pub(super) struct Selection {
    /// Ranges of home. The first begins anywhere in its first extent, the last ends anywhere in its last; all others are whole extents.
    pub(super) ranges: Vec<(u64, u64)>,
    /// Bytes of the last range in an extent that is only partly free.
    pub(super) tail: u64,
    /// Bytes of new memory needed, in front of the tail.
    pub(super) missing: u64,
}

impl Selection {
    /// Chooses free ranges for an alias: the longest first, so that few are broken; at the end the shortest sufficient one. A free suffix
    /// of an extent can only come first, a free prefix only last.
    pub(super) fn of(size: u64, runs: &[Run], extents: &Extents) -> Self {
        let mut candidates: Vec<Candidate> = runs
            .iter()
            .map(|run| Candidate::of(run, extents))
            .filter(|candidate| candidate.first <= candidate.last)
            .collect();
        candidates.sort_unstable_by_key(|candidate| std::cmp::Reverse((candidate.whole(), candidate.start)));
        let mut ranges = Vec::new();
        let mut missing = size;
        let mut rest = candidates.as_slice();
        while missing > 0
            && let Some((longest, shorter)) = rest.split_first()
        {
            if longest.whole() == 0 {
                break;
            }
            if longest.whole() >= missing {
                let shortest =
                    rest.iter().rev().find(|candidate| candidate.whole() >= missing).unwrap_or(longest);
                ranges.push((shortest.first, shortest.first + missing));
                return Selection { ranges, tail: 0, missing: 0 };
            }
            missing -= longest.whole();
            ranges.push((longest.first, longest.last));
            rest = shorter;
        }
        Selection::with_ends(&candidates, ranges, missing, extents)
    }

    /// Completes whole extents by a suffix in front and a prefix behind.
    fn with_ends(
        candidates: &[Candidate],
        mut ranges: Vec<(u64, u64)>,
        mut missing: u64,
        extents: &Extents,
    ) -> Self {
        let head = candidates.iter().max_by_key(|candidate| candidate.head()).filter(|head| head.head() > 0);
        // An alias maps an extent once: suffix and prefix must come from different extents.
        let apart = |tail: &&Candidate| {
            head.is_none_or(|head| {
                head.start != tail.start && extents.at(head.start) != extents.at(tail.end - 1)
            })
        };
        let tail = candidates
            .iter()
            .filter(apart)
            .max_by_key(|candidate| candidate.tail())
            .filter(|tail| tail.tail() > 0);
        if missing > 0
            && let Some(head) = head
        {
            let take = head.head().min(missing);
            missing -= take;
            match ranges.iter().position(|range| range.0 == head.first && head.whole() > 0) {
                Some(at) => {
                    let (_, end) = ranges.remove(at);
                    ranges.insert(0, (head.first - take, end));
                }
                None => ranges.insert(0, (head.first - take, head.first)),
            }
        }
        let mut used_tail = 0;
        if missing > 0
            && let Some(tail) = tail
        {
            let take = tail.tail().min(missing);
            missing -= take;
            match ranges.iter().skip(1).position(|range| range.0 == tail.first && tail.whole() > 0) {
                Some(at) => {
                    let (start, _) = ranges.remove(at + 1);
                    ranges.push((start, tail.last + take));
                }
                None => ranges.push((tail.last, tail.last + take)),
            }
            used_tail = take;
        }
        Selection { ranges, tail: used_tail, missing }
    }

    /// Returns the number of extents that an alias over its ranges maps.
    pub(super) fn touched(&self, extents: &Extents) -> usize {
        self.ranges.iter().map(|&(start, end)| extents.touching(start, end).count()).sum()
    }

    /// Sets the size of the new range to `total` instead of `missing`, so that less of the tail is needed, or none. Returns how much of the
    /// new range is used, and its position among the ranges.
    pub(super) fn grow_to(&mut self, total: u64) -> (u64, usize) {
        let spared = (total - self.missing).min(self.tail);
        if let Some((start, end)) = self.ranges.pop()
            && start < end - spared
        {
            self.ranges.push((start, end - spared));
        }
        let behind = self.tail > spared;
        (self.missing + spared, self.ranges.len() - usize::from(behind))
    }
}

/// A free run with its outermost extent boundaries.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    start: u64,
    first: u64,
    last: u64,
    end: u64,
}

impl Candidate {
    fn of(run: &Run, extents: &Extents) -> Self {
        let (first, last) = extents.boundaries(run.start, run.end);
        Candidate { start: run.start, first, last, end: run.end }
    }

    fn whole(&self) -> u64 {
        self.last - self.first
    }

    fn head(&self) -> u64 {
        self.first - self.start
    }

    fn tail(&self) -> u64 {
        self.end - self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extent::{Extent, ExtentState};
    use crate::free_list::Class;
    use crate::ids::{DomainId, PieceId};

    const MIB: u64 = 1 << 20;

    /// Creates extents of 8 MiB side by side.
    fn extents(count: u64) -> Extents {
        let mut extents = Extents::new(2 * MIB);
        for start in (0..count).map(|n| n * 8 * MIB) {
            extents.insert(Extent {
                start,
                size: 8 * MIB,
                domain: DomainId::DEFAULT,
                class: Class::Large,
                aliases: Default::default(),
                state: ExtentState::Resident,
                live: 0,
            });
        }
        extents
    }

    fn run(start: u64, end: u64) -> Run {
        Run { start: start * MIB, end: end * MIB, first: PieceId::NONE }
    }

    fn of(size: u64, runs: &[Run]) -> (Vec<(u64, u64)>, u64) {
        let selection = Selection::of(size * MIB, runs, &extents(16));
        let ranges = selection.ranges.iter().map(|&(start, end)| (start / MIB, end / MIB)).collect();
        (ranges, selection.missing / MIB)
    }

    #[test]
    fn longest_ranges_come_first_and_the_shortest_sufficient_one_last() {
        let runs = [run(0, 8), run(16, 40), run(48, 64)];
        assert_eq!(of(30, &runs), (vec![(16, 40), (0, 6)], 0));
        assert_eq!(of(10, &runs), (vec![(48, 58)], 0), "one run that is enough");
    }

    #[test]
    fn a_suffix_comes_first_and_a_prefix_last() {
        let runs = [run(4, 8), run(16, 24), run(32, 35)];
        assert_eq!(of(15, &runs), (vec![(4, 8), (16, 24), (32, 35)], 0));
        assert_eq!(of(20, &runs), (vec![(4, 8), (16, 24), (32, 35)], 5), "the rest is grown");
    }

    #[test]
    fn an_extent_is_mapped_once() {
        // A suffix and a prefix of the same extent: only one of them can be used.
        let runs = [run(0, 3), run(5, 8)];
        let (ranges, missing) = of(6, &runs);
        assert_eq!((ranges.len(), missing), (1, 3));
    }

    #[test]
    fn new_memory_replaces_the_tail() {
        let runs = [run(4, 8), run(16, 24), run(32, 35)];
        let mut selection = Selection::of(20 * MIB, &runs, &extents(16));
        let (used, at) = selection.grow_to(8 * MIB);
        assert_eq!((used, at), (8 * MIB, 2));
        assert_eq!(selection.ranges.last(), Some(&(16 * MIB, 24 * MIB)), "the tail of 3 MiB is not needed");
    }
}
