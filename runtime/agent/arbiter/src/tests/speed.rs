//! Time of a decision among 1,000 workers: the median is at most 50 us in release builds, where the test prints it. On all machines the
//! test fails only if a decision is not linear in the number of workers.

use std::time::{Duration, Instant};

use glake_units::Bytes;

use super::world::FLOOR;
use crate::{Account, Action, Arbiter, Event, GpuId, Joined, Settings, WorkerId};

/// Returns the median and the 99th percentile of decision times among `workers` workers.
fn decisions_among(workers: u64) -> (Duration, Duration) {
    let (gpu, mut arbiter, mut now) = (GpuId(0), Arbiter::new(Settings::default()), Duration::ZERO);
    let (budget, total) = (Bytes::gib(workers * 9 / 10), Bytes::gib(workers * 2));
    arbiter.step(Event::Capacity { gpu, budget, total }, now);
    for id in 0..workers {
        let held = Account { evicted: Bytes::gib(1), ..Account::nothing(gpu, FLOOR) };
        arbiter.step(Event::Joined(Joined::alone(WorkerId(id), vec![held])), now);
    }
    let resident = Account { resident: Bytes::gib(1), ..Account::nothing(gpu, FLOOR) };
    let gone = Account { evicted: Bytes::gib(1), ..Account::nothing(gpu, FLOOR) };
    let mut times = Vec::new();
    for round in 0..3_000_u64 {
        let worker = WorkerId(round * 7 % workers);
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
                arbiter.step(Event::Shrunk { worker, accounts: vec![gone.clone()] }, now);
            }
        }
        arbiter.step(Event::Refilled { worker, accounts: vec![resident.clone()] }, now);
    }
    times.sort();
    (times[times.len() / 2], times[times.len() * 99 / 100])
}

#[test]
fn a_decision_is_linear_in_the_number_of_workers() {
    let ((few, _), (median, tail)) = (decisions_among(100), decisions_among(1_000));
    println!(
        "1,000 workers: a decision takes {median:?}, one in a hundred {tail:?} and more; among 100 {few:?}"
    );
    // Ten times as many workers take ten times as long; a quadratic algorithm would take a hundred times.
    assert!(median < few * 30, "{median:?}, {few:?}");
}
