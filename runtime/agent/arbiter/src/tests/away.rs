//! Tests of checkpoints: when workers leave, how they are accounted, when they return.

use std::time::Duration;

use glake_units::Bytes;

use super::world::{DRAIN, FLOOR, World};
use crate::{Account, Action, Contexts, Event, GpuId, Outcome, Settings, UseState, WorkerId};

const GPU: GpuId = GpuId(0);
const AFTER: Duration = Duration::from_secs(30);
const S: fn(u64) -> Duration = Duration::from_secs;

/// Creates `count` shrunk workers of 8 GiB on a GPU of `gib` GiB.
fn asleep(count: u64, gib: u64, checkpoint_after: Option<Duration>) -> World {
    let settings = Settings { checkpoint_after, ..Settings::default() };
    let mut world = World::new(settings, &[(gib, 140)]);
    (0..count).for_each(|id| world.join_asleep(id, Bytes::gib(8)));
    world.pass(S(1));
    world
}

/// Advances the time to the next deadline.
fn due(world: &mut World) -> Vec<Action> {
    world.now = world.arbiter.next_deadline().unwrap();
    world.tell(Event::Tick)
}

fn put_away(world: &mut World, id: u64) {
    let worker = WorkerId(id);
    assert_eq!(due(world), [Action::Checkpoint { worker }]);
    world.drive(worker, Some(true));
}

fn last(world: &World) -> Outcome {
    world.arbiter.decisions().last().unwrap().outcome
}

#[test]
fn checkpoints_are_off_by_default() {
    let mut world = asleep(2, 23, None);
    assert_eq!(world.arbiter.next_deadline(), None);
    assert_eq!(world.tell(Event::Tick), []);
    world.pass(S(100_000));
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("asleep"));
}

#[test]
fn a_long_idle_worker_without_memory_is_checkpointed() {
    let mut world = asleep(1, 23, Some(AFTER));
    let worker = WorkerId(0);
    // The worker joined a second ago.
    assert_eq!(world.arbiter.next_deadline(), Some(AFTER));
    // A refill and a shrink restart the idle time.
    world.pass(S(20));
    world.want(worker, None);
    world.answer(worker);
    assert_eq!(world.arbiter.next_deadline(), None, "it holds something");
    world.pass(S(1));
    world.tell(Event::Shrink { worker, within: DRAIN });
    world.answer(worker);
    let left = world.now;
    assert_eq!(world.arbiter.next_deadline(), Some(left + AFTER));
    assert_eq!(world.arbiter.claimed(GPU), FLOOR);
    put_away(&mut world, 0);
    assert_eq!(
        (world.arbiter.claimed(GPU), world.arbiter.state(worker)),
        (Bytes::ZERO, Some("checkpointed"))
    );
    assert_eq!(last(&world), Outcome::Checkpointed);
    assert_eq!(world.arbiter.next_deadline(), None);
    // The meter does not show the checkpointed worker, and its absence does not count as unmanaged memory.
    world.measure(GPU);
    assert_eq!(world.arbiter.limit(GPU), Bytes::gib(23));
}

#[test]
fn busy_starting_ganged_or_fixed_workers_are_not_checkpointed() {
    let mut world = asleep(1, 23, Some(AFTER));
    world.does(WorkerId(0), UseState::Busy);
    assert_eq!(world.arbiter.next_deadline(), None);
    world.does(WorkerId(0), UseState::Idle);
    assert!(world.arbiter.next_deadline().is_some());
    let fixed = Account {
        fixed: Bytes::mib(2),
        lease: Bytes::mib(2),
        evicted: Bytes::gib(1),
        ..Account::nothing(GPU, FLOOR)
    };
    world.tell(Event::Died { worker: WorkerId(0) });
    world.join(1, 1, 1, crate::Profile::default(), vec![fixed]);
    let evicted = Account { evicted: Bytes::gib(1), ..Account::nothing(GPU, FLOOR) };
    world.join(2, 9, 2, crate::Profile::default(), vec![evicted.clone()]);
    world.join(3, 9, 2, crate::Profile::default(), vec![evicted]);
    world.measure(GPU);
    world.pass(S(1_000));
    for id in 1..4 {
        assert_eq!(world.arbiter.state(WorkerId(id)), Some("asleep"), "{id}");
    }
}

#[test]
fn a_want_of_a_checkpointed_worker_restores_it_first() {
    let mut world = asleep(1, 23, Some(AFTER));
    let worker = WorkerId(0);
    put_away(&mut world, 0);
    let wake = crate::Overview::of(&world.arbiter).workers[&worker].wake;
    assert!(wake > Duration::from_millis(700), "{wake:?}: a restore, and 8 GiB");
    let actions = world.tell(Event::Want { worker, deadline: None });
    assert_eq!(actions, [Action::Restore { worker }]);
    assert_eq!((world.arbiter.claimed(GPU), world.arbiter.state(worker)), (FLOOR, Some("restoring")));
    // No deadline passes meanwhile.
    world.pass(S(4));
    world.drive(worker, Some(true));
    assert!(!world.open.contains(&worker));
    world.answer(worker);
    assert_eq!(world.arbiter.state(worker), Some("resident"));
    assert!(matches!(last(&world), Outcome::Refilled(_)));
}

#[test]
fn a_want_during_a_checkpoint_is_not_lost() {
    let mut world = asleep(1, 23, Some(AFTER));
    let worker = WorkerId(0);
    assert_eq!(due(&mut world), [Action::Checkpoint { worker }]);
    assert_eq!(world.tell(Event::Want { worker, deadline: None }), []);
    world.drive(worker, Some(true));
    assert_eq!(world.workers[&worker].asked, Some(true));
    world.drive(worker, Some(true));
    assert!(!world.open.contains(&worker));
}

#[test]
fn victims_also_give_memory_for_floors() {
    let mut world = asleep(1, 10, Some(AFTER));
    put_away(&mut world, 0);
    world.join_asleep(1, Bytes::gib(8));
    world.want(WorkerId(1), None);
    world.answer(WorkerId(1));
    world.does(WorkerId(1), UseState::Idle);
    world.pass(S(1));
    // 10 GiB less 8 and one floor: room for the other worker's floor and little of its memory.
    world.want(WorkerId(0), None);
    let taken = world.arbiter.decisions().last().unwrap().taken[0].bytes;
    assert_eq!(taken, Bytes::gib(6).saturating_add(Bytes::mib(1280)));
    assert_eq!(world.workers[&WorkerId(0)].asked, Some(true));
    world.answer(WorkerId(1));
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("restoring"), "nothing is granted yet");
    world.drive(WorkerId(0), Some(true));
    world.answer(WorkerId(0));
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("resident"));
}

#[test]
fn a_failed_restore_is_retried_and_the_want_waits() {
    let mut world = asleep(1, 23, Some(AFTER));
    let worker = WorkerId(0);
    put_away(&mut world, 0);
    world.want(worker, None);
    for seconds in [1, 2, 4, 8, 16, 30, 30] {
        world.drive(worker, Some(false));
        assert_eq!((world.arbiter.claimed(GPU), last(&world)), (Bytes::ZERO, Outcome::NotRestored));
        assert!(world.open.contains(&worker));
        assert_eq!(world.arbiter.next_deadline(), Some(world.now + S(seconds)));
        assert!(due(&mut world).contains(&Action::Restore { worker }));
    }
    // The agent was killed during the request, so the driver is asked again.
    world.drive(worker, None);
    assert!(due(&mut world).contains(&Action::Restore { worker }));
    world.drive(worker, Some(true));
    assert!(!world.open.contains(&worker));
}

#[test]
fn a_hanging_restore_does_not_block_its_want_forever() {
    let mut world = asleep(1, 23, Some(AFTER));
    put_away(&mut world, 0);
    world.want(WorkerId(0), Some(S(120)));
    world.silence();
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("restoring"));
    world.drive(WorkerId(0), Some(true));
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("asleep"));
}

#[test]
fn a_worker_in_an_unknown_state_is_restored_without_a_want() {
    let mut world = asleep(1, 23, None);
    let worker = WorkerId(0);
    let unknown = Event::Contexts { worker, contexts: Contexts::Unknown };
    assert_eq!(world.tell(unknown), [Action::Restore { worker }]);
    assert_eq!(world.arbiter.claimed(GPU), FLOOR);
    world.drive(worker, Some(true));
    assert_eq!((world.arbiter.state(worker), world.arbiter.next_deadline()), (Some("asleep"), None));
}

#[test]
fn failed_checkpoints_back_off() {
    let mut world = asleep(1, 23, Some(AFTER));
    let worker = WorkerId(0);
    for times in [1, 2, 4] {
        assert_eq!(due(&mut world), [Action::Checkpoint { worker }]);
        world.drive(worker, Some(false));
        assert_eq!((last(&world), world.arbiter.claimed(GPU)), (Outcome::Kept, FLOOR));
        assert_eq!(world.arbiter.next_deadline(), Some(world.now + AFTER * times));
    }
}

#[test]
fn checkpoints_run_one_at_a_time() {
    let mut world = asleep(3, 23, Some(AFTER));
    assert_eq!(due(&mut world).len(), 1);
    assert_eq!(world.tell(Event::Tick), []);
    for id in 0..3 {
        assert_eq!(world.workers[&WorkerId(id)].asked, Some(false), "{id}");
        world.drive(WorkerId(id), Some(true));
    }
    assert_eq!(world.arbiter.claimed(GPU), Bytes::ZERO);
}

#[test]
fn a_growth_of_a_checkpointed_worker_waits_for_its_restore() {
    let mut world = asleep(1, 23, Some(AFTER));
    let worker = WorkerId(0);
    put_away(&mut world, 0);
    let grow = Event::Grow { worker, gpu: GPU, bytes: Bytes::gib(1), within: S(10) };
    assert_eq!(world.tell(grow), [Action::Restore { worker }]);
    world.drive(worker, Some(true));
    assert_eq!(world.workers[&worker].held[0].lease, Bytes::gib(1));
}

#[test]
fn a_slow_restore_does_not_block_other_wants() {
    let mut world = asleep(2, 23, Some(AFTER));
    put_away(&mut world, 0);
    world.drive(WorkerId(1), Some(false));
    world.want(WorkerId(0), None);
    world.want(WorkerId(1), None);
    assert!(world.open.contains(&WorkerId(1)));
    world.pass(S(5));
    assert!(!world.open.contains(&WorkerId(1)) && world.open.contains(&WorkerId(0)));
    world.answer(WorkerId(1));
    world.drive(WorkerId(0), Some(true));
    assert!(!world.open.contains(&WorkerId(0)));
}

/// An idle worker occupies the whole GPU.
#[test]
fn idle_victims_give_memory_for_restores_and_growths() {
    for grows in [true, false] {
        let mut world = asleep(1, 10, Some(AFTER));
        let worker = WorkerId(0);
        put_away(&mut world, 0);
        world.join_asleep(1, Bytes::mib(9000));
        world.want(WorkerId(1), None);
        world.answer(WorkerId(1));
        world.does(WorkerId(1), UseState::Idle);
        world.pass(S(1));
        let grow = Event::Grow { worker, gpu: GPU, bytes: Bytes::gib(2), within: S(10) };
        let actions = world.tell(if grows { grow } else { Event::Refill { worker } });
        assert!(matches!(actions[..], [Action::Shrink { worker: WorkerId(1), .. }]), "{actions:?}");
        world.answer(WorkerId(1));
        assert_eq!(world.workers[&worker].asked, Some(true));
        world.drive(worker, Some(true));
        let lease = if grows { Bytes::gib(2) } else { Bytes::ZERO };
        assert_eq!(
            (world.arbiter.state(worker), world.workers[&worker].held[0].lease),
            (Some("asleep"), lease)
        );
    }
}

#[test]
fn another_rank_of_a_checkpointed_gang_counts() {
    let mut world = asleep(1, 23, Some(AFTER));
    put_away(&mut world, 0);
    let held = Account { evicted: Bytes::gib(1), ..Account::nothing(GPU, FLOOR) };
    world.join(7, 0, 1, crate::Profile::default(), vec![held]);
    assert_eq!(world.arbiter.claimed(GPU), FLOOR);
    world.tell(Event::Refill { worker: WorkerId(0) });
    assert_eq!(world.workers[&WorkerId(0)].asked, Some(true));
    world.drive(WorkerId(0), Some(false));
    world.die(WorkerId(0));
    assert_eq!(world.arbiter.state(WorkerId(7)), Some("asleep"));
    world.want(WorkerId(7), None);
    assert!(!world.open.contains(&WorkerId(7)));
}

/// After a permanent failure of the restore, waiters are denied and the driver is not asked again.
#[test]
fn a_lost_worker_is_denied_and_not_restored_again() {
    let denied = |worker| Action::Deny { worker, why: crate::Denied::Lost, retry_after: None };
    let worker = WorkerId(0);
    for wants in [true, false] {
        let mut world = asleep(1, 23, Some(AFTER));
        put_away(&mut world, 0);
        if wants {
            world.want(worker, None);
        } else {
            world.tell(Event::Refill { worker });
        }
        let grow = |bytes| Event::Grow { worker, gpu: GPU, bytes, within: S(10) };
        assert_eq!(world.tell(grow(Bytes::gib(1))), []);
        world.lose(worker);
        assert_eq!((world.arbiter.state(worker), last(&world)), (Some("failed"), Outcome::Lost));
        assert!(!world.open.contains(&worker) && world.arbiter.claimed(GPU).is_zero());
        assert_eq!(world.arbiter.next_deadline(), None);
        assert_eq!(world.tell(Event::Want { worker, deadline: None }), [denied(worker)]);
        assert_eq!(world.tell(Event::Refill { worker }), []);
        assert_eq!(world.tell(Event::Shrink { worker, within: DRAIN }), []);
        let bytes = Bytes::gib(1);
        assert_eq!(
            world.tell(grow(bytes)),
            [Action::DenyGrowth { worker, gpu: GPU, bytes, why: crate::Denied::Lost }]
        );
        world.pass(S(1_000));
        // Other workers use its memory, and its name is free after its end.
        world.join_asleep(1, Bytes::gib(22));
        world.want(WorkerId(1), None);
        assert!(!world.open.contains(&WorkerId(1)));
        world.die(worker);
        assert_eq!(world.arbiter.state(worker), None);
    }
}

/// The restore command requires slightly more free memory than the restored floor.
#[test]
fn a_restore_needs_a_margin_beyond_the_floor() {
    for (spare, asks) in [(63, false), (64, true)] {
        let mut world = asleep(1, 23, Some(AFTER));
        let worker = WorkerId(0);
        put_away(&mut world, 0);
        let other =
            Account { lease: Bytes::gib(23), resident: Bytes::gib(23), ..Account::nothing(GPU, Bytes::ZERO) };
        let rest = FLOOR.saturating_add(Bytes::mib(spare));
        let lease = other.lease.saturating_sub(rest);
        let profile = crate::Profile { preempt: crate::Preempt::Never, ..crate::Profile::default() };
        world.join(1, 1, 1, profile, vec![Account { lease, resident: lease, fixed: lease, ..other }]);
        let actions = world.tell(Event::Refill { worker });
        assert_eq!(actions.contains(&Action::Restore { worker }), asks, "{spare}: {actions:?}");
    }
}
