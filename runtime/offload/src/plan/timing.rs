//! Timing of a pass in virtual time, following a schedule.

use super::Verdict;
use super::course::{Course, NONE};
use super::queues::Queues;
use super::schedule::Schedule;
use crate::Step;

/// Estimated duration of a pass, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Timing {
    pub(crate) total: f64,
    /// Parts of the total: recomputation, and waits for copies.
    pub(crate) recompute: f64,
    pub(crate) exposed: f64,
}

/// Simulates passes; reused to keep its buffers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clockwork {
    queues: Queues,
    /// Number of reloads that must have completed before each step.
    arrived: Vec<usize>,
    replays: Vec<f64>,
}

impl Clockwork {
    /// Returns the timing of a pass that follows `schedule`.
    pub(crate) fn run(
        &mut self,
        course: &Course,
        verdicts: &[Verdict],
        replayed: &[bool],
        schedule: &Schedule,
    ) -> Timing {
        self.prepare(course, verdicts, replayed, schedule);
        let (rates, mut timing, mut now, mut issued) = (course.rates, Timing::default(), 0.0, 0);
        for (cell, step) in course.steps.iter().enumerate() {
            self.queues.advance(now, rates);
            let begun = self.queues.wait(schedule.settled[cell], 0, rates).max(now);
            for &index in &schedule.into[issued..schedule.issued[cell]] {
                self.queues.push_into(course.items[index].into);
            }
            issued = schedule.issued[cell];
            let ready = self.queues.wait(0, self.arrived[cell], rates).max(begun);
            timing.exposed += ready - now;
            timing.recompute += self.replays[cell];
            now = ready;
            if let Step::Pack(item) = *step
                && verdicts[item.index()] == Verdict::Offload
            {
                self.queues.push_out(course.items[item.index()].out);
            }
            now += self.replays[cell] + course.begins[cell + 1] - course.begins[cell];
        }
        timing.total = now;
        timing
    }

    fn prepare(&mut self, course: &Course, verdicts: &[Verdict], replayed: &[bool], schedule: &Schedule) {
        self.queues.clear();
        self.arrived.clear();
        self.arrived.resize(course.cells, 0);
        for (at, index) in schedule.into.iter().enumerate() {
            let need = course.need(&course.items[*index], replayed);
            self.arrived[need] = self.arrived[need].max(at + 1);
        }
        self.replays.clear();
        self.replays.resize(course.cells, 0.0);
        for scope in course.scopes.iter().filter(|scope| scope.start != NONE) {
            let again = scope.items.iter().filter(|item| verdicts[**item] == Verdict::Recompute);
            self.replays[scope.start] += again.filter_map(|item| course.items[*item].recompute).sum::<f64>();
        }
    }
}
