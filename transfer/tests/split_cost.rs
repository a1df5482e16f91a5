//! What a split costs: no memory of the heap, and how much time.

#![allow(missing_docs)]
// What goes wrong here fails the test.
#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::time::Instant;

use allocation_counter::measure;
use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_device::topology::Topology;
use glake_sim::load;
use glake_transfer::paths::{Ask, Direction, GpuLinks, Load, PathGraph, split};
use glake_units::Bytes;

const SERVERS: [&str; 3] = ["h200x4", "a100x8", "h20x8"];

fn graph(name: &str) -> PathGraph {
    PathGraph::conservative(&GpuLinks::of(&Topology::from(&load(name).unwrap())))
}

#[test]
fn nothing_is_taken_from_the_heap() {
    assert_eq!(measure(|| drop(black_box(Box::new(1)))).count_total, 1, "allocations are counted");
    let (idle, busy) = (Load::new(), Load::new());
    for gpu in 0..8 {
        busy.begin(DeviceId(gpu / 2), DeviceId(gpu), Direction::FromGpu, Bytes::mib(64));
    }
    for graph in SERVERS.map(graph) {
        let made = measure(|| {
            for (size, load) in [(0, &idle), (1, &idle), (3, &busy), (64, &idle), (4096, &busy)] {
                for (zero_staging, staged) in
                    [(DeviceSet::ALL, DeviceSet::EMPTY), (DeviceSet::EMPTY, DeviceSet::ALL)]
                {
                    let (target, direction, size) = (DeviceId(1), Direction::FromGpu, Bytes::mib(size));
                    black_box(split(
                        &graph,
                        &Ask { target, direction, size, zero_staging, staged, load, expected: 0 },
                    ));
                }
            }
        });
        assert_eq!(made.count_total, 0, "{made:?}");
    }
}

/// Nanoseconds a split: of an idle server, of a busy one, of a copy that is not split.
#[test]
#[ignore = "a measurement: cargo test --release -p glake-transfer --test split_cost -- --ignored --nocapture"]
fn how_long_it_takes() {
    for name in SERVERS {
        let graph = graph(name);
        let (idle, busy) = (Load::new(), Load::new());
        busy.begin(DeviceId(1), DeviceId(1), Direction::ToGpu, Bytes::mib(64));
        let mut ask = Ask {
            target: DeviceId(0),
            direction: Direction::ToGpu,
            size: Bytes::gib(1),
            zero_staging: DeviceSet::ALL,
            staged: DeviceSet::EMPTY,
            load: &idle,
            expected: 0,
        };
        for (what, size, load) in [
            ("64 KiB", Bytes::kib(64), &idle),
            ("1 MiB", Bytes::mib(1), &idle),
            ("4 MiB", Bytes::mib(4), &idle),
            ("64 MiB", Bytes::mib(64), &idle),
            ("64 MiB, busy", Bytes::mib(64), &busy),
        ] {
            (ask.size, ask.load) = (size, load);
            let rounds: u128 = 1_000_000;
            let begun = Instant::now();
            let paths: usize = (0..rounds).map(|_| split(&graph, black_box(&ask)).len()).sum();
            println!(
                "{name} {what}: {} ns, {} paths",
                begun.elapsed().as_nanos() / rounds,
                u128::try_from(paths).unwrap() / rounds
            );
        }
    }
}
