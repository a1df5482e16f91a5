//! Fluid model of concurrent copies: computes the rates of flows that share pipes, the ends of copies that begin together, and the rate of a
//! pipe from a measured end.
//!
//! ```text
//!   rate ▲            ┌─────────┐
//!        │   ┌────────┘ alone   │ b
//!        │   ├────────┐─────────┘     rates change where a copy begins to flow, and where one ends
//!        └───┴────────┴─────────┴─► time
//!         latency     a ends
//!
//!   level ▲
//!         │            ┌────────┐ until its own pipe is full, or its demand is met
//!         │   ┌────────┤        │
//!         │   │ a    b │   c    │  all rise together; a and b stop where their shared pipe is full
//!         └───┴────────┴────────┴─►
//! ```
//!
//! Rates are max-min fair, by progressive filling (Bertsekas and Gallager, Data Networks, 6.5.2), with a demand that bounds each flow.
//!
//! Invariants of the rates: no flow exceeds its demand and no pipe its rate (except for rounding). A flow below its demand goes through a full
//! pipe in which no other flow has a higher rate.

use smallvec::SmallVec;

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

/// Pipe and its flows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pipe {
    /// Flows, as a bit set of indices.
    pub(super) flows: u64,
    /// Capacity of the pipe.
    pub(super) rate: f64,
}

/// Relative tolerance for equality: 10^-12, far above rounding errors and far below measurable differences.
const EVEN: f64 = 1.0 + 1e-12;

/// Computes the rate of each flow from its demand and the pipes. At most 64 flows.
pub(super) fn fill(demands: &[f64], pipes: &[Pipe], rates: &mut [f64]) {
    let mut open: u64 = 0;
    let known = u64::MAX.checked_shr(64 - u32::try_from(demands.len()).unwrap_or(64)).unwrap_or(0);
    for (flow, demand) in demands.iter().enumerate() {
        rates[flow] = 0.0;
        open |= u64::from(*demand > 0.0) << flow;
    }
    while open != 0 {
        let at_full = |pipe: &Pipe| {
            let members = (pipe.flows & open).count_ones();
            let fixed: f64 = each(pipe.flows & known & !open).map(|flow| rates[flow]).sum();
            (members > 0).then(|| ((pipe.rate - fixed) / f64::from(members)).max(0.0))
        };
        let mut level = each(open).map(|flow| demands[flow]).fold(f64::INFINITY, f64::min);
        let mut full: u64 = 0;
        for pipe in pipes {
            if let Some(at) = at_full(pipe) {
                if at * EVEN < level {
                    (level, full) = (at, 0);
                }
                if at <= level * EVEN {
                    full |= pipe.flows & open;
                }
            }
        }
        let stopped: u64 =
            each(open).filter(|&flow| demands[flow] <= level * EVEN).map(|flow| 1 << flow).sum();
        for flow in each(stopped | full) {
            rates[flow] = level;
        }
        // A level that is no number would stop nobody.
        open = if stopped | full == 0 { 0 } else { open & !(stopped | full) };
    }
}

/// Iterates over the set bits.
fn each(mut bits: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lowest = (bits != 0).then(|| bits.trailing_zeros())?;
        bits &= bits - 1;
        usize::try_from(lowest).ok()
    })
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

#[cfg(test)]
mod rates_tests {
    use proptest::prelude::*;

    use super::*;

    fn filled(demands: &[f64], pipes: &[(u64, f64)]) -> Vec<f64> {
        let pipes: Vec<Pipe> = pipes.iter().map(|&(flows, rate)| Pipe { flows, rate }).collect();
        let mut rates = vec![0.0; demands.len()];
        fill(demands, &pipes, &mut rates);
        rates
    }

    #[test]
    fn shares_are_max_min() {
        assert_eq!(filled(&[10.0, 10.0, 10.0], &[(0b011, 4.0)]), [2.0, 2.0, 10.0]);
        assert_eq!(filled(&[10.0, 1.0, 10.0], &[(0b011, 4.0), (0b111, 9.0)]), [3.0, 1.0, 5.0]);
        assert_eq!(filled(&[0.0, 5.0], &[(0b11, 4.0)]), [0.0, 4.0]);
        assert_eq!(filled(&[], &[]), [0.0; 0]);
    }

    proptest! {
        #[test]
        fn every_cap_holds_and_every_flow_has_its_bottleneck(
            demands in prop::collection::vec(0.1f64..100.0, 1..24),
            pipes in prop::collection::vec((any::<u64>(), 0.1f64..200.0), 0..12),
        ) {
            let rates = filled(&demands, &pipes);
            let inside = |flows: u64| (0..rates.len()).filter(move |flow| flows >> flow & 1 == 1);
            let used = |flows: u64| inside(flows).map(|flow| rates[flow]).sum::<f64>();
            for &(flows, rate) in &pipes {
                prop_assert!(used(flows) <= rate * (1.0 + 1e-9), "{} of {rate}", used(flows));
            }
            for (flow, &rate) in rates.iter().enumerate() {
                prop_assert!(rate > 0.0 && rate <= demands[flow] * (1.0 + 1e-9));
                let bottleneck = |&&(flows, cap): &&(u64, f64)| {
                    flows >> flow & 1 == 1
                        && used(flows) >= cap * (1.0 - 1e-9)
                        && inside(flows).all(|other| rates[other] <= rate * (1.0 + 1e-9))
                };
                prop_assert!(rate >= demands[flow] * (1.0 - 1e-9) || pipes.iter().find(bottleneck).is_some());
            }
        }
    }
}
