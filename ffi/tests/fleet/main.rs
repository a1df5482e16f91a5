//! Models that share a GPU under an agent, in random programs: `glake serve` and workers, each a process, over a simulated GPU.
//!
//! ```text
//! program (pure, of a seed) ─► script: a thread a model ─┬─► glake serve          start, stop, killed, started again
//!                                                        └─► workers: the library   load, use, grow, leave, killed
//!            node: leases within the budget, memory within the GPU, at any time
//! ```
//!
//! Every start ends with a worker that serves; no memory of a worker that loads or runs is taken; every request is served in
//! time; every byte is what was written. `GLAKE_SEED` runs the program of one seed.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

mod node;
mod program;
mod script;
mod worker;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

/// Helper process of the other tests, not a test: the agent.
#[test]
#[ignore = "the agent that the tests beside it start"]
fn agent() {
    let Some(folder) = std::env::var_os(node::FOLDER).map(PathBuf::from) else { return };
    let _ = node::serve(&folder);
}

/// Helper process of the other tests and the agent, not a test: a worker.
#[test]
#[ignore = "the process that the tests beside it and the agent start"]
fn worker() {
    let Some(folder) = std::env::var_os(node::FOLDER).map(PathBuf::from) else { return };
    worker::run(&folder, &std::env::var("GLAKE_WORKER").unwrap());
}

/// Runs the programs of these seeds, the given number at a time.
fn run(seeds: std::ops::Range<u64>, at_a_time: usize) {
    let seeds = match std::env::var("GLAKE_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => seeds,
    };
    let next = AtomicU64::new(seeds.start);
    let failures = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..at_a_time {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    if let Err(why) = script::run(seed) {
                        failures.lock().unwrap().push(why);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} programs failed\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn every_start_ends_with_a_worker_that_serves() {
    run(0..20, 10);
}

#[test]
fn soak_every_start_ends_with_a_worker_that_serves() {
    if std::env::var_os("GLAKE_SOAK").is_some() {
        run(20..220, 6);
    }
}
