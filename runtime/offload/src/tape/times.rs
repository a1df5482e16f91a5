//! Begin of each step of a pass, interpolated from marks.

use std::time::Duration;

use crate::Position;

/// Time marks and waits, in any order of positions.
#[derive(Clone, Debug, Default)]
pub(super) struct Times {
    marks: Vec<(Position, Duration)>,
    waits: Vec<(Position, Duration)>,
}

impl Times {
    /// Records that `at` steps were complete after `since_begin`.
    pub(super) fn mark(&mut self, at: Position, since_begin: Duration) {
        self.marks.push((at, since_begin));
    }

    /// Records that the work waited before the step at `at`.
    pub(super) fn wait(&mut self, at: Position, wait: Duration) {
        self.waits.push((at, wait));
    }

    /// Returns whether any mark has a positive time.
    pub(super) fn is_timed(&self) -> bool {
        self.marks.iter().any(|(at, time)| at.0 > 0 && !time.is_zero())
    }

    /// Returns the begin of each of `steps` steps and the end of the last one, without waits. Steps between two marks take equally long;
    /// steps after the last mark take no time.
    pub(super) fn resolve(&self, steps: usize) -> Vec<Duration> {
        let mut marks: Vec<(usize, Duration)> = vec![(0, Duration::ZERO)];
        marks.extend(self.marks.iter().map(|(at, time)| (at.0.min(steps), *time)));
        // A pass begins with its first pack: a mark there sets nothing.
        marks.retain(|(at, time)| *at > 0 || time.is_zero());
        marks.sort();
        let mut waits = self.waits.clone();
        waits.sort();
        let (mut waits, mut waited) = (waits.into_iter().peekable(), Duration::ZERO);
        let mut times = Vec::with_capacity(steps + 1);
        let (mut from, mut since) = (0, Duration::ZERO);
        times.push(since);
        for (at, time) in marks {
            while let Some((_, wait)) = waits.next_if(|(before, _)| before.0 < at) {
                waited = waited.saturating_add(wait);
            }
            let until = time.saturating_sub(waited).max(since);
            if at > from {
                let (span, parts) = (until - since, at - from);
                times.extend((1..=parts).map(|part| since + span.mul_f64(part_of(part, parts))));
            }
            (from, since) = (at, until);
            if let Some(last) = times.last_mut() {
                *last = until;
            }
        }
        times.resize(steps + 1, since);
        times
    }
}

#[allow(clippy::cast_precision_loss)] // counts of steps
fn part_of(part: usize, parts: usize) -> f64 {
    part as f64 / parts as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(times: &[Duration]) -> Vec<u128> {
        times.iter().map(Duration::as_millis).collect()
    }

    #[test]
    fn steps_between_two_marks_are_equally_long() {
        let mut times = Times::default();
        times.mark(Position(4), Duration::from_millis(100));
        times.mark(Position(2), Duration::from_millis(20));
        assert_eq!(millis(&times.resolve(6)), [0, 10, 20, 60, 100, 100, 100]);
        assert!(times.is_timed());
    }

    #[test]
    fn what_was_waited_for_is_no_time_of_the_pass() {
        let mut times = Times::default();
        times.mark(Position(2), Duration::from_millis(20));
        times.mark(Position(4), Duration::from_millis(100));
        times.wait(Position(3), Duration::from_millis(60));
        assert_eq!(millis(&times.resolve(4)), [0, 10, 20, 30, 40]);
    }

    #[test]
    fn without_marks_nothing_takes_time_and_times_never_go_back() {
        assert_eq!(millis(&Times::default().resolve(2)), [0, 0, 0]);
        assert!(!Times::default().is_timed());
        let mut times = Times::default();
        times.mark(Position(1), Duration::from_millis(50));
        times.mark(Position(2), Duration::from_millis(40));
        assert_eq!(millis(&times.resolve(2)), [0, 50, 50]);
    }
}
