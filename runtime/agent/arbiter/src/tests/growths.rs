//! Tests of growths: a growth waits for bytes on their way, and is denied only if none are.

use std::time::Duration;

use glake_units::Bytes;

use super::world::{DRAIN, FLOOR, World};
use crate::{Account, Action, Contexts, Event, GpuId, Profile, Settings, UseState, WorkerId};

const GPU: GpuId = GpuId(0);
const MS: fn(u64) -> Duration = Duration::from_millis;

fn grow(id: u64, bytes: Bytes) -> Event {
    Event::Grow { worker: WorkerId(id), gpu: GPU, bytes, within: MS(30_000) }
}

/// Creates resident workers of these sizes in GiB, in order; all but the first `busy` are idle, and no memory is free.
pub(super) fn full(gib: &[u64], busy: u64, budget: u64) -> World {
    let mut world = World::new(Settings::default(), &[(budget, 200)]);
    for (id, gib) in (0..).zip(gib) {
        world.join_asleep(id, Bytes::gib(*gib));
        world.pass(MS(1_000));
        world.want(WorkerId(id), None);
        world.answer(WorkerId(id));
        world.does(WorkerId(id), UseState::Busy);
        world.pass(MS(3_000));
    }
    let free = world.arbiter.limit(GPU).saturating_sub(world.arbiter.claimed(GPU));
    world.tell(grow(0, free));
    (busy..gib.len() as u64).for_each(|id| world.does(WorkerId(id), UseState::Idle));
    world.pass(MS(1_000));
    world
}

fn step(world: &mut World, event: Event, after: Duration) -> Vec<Action> {
    world.now += after;
    world.arbiter.step(event, world.now)
}

/// Carries out the shrink of a victim in one piece.
fn gives(world: &mut World, id: u64) -> Vec<Action> {
    let worker = WorkerId(id);
    let Some(Action::Shrink { bytes, .. }) = world.workers[&worker].queue.front().cloned() else {
        panic!("{id} was not asked")
    };
    let evicted = Account { evicted: bytes, ..Account::nothing(GPU, FLOOR) };
    let mut actions = step(world, Event::Returned { worker, gpu: GPU, bytes }, MS(20));
    actions.extend(step(world, Event::Shrunk { worker, accounts: vec![evicted] }, MS(0)));
    actions
}

fn granted(actions: &[Action], to: u64) -> bool {
    assert!(!actions.iter().any(|action| matches!(action, Action::DenyGrowth { .. })), "{actions:?}");
    actions.iter().any(|action| matches!(action, Action::Grant { worker, .. } if *worker == WorkerId(to)))
}

#[test]
fn a_refill_with_steady_bytes_is_awaited() {
    let mut world = full(&[8, 30, 30], 1, 78);
    for id in [1, 2] {
        let dirty = Account { dirty: Bytes::gib(30), ..world.workers[&WorkerId(id)].held[0].clone() };
        world.tell(Event::Changed { worker: WorkerId(id), accounts: vec![dirty] });
    }
    let asked = world.tell(grow(0, Bytes::gib(20)));
    assert!(matches!(asked[..], [Action::Shrink { worker: WorkerId(1), .. }]), "{asked:?}");
    // Longer than the timeout of the first part.
    let returned = Event::Returned { worker: WorkerId(1), gpu: GPU, bytes: Bytes::mib(512) };
    for part in 1..=40 {
        let actions = step(&mut world, returned.clone(), MS(10));
        let leaves = actions.iter().any(|action| matches!(action, Action::Shrink { .. }));
        assert!(!leaves, "others leave for nothing: {actions:?}");
        assert_eq!(granted(&actions, 0), part == 40, "part {part}: {actions:?}");
    }
}

#[test]
fn two_growths_share_what_two_victims_give() {
    let mut world = full(&[8, 8, 8, 8], 2, 40);
    world.tell(grow(0, Bytes::gib(8)));
    world.tell(grow(1, Bytes::gib(8)));
    // The victim of the second growth gives first.
    assert!(granted(&gives(&mut world, 3), 0));
    assert!(granted(&gives(&mut world, 2), 1));
}

#[test]
fn a_refill_gives_way_to_the_growth_whose_bytes_it_got() {
    let mut world = World::new(Settings::default(), &[(27, 140)]);
    (0..4).for_each(|id| world.join_asleep(id, Bytes::gib(8)));
    for id in 0..3 {
        world.pass(MS(1_000));
        world.want(WorkerId(id), None);
        world.answer(WorkerId(id));
        world.does(WorkerId(id), UseState::Busy);
    }
    (1..3).for_each(|id| world.does(WorkerId(id), UseState::Idle));
    world.pass(MS(1_000));
    let free = world.arbiter.limit(GPU).saturating_sub(world.arbiter.claimed(GPU));
    world.tell(grow(0, free));
    world.tell(grow(0, Bytes::gib(8)));
    world.want(WorkerId(3), None);
    assert!(granted(&gives(&mut world, 1), 3));
    assert!(granted(&gives(&mut world, 2), 0));
}

#[test]
fn a_refill_waits_for_a_dead_victims_bytes() {
    let mut world = full(&[8, 8], 1, 20);
    assert!(matches!(world.tell(grow(0, Bytes::gib(6)))[..], [Action::Shrink { .. }]));
    world.workers.remove(&WorkerId(1));
    let actions = world.tell(Event::Died { worker: WorkerId(1) });
    assert!(!granted(&actions, 0), "{actions:?}");
}

#[test]
fn a_restored_worker_waits_for_its_victims() {
    let settings = Settings { checkpoint_after: Some(MS(5_000)), ..Settings::default() };
    let mut world = World::new(settings, &[(10, 140)]);
    world.join_asleep(0, Bytes::gib(4));
    world.join_asleep(1, Bytes::gib(8));
    world.pass(MS(1_000));
    world.want(WorkerId(1), None);
    world.answer(WorkerId(1));
    world.does(WorkerId(1), UseState::Busy);
    world.pass(MS(6_000));
    world.drive(WorkerId(0), Some(true));
    world.does(WorkerId(1), UseState::Idle);
    world.pass(MS(1_000));
    world.tell(grow(0, Bytes::gib(6)));
    step(&mut world, Event::Returned { worker: WorkerId(1), gpu: GPU, bytes: Bytes::gib(1) }, MS(20));
    let present = Event::Contexts { worker: WorkerId(0), contexts: Contexts::Present };
    let actions = step(&mut world, present, MS(20));
    assert!(!granted(&actions, 0), "{actions:?}");
}

fn denied(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::DenyGrowth { .. }))
}

pub(super) fn is_marked(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::StopCountingOn { .. }))
}

/// Passes all deadlines up to `end` and returns the actions.
pub(super) fn until(world: &mut World, end: Duration) -> Vec<Action> {
    let mut actions = Vec::new();
    while let Some(next) = world.arbiter.next_deadline().filter(|next| *next <= end) {
        world.now = world.now.max(next);
        actions.extend(world.tell(Event::Tick));
    }
    world.now = end;
    actions.extend(world.tell(Event::Tick));
    actions
}

#[test]
fn a_slow_first_shrink_is_awaited_as_long_as_the_requester_waits() {
    let mut world = full(&[8, 8], 1, 20);
    let begin = world.now;
    assert!(matches!(world.tell(grow(0, Bytes::gib(6)))[..], [Action::Shrink { .. }]));
    // The first shrink pins host memory.
    let actions = until(&mut world, begin + MS(29_000));
    assert!(!denied(&actions) && !is_marked(&actions), "{actions:?}");
    assert!(granted(&gives(&mut world, 1), 0));
}

#[test]
fn a_growth_is_denied_after_its_timeout() {
    let mut world = full(&[8, 8], 1, 20);
    let begin = world.now;
    world.tell(grow(0, Bytes::gib(6)));
    assert!(!denied(&until(&mut world, begin + MS(29_999))));
    assert!(denied(&until(&mut world, begin + MS(30_000))));
}

#[test]
fn a_growth_during_a_refill_is_answered_from_idle_memory_afterwards() {
    let mut world = full(&[8, 8], 1, 20);
    world.tell(Event::Shrink { worker: WorkerId(1), within: DRAIN });
    world.answer(WorkerId(1));
    world.want(WorkerId(1), None);
    assert_eq!(world.arbiter.state(WorkerId(1)), Some("refilling"));
    let asked = world.tell(grow(0, Bytes::gib(6)));
    assert!(!denied(&asked), "{asked:?}");
    world.pass(MS(300));
    world.answer(WorkerId(1));
    // A worker refilled just now may not have reported its uses yet.
    let now = world.now;
    let actions = until(&mut world, now + MS(300));
    assert!(actions.iter().any(|action| matches!(action, Action::Shrink { .. })), "{actions:?}");
    assert!(granted(&gives(&mut world, 1), 0));
}

#[test]
fn growth_beside_a_start_is_answered_after_it() {
    let mut world = full(&[8, 8], 1, 20);
    world.tell(Event::Shrink { worker: WorkerId(1), within: DRAIN });
    world.answer(WorkerId(1));
    let starts = Account { room: Bytes::gib(2), ..Account::nothing(GPU, FLOOR) };
    world.join_as(2, 2, 1, Profile::default(), vec![starts], true);
    world.want(WorkerId(2), None);
    assert_eq!(world.arbiter.state(WorkerId(2)), Some("starting"));
    let asked = world.tell(grow(0, Bytes::gib(7)));
    assert!(!denied(&asked), "{asked:?}");
    world.pass(MS(300));
    // The worker needs only half of the file's size.
    let worker = world.workers.get_mut(&WorkerId(2)).unwrap();
    worker.held[0] =
        Account { resident: Bytes::gib(1), lease: Bytes::gib(2), ..Account::nothing(GPU, FLOOR) };
    world.answer(WorkerId(2));
    let now = world.now;
    let actions = until(&mut world, now + MS(300));
    assert!(actions.iter().any(|action| matches!(action, Action::Shrink { .. })), "{actions:?}");
    assert!(granted(&gives(&mut world, 2), 0));
}

#[test]
fn an_impossible_growth_is_denied_immediately() {
    let mut world = full(&[8, 8], 1, 20);
    let actions = world.tell(grow(0, Bytes::gib(9)));
    assert!(denied(&actions), "{actions:?}");
}

fn lease(world: &World, id: u64) -> Bytes {
    world.workers[&WorkerId(id)].held[0].lease
}

/// Creates three workers of 8 GiB with 1 GiB of room to grow: one resident and idle, two shrunk; 8.1 GiB are free.
fn with_room_to_grow() -> World {
    let mut world = World::new(Settings::default(), &[(18, 140)]);
    let profile = Profile::default;
    let held = Account { lease: Bytes::gib(8), resident: Bytes::gib(8), ..Account::nothing(GPU, FLOOR) };
    world.join(0, 0, 1, profile(), vec![held]);
    for id in 1..3 {
        let held = Account { evicted: Bytes::gib(8), growth: Bytes::gib(1), ..Account::nothing(GPU, FLOOR) };
        world.join(id, id, 1, profile(), vec![held]);
    }
    world.pass(MS(1_000));
    world
}

#[test]
fn room_to_grow_comes_from_free_bytes() {
    let mut world = with_room_to_grow();
    let free = world.arbiter.limit(GPU).saturating_sub(world.arbiter.claimed(GPU));
    world.want(WorkerId(1), None);
    assert!(!world.open.contains(&WorkerId(1)) && lease(&world, 1) == free, "{}", lease(&world, 1));
    assert!(world.workers[&WorkerId(0)].queue.is_empty(), "it would have fitted");
}

#[test]
fn room_to_grow_is_not_taken_from_waiters() {
    let mut world = with_room_to_grow();
    world.does(WorkerId(0), UseState::Capturing);
    let held = |gib| Account {
        evicted: Bytes::gib(gib),
        growth: Bytes::gib(1),
        ..Account::nothing(GPU, Bytes::ZERO)
    };
    world.join(3, 3, 1, Profile::default(), vec![held(9)]);
    world.join(4, 4, 1, Profile { priority: 1, ..Profile::default() }, vec![held(4)]);
    world.want(WorkerId(3), None);
    world.want(WorkerId(4), None);
    assert!(world.open.contains(&WorkerId(3)));
    assert_eq!(lease(&world, 4), Bytes::gib(4));
}

#[test]
fn unused_lease_leaves_first() {
    let mut world = with_room_to_grow();
    world.want(WorkerId(1), None);
    world.answer(WorkerId(1));
    let unused = lease(&world, 1).saturating_sub(Bytes::gib(8));
    let small = Account { evicted: unused, ..Account::nothing(GPU, Bytes::ZERO) };
    world.join(3, 3, 1, Profile::default(), vec![small]);
    world.pass(MS(1_000));
    world.want(WorkerId(3), None);
    let taken: Vec<_> =
        world.arbiter.decisions().last().unwrap().taken.iter().map(|of| (of.gang.0, of.bytes)).collect();
    assert!(!unused.is_zero() && taken == [(1, unused)], "{taken:?}");
    world.answer(WorkerId(1));
    assert!(world.workers[&WorkerId(1)].held[0].evicted.is_zero() && !world.open.contains(&WorkerId(3)));
}
