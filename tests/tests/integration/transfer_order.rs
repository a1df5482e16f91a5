//! The order of copies, against a model: `cargo test --release -p glake-tests --test integration transfer_order -- --ignored` takes a
//! million steps.

#![allow(clippy::unwrap_used)]

use glake_tests::transfer::{Litmus, Server, ServerShape};
use glake_transfer::paths::Way;
use glake_units::Bytes;

/// Steps over some programs, each on a server of its own. In every second two only half of the GPUs have streams, for GPUs that all
/// have copies at a time keep their links to themselves.
fn run(programs: u64, steps: u64) {
    let (mut split, mut staged) = (0, Bytes::ZERO);
    for number in 1..=programs {
        let server = Server::new(ServerShape::four(Bytes::mib(512)));
        let mut litmus = Litmus::new(&server, number, if number % 4 < 2 { 4 } else { 2 });
        let tally = litmus.run(steps);
        assert!(tally.copies > steps / 5 && tally.gates > 0 && tally.frees > 0, "{tally:?}");
        litmus.end();
        let statistics = server.engine.statistics();
        split += statistics.split_copies;
        let by_slots = statistics.paths.iter().filter(|path| path.way == Way::Staged);
        staged = staged.saturating_add(by_slots.map(|path| path.bytes).sum());
        // Nothing fails here: a part that was refused was out of order on its lane, or in its slot.
        assert!(statistics.paths.iter().all(|path| path.retries == 0), "{statistics:?}");
        server.end();
    }
    // How many vary from program to program.
    assert!(split > programs * steps / 10, "{split} copies were split");
    assert!(staged > Bytes::kib(programs * steps * 50), "{staged} went through slots");
}

#[test]
fn every_kernel_finds_what_the_model_says() {
    run(4, 4_000);
}

#[test]
#[ignore = "takes minutes"]
fn every_kernel_finds_what_the_model_says_for_a_million_steps() {
    run(20, 50_000);
}
