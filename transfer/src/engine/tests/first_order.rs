//! Engines with a plain scheduler: all bytes arrive by the same ways, and no copy minds another.

use std::time::Duration;

use glake_units::Bytes;

use super::fixture::{Fixture, GPU, ends};
use crate::paths::{Direction, Way};
use crate::{CopyOptions, EngineOptions, Priority, Scheduling};

const BACKGROUND: CopyOptions =
    CopyOptions { priority: Priority::Background, verify: true, waited: true, unordered: false };

fn fixture(scheduling: Scheduling) -> Fixture {
    Fixture::with("h200x4", EngineOptions { scheduling, ..EngineOptions::default() })
}

/// How long a lone copy takes, and how many of the driver's copies it is.
fn alone(scheduling: Scheduling, direction: Direction, options: CopyOptions) -> (Duration, u64) {
    let fixture = fixture(scheduling);
    let stream = fixture.stream(GPU);
    let on = fixture.user(GPU, stream.id());
    let (host, memory) = (fixture.pinned(Bytes::mib(256), 1), fixture.mapped(GPU, Bytes::mib(256)));
    let host = glake_device::owned::Span::pinned(&host, Bytes::ZERO, Bytes::mib(256)).unwrap();
    let gpu = memory.span(Bytes::ZERO, Bytes::mib(256)).unwrap();
    let (to, from) = ends(direction, &host, &gpu);
    let begin = fixture.sim.now();
    fixture.engine().copy(to, from, on, options).unwrap().wait().unwrap();
    let took = fixture.sim.now() - begin;
    fixture.engine().verify(&[(to.clone(), from.clone())], on).unwrap();
    let slices = fixture.engine().statistics().paths.iter().map(|path| path.slices).sum();
    assert!(!fixture.carried(Way::ZeroStaging).is_zero());
    drop((host, gpu, memory, stream));
    fixture.end();
    (took, slices)
}

#[test]
fn a_lone_copy_takes_as_long_as_with_the_adaptive_scheduler() {
    for direction in Direction::BOTH {
        let of = |scheduling| alone(scheduling, direction, CopyOptions::default());
        assert_eq!(of(Scheduling::FirstOrder), of(Scheduling::Adaptive));
    }
}

#[test]
fn a_background_copy_is_as_any_other() {
    let normal = alone(Scheduling::FirstOrder, Direction::ToGpu, CopyOptions::default());
    let background = alone(Scheduling::FirstOrder, Direction::ToGpu, BACKGROUND);
    assert_eq!(normal, background);
    let (_, slices) = alone(Scheduling::Adaptive, Direction::ToGpu, BACKGROUND);
    assert!(slices > background.1, "there it is enqueued slice by slice");
}

#[test]
fn a_background_copy_that_is_waited_for_is_bound_at_once() {
    for (scheduling, deferred) in [(Scheduling::FirstOrder, 0), (Scheduling::Adaptive, 1)] {
        let fixture = fixture(scheduling);
        let stream = fixture.stream(GPU);
        let on = fixture.user(GPU, stream.id());
        let (host, memory) = (fixture.pinned(Bytes::mib(64), 1), fixture.mapped(GPU, Bytes::mib(64)));
        let from = glake_device::owned::Span::pinned(&host, Bytes::ZERO, Bytes::mib(64)).unwrap();
        let to = memory.span(Bytes::ZERO, Bytes::mib(64)).unwrap();
        fixture.engine().copy_blocking(&to, &from, on, BACKGROUND).unwrap();
        let count = fixture.engine().waited.deferred.count.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(count, deferred);
        assert!(!fixture.engine().is_stale());
        drop((to, from, host, memory, stream));
        fixture.end();
    }
}
