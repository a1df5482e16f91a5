//! Compute model of a worker: a step generates a token for each request, and prompts are read between two steps.
//!
//! ```text
//! progress ──┬── step ──┬── step ──┬─ prompt ─ prompt ─┬── step ──┬──►      in the worker's own seconds of compute
//!            steps_from            reads_from          steps_from read_by
//! ```

/// Tolerance between two sums of the same figures.
pub(super) const HAIR: f64 = 1e-7;

/// Position of a worker in its steps and prompts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps {
    /// Compute so far, in seconds.
    pub(super) progress: f64,
    /// Length of a step.
    pub(super) length: f64,
    /// Part of a step in which the GPU computes.
    computes: f64,
    /// Start and length of the latest or next reading of prompts.
    reads_from: f64,
    reads: f64,
    /// Time from which steps follow the prompts, one after the other.
    steps_from: f64,
    /// Position of the stop at the next safe point, if the worker must park.
    stops_at: Option<f64>,
}

/// Schedule of one more prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    /// Start of the reading, together with all prompts before the same step.
    pub(super) from: f64,
    /// Delay of the following steps.
    pub(super) later: f64,
    /// Time without a token for running requests.
    pub(super) gap: f64,
}

impl Steps {
    pub(super) fn new(decode_ms: f64, step_ms: f64) -> Self {
        let (length, computes) = (decode_ms / 1e3, step_ms / 1e3);
        Steps {
            progress: 0.0,
            length,
            computes,
            reads_from: 0.0,
            reads: 0.0,
            steps_from: 0.0,
            stops_at: None,
        }
    }

    /// Advances by `compute` seconds, up to the stop.
    pub(super) fn pass(&mut self, compute: f64) {
        self.progress = (self.progress + compute).min(self.stops_at.unwrap_or(f64::INFINITY));
    }

    /// Stops at the next safe point: after the current step, or between two parts of a prompt. Returns the distance.
    pub(super) fn stop(&mut self) -> f64 {
        let is_reading = self.progress + HAIR < self.steps_from;
        let at = if is_reading { self.progress } else { self.step_ends().max(self.progress) };
        self.stops_at = Some(at);
        at - self.progress
    }

    /// Cancels the stop.
    pub(super) fn go_on(&mut self) {
        self.stops_at = None;
    }

    pub(super) fn stands(&self) -> bool {
        self.stops_at.is_some_and(|at| at <= self.progress)
    }

    /// Returns the fraction of a GPU that the worker can use now.
    pub(super) fn demand(&self) -> f64 {
        let is_read = self.progress + HAIR >= self.reads_from && self.progress + HAIR < self.read_by();
        let reads = if is_read { self.reads } else { 0.0 };
        ((reads + self.computes) / self.length).min(1.0)
    }

    /// Returns the positions at which the demand changes or the worker stops.
    pub(super) fn turns(&self) -> impl Iterator<Item = f64> {
        let turns = [Some(self.reads_from), Some(self.read_by()), self.stops_at];
        let progress = self.progress;
        turns.into_iter().flatten().filter(move |at| *at > progress)
    }

    /// Returns the end of the step before which prompts are read.
    pub(super) fn read_by(&self) -> f64 {
        self.steps_from + self.length
    }

    /// Schedules a prompt of `prompt` seconds after the current step and earlier prompts; immediately if no request is running.
    pub(super) fn read(&mut self, prompt: f64, is_idle: bool) -> Read {
        if is_idle {
            (self.reads_from, self.reads, self.steps_from) = (self.progress, 0.0, self.progress);
        } else if self.progress > self.reads_from + HAIR {
            let is_reading = self.progress + HAIR < self.steps_from;
            let end = if is_reading { self.read_by() } else { self.step_ends() };
            (self.reads_from, self.reads, self.steps_from) = (end, 0.0, end);
        }
        let before = self.delay();
        self.reads += prompt;
        self.steps_from = self.reads_from + self.delay();
        Read { from: self.reads_from, later: self.delay() - before, gap: self.length + self.delay() }
    }

    /// Returns the delay of the next step by prompts: their compute minus the GPU's idle part of a step.
    fn delay(&self) -> f64 {
        (self.reads + self.computes - self.length).max(0.0)
    }

    /// Returns the end of the current step.
    fn step_ends(&self) -> f64 {
        let steps = ((self.progress - self.steps_from - HAIR) / self.length).ceil();
        self.steps_from + steps.max(0.0) * self.length
    }
}

/// Returns the max-min fair share of one GPU for these demands: no worker gets less than an equal part of the remainder.
pub(super) fn equal_part(mut demands: Vec<f64>) -> f64 {
    demands.sort_by(f64::total_cmp);
    let count = u32::try_from(demands.len()).unwrap_or(u32::MAX);
    let mut left = 1.0;
    for (demand, sharing) in demands.into_iter().zip((1..=count).rev()) {
        let equal = left / f64::from(sharing);
        if demand > equal {
            return equal;
        }
        left -= demand;
    }
    1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, wanted: f64) {
        assert!((found - wanted).abs() < 1e-9, "{found} is not {wanted}");
    }

    #[test]
    fn prompts_are_read_together_after_the_step_that_is_under_way() {
        let mut steps = Steps::new(12.0, 12.0);
        near(steps.read(0.03, true).gap, 0.042);
        steps.pass(0.03 + 0.012 + 0.004);
        let (first, second) = (steps.read(0.02, false), steps.read(0.01, false));
        near(first.from, 0.054);
        near(second.from, 0.054);
        near(first.later, 0.02);
        near(second.gap, 0.042);
        near(steps.read_by(), 0.054 + 0.03 + 0.012);
        // While they are read a third waits for the step after them.
        steps.pass(0.02);
        near(steps.read(0.01, false).from, 0.096);
    }

    #[test]
    fn what_a_gpu_does_nothing_in_has_room_for_a_prompt() {
        let mut steps = Steps::new(12.0, 4.0);
        near(steps.demand(), 1.0 / 3.0);
        near(steps.read(0.006, true).later, 0.0);
        near(steps.demand(), 10.0 / 12.0);
        near(steps.read(0.014, true).later, 0.006);
        near(steps.demand(), 1.0);
        steps.pass(0.018);
        near(steps.demand(), 1.0 / 3.0);
    }

    #[test]
    fn a_stop_is_after_a_step_or_in_a_prompt() {
        let mut steps = Steps::new(12.0, 12.0);
        steps.read(0.03, true);
        steps.pass(0.01);
        near(steps.stop(), 0.0);
        assert!(steps.stands());
        steps.go_on();
        steps.pass(0.025);
        near(steps.stop(), 0.007);
        steps.pass(1.0);
        near(steps.progress, 0.042);
    }
}
