//! How a worker computes: a step gives each of its requests a token, and prompts are read between two steps.
//!
//! ```text
//! progress ──┬── step ──┬── step ──┬─ prompt ─ prompt ─┬── step ──┬──►      in the worker's own seconds of compute
//!            steps_from            reads_from          steps_from read_by
//! ```

/// Compute that two sums of the same figures may differ by.
pub(super) const HAIR: f64 = 1e-7;

/// Where a worker is in its steps and prompts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Steps {
    /// Seconds of compute that it has had.
    pub(super) progress: f64,
    /// A step's.
    pub(super) length: f64,
    /// The part of it in which the GPU computes.
    computes: f64,
    /// When prompts were read last, or will be, and how long that takes.
    reads_from: f64,
    reads: f64,
    /// From when on steps follow that, one after the other.
    steps_from: f64,
    /// Where it is to stop: at the next safe point, once it is to park.
    stops_at: Option<f64>,
}

/// One more prompt is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    /// From when on, with those that are read before the same step.
    pub(super) from: f64,
    /// How much later it makes what comes after that.
    pub(super) later: f64,
    /// How long no token is answered.
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

    /// So much compute later, or where it stops.
    pub(super) fn pass(&mut self, compute: f64) {
        self.progress = (self.progress + compute).min(self.stops_at.unwrap_or(f64::INFINITY));
    }

    /// It is to stop at its next safe point: after the step that is under way, or between two parts of a prompt. Says how
    /// far that is.
    pub(super) fn stop(&mut self) -> f64 {
        let is_reading = self.progress + HAIR < self.steps_from;
        let at = if is_reading { self.progress } else { self.step_ends().max(self.progress) };
        self.stops_at = Some(at);
        at - self.progress
    }

    /// It need not stop.
    pub(super) fn go_on(&mut self) {
        self.stops_at = None;
    }

    pub(super) fn stands(&self) -> bool {
        self.stops_at.is_some_and(|at| at <= self.progress)
    }

    /// The part of a GPU that it can use now.
    pub(super) fn demand(&self) -> f64 {
        let is_read = self.progress + HAIR >= self.reads_from && self.progress + HAIR < self.read_by();
        let reads = if is_read { self.reads } else { 0.0 };
        ((reads + self.computes) / self.length).min(1.0)
    }

    /// When it becomes another, or stops.
    pub(super) fn turns(&self) -> impl Iterator<Item = f64> {
        let turns = [Some(self.reads_from), Some(self.read_by()), self.stops_at];
        let progress = self.progress;
        turns.into_iter().flatten().filter(move |at| *at > progress)
    }

    /// When the step ends before which prompts are read.
    pub(super) fn read_by(&self) -> f64 {
        self.steps_from + self.length
    }

    /// A prompt that takes so long: it is read after the step that is under way, and after others that are; at once where
    /// nothing is answered.
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

    /// By how much later the step after prompts ends than one before which none is read: what they take, less what the
    /// GPU does nothing in.
    fn delay(&self) -> f64 {
        (self.reads + self.computes - self.length).max(0.0)
    }

    /// The end of the step that is under way.
    fn step_ends(&self) -> f64 {
        let steps = ((self.progress - self.steps_from - HAIR) / self.length).ceil();
        self.steps_from + steps.max(0.0) * self.length
    }
}

/// The most that one has of what all share, whose demands these are, so that none has less than an equal part of what
/// others leave.
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
