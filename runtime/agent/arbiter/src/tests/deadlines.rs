//! Tests of deadlines: a worker with progress is not late, however slow its first shrink is.

use std::time::Duration;

use glake_units::Bytes;

use super::growths::{full, is_marked, until};
use super::scenarios::six;
use super::world::World;
use crate::{Action, Event, GpuId, UseState, WorkerId};

const GPU: GpuId = GpuId(0);
const MS: fn(u64) -> Duration = Duration::from_millis;

/// Like `full`, with a third worker that has an open want.
fn wanted() -> (World, Duration) {
    let mut world = full(&[8, 8], 1, 20);
    world.join_asleep(2, Bytes::gib(7));
    world.does(WorkerId(0), UseState::Capturing);
    world.pass(MS(1_000));
    // The context of the third worker did not fit.
    world.answer(WorkerId(1));
    world.want(WorkerId(2), None);
    assert!(matches!(world.workers[&WorkerId(1)].queue[0], Action::Shrink { .. }), "{:?}", world.workers);
    let begin = world.now;
    (world, begin)
}

#[test]
fn a_slow_first_shrink_is_not_a_strike() {
    let (mut world, begin) = wanted();
    let actions = until(&mut world, begin + MS(20_000));
    assert!(!is_marked(&actions), "{actions:?}");
    world.answer(WorkerId(1));
    assert!(!world.open.contains(&WorkerId(2)), "{:?} {:?}", world.arbiter.state(WorkerId(2)), world.workers);
}

#[test]
fn a_shrink_with_progress_is_not_late() {
    let (mut world, mut now) = wanted();
    let worker = WorkerId(1);
    // A host that pins 1 GiB in 12 s.
    for _ in 0..7 {
        now += MS(12_000);
        let actions = until(&mut world, now);
        assert!(!is_marked(&actions) && !world.arbiter.is_late(worker), "{actions:?}");
        let held = &mut world.workers.get_mut(&worker).unwrap().held[0];
        held.lease = held.lease.saturating_sub(Bytes::gib(1));
        world.tell(Event::Returned { worker, gpu: GPU, bytes: Bytes::gib(1) });
    }
}

#[test]
fn a_refill_with_progress_is_not_late() {
    let (mut world, worker) = (six(1), WorkerId(0));
    let begin = world.now;
    world.want(worker, None);
    // From files: a tenth of what the link would carry.
    for second in 1..20 {
        let actions = until(&mut world, begin + MS(1_000 * second));
        assert!(!is_marked(&actions), "{actions:?}");
        world.tell(Event::Progress { worker });
    }
    let actions = until(&mut world, begin + MS(30_000));
    assert!(is_marked(&actions), "it has stopped");
}

#[test]
fn a_long_step_is_not_late() {
    let mut world = six(3);
    for id in 0..2 {
        super::scenarios::wake(&mut world, id);
        world.pass(MS(2_000));
    }
    let begin = world.now;
    world.want(WorkerId(2), None);
    assert!(matches!(world.workers[&WorkerId(0)].queue[0], Action::Park { .. }));
    let actions = until(&mut world, begin + MS(1_500));
    assert_eq!(actions, [], "a step of 1.5 s");
    (0..2).for_each(|_| world.answer(WorkerId(0)));
    assert!(!world.open.contains(&WorkerId(2)));
}

#[test]
fn a_prediction_alone_does_not_deny_a_want() {
    let mut world = six(3);
    (0..2).for_each(|id| super::scenarios::wake(&mut world, id));
    // Earlier wants and its own refill are predicted to exceed its deadline.
    world.does(WorkerId(0), UseState::Capturing);
    world.does(WorkerId(1), UseState::Capturing);
    world.join_asleep(3, Bytes::gib(8));
    world.want(WorkerId(2), None);
    let actions = world.tell(Event::Want { worker: WorkerId(3), deadline: Some(MS(250)) });
    assert_eq!(actions, []);
}

#[test]
fn a_want_with_unresponsive_victims_ends_after_their_deadline() {
    let mut world = six(3);
    for id in 0..2 {
        super::scenarios::wake(&mut world, id);
        world.does(WorkerId(id), UseState::Running);
        world.pass(MS(2_000));
    }
    let begin = world.now;
    world.want(WorkerId(2), Some(MS(10_000)));
    until(&mut world, begin + MS(29_999));
    assert!(world.open.contains(&WorkerId(2)), "its victim is in time");
    until(&mut world, begin + MS(30_000));
    world.answer(WorkerId(2));
    assert!(!world.open.contains(&WorkerId(2)));
    assert!(world.workers[&WorkerId(1)].queue.is_empty(), "nobody else is asked for it");
}
