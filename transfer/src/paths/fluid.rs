//! Fluid model of concurrent copies: computes when copies that begin together end, and the rate of a pipe from the measured end.
//!
//! ```text
//!   rate ▲            ┌─────────┐
//!        │   ┌────────┘ alone   │ b
//!        │   ├────────┐─────────┘     rates change where a copy begins to flow, and where one ends
//!        └───┴────────┴─────────┴─► time
//!         latency     a ends
//! ```

use smallvec::SmallVec;

use super::rates::{Pipe, fill};

/// Bytes of one copy, with its start time and maximum rate per microsecond.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stint {
    pub(super) starts: f64,
    pub(super) bytes: f64,
    pub(super) most: f64,
}

/// Rounding threshold: less than a byte left counts as complete.
const NOTHING: f64 = 0.5;
/// Number of bisection steps, enough for full floating-point precision.
const HALVINGS: usize = 60;

/// Returns the end of the last copy, in microseconds.
pub(super) fn ends(stints: &[Stint], pipes: &[Pipe]) -> f64 {
    let mut left: SmallVec<[f64; 16]> = stints.iter().map(|stint| stint.bytes).collect();
    let mut rates: SmallVec<[f64; 16]> = SmallVec::from_elem(0.0, stints.len());
    let mut now = 0.0;
    // Each round a copy begins or ends.
    for _ in 0..=2 * stints.len() {
        let flowing = |(stint, left): (&Stint, &f64)| stint.starts <= now && *left > NOTHING;
        let demands: SmallVec<[f64; 16]> =
            stints.iter().zip(&left).map(|pair| if flowing(pair) { pair.0.most } else { 0.0 }).collect();
        fill(&demands, pipes, &mut rates);
        let begins = stints.iter().map(|stint| stint.starts - now).filter(|wait| *wait > 0.0);
        let ends = left.iter().zip(&rates).filter(|(_, rate)| **rate > 0.0).map(|(left, rate)| left / rate);
        let Some(step) = begins.chain(ends).reduce(f64::min) else { break };
        for (left, rate) in left.iter_mut().zip(&rates) {
            *left -= rate * step;
        }
        now += step;
    }
    now
}

/// Returns the maximum combined rate of the flows `members` if the last one ended at `took`.
pub(super) fn ceiling(stints: &[Stint], pipes: &[Pipe], members: u64, took: f64) -> f64 {
    let mut pipes: SmallVec<[Pipe; 16]> = SmallVec::from_slice(pipes);
    let (mut low, mut high) = (0.0, stints.iter().map(|stint| stint.most).sum::<f64>());
    for _ in 0..HALVINGS {
        let rate = f64::midpoint(low, high);
        pipes.push(Pipe { flows: members, rate });
        let late = ends(stints, &pipes) > took;
        pipes.pop();
        if late {
            low = rate;
        } else {
            high = rate;
        }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Stint = Stint { starts: 2.0, bytes: 100.0, most: 10.0 };
    const B: Stint = Stint { starts: 5.0, bytes: 400.0, most: 20.0 };

    #[test]
    fn copies_that_share_nothing_end_by_themselves() {
        assert_eq!(ends(&[A, B], &[]), 25.0);
        assert_eq!(ends(&[], &[]), 0.0);
    }

    #[test]
    fn copies_that_share_end_when_the_pipe_has_carried_them() {
        // 10 a microsecond for 3, then 12 shared evenly until the first has its 70 more, then the rest.
        let pipe = Pipe { flows: 0b11, rate: 12.0 };
        let both = 5.0 + 70.0 / 6.0;
        assert!((ends(&[A, B], &[pipe]) - (both + (400.0 - 70.0) / 12.0)).abs() < 1e-6);
    }

    #[test]
    fn the_pipe_is_found_from_the_time() {
        for rate in [3.0, 12.0, 25.0] {
            let took = ends(&[A, B], &[Pipe { flows: 0b11, rate }]);
            assert!((ceiling(&[A, B], &[], 0b11, took) - rate).abs() < 1e-3, "{rate}");
        }
    }
}
