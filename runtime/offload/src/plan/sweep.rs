//! Local search: changes verdicts while that shortens the pass.

use super::Verdict;
use super::order::{Arms, together};
use super::search::Search;

impl Search<'_> {
    /// Improves the best verdicts by changing runs of items, long ones first, then pairs, while work is left.
    pub(crate) fn sweep(&mut self) {
        let open: Vec<usize> = (0..self.course.items.len()).filter(|item| self.is_open(*item)).collect();
        if self.best.is_none() || open.is_empty() {
            return;
        }
        loop {
            let before = self.cost();
            let mut length = open.len().div_ceil(4).next_power_of_two();
            while length > 0 {
                for run in open.chunks(length) {
                    self.move_run(run);
                }
                length /= 2;
            }
            if self.cost() >= before && !self.swaps(&open) {
                return;
            }
            if self.work == 0 {
                return;
            }
        }
    }

    fn cost(&self) -> f64 {
        self.best.as_ref().map_or(f64::INFINITY, |best| best.outcome.cost)
    }

    /// Tries each other verdict for a run of items.
    fn move_run(&mut self, run: &[usize]) {
        for verdict in [Verdict::Keep, Verdict::Offload, Verdict::Recompute] {
            self.change(&[(run, verdict)]);
        }
    }

    /// Swaps the verdicts of pairs of items. Returns whether that improved anything.
    fn swaps(&mut self, open: &[usize]) -> bool {
        let before = self.cost();
        for &left in open {
            for &right in open {
                let Some(best) = &self.best else { return false };
                let (mine, other) = (best.verdicts[left], best.verdicts[right]);
                if mine != other {
                    self.change(&[(&[left], other), (&[right], mine)]);
                }
                if self.work == 0 {
                    return self.cost() < before;
                }
            }
        }
        self.cost() < before
    }

    fn change(&mut self, moves: &[(&[usize], Verdict)]) {
        let Some(best) = self.best.as_ref().filter(|_| self.work > 0) else { return };
        let mut verdicts = best.verdicts.clone();
        for (run, verdict) in moves {
            for &item in *run {
                self.give(&mut verdicts, item, *verdict);
            }
        }
        together(self.course, self.arms, &mut verdicts);
        if self.best.as_ref().is_some_and(|best| best.verdicts != verdicts) {
            self.attempt(&verdicts);
        }
    }

    /// Sets the verdict of an item, and of its scope if both are inseparable.
    fn give(&self, verdicts: &mut [Verdict], item: usize, verdict: Verdict) {
        let span = &self.course.items[item];
        if verdict == Verdict::Recompute && (span.recompute.is_none() || self.arms == Arms::Stored) {
            return;
        }
        let whole = self.arms == Arms::Scopes || span.inner;
        if whole && verdicts[item] == Verdict::Recompute && verdict != Verdict::Recompute {
            for &other in &self.course.scopes[span.scope].items {
                if self.is_open(other) && verdicts[other] == Verdict::Recompute {
                    verdicts[other] = verdict;
                }
            }
        }
        verdicts[item] = verdict;
    }
}
