//! Exhaustive search for passes with few items. A sweep may end at verdicts that no single move improves, and with few items each of them
//! matters.

use super::Verdict;
use super::order::{Arms, together};
use super::search::Search;

/// Maximum number of combinations of verdicts. Combinations that split inseparable items are skipped, not counted as trials; with more
/// combinations the search is not exhaustive at all.
const WAYS: usize = 20_000;

impl Search<'_> {
    /// Tries all combinations if their number permits it. Returns whether it did.
    pub(crate) fn everything(&mut self) -> bool {
        let open: Vec<usize> = (0..self.course.items.len()).filter(|item| self.is_open(*item)).collect();
        let ways = open.iter().try_fold(1, |ways: usize, item| ways.checked_mul(self.choices(*item).len()));
        let Some(ways) = ways.filter(|ways| *ways <= WAYS) else { return false };
        let most = self.work / self.work_of_one();
        let whole: Vec<Vec<Verdict>> =
            (0..ways).filter_map(|way| self.way(&open, way)).take(most + 1).collect();
        let is_done = whole.len() <= most;
        for verdicts in whole.iter().filter(|_| is_done) {
            self.attempt(verdicts);
        }
        is_done
    }

    /// Returns combination `number` of verdicts for the `open` items; `None` if it splits inseparable items.
    fn way(&self, open: &[usize], number: usize) -> Option<Vec<Verdict>> {
        let (mut verdicts, mut left) = (self.start(), number);
        for &item in open {
            let choices = self.choices(item);
            verdicts[item] = choices[left % choices.len()];
            left /= choices.len();
        }
        let given = verdicts.clone();
        together(self.course, self.arms, &mut verdicts);
        open.iter().all(|item| verdicts[*item] == given[*item]).then_some(verdicts)
    }

    /// Returns the possible verdicts of an open item.
    fn choices(&self, item: usize) -> &'static [Verdict] {
        const STORED: [Verdict; 2] = [Verdict::Keep, Verdict::Offload];
        const ALL: [Verdict; 3] = [Verdict::Keep, Verdict::Offload, Verdict::Recompute];
        let recomputes = self.arms != Arms::Stored && self.course.items[item].recompute.is_some();
        if recomputes { &ALL } else { &STORED }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::course::tests::small;

    #[test]
    fn ways_are_all_that_part_nothing() {
        let course = small();
        // The first two may leave, and be recomputed, of one scope; to offload the third frees nothing.
        let ways = |arms| {
            let search = Search::new(&course, 0, u64::MAX, arms);
            (0..9).filter_map(|way| search.way(&[0, 1], way)).count()
        };
        assert_eq!([ways(Arms::Scopes), ways(Arms::Leaves)], [5, 9]);
        let search = Search::new(&course, 0, u64::MAX, Arms::Stored);
        let ways: Vec<_> = (0..4).filter_map(|way| search.way(&[0, 1], way)).collect();
        let (keep, offload) = (Verdict::Keep, Verdict::Offload);
        assert_eq!(
            ways,
            [[keep, keep, keep], [offload, keep, keep], [keep, offload, keep], [offload, offload, keep]]
        );
    }
}
