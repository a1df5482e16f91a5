//! Search for the verdicts with the least time under a budget.

use super::Verdict;
use super::course::{Course, Span};
use super::order::{Arms, Order, Recipe, Values, together};
use super::trial::{Outcome, Trial};

/// Maximum number of items examined in all trials of one search, which bounds its time for any tape.
const WORK: usize = 40_000;

/// Number of feasibility checks that take as long as one trial.
const CHECK: usize = 6;

/// Best verdicts found so far.
#[derive(Clone, Debug)]
pub(crate) struct Best {
    pub(crate) verdicts: Vec<Verdict>,
    pub(crate) outcome: Outcome,
}

/// State of the search.
#[derive(Debug)]
pub(crate) struct Search<'c> {
    pub(crate) course: &'c Course,
    pub(crate) budget: i64,
    pub(crate) host_room: u64,
    pub(crate) arms: Arms,
    pub(crate) trial: Trial,
    pub(crate) best: Option<Best>,
    pub(crate) work: usize,
}

impl<'c> Search<'c> {
    pub(crate) fn new(course: &'c Course, budget: i64, host_room: u64, arms: Arms) -> Self {
        Search { course, budget, host_room, arms, trial: Trial::default(), best: None, work: WORK }
    }

    /// Returns the best verdicts under the budget; `None` if none fit.
    pub(crate) fn run(&mut self) -> Option<Best> {
        let kept = self.start();
        if self.attempt(&kept).is_some() {
            return self.best.clone();
        }
        if self.everything() {
            return self.best.clone();
        }
        self.trial.peak(self.course, &kept);
        let values = Values::new(self.course, &self.trial.curve, self.budget, self.arms);
        self.attempt(&self.tightest());
        if values.recomputes() {
            self.mixes(&values);
        } else {
            for haste in [0.0, 1.0, 1e6] {
                self.fill(&values.order(self.course, &Recipe { offloaded: 1.0, price: 1.0, haste }));
            }
        }
        self.sweep();
        self.best.clone()
    }

    /// Returns verdicts that keep everything.
    pub(crate) fn start(&self) -> Vec<Verdict> {
        vec![Verdict::default(); self.course.items.len()]
    }

    /// Returns verdicts that offload every item that frees a cell, the largest first if host memory is short. The others are recomputed if
    /// possible.
    pub(crate) fn tightest(&self) -> Vec<Verdict> {
        let mut verdicts = self.start();
        let mut items: Vec<usize> = (0..verdicts.len()).filter(|item| self.is_open(*item)).collect();
        let all: u64 = items.iter().map(|item| self.course.items[*item].host).fold(0, u64::saturating_add);
        if all > self.host_room {
            items.sort_by_key(|item| std::cmp::Reverse(self.course.items[*item].bytes));
        }
        let mut room = self.host_room;
        for item in items {
            let (host, recompute) = (self.course.items[item].host, self.course.items[item].recompute);
            if host <= room {
                room -= host;
                verdicts[item] = Verdict::Offload;
            } else if self.arms != Arms::Stored && recompute.is_some() {
                verdicts[item] = Verdict::Recompute;
            }
        }
        together(self.course, self.arms, &mut verdicts);
        verdicts
    }

    /// Returns whether the search may choose the item's verdict and one other than `Keep` is useful.
    pub(crate) fn is_open(&self, item: usize) -> bool {
        self.course.frees(&self.course.items[item])
    }

    /// Returns the work that one attempt costs.
    pub(crate) fn work_of_one(&self) -> usize {
        self.course.items.len() + 8
    }

    /// Tries verdicts and keeps the best. Returns their cost if they fit and work is left.
    pub(crate) fn attempt(&mut self, verdicts: &[Verdict]) -> Option<f64> {
        self.work = self.work.saturating_sub(self.work_of_one());
        let offloaded = self.course.items.iter().zip(verdicts).filter(|(_, to)| **to == Verdict::Offload);
        let host = offloaded.map(|(item, _)| item.host).fold(0, u64::saturating_add);
        if host > self.host_room {
            return None;
        }
        let outcome = self.trial.run(self.course, verdicts, self.budget)?;
        if self.best.as_ref().is_none_or(|best| outcome.cost < best.outcome.cost - 1e-9) {
            self.best = Some(Best { verdicts: verdicts.to_vec(), outcome });
        }
        Some(outcome.cost)
    }

    /// Searches the share of recomputable items that are offloaded instead: a few shares, then finer around the best.
    fn mixes(&mut self, values: &Values) {
        let recipe = |offloaded| Recipe { offloaded, price: 1e-6, haste: 1.0 };
        let mut tried: Vec<(f64, f64)> = Vec::new();
        let best = |tried: &[(f64, f64)]| {
            tried.iter().min_by(|left, right| left.1.total_cmp(&right.1)).map_or(0.5, |(part, _)| *part)
        };
        for step in [0.25, 0.125, 0.0625] {
            let around = best(&tried);
            let parts = if tried.is_empty() {
                vec![0.0, 0.25, 0.5, 0.75, 1.0]
            } else {
                vec![around - step, around + step]
            };
            for part in parts.into_iter().filter(|part| (0.0..=1.0).contains(part)) {
                let cost = self.fill(&values.order(self.course, &recipe(part)));
                tried.push((part, cost.unwrap_or(f64::INFINITY)));
            }
        }
        self.fill(&values.order(self.course, &Recipe { price: 0.3, ..recipe(best(&tried)) }));
    }

    /// Finds the smallest number of items, in order, that makes the rest fit; then tries a few more.
    fn fill(&mut self, order: &Order) -> Option<f64> {
        let all = self.leave(order, order.len());
        if self.trial.peak(self.course, &all) > self.budget {
            return None;
        }
        let (mut low, mut high) = (0, order.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            let verdicts = self.leave(order, middle);
            let fits = self.trial.peak(self.course, &verdicts) <= self.budget;
            self.work = self.work.saturating_sub(order.len() / CHECK);
            if fits {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        let least = self.attempt(&self.leave(order, low));
        let more = order.len() - low;
        let some = self.attempt(&self.leave(order, low + more / 4));
        [least, some].into_iter().flatten().reduce(f64::min)
    }

    /// Returns verdicts under which the first `count` items of `order` leave, host memory permitting.
    fn leave(&self, order: &Order, count: usize) -> Vec<Verdict> {
        let mut verdicts = self.start();
        let mut room = self.host_room;
        let items = order.iter().filter(|(item, _)| self.is_open(*item)).take(count);
        for &(item, verdict) in items {
            let Span { host, recompute, .. } = self.course.items[item];
            verdicts[item] = match verdict {
                Verdict::Offload if host <= room => {
                    room -= host;
                    Verdict::Offload
                }
                Verdict::Offload if recompute.is_none() || self.arms == Arms::Stored => Verdict::Keep,
                Verdict::Offload => Verdict::Recompute,
                other => other,
            };
        }
        together(self.course, self.arms, &mut verdicts);
        verdicts
    }
}
