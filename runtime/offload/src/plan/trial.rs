//! Verdicts tried: whether they fit, and how long the pass takes with them.

use super::Verdict;
use super::course::Course;
use super::curve::Curve;
use super::schedule::Schedule;
use super::timing::{Clockwork, Timing};

/// What a second of a link counts beside one of the pass: of verdicts that take equally long, those with fewer copies.
const LINK_PRICE: f64 = 1e-4;

/// Tries verdicts one after the other; kept for its memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trial {
    pub(crate) replayed: Vec<bool>,
    pub(crate) curve: Curve,
    pub(crate) schedule: Schedule,
    clockwork: Clockwork,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) timing: Timing,
    /// What is compared: time, and a little for each copy.
    pub(crate) cost: f64,
}

impl Trial {
    /// The highest point of what must be on the GPU.
    pub(crate) fn peak(&mut self, course: &Course, verdicts: &[Verdict]) -> i64 {
        course.replayed(verdicts, &mut self.replayed);
        self.curve.fill(course, verdicts, &self.replayed);
        self.curve.peak()
    }

    /// `None`: they do not fit into `budget`.
    pub(crate) fn run(&mut self, course: &Course, verdicts: &[Verdict], budget: i64) -> Option<Outcome> {
        if self.peak(course, verdicts) > budget {
            return None;
        }
        self.schedule.fill(course, verdicts, &self.replayed, &self.curve, budget);
        let timing = self.clockwork.run(course, verdicts, &self.replayed, &self.schedule);
        let copies: f64 =
            self.schedule.out.iter().map(|index| course.items[*index].out + course.items[*index].into).sum();
        Some(Outcome { timing, cost: timing.total + LINK_PRICE * copies })
    }
}
