//! The order of copies, against a model: `cargo test --release -p glake-tests --test transfer_order -- --ignored` takes a
//! million steps.

#![allow(clippy::unwrap_used)]

use glake_tests::transfer::{Litmus, Server, ServerShape};
use glake_units::Bytes;

/// Steps over some programs, each on a server of its own.
fn run(programs: u64, steps: u64) {
    for number in 1..=programs {
        let server = Server::new(ServerShape::four(Bytes::mib(512)));
        let mut litmus = Litmus::new(&server, number);
        let tally = litmus.run(steps);
        assert!(tally.copies > steps / 5 && tally.gates > 0 && tally.frees > 0, "{tally:?}");
        litmus.end();
        let statistics = server.engine.statistics();
        assert!(statistics.split_copies > steps / 20, "{statistics:?}");
        server.end();
    }
}

#[test]
fn every_kernel_finds_what_the_model_says() {
    run(2, 4_000);
}

#[test]
#[ignore = "takes minutes"]
fn every_kernel_finds_what_the_model_says_for_a_million_steps() {
    run(20, 50_000);
}
