//! Rates of flows that share pipes: max-min fairness by progressive filling.
//!
//! ```text
//!   level ▲
//!         │            ┌────────┐ until its pipe alone is full, or it wants no more
//!         │   ┌────────┤        │
//!         │   │ a    b │   c    │  all rise together; a and b stop where the pipe that they share is full
//!         └───┴────────┴────────┴─►
//! ```
//!
//! Bertsekas and Gallager, Data Networks, 6.5.2, with a demand that bounds each flow.
//!
//! Invariants of what is filled: no flow is above its demand, no pipe above its rate (but for rounding), and a flow that
//! gets less than its demand goes through a full pipe in which no other flow gets more.

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
