//! How long a decision takes among 1,000 workers: a median of 50 us at most in release. Here it is told, and may be
//! ten times that.

use std::time::{Duration, Instant};

use glake_units::Bytes;

use super::world::FLOOR;
use crate::{Action, Arbiter, Event, GpuId, Holding, Joined, Settings, WorkerId};

#[test]
fn a_decision_among_a_thousand_workers() {
    let (gpu, mut arbiter, mut now) = (GpuId(0), Arbiter::new(Settings::default()), Duration::ZERO);
    let (budget, total) = (Bytes::gib(900), Bytes::gib(2000));
    arbiter.step(Event::Capacity { gpu, budget, total }, now);
    for id in 0..1_000 {
        let held = Holding { evicted: Bytes::gib(1), ..Holding::nothing(gpu, FLOOR) };
        arbiter.step(Event::Joined(Joined::alone(WorkerId(id), vec![held])), now);
    }
    let resident = Holding { resident: Bytes::gib(1), ..Holding::nothing(gpu, FLOOR) };
    let gone = Holding { evicted: Bytes::gib(1), ..Holding::nothing(gpu, FLOOR) };
    let mut times = Vec::new();
    for round in 0..3_000_u64 {
        let worker = WorkerId(round * 7 % 1_000);
        now += Duration::from_secs(1);
        let begin = Instant::now();
        let mut actions = arbiter.step(Event::Want { worker, deadline: None }, now);
        let next = arbiter.next_deadline();
        times.push(begin.elapsed());
        assert!(
            next.is_some() || actions.is_empty() || actions.iter().any(|a| matches!(a, Action::Admit { .. }))
        );
        for action in std::mem::take(&mut actions) {
            if let Action::Shrink { worker, gpu, bytes, .. } = action {
                actions.extend(arbiter.step(Event::Returned { worker, gpu, bytes }, now));
                arbiter.step(Event::Shrunk { worker, holdings: vec![gone.clone()] }, now);
            }
        }
        arbiter.step(Event::Refilled { worker, holdings: vec![resident.clone()] }, now);
    }
    times.sort();
    let (median, tail) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    println!("1,000 workers: a decision takes {median:?}, one in a hundred {tail:?} and more");
    assert!(median < Duration::from_micros(500), "{median:?}");
}
