//! Tests of parked workers: their order, the length of turns, and the reset of parks.

use std::time::Duration;

use glake_units::Bytes;

use super::scenarios::{six, wake};
use super::world::{DRAIN, FLOOR, World};
use crate::{Account, Action, Event, GangId, GpuId, Profile, Settings, UseState, WorkerId};

const GPU: GpuId = GpuId(0);
const MS: fn(u64) -> Duration = Duration::from_millis;

/// Parks a running worker for a waiting one, which is refilled within `refill` and runs. Returns the remaining run time of the first and
/// the waiting time of the other.
fn takes_its_turn(world: &mut World, runs: u64, waits: u64, refill: Duration) -> (Duration, Duration) {
    let begin = world.now;
    world.want(WorkerId(waits), None);
    while world.workers[&WorkerId(runs)].queue.is_empty() {
        world.now = world.arbiter.next_deadline().unwrap();
        world.tell(Event::Tick);
    }
    let turn = world.now - begin;
    (0..2).for_each(|_| world.answer(WorkerId(runs)));
    world.now += refill;
    world.answer(WorkerId(waits));
    world.does(WorkerId(waits), UseState::Busy);
    (turn, world.now - begin)
}

/// Returns the worker of the latest refill.
fn last_refilled(world: &World) -> u64 {
    world.arbiter.decisions().last().unwrap().gang.0
}

#[test]
fn a_parked_worker_waits_behind_newer_wants_for_a_bounded_time() {
    for (waited, first) in [(MS(400), 3), (MS(1_050), 0)] {
        let mut world = six(4);
        wake(&mut world, 0);
        world.pass(MS(1_000));
        wake(&mut world, 1);
        world.want(WorkerId(2), None);
        (0..2).for_each(|_| world.answer(WorkerId(0)));
        // No worker is past its quantum: 1 was just refilled, and 2 is being refilled.
        world.want(WorkerId(0), None);
        let since = world.now;
        world.answer(WorkerId(2));
        world.does(WorkerId(2), UseState::Busy);
        world.does(WorkerId(1), UseState::Capturing);
        world.does(WorkerId(2), UseState::Capturing);
        world.pass(waited - (world.now - since));
        world.want(WorkerId(3), None);
        assert_eq!(last_refilled(&world), 2, "nobody can be parked");
        world.does(WorkerId(1), UseState::Busy);
        world.pass(MS(1));
        assert_eq!(last_refilled(&world), first, "after {waited:?}");
    }
}

#[test]
fn turns_of_alternately_parked_workers_grow() {
    let mut world = six(3);
    wake(&mut world, 0);
    wake(&mut world, 1);
    // Worker 1 cannot be parked, so that 0 and 2 take turns.
    world.does(WorkerId(1), UseState::Capturing);
    let (mut runs, mut waits) = (0, 2);
    let mut turns = Vec::new();
    for _ in 0..14 {
        turns.push(takes_its_turn(&mut world, runs, waits, MS(0)).0);
        (runs, waits) = (waits, runs);
    }
    let longer = [300, 300, 450, 450, 600, 600, 750, 750, 900, 900, 900, 900, 900, 900];
    assert_eq!(turns, longer.map(MS));
    // The worker is idle, which resets its parks.
    world.pass(MS(1_000));
    world.does(WorkerId(runs), UseState::Idle);
    world.does(WorkerId(runs), UseState::Busy);
    world.want(WorkerId(waits), None);
    assert!(matches!(world.workers[&WorkerId(runs)].queue[0], Action::Park { .. }));
}

#[test]
fn a_busy_link_does_not_lengthen_turns() {
    let mut world = six(3);
    wake(&mut world, 0);
    wake(&mut world, 1);
    world.does(WorkerId(1), UseState::Capturing);
    world.pass(MS(10_000));
    let now = world.now.as_secs();
    for second in now - 9..=now {
        world.arbiter.ledger.duties.entry(GPU).or_default().add(Duration::from_secs(second), MS(950));
    }
    assert_eq!(takes_its_turn(&mut world, 0, 2, MS(0)).0, MS(0), "0 has run for longer than a quantum");
    assert!(world.arbiter.link_duty(GPU) > 0.8);
    assert_eq!(takes_its_turn(&mut world, 2, 0, MS(0)).0, MS(300));
}

fn parks(world: &World, id: u64) -> (bool, u32) {
    let gang = &world.arbiter.ledger.gangs[&GangId(id)];
    (gang.is_parked, gang.parks)
}

/// Creates three busy workers of 8 GiB; an operator parked the first one, which has returned its memory.
fn one_was_parked() -> World {
    let mut world = World::new(Settings::default(), &[(31, 140)]);
    (0..3).for_each(|id| world.join_asleep(id, Bytes::gib(8)));
    world.pass(MS(1_000));
    for id in 0..3 {
        wake(&mut world, id);
        world.pass(MS(1_000));
    }
    world.tell(Event::Shrink { worker: WorkerId(0), within: DRAIN });
    (0..2).for_each(|_| world.answer(WorkerId(0)));
    assert_eq!(parks(&world, 0), (true, 1));
    world
}

#[test]
fn the_end_of_a_wait_resets_parks() {
    let mut world = one_was_parked();
    world.want(WorkerId(0), None);
    world.tell(Event::Cancel { worker: WorkerId(0) });
    assert_eq!(parks(&world, 0), (false, 0));

    // The worker could not give its memory back, and wants what it already has.
    let mut world = one_was_parked();
    world.want(WorkerId(0), None);
    world.answer(WorkerId(0));
    world.does(WorkerId(0), UseState::Busy);
    world.tell(Event::Shrink { worker: WorkerId(0), within: DRAIN });
    world.answer(WorkerId(0));
    world.fail(WorkerId(0));
    world.want(WorkerId(0), None);
    world.does(WorkerId(0), UseState::Busy);
    world.pass(MS(1_000));
    world.does(WorkerId(0), UseState::Idle);
    assert_eq!(parks(&world, 0), (false, 0));

    // The late refill completed after all.
    let mut world = one_was_parked();
    world.want(WorkerId(0), None);
    world.pass(MS(60_000));
    world.answer(WorkerId(0));
    world.does(WorkerId(0), UseState::Busy);
    world.pass(MS(1_000));
    world.does(WorkerId(0), UseState::Idle);
    assert_eq!(parks(&world, 0), (false, 0));
}

/// Lets two workers of 40 GiB on a GPU with room for one take turns until the turns stop growing; the second one has `max_pause`.
fn turns_of_two_large_ones(max_pause: Option<Duration>) -> (World, Vec<Duration>) {
    let mut world = World::new(Settings::default(), &[(46, 140)]);
    for id in 0..3 {
        let held = Account { evicted: Bytes::gib(40), ..Account::nothing(GPU, FLOOR) };
        let max_pause = max_pause.filter(|_| id == 1);
        world.join(id, id, 1, Profile { max_pause, ..Profile::default() }, vec![held]);
    }
    world.pass(MS(1_000));
    wake(&mut world, 0);
    let (mut runs, mut waits, mut pauses) = (0, 1, Vec::new());
    for _ in 0..12 {
        let (_, pause) = takes_its_turn(&mut world, runs, waits, MS(900));
        if waits == 1 {
            pauses.push(pause);
        }
        (runs, waits) = (waits, runs);
    }
    (world, pauses)
}

#[test]
fn a_worker_with_max_pause_does_not_wait_for_longer_turns() {
    let (_, pauses) = turns_of_two_large_ones(None);
    assert!(pauses.last().is_some_and(|pause| *pause > MS(4_500)), "{pauses:?}");
    let (_, pauses) = turns_of_two_large_ones(Some(MS(4_500)));
    assert!(pauses.iter().all(|pause| *pause <= MS(4_500)), "{pauses:?}");
}

#[test]
fn a_wait_for_a_first_token_does_not_lengthen_turns() {
    let (mut world, _) = turns_of_two_large_ones(None);
    let begin = world.now;
    world.want(WorkerId(1), None);
    world.pass(MS(300));
    world.want(WorkerId(2), None);
    while world.workers[&WorkerId(0)].queue.is_empty() {
        world.now = world.arbiter.next_deadline().unwrap();
        world.tell(Event::Tick);
    }
    // Exactly its quantum: 40 GiB are refilled in 0.86 s.
    assert!(world.now - begin < MS(2_000), "{:?}", world.now - begin);
}

#[test]
fn a_parked_worker_is_reconsidered_after_its_bounded_wait() {
    let mut world = World::new(Settings::default(), &[(28, 140)]);
    (0..4).for_each(|id| world.join_asleep(id, Bytes::gib(if id == 3 { 16 } else { 8 })));
    world.pass(MS(1_000));
    for id in 0..3 {
        wake(&mut world, id);
        world.pass(MS(1_000));
    }
    world.tell(Event::Shrink { worker: WorkerId(0), within: DRAIN });
    (0..2).for_each(|_| world.answer(WorkerId(0)));
    world.does(WorkerId(1), UseState::Capturing);
    let grow = |bytes| Event::Grow { worker: WorkerId(1), gpu: GPU, bytes, within: MS(100) };
    let free = world.arbiter.limit(GPU).saturating_sub(world.arbiter.claimed(GPU));
    world.tell(grow(free));
    let since = world.now;
    world.want(WorkerId(0), None);
    world.pass(MS(100));
    world.want(WorkerId(3), None);
    // The worker could not be parked.
    world.fail(WorkerId(2));
    world.pass(MS(400));
    // Enough for the parked worker, but not for the newer one.
    world.does(WorkerId(2), UseState::Idle);
    assert!(world.arbiter.next_deadline().unwrap() <= since + MS(1_000));
    world.now = since + MS(1_000);
    world.tell(Event::Tick);
    assert_eq!(last_refilled(&world), 0);
}
