//! Fluid model of copies in flight: each gets a fair share of every pipe on its route.
//!
//! Rates are max-min fair (Bertsekas and Gallager, Data Networks, 6.5.2): the fullest pipe is shared evenly, its flows are fixed, and so on
//! with the rest. Rates change only when a flow begins or ends.
//!
//! Invariant: `remaining` of every flow is exact at time `at`.

use std::sync::Arc;

/// Pipes of a copy, by index in the plumbing, with the share of each that one byte takes; sorted, without duplicates.
pub(super) type Route = Arc<[(usize, f64)]>;

/// Bytes that travel along a route.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Load {
    pub(super) route: Route,
    pub(super) bytes: u64,
    /// Maximum rate of this copy alone, in bytes per nanosecond.
    pub(super) cap: f64,
}

impl Load {
    pub(super) fn is_in(&self, pipe: usize) -> bool {
        self.route.iter().any(|(through, _)| *through == pipe)
    }
}

#[derive(Debug)]
struct Flow {
    load: Load,
    owner: u64,
    remaining: f64,
    rate: f64,
}

#[derive(Debug)]
pub(super) struct FlowNet {
    /// Capacity of each pipe in bytes per nanosecond (equal to GB/s).
    pipes: Vec<f64>,
    flows: Vec<Flow>,
    at: u64,
}

/// Bytes below which a flow counts as finished: rounding leaves a remainder.
const NOTHING: f64 = 0.5;

impl FlowNet {
    pub(super) fn new(pipes: Vec<f64>) -> Self {
        FlowNet { pipes, flows: Vec::new(), at: 0 }
    }

    /// Begins flows at time `now`, which must not be after `next`.
    pub(super) fn begin(&mut self, now: u64, owner: u64, loads: &[Load]) {
        self.run_to(now);
        self.flows.extend(loads.iter().map(|load| Flow {
            load: load.clone(),
            owner,
            remaining: load.bytes as f64,
            rate: 0.0,
        }));
        self.share();
    }

    /// Returns whether any flow uses a pipe.
    pub(super) fn is_in(&self, pipe: usize) -> bool {
        self.flows.iter().any(|flow| flow.load.is_in(pipe))
    }

    /// Returns the time at which the next flow ends.
    pub(super) fn next(&self) -> Option<u64> {
        let left = |flow: &Flow| (flow.remaining / flow.rate).ceil().max(0.0) as u64;
        self.flows.iter().map(left).min().map(|left| self.at.saturating_add(left))
    }

    /// Advances time to `now`, at most to [`FlowNet::next`]; returns the owner of each flow that ended.
    pub(super) fn end(&mut self, now: u64) -> Vec<u64> {
        self.run_to(now);
        let mut owners = Vec::new();
        self.flows.retain(|flow| {
            let alive = flow.remaining > NOTHING;
            if !alive {
                owners.push(flow.owner);
            }
            alive
        });
        if !owners.is_empty() {
            self.share();
        }
        owners
    }

    fn run_to(&mut self, now: u64) {
        let passed = now.saturating_sub(self.at) as f64;
        for flow in &mut self.flows {
            flow.remaining -= flow.rate * passed;
        }
        self.at = self.at.max(now);
    }

    fn share(&mut self) {
        let mut left = self.pipes.clone();
        let mut open: Vec<usize> = (0..self.flows.len()).collect();
        while !open.is_empty() {
            let mut users = vec![0.0; left.len()];
            for &flow in &open {
                for &(pipe, weight) in &*self.flows[flow].load.route {
                    users[pipe] += weight;
                }
            }
            let even = |flow: &Flow| {
                let shares = flow.load.route.iter().map(|&(pipe, _)| left[pipe] / users[pipe]);
                shares.fold(flow.load.cap, f64::min)
            };
            let shares: Vec<f64> = open.iter().map(|&flow| even(&self.flows[flow])).collect();
            let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
            let mut rest = Vec::new();
            for (&flow, share) in open.iter().zip(shares) {
                if share > least {
                    rest.push(flow);
                    continue;
                }
                // Every copy makes progress, however little bandwidth the topology gives it.
                self.flows[flow].rate = least.clamp(1e-6, 1e9);
                for &(pipe, weight) in &*self.flows[flow].load.route {
                    left[pipe] = (left[pipe] - least * weight).max(0.0);
                }
            }
            open = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(route: &[usize], bytes: u64) -> Load {
        Load { route: route.iter().map(|pipe| (*pipe, 1.0)).collect(), bytes, cap: f64::INFINITY }
    }

    #[test]
    fn shares_are_max_min_fair() {
        let mut net = FlowNet::new(vec![10.0, 4.0, 100.0]);
        net.begin(0, 1, &[load(&[0, 2], 600), load(&[0, 1, 2], 400), load(&[1], 200)]);
        let rates: Vec<f64> = net.flows.iter().map(|flow| flow.rate).collect();
        assert_eq!(rates, [8.0, 2.0, 2.0]);
        assert_eq!(net.next(), Some(75));
        assert_eq!(net.end(75), [1]);
        assert_eq!(net.flows[0].rate, 2.0);
        assert_eq!(net.next(), Some(100));
        assert_eq!(net.end(100), [1]);
        assert_eq!(net.flows[0].rate, 4.0);
        assert_eq!(net.next(), Some(150));
    }

    #[test]
    fn a_capped_flow_leaves_bandwidth_to_others() {
        let mut net = FlowNet::new(vec![10.0]);
        net.begin(5, 1, &[Load { cap: 1.0, ..load(&[0], 100) }, load(&[0], 900)]);
        assert_eq!(net.flows.iter().map(|flow| flow.rate).collect::<Vec<_>>(), [1.0, 9.0]);
        assert_eq!(net.next(), Some(105));
        assert_eq!(net.end(105), [1, 1]);
        assert_eq!(net.next(), None);
    }
}
