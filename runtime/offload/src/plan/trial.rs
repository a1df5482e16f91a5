//! Trial of verdicts: feasibility and time of the pass.
//!
//! Timing of a pass in virtual time, following a schedule.
//!
//! Memory that must be on the GPU in each cell, independent of the links.

use super::Verdict;
use super::course::{Course, NONE};
use super::queues::Queues;
use super::schedule::Schedule;
use crate::Step;

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

/// Memory use of a pass: bytes in each cell.
#[derive(Clone, Debug, Default)]
pub(crate) struct Curve {
    cells: Vec<i64>,
}

impl Curve {
    /// Computes the curve of verdicts: kept items; other items while the forward pass holds them and while the backward pass uses them, as
    /// if copies took no time; and the memory outside items.
    pub(crate) fn fill(&mut self, course: &Course, verdicts: &[Verdict], replayed: &[bool]) {
        self.cells.clear();
        self.cells.resize(course.cells + 1, 0);
        for (item, verdict) in course.items.iter().zip(verdicts) {
            if *verdict == Verdict::Keep {
                self.add(item.bytes, item.pack, item.end);
                continue;
            }
            match course.need(item, replayed) {
                NONE => self.add(item.bytes, item.pack, item.release),
                need if need <= item.release + 1 => {
                    self.add(item.bytes, item.pack, item.last.max(item.release));
                }
                need => {
                    self.add(item.bytes, item.pack, item.release);
                    self.add(item.bytes, need, item.last);
                }
            }
        }
        let mut sum = 0;
        self.cells.pop();
        for (cell, rest) in self.cells.iter_mut().zip(&course.rest) {
            sum += *cell;
            *cell = sum + rest;
        }
    }

    /// Returns the maximum over all cells.
    pub(crate) fn peak(&self) -> i64 {
        self.cells.iter().copied().max().unwrap_or(0)
    }

    /// Returns the bytes of each cell.
    pub(crate) fn cells(&self) -> &[i64] {
        &self.cells
    }

    fn add(&mut self, bytes: i64, from: usize, last: usize) {
        self.cells[from] += bytes;
        self.cells[last + 1] -= bytes;
    }
}

#[cfg(test)]
mod curve_tests {
    use super::*;
    use crate::plan::course::tests::small;

    #[test]
    fn kept_to_the_end_offloaded_while_used_recomputed_from_the_replay() {
        let course = small();
        let mut curve = Curve::default();
        let mut of = |verdicts: [Verdict; 3]| {
            let mut replayed = Vec::new();
            course.replayed(&verdicts, &mut replayed);
            curve.fill(&course, &verdicts, &replayed);
            curve.cells().to_vec()
        };
        assert_eq!(of([Verdict::Keep; 3]), [101, 111, 211, 211, 111, 101]);
        assert_eq!(of([Verdict::Offload; 3]), [101, 110, 200, 200, 110, 101]);
        // The first two are of one scope, whose replay begins with the second.
        assert_eq!(
            of([Verdict::Recompute, Verdict::Recompute, Verdict::Keep]),
            [101, 110, 200, 200, 111, 101]
        );
        assert_eq!(of([Verdict::Recompute, Verdict::Keep, Verdict::Keep]), [101, 110, 210, 210, 111, 101]);
    }
}
