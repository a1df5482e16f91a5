//! Tests of workers without safe points: their gate closes, and running uses end by themselves.

use std::time::Duration;

use glake_units::Bytes;

use super::scenarios::{last_victims, six, wake};
use super::world::{FLOOR, World};
use crate::{Account, Action, Event, GpuId, Preempt, Profile, Settings, UseState, Why, WorkerId};

const GPU: GpuId = GpuId(0);
const MS: fn(u64) -> Duration = Duration::from_millis;

/// Creates two workers of 8 GiB whose uses run without safe points, and a third one without memory.
fn busy(profile: &Profile) -> World {
    let mut world = six(0);
    for id in 0..3 {
        let held = Account { evicted: Bytes::gib(8), ..Account::nothing(GPU, FLOOR) };
        let profile = if id < 2 { profile.clone() } else { Profile::default() };
        world.join(id, id, 1, profile, vec![held]);
    }
    world.pass(MS(1_000));
    for id in 0..2 {
        wake(&mut world, id);
        world.does(WorkerId(id), UseState::Running);
        world.pass(MS(2_000));
    }
    world
}

fn command(world: &World, id: u64) -> Option<&Action> {
    world.workers[&WorkerId(id)].queue.front()
}

fn ticks(world: &mut World, end: Duration) -> Vec<Action> {
    let mut actions = Vec::new();
    while let Some(next) = world.arbiter.next_deadline().filter(|next| *next <= end) {
        world.now = world.now.max(next);
        actions.extend(world.tell(Event::Tick));
    }
    world.now = end;
    actions
}

#[test]
fn a_drain_waits_for_running_uses_until_its_timeout() {
    let mut world = busy(&Profile::default());
    let begin = world.now;
    world.want(WorkerId(2), None);
    assert_eq!(last_victims(&world), [(0, Why::Quantum)]);
    assert!(matches!(command(&world, 0), Some(Action::Park { by, .. }) if *by == begin + MS(30_000)));
    // Longer than any step, and no other worker is asked or excluded.
    let actions = ticks(&mut world, begin + MS(20_000));
    assert_eq!(actions, []);
    (0..2).for_each(|_| world.answer(WorkerId(0)));
    assert!(!world.open.contains(&WorkerId(2)));
}

#[test]
fn workers_with_safe_points_are_parked_first() {
    let mut world = busy(&Profile::default());
    world.does(WorkerId(1), UseState::Busy);
    world.want(WorkerId(2), None);
    assert_eq!(last_victims(&world), [(1, Why::Quantum)]);
}

#[test]
fn idle_workers_are_asked_during_a_drain() {
    let mut world = busy(&Profile::default());
    let begin = world.now;
    world.want(WorkerId(2), None);
    world.does(WorkerId(1), UseState::Idle);
    let actions = ticks(&mut world, begin + MS(3_000));
    assert!(matches!(
        actions[..],
        [Action::Unpark { worker: WorkerId(0) }, Action::Shrink { worker: WorkerId(1), .. }]
    ));
}

#[test]
fn a_failed_drain_excludes_its_worker_for_as_long() {
    let mut world = busy(&Profile::default());
    world.does(WorkerId(1), UseState::Capturing);
    let begin = world.now;
    world.want(WorkerId(2), None);
    let actions = ticks(&mut world, begin + MS(30_000));
    assert!(actions.contains(&Action::Unpark { worker: WorkerId(0) }), "{actions:?}");
    assert!(!actions.iter().any(|action| matches!(action, Action::StopCountingOn { .. })), "{actions:?}");
    assert!(world.open.contains(&WorkerId(2)));
    // The grants are returned.
    world.answer(WorkerId(2));
    let is_park = |action: &Action| matches!(action, Action::Park { .. });
    assert!(!ticks(&mut world, begin + MS(59_999)).iter().any(is_park));
    assert!(ticks(&mut world, begin + MS(60_000)).iter().any(is_park), "it is asked again");
}

#[test]
fn max_pause_bounds_a_drain() {
    let mut world = busy(&Profile { max_pause: Some(MS(2_500)), ..Profile::default() });
    let begin = world.now;
    world.want(WorkerId(2), None);
    assert!(matches!(command(&world, 0), Some(Action::Park { by, .. }) if *by == begin + MS(2_500)));
    let actions = ticks(&mut world, begin + MS(2_500));
    let both =
        [Action::Unpark { worker: WorkerId(0) }, Action::Park { worker: WorkerId(1), by: begin + MS(5_000) }];
    assert_eq!(actions, both, "another one is tried");
}

#[test]
fn a_drain_without_a_waiter_is_cancelled() {
    let mut world = busy(&Profile::default());
    world.want(WorkerId(2), None);
    world.tell(Event::Cancel { worker: WorkerId(2) });
    let accounts = world.workers[&WorkerId(2)].held.clone();
    let actions = world.tell(Event::Failed { worker: WorkerId(2), what: crate::Task::Refill, accounts });
    assert!(actions.contains(&Action::Unpark { worker: WorkerId(0) }), "{actions:?}");

    let mut world = busy(&Profile::default());
    world.want(WorkerId(2), None);
    world.die(WorkerId(2));
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("resident"));
}

#[test]
fn a_worker_that_forbids_preemption_is_not_drained() {
    for profile in [
        Profile { preempt: Preempt::Idle, ..Profile::default() },
        Profile { preempt: Preempt::Never, ..Profile::default() },
        Profile { priority: 1, ..Profile::default() },
    ] {
        let mut world = busy(&profile);
        world.want(WorkerId(2), Some(MS(3_000)));
        let end = world.now + MS(700);
        ticks(&mut world, end);
        assert!((0..2).all(|id| command(&world, id).is_none()), "{profile:?}");
    }
}

#[test]
fn a_new_worker_runs_for_its_quantum() {
    let mut world = six(3);
    wake(&mut world, 0);
    wake(&mut world, 1);
    (0..2).for_each(|id| world.does(WorkerId(id), UseState::Running));
    world.want(WorkerId(2), None);
    assert!(command(&world, 0).is_none() && command(&world, 1).is_none());
    let next = world.arbiter.next_deadline().unwrap();
    assert!((MS(1_300)..MS(1_400)).contains(&next), "{next:?}");
}

#[test]
fn a_refill_that_waits_for_a_drain_gives_way_to_a_higher_class() {
    let mut world = busy(&Profile::default());
    let held = Account { evicted: Bytes::gib(2), ..Account::nothing(GPU, FLOOR) };
    world.join(9, 9, 1, Profile { priority: 9, ..Profile::default() }, vec![held]);
    let begin = world.now;
    world.want(WorkerId(2), None);
    // The GPU has enough room.
    world.want(WorkerId(9), None);
    ticks(&mut world, begin + MS(3_000));
    world.answer(WorkerId(2));
    assert!(!world.open.contains(&WorkerId(9)), "it waits for another one's victim");
}

/// States of a worker that holds memory requested by another one.
const HOLDERS: [Holder; 6] =
    [Holder::Idle, Holder::Busy, Holder::Running, Holder::BackToBack, Holder::Suspected, Holder::Grows];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Holder {
    Idle,
    Busy,
    Running,
    /// Idle for short moments, but never at the choice of a victim.
    BackToBack,
    /// Excluded after a recent failed park.
    Suspected,
    Grows,
}

#[derive(Clone, Copy, Debug)]
enum Request {
    Want,
    Growth,
    Start,
    Restore,
}

/// One worker holds all of a GPU, and another one requests a part: returns whether the holder gets a command within five seconds.
fn has_a_way(holder: Holder, request: Request) -> bool {
    let checkpoint_after = matches!(request, Request::Restore).then_some(MS(1_000));
    let settings = Settings { checkpoint_after, ..Settings::default() };
    let mut world = World::new(settings, &[(10, 140)]);
    let (first, second) = (WorkerId(0), WorkerId(1));
    match request {
        Request::Want | Request::Restore => world.join_asleep(1, Bytes::gib(4)),
        _ => {}
    }
    world.pass(MS(1_500));
    if matches!(request, Request::Restore) {
        world.drive(second, Some(true));
    }
    world.join_asleep(0, Bytes::gib(8));
    wake(&mut world, 0);
    let free = world.arbiter.limit(GPU).saturating_sub(world.arbiter.claimed(GPU));
    let keep = if matches!(request, Request::Growth | Request::Start) { FLOOR } else { Bytes::ZERO };
    let grow = |worker, bytes, within| Event::Grow { worker, gpu: GPU, bytes, within };
    world.tell(grow(first, free.saturating_sub(keep), MS(1_000)));
    world.pass(MS(3_000));
    match holder {
        Holder::Idle => world.does(first, UseState::Idle),
        Holder::Busy | Holder::Suspected => {}
        Holder::Running | Holder::BackToBack => world.does(first, UseState::Running),
        Holder::Grows => _ = world.tell(grow(first, Bytes::gib(1), MS(2_000))),
    }
    if holder == Holder::Suspected {
        world.join_asleep(7, Bytes::gib(6));
        world.want(WorkerId(7), None);
        world.fail(first);
        world.tell(Event::Cancel { worker: WorkerId(7) });
    }
    world.pass(MS(1_000));
    match request {
        Request::Want => world.want(second, Some(MS(30_000))),
        Request::Restore => _ = world.tell(Event::Refill { worker: second }),
        Request::Growth => {
            let held = Account::nothing(GPU, FLOOR);
            world.join(1, 1, 1, Profile::default(), vec![held]);
            world.tell(grow(second, Bytes::gib(2), MS(30_000)));
        }
        Request::Start => {
            let starts = Account { room: Bytes::gib(4), ..Account::nothing(GPU, FLOOR) };
            world.join_as(1, 1, 1, Profile::default(), vec![starts], true);
            world.want(second, None);
        }
    }
    for round in 0..500 {
        if world.workers[&first]
            .queue
            .iter()
            .any(|of| matches!(of, Action::Park { .. } | Action::Shrink { .. }))
        {
            return true;
        }
        if holder == Holder::BackToBack && round % 20 == 19 {
            world.does(first, UseState::Idle);
            world.does(first, UseState::Running);
        }
        world.pass(MS(10));
    }
    false
}

#[test]
fn every_request_can_reach_every_preemptible_holder() {
    for request in [Request::Want, Request::Growth, Request::Start, Request::Restore] {
        for holder in HOLDERS {
            assert!(has_a_way(holder, request), "{request:?} of memory of one that is {holder:?}");
        }
    }
}
