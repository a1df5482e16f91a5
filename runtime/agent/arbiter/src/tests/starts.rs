//! Tests of starts: the expected size applies until the start is over.

use std::time::Duration;

use glake_units::Bytes;

use super::world::{FLOOR, World};
use crate::{Account, Action, Denied, Event, GpuId, Profile, Settings, UseState, WorkerId};

const GPU: GpuId = GpuId(0);
const MS: fn(u64) -> Duration = Duration::from_millis;

fn starts(world: &mut World, id: u64, gib: u64) {
    let held = Account { room: Bytes::gib(gib), ..Account::nothing(GPU, FLOOR) };
    world.join_as(id, id, 1, Profile::default(), vec![held], true);
    world.want(WorkerId(id), None);
}

fn lease(world: &World, id: u64) -> Bytes {
    let own = world.arbiter.footprints().filter(|of| of.worker == WorkerId(id));
    own.map(|of| of.lease).sum()
}

/// Sends the report of the library after each welcome: no memory, and no known need.
fn says_that_it_holds_nothing(world: &mut World, id: u64) {
    let held = lease(world, id);
    let nothing = Account { lease: held, ..Account::nothing(GPU, FLOOR) };
    world.workers.get_mut(&WorkerId(id)).unwrap().held = vec![nothing.clone()];
    world.tell(Event::Changed { worker: WorkerId(id), accounts: vec![nothing] });
}

fn has_loaded(world: &mut World, id: u64, gib: u64) {
    let bytes = Bytes::gib(gib);
    let held = Account { lease: lease(world, id), resident: bytes, ..Account::nothing(GPU, FLOOR) };
    world.workers.get_mut(&WorkerId(id)).unwrap().held = vec![held];
    world.answer(WorkerId(id));
}

#[test]
fn a_waiting_start_gets_its_full_size_regardless_of_reports() {
    let mut world = World::new(Settings::default(), &[(23, 140)]);
    starts(&mut world, 0, 4);
    says_that_it_holds_nothing(&mut world, 0);
    starts(&mut world, 1, 6);
    says_that_it_holds_nothing(&mut world, 1);
    assert_eq!((lease(&world, 0), lease(&world, 1)), (Bytes::gib(4), Bytes::ZERO));
    has_loaded(&mut world, 0, 4);
    assert_eq!(world.arbiter.state(WorkerId(1)), Some("starting"));
    assert_eq!(lease(&world, 1), Bytes::gib(6));
    has_loaded(&mut world, 1, 5);
    // From now on the report counts: the worker needs no more, and keeps its grants.
    assert_eq!((world.arbiter.state(WorkerId(1)), lease(&world, 1)), (Some("resident"), Bytes::gib(6)));
}

#[test]
fn a_start_whose_victims_are_late_waits_for_all_of_its_size_again() {
    let mut world = World::new(Settings::default(), &[(12, 140)]);
    let held = Account { lease: Bytes::gib(8), resident: Bytes::gib(8), ..Account::nothing(GPU, FLOOR) };
    world.join(0, 0, 1, Profile::default(), vec![held]);
    world.does(WorkerId(0), UseState::Idle);
    world.pass(MS(1_000));
    starts(&mut world, 1, 6);
    says_that_it_holds_nothing(&mut world, 1);
    world.pass(MS(60_000));
    says_that_it_holds_nothing(&mut world, 1);
    for _ in 0..4 {
        world.answer(WorkerId(0));
        world.answer(WorkerId(1));
        world.pass(MS(61_000));
        says_that_it_holds_nothing(&mut world, 1);
    }
    assert_eq!(lease(&world, 1), Bytes::gib(6));
}

/// The size in the file was too small, or the context's libraries took more: other workers give memory to the start.
#[test]
fn a_worker_that_starts_grows_beyond_its_size() {
    let mut world = World::new(Settings::default(), &[(12, 140)]);
    let held = Account { lease: Bytes::gib(5), resident: Bytes::gib(5), ..Account::nothing(GPU, FLOOR) };
    world.join(0, 0, 1, Profile::default(), vec![held]);
    world.does(WorkerId(0), UseState::Idle);
    world.pass(MS(1_000));
    starts(&mut world, 1, 4);
    says_that_it_holds_nothing(&mut world, 1);
    let grow = Event::Grow { worker: WorkerId(1), gpu: GPU, bytes: Bytes::gib(3), within: MS(30_000) };
    let actions = world.tell(grow);
    assert!(matches!(actions[..], [Action::Shrink { worker: WorkerId(0), .. }]), "{actions:?}");
    world.answer(WorkerId(0));
    assert_eq!(lease(&world, 1), Bytes::gib(7));
}

/// A starting worker may report its holdings and its optional room at any time.
#[test]
fn unreachable_room_is_not_awaited_when_reported_again() {
    let mut world = World::new(Settings::default(), &[(20, 140)]);
    let busy = Account {
        lease: Bytes::gib(8),
        resident: Bytes::gib(8),
        fixed: Bytes::gib(8),
        ..Account::nothing(GPU, FLOOR)
    };
    world.join(0, 0, 1, Profile::default(), vec![busy]);
    let idle = Account { lease: Bytes::gib(10), resident: Bytes::gib(10), ..Account::nothing(GPU, FLOOR) };
    world.join(1, 1, 1, Profile::default(), vec![idle]);
    world.pass(MS(1_000));
    let held = Account { evicted: Bytes::gib(9), room: Bytes::gib(4), ..Account::nothing(GPU, FLOOR) };
    world.join(2, 2, 1, Profile::default(), vec![held.clone()]);
    world.want(WorkerId(2), None);
    world.tell(Event::Changed { worker: WorkerId(2), accounts: vec![held] });
    world.answer(WorkerId(1));
    let come = Bytes::gib(20 - 8).saturating_sub(FLOOR.checked_mul(3).unwrap());
    assert_eq!((lease(&world, 2), world.open.contains(&WorkerId(2))), (come, false), "it is admitted");
}

#[test]
fn a_want_above_the_gpu_is_denied_forever_and_one_blocked_by_contexts_for_now() {
    let mut world = World::new(Settings::default(), &[(10, 140)]);
    world.join_asleep(0, Bytes::gib(9));
    // Programs that join with a context only.
    for id in 1..3 {
        world.join(id, id, 1, Profile::default(), vec![Account::nothing(GPU, FLOOR)]);
    }
    let again = |actions: &[Action]| match actions {
        [Action::Deny { worker: WorkerId(0), why: Denied::TooLarge, retry_after }] => *retry_after,
        _ => panic!("{actions:?}"),
    };
    for id in 1..3 {
        let actions = world.tell(Event::Want { worker: WorkerId(0), deadline: None });
        assert_eq!(again(&actions), Some(MS(1_000)), "they may leave");
        world.die(WorkerId(id));
        world.pass(MS(3_000));
        (0..20).for_each(|_| world.measure(GPU));
    }
    world.want(WorkerId(0), None);
    assert_eq!(lease(&world, 0), Bytes::gib(9));
    world.answer(WorkerId(0));
    world.join_asleep(3, Bytes::gib(10));
    let actions = world.tell(Event::Want { worker: WorkerId(3), deadline: None });
    assert!(
        matches!(actions[..], [Action::Deny { why: Denied::TooLarge, retry_after: None, .. }]),
        "with its own context it never fits: {actions:?}"
    );
}
