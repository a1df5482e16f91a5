//! Relays of a process of simulated devices are suspended while everything is evicted, and come back with the first refill.

use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_units::Bytes;

use glake_tiers::RegionOptions;

use super::super::super::Process;
use super::super::tests::{Written, started};
use super::super::{MemoryUsage, Refill, Shrink};

const RELAYS: [DeviceId; 2] = [DeviceId(2), DeviceId(3)];

impl Process {
    /// Whether the engine has contexts of its own there.
    fn has_contexts(&self) -> [bool; 2] {
        let costs = self.registry.engine.made().map_or(Vec::new(), |engine| engine.relay_cost());
        RELAYS.map(|relay| costs.iter().any(|cost| cost.relay == relay))
    }

    fn wait_for_relays(&self, count: u32) {
        let begin = Instant::now();
        while self.registry.engine.made().is_none_or(|engine| engine.relays().len() != count) {
            assert!(begin.elapsed() < Duration::from_secs(20), "relays are not made ready");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn named_relays(&self) -> Vec<MemoryUsage> {
        self.regions()
            .memory_usage()
            .unwrap()
            .into_iter()
            .filter(|left| left.holder.contains("copies of other GPUs,"))
            .collect()
    }
}

/// Pools on two devices; the other two relay.
fn served(settings: &str) -> (Process, Vec<Written>) {
    let process = started(settings);
    process.regions().define(RegionOptions::of("a")).unwrap();
    let blocks = (0..4_u64).map(|seed| match seed {
        0 | 1 => process.written_in("a", seed as i64, Bytes::mib(24), seed),
        _ => process.written(seed as i64 - 2, Bytes::mib(6), seed),
    });
    let blocks = blocks.collect();
    process.copies().multi_path(true).unwrap();
    process.wait_for_relays(2);
    (process, blocks)
}

#[test]
fn contexts_go_with_everything_and_come_back_with_anything() {
    let (process, blocks) = served("");
    assert_eq!(process.has_contexts(), [true; 2]);
    for round in 0..50 {
        // A part of it leaves the relays as they are.
        process.regions().shrink(&Shrink { tags: Some(vec!["a".to_owned()]), ..Shrink::default() }).unwrap();
        assert_eq!(process.has_contexts(), [true; 2]);
        let report = process.regions().shrink(&Shrink::default()).unwrap();
        assert_eq!(process.has_contexts(), [false; 2], "round {round}");
        assert!(
            report.gpu.iter().all(|left| !RELAYS.iter().any(|relay| left.device == Some(*relay))),
            "{:?}",
            report.gpu
        );
        assert!(process.named_relays().is_empty());
        // Neither of these makes them again.
        process.regions().views().unwrap();
        process.reports().stats(0).unwrap();
        process.trim(None, Bytes::ZERO).unwrap();
        assert_eq!(process.has_contexts(), [false; 2], "round {round}");
        match round % 3 {
            0 => drop(process.regions().refill(&Refill::default()).unwrap()),
            1 => {
                // Touched: one device's default region comes back, and the relays with it.
                process.regions().bring_back(blocks[2].address).unwrap();
                process.regions().refill(&Refill::default()).unwrap();
            }
            _ => {
                process.regions().refill(&Refill { wait: false, ..Refill::default() }).unwrap();
                process.regions().refill(&Refill::default()).unwrap();
            }
        }
        blocks.iter().for_each(|block| process.check(block));
        process.wait_for_relays(2);
        assert_eq!(process.has_contexts(), [true; 2]);
    }
    process.end(blocks);
}

#[test]
fn asking_for_relays_wakes_them() {
    let (process, blocks) = served("");
    process.regions().shrink(&Shrink::default()).unwrap();
    assert_eq!(process.has_contexts(), [false; 2]);
    process.copies().multi_path(false).unwrap();
    process.copies().multi_path(true).unwrap();
    process.wait_for_relays(2);
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn a_gpu_that_the_program_begins_to_use_is_left_to_it() {
    let (process, blocks) = served("");
    let driver = process.registry.completion_events.driver().clone();
    let stream = glake_device::owned::OwnedStream::new(&driver, RELAYS[0]).unwrap();
    process.regions().shrink(&Shrink::default()).unwrap();
    assert_eq!(process.has_contexts(), [false; 2]);
    assert!(process.named_relays().is_empty());
    process.regions().refill(&Refill::default()).unwrap();
    process.wait_for_relays(1);
    assert_eq!(process.has_contexts(), [false, true]);
    drop(stream);
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn a_pool_that_starts_while_relays_are_suspended_is_opened_to_them_when_they_are_resumed() {
    let (process, mut blocks) = served("");
    process.regions().shrink(&Shrink::default()).unwrap();
    blocks.push(process.written(2, Bytes::mib(6), 9));
    assert_eq!(process.has_contexts(), [false; 2]);
    process.regions().refill(&Refill::default()).unwrap();
    // The pool's GPU is the program's now.
    process.wait_for_relays(1);
    let pool = &process.device(2).unwrap().started().unwrap().pool;
    let begin = Instant::now();
    while !pool.peer_access().devices().contains(RELAYS[1]) {
        assert!(begin.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}
