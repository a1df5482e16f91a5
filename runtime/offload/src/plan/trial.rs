//! Trial of verdicts: feasibility and time of the pass.

use super::Verdict;
use super::course::Course;
use super::curve::Curve;
use super::schedule::Schedule;
use super::timing::{Clockwork, Timing};

/// Weight of a link second relative to a pass second: among verdicts of equal time, prefer fewer copies.
const LINK_PRICE: f64 = 1e-4;

/// Evaluates verdicts; reused to keep its buffers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trial {
    pub(crate) replayed: Vec<bool>,
    pub(crate) curve: Curve,
    pub(crate) schedule: Schedule,
    clockwork: Clockwork,
}

/// Result of a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) timing: Timing,
    /// Objective to minimize: time plus a small penalty for each copy.
    pub(crate) cost: f64,
}

impl Trial {
    /// Returns the maximum of the memory that must be on the GPU.
    pub(crate) fn peak(&mut self, course: &Course, verdicts: &[Verdict]) -> i64 {
        course.replayed(verdicts, &mut self.replayed);
        self.curve.fill(course, verdicts, &self.replayed);
        self.curve.peak()
    }

    /// Evaluates verdicts; `None` if they exceed `budget`.
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
