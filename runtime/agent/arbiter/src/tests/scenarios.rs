//! Tests of the promises, one promise per test.

use std::time::Duration;

use glake_units::Bytes;

use super::world::{DRAIN, FLOOR, World};
use crate::{
    Account, Action, Arbiter, Denied, Event, GpuId, Joined, Outcome, Preempt, Profile, Settings, Task, Tier,
    UseState, Why, WorkerId,
};

const GPU: GpuId = GpuId(0);
const MS: fn(u64) -> Duration = Duration::from_millis;

/// Creates `count` shrunk workers of 8 GiB on a GPU with 23 GiB.
pub(super) fn six(count: u64) -> World {
    let mut world = World::new(Settings::default(), &[(23, 140)]);
    (0..count).for_each(|id| world.join_asleep(id, Bytes::gib(8)));
    world.pass(MS(1_000));
    world
}

pub(super) fn wake(world: &mut World, id: u64) {
    world.want(WorkerId(id), None);
    world.answer(WorkerId(id));
    world.does(WorkerId(id), UseState::Busy);
}

pub(super) fn last_victims(world: &World) -> Vec<(u64, Why)> {
    let last = world.arbiter.decisions().last().unwrap();
    last.taken.iter().map(|taken| (taken.gang.0, taken.why)).collect()
}

/// The reading shows a dead worker's memory, and not yet the context of a worker that joins meanwhile.
#[test]
fn a_reading_does_not_subtract_a_worker_that_joins_during_it() {
    let mut arbiter = Arbiter::new(Settings::default());
    let (held, died) = (Bytes::gib(3), FLOOR.saturating_add(Bytes::gib(3)));
    arbiter.step(Event::Capacity { gpu: GPU, budget: Bytes::gib(24), total: Bytes::gib(80) }, MS(0));
    let account = Account { lease: held, resident: held, ..Account::nothing(GPU, FLOOR) };
    arbiter.step(Event::Joined(Joined::alone(WorkerId(0), vec![account])), MS(0));
    arbiter.step(Event::Died { worker: WorkerId(0) }, MS(10));
    arbiter.step(Event::Joined(Joined::alone(WorkerId(1), vec![Account::nothing(GPU, FLOOR)])), MS(20));
    arbiter.step(Event::Measured { gpu: GPU, begun: MS(15), used: died, physical: Vec::new() }, MS(30));
    let free = arbiter.ledger.gpus[&GPU].free();
    assert_eq!(free, Bytes::gib(24).saturating_sub(died).saturating_sub(FLOOR));
}

#[test]
fn a_busy_worker_is_parked_only_after_its_quantum() {
    let mut world = six(3);
    wake(&mut world, 0);
    world.pass(MS(50));
    wake(&mut world, 1);
    world.want(WorkerId(2), None);
    assert!(world.workers[&WorkerId(0)].queue.is_empty(), "parked within its quantum");
    // Twice the time of an 8 GiB refill at 50 GB/s, since the refill.
    let next = world.arbiter.next_deadline().unwrap();
    assert!((MS(1_300)..MS(1_400)).contains(&next), "{next:?}");
    world.now = next;
    world.tell(Event::Tick);
    assert_eq!(last_victims(&world), [(0, Why::Quantum)]);
    assert!(matches!(world.workers[&WorkerId(0)].queue[0], Action::Park { .. }));
    world.answer(WorkerId(0));
    world.answer(WorkerId(0));
    assert!(!world.open.contains(&WorkerId(2)));
    world.answer(WorkerId(2));
    assert!(matches!(world.arbiter.decisions().last().unwrap().outcome, Outcome::Refilled(_)));
}

#[test]
fn the_prediction_of_a_decision_is_not_its_timeout() {
    let mut world = six(3);
    for (id, victim) in [(0, false), (1, false), (2, true)] {
        let refill = crate::Overview::of(&world.arbiter).workers[&WorkerId(id)].wake;
        world.want(WorkerId(id), None);
        let decision = world.arbiter.decisions().last().unwrap();
        assert_eq!(!decision.taken.is_empty(), victim);
        let first = decision.predicted.saturating_sub(refill);
        assert!(
            if victim { first > MS(0) && first < MS(30) } else { first == MS(0) },
            "{first:?} of worker {id}"
        );
        world.answer(WorkerId(id));
        world.pass(MS(1_000));
    }
}

#[test]
fn max_pause_prevents_a_longer_park() {
    let mut world = six(0);
    for (id, most) in [(0, Some(MS(500))), (1, None), (2, None)] {
        let held = Account { evicted: Bytes::gib(8), ..Account::nothing(GPU, FLOOR) };
        world.join(id, id, 1, Profile { max_pause: most, ..Profile::default() }, vec![held]);
    }
    wake(&mut world, 0);
    world.pass(MS(50));
    wake(&mut world, 1);
    world.pass(MS(5_000));
    // A turn of 8 GiB and the copies before and after it take 0.7 s.
    world.want(WorkerId(2), None);
    assert_eq!(last_victims(&world), [(1, Why::Quantum)], "not the one that has been resident for longest");
}

#[test]
fn max_pause_does_not_block_others_forever() {
    let mut world = World::new(Settings::default(), &[(10, 20)]);
    let held = Account { evicted: Bytes::gib(8), ..Account::nothing(GPU, FLOOR) };
    let profile = Profile { max_pause: Some(MS(500)), ..Profile::default() };
    world.join(0, 0, 1, profile, vec![held]);
    wake(&mut world, 0);
    world.join_asleep(1, Bytes::gib(8));
    world.pass(MS(5_000));
    world.want(WorkerId(1), None);
    let begin = world.now;
    while world.workers[&WorkerId(0)].queue.is_empty() {
        world.now = world.arbiter.next_deadline().unwrap();
        assert!(world.now <= begin + MS(16_000), "longer than a quarter of a minute");
        world.tell(Event::Tick);
    }
    assert!(world.now >= begin + MS(15_000), "it was parked after {:?}", world.now - begin);
}

#[test]
fn idle_workers_go_first_the_longest_idle_before_others_and_only_as_much_as_is_needed() {
    let mut world = six(3);
    for id in [0, 1] {
        wake(&mut world, id);
        world.pass(MS(5_000));
    }
    world.does(WorkerId(1), UseState::Idle);
    world.pass(MS(1_000));
    world.does(WorkerId(0), UseState::Idle);
    world.want(WorkerId(2), None);
    assert_eq!(last_victims(&world), [(1, Why::Idle)]);
    let taken = world.arbiter.decisions().last().unwrap().taken[0].bytes;
    // 23 less three contexts and two workers leaves 5.1 GiB.
    assert!(taken < Bytes::gib(4), "{taken}");
}

#[test]
fn an_older_want_goes_first_and_a_higher_class_before_it() {
    let mut world = six(3);
    let held = Account { evicted: Bytes::gib(8), ..Account::nothing(GPU, FLOOR) };
    world.join(9, 9, 1, Profile { priority: 1, ..Profile::default() }, vec![held]);
    wake(&mut world, 0);
    world.want(WorkerId(1), None);
    world.pass(MS(10));
    world.want(WorkerId(2), None);
    world.pass(MS(10));
    world.want(WorkerId(9), None);
    world.answer(WorkerId(1));
    world.pass(MS(10_000));
    assert_eq!(world.arbiter.state(WorkerId(9)), Some("refilling"));
    assert_eq!(world.arbiter.state(WorkerId(2)), Some("waiting"));
}

#[test]
fn an_impossible_want_is_denied_forever_and_a_late_one_immediately() {
    let mut world = six(1);
    let large = Account { evicted: Bytes::gib(30), ..Account::nothing(GPU, FLOOR) };
    world.join(7, 7, 1, Profile::default(), vec![large]);
    let actions = world.tell(Event::Want { worker: WorkerId(7), deadline: None });
    assert_eq!(actions, [Action::Deny { worker: WorkerId(7), why: Denied::TooLarge, retry_after: None }]);
    let actions = world.tell(Event::Want { worker: WorkerId(0), deadline: Some(MS(5)) });
    let Action::Deny { why: Denied::Deadline, retry_after: Some(after), .. } = actions[0] else {
        panic!("{actions:?}")
    };
    assert!(after >= MS(1_000));
}

#[test]
fn all_ranks_of_a_gang_or_none() {
    let mut world = World::new(Settings::default(), &[(10, 20), (10, 20)]);
    for rank in 0..2_u64 {
        let gpu = GpuId(u16::try_from(rank).unwrap());
        let held = Account { evicted: Bytes::gib(6), ..Account::nothing(gpu, FLOOR) };
        world.join(rank, 50, 2, Profile::default(), vec![held]);
        if rank == 0 {
            let actions = world.tell(Event::Want { worker: WorkerId(0), deadline: None });
            assert!(matches!(actions[0], Action::Deny { why: Denied::Incomplete, .. }));
        }
    }
    // GPU 1 has no room: GPU 0's is not given either.
    let fixed = Account { lease: Bytes::gib(5), fixed: Bytes::gib(1), ..Account::nothing(GpuId(1), FLOOR) };
    world.join(9, 9, 1, Profile { preempt: Preempt::Idle, ..Profile::default() }, vec![fixed]);
    world.does(WorkerId(9), UseState::Busy);
    let actions = world.tell(Event::Want { worker: WorkerId(1), deadline: None });
    assert!(actions.is_empty(), "{actions:?}");
    world.does(WorkerId(9), UseState::Idle);
    world.pass(MS(1_000));
    world.answer(WorkerId(9));
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("refilling"));
    world.die(WorkerId(1));
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("refilling"), "all was granted: it ends by itself");
}

#[test]
fn a_rank_that_dies_during_a_park_does_not_block_the_others() {
    let mut world = World::new(Settings::default(), &[(10, 20), (10, 20)]);
    for rank in 0..2_u64 {
        let gpu = GpuId(u16::try_from(rank).unwrap());
        let held = Account { lease: Bytes::gib(8), resident: Bytes::gib(8), ..Account::nothing(gpu, FLOOR) };
        world.join(rank, 50, 2, Profile::default(), vec![held]);
        world.does(WorkerId(rank), UseState::Busy);
    }
    let held = Account { evicted: Bytes::gib(6), ..Account::nothing(GPU, FLOOR) };
    world.join(9, 9, 1, Profile::default(), vec![held]);
    world.pass(MS(5_000));
    world.want(WorkerId(9), None);
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("parking"));
    world.answer(WorkerId(0));
    world.die(WorkerId(1));
    assert_eq!(
        world.arbiter.state(WorkerId(0)),
        Some("shrinking"),
        "rank 0 has parked, and nobody else is left"
    );
}

#[test]
fn a_stale_failure_is_ignored() {
    let mut world = World::new(Settings::default(), &[(10, 20)]);
    let held = Account { lease: Bytes::gib(8), resident: Bytes::gib(8), ..Account::nothing(GPU, FLOOR) };
    world.join(0, 0, 1, Profile::default(), vec![held]);
    world.does(WorkerId(0), UseState::Busy);
    world.join_asleep(1, Bytes::gib(6));
    world.pass(MS(5_000));
    world.want(WorkerId(1), None);
    world.answer(WorkerId(0));
    let failed = |what| Event::Failed {
        worker: WorkerId(0),
        what,
        accounts: vec![Account {
            lease: Bytes::gib(8),
            resident: Bytes::gib(8),
            ..Account::nothing(GPU, FLOOR)
        }],
    };
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("shrinking"));
    world.tell(failed(Task::Park));
    world.tell(failed(Task::Refill));
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("shrinking"), "it parked, and shrinks now");
    world.tell(failed(Task::Shrink));
    assert_ne!(world.arbiter.state(WorkerId(0)), Some("shrinking"));
}

/// The report of resident and evicted memory is slightly older than the lease.
#[test]
fn a_want_is_planned_completely_despite_concurrent_evictions() {
    let mut world = six(1);
    let told = Account {
        resident: Bytes::gib(1),
        evicted: Bytes::gib(7),
        room: Bytes::mib(4),
        ..Account::nothing(GPU, FLOOR)
    };
    world.tell(Event::Changed { worker: WorkerId(0), accounts: vec![told] });
    let actions = world.tell(Event::Want { worker: WorkerId(0), deadline: None });
    let granted =
        |action: &Action| if let Action::Grant { bytes, .. } = action { *bytes } else { Bytes::ZERO };
    assert_eq!(actions.iter().map(granted).sum::<Bytes>(), Bytes::gib(8).saturating_add(Bytes::mib(4)));
}

#[test]
fn memory_evicted_during_a_refill_is_granted_again() {
    let mut world = six(1);
    world.want(WorkerId(0), None);
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("refilling"));
    let bytes = Bytes::gib(3);
    let worker = world.workers.get_mut(&WorkerId(0)).unwrap();
    worker.held[0].lease = worker.held[0].lease.saturating_sub(bytes);
    world.tell(Event::Returned { worker: WorkerId(0), gpu: GPU, bytes });
    let worker = &world.workers[&WorkerId(0)];
    let accounts = worker.held.clone();
    let actions = world.tell(Event::Changed { worker: WorkerId(0), accounts });
    assert!(matches!(actions[..], [Action::Grant { bytes: granted, .. }] if granted == bytes), "{actions:?}");
    world.answer(WorkerId(0));
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("resident"));
}

/// The worker returned memory of another region than the one that it waits for.
#[test]
fn a_refill_ends_although_memory_left_meanwhile() {
    let mut world = six(3);
    wake(&mut world, 1);
    world.want(WorkerId(0), None);
    let worker = world.workers.get_mut(&WorkerId(0)).unwrap();
    worker.held[0].lease = Bytes::gib(5);
    (worker.held[0].resident, worker.held[0].evicted) = (Bytes::gib(5), Bytes::gib(3));
    world.tell(Event::Returned { worker: WorkerId(0), gpu: GPU, bytes: Bytes::gib(3) });
    // No memory is free now.
    let other = Account { lease: Bytes::gib(7), resident: Bytes::gib(7), ..Account::nothing(GPU, FLOOR) };
    world.join(9, 9, 1, Profile { preempt: Preempt::Never, ..Profile::default() }, vec![other]);
    let accounts = world.workers[&WorkerId(0)].held.clone();
    world.tell(Event::Changed { worker: WorkerId(0), accounts: accounts.clone() });
    world.tell(Event::Refilled { worker: WorkerId(0), accounts });
    let state = world.arbiter.state(WorkerId(0));
    assert_eq!(state, Some("asleep"), "nothing is taken of it, and nothing waited for");
    let queue = &world.workers[&WorkerId(0)].queue;
    assert!(!queue.iter().any(|command| matches!(command, Action::Shrink { .. })), "{queue:?}");
}

#[test]
fn a_late_victim_is_replaced_and_early_grants_are_returned() {
    let mut world = six(3);
    for id in [0, 1] {
        wake(&mut world, id);
        world.pass(MS(2_000));
    }
    world.want(WorkerId(2), None);
    world.workers.get_mut(&WorkerId(0)).unwrap().stopped = true;
    let by = world.arbiter.next_deadline().unwrap();
    world.now = by;
    let actions = world.tell(Event::Tick);
    assert!(actions.contains(&Action::Unpark { worker: WorkerId(0) }), "{actions:?}");
    assert!(matches!(world.workers[&WorkerId(1)].queue[0], Action::Park { .. }), "{actions:?}");
    world.workers.get_mut(&WorkerId(1)).unwrap().stopped = true;
    world.does(WorkerId(0), UseState::Capturing);
    let by = world.arbiter.next_deadline().unwrap();
    world.now = by;
    let actions = world.tell(Event::Tick);
    let back = |action: &Action| matches!(action, Action::Shrink { worker: WorkerId(2), .. });
    assert!(actions.iter().any(back), "{actions:?}");
    assert!(world.open.contains(&WorkerId(2)), "it waits again");
}

#[test]
fn a_late_shrink_is_reported_as_late_until_it_ends() {
    let mut world = World::new(Settings::default(), &[(10, 20)]);
    let held = Account { lease: Bytes::gib(8), resident: Bytes::gib(8), ..Account::nothing(GPU, FLOOR) };
    world.join(0, 0, 1, Profile::default(), vec![held]);
    world.tell(Event::Shrink { worker: WorkerId(0), within: DRAIN });
    assert!(!world.arbiter.is_late(WorkerId(0)));
    world.pass(MS(100_000));
    assert!(world.arbiter.is_late(WorkerId(0)));
    world.answer(WorkerId(0));
    assert_eq!(
        (world.arbiter.state(WorkerId(0)), world.arbiter.is_late(WorkerId(0))),
        (Some("asleep"), false)
    );
}

#[test]
fn a_new_agent_takes_memory_only_from_workers_that_have_rejoined() {
    let mut world = six(3);
    wake(&mut world, 0);
    world.pass(MS(2_000));
    wake(&mut world, 1);
    world.pass(MS(5_000));
    [0, 1].into_iter().for_each(|id| world.does(WorkerId(id), UseState::Idle));
    let before = world.arbiter.claimed(GPU);
    world.restart(|_| true, |id| id != 0);
    assert_eq!(world.arbiter.claimed(GPU), before, "counted twice, or not at all");
    world.pass(MS(400));
    world.want(WorkerId(2), None);
    assert_eq!(last_victims(&world), [(1, Why::Idle)]);
    world.tell_joined(WorkerId(0), Event::Joined);
    world.tell_joined(WorkerId(0), Event::Joined);
    assert!(world.arbiter.claimed(GPU) <= world.arbiter.limit(GPU));
}

#[test]
fn a_growth_parks_workers_past_their_quantum() {
    let mut world = six(3);
    wake(&mut world, 0);
    wake(&mut world, 1);
    world.pass(MS(9_000));
    let grow = |gib| Event::Grow { worker: WorkerId(0), gpu: GPU, bytes: Bytes::gib(gib), within: MS(200) };
    let actions = world.tell(grow(5));
    assert!(matches!(actions[..], [Action::Grant { .. }]));
    assert!(matches!(world.tell(grow(5))[..], [Action::Park { worker: WorkerId(1), .. }]));
    world.pass(MS(199));
    let actions = world.tell(Event::Tick);
    assert!(actions.is_empty(), "{actions:?}");
    world.now += MS(1);
    let actions = world.tell(Event::Tick);
    let why = crate::Denied::Deadline;
    let denied = Action::DenyGrowth { worker: WorkerId(0), gpu: GPU, bytes: Bytes::gib(5), why };
    assert_eq!(actions, [denied, Action::Unpark { worker: WorkerId(1) }], "nobody waits for it any more");
    world.does(WorkerId(1), UseState::Idle);
    assert!(matches!(world.tell(grow(5))[..], [Action::Shrink { worker: WorkerId(1), .. }]));
    world.workers.get_mut(&WorkerId(1)).unwrap().queue.pop_front();
    world.pass(MS(200));
    world.answer(WorkerId(1));
    assert!(matches!(world.tell(grow(5))[..], [Action::Grant { .. }]), "late bytes are free");
}

#[test]
fn growth_gets_other_victims_where_one_is_late_and_waits_for_all_of_them() {
    let mut world = World::new(Settings::default(), &[(30, 140)]);
    (0..3).for_each(|id| world.join_asleep(id, Bytes::gib(8)));
    world.pass(MS(1_000));
    for id in 0..3 {
        wake(&mut world, id);
        world.pass(MS(1_000));
    }
    (1..3).for_each(|id| world.does(WorkerId(id), UseState::Idle));
    let within = MS(30_000);
    let grow = Event::Grow { worker: WorkerId(0), gpu: GPU, bytes: Bytes::gib(6), within };
    assert!(matches!(world.tell(grow)[..], [Action::Shrink { worker: WorkerId(1), .. }]));
    // A use began at the same moment, and the memory leaves when it ends.
    world.now = world.arbiter.next_deadline().unwrap();
    assert!(world.now < MS(10_000));
    let actions = world.tell(Event::Tick);
    assert!(matches!(actions[..], [Action::Shrink { worker: WorkerId(2), .. }]), "{actions:?}");
    world.does(WorkerId(2), UseState::Busy);
    world.pass(MS(10_000));
    world.answer(WorkerId(1));
    assert_eq!(world.workers[&WorkerId(0)].held[0].lease, Bytes::gib(14));
}

#[test]
fn a_rank_that_starts_beside_one_that_is_resident_ends_its_start_alone() {
    let mut world = World::new(Settings::default(), &[(10, 20), (10, 20)]);
    let held = |gpu| Account {
        lease: Bytes::gib(4),
        resident: Bytes::gib(4),
        ..Account::nothing(GpuId(gpu), FLOOR)
    };
    world.join(0, 50, 2, Profile::default(), vec![held(0)]);
    let starts = Account { room: Bytes::gib(4), ..Account::nothing(GpuId(1), FLOOR) };
    world.join_as(1, 50, 2, Profile::default(), vec![starts], true);
    world.want(WorkerId(1), None);
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("starting"));
    world.workers.get_mut(&WorkerId(1)).unwrap().held = vec![held(1)];
    world.answer(WorkerId(1));
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("resident"), "rank 0 had nothing to wait for");
}

/// Creates a gang of two ranks on two GPUs: one rank is resident, the other has been admitted to its start.
fn starting_beside_resident() -> World {
    let mut world = World::new(Settings::default(), &[(10, 20), (10, 20)]);
    let held = Account { lease: Bytes::gib(4), resident: Bytes::gib(4), ..Account::nothing(GPU, FLOOR) };
    world.join(0, 50, 2, Profile::default(), vec![held]);
    let starts = Account { room: Bytes::gib(4), ..Account::nothing(GpuId(1), FLOOR) };
    world.join_as(1, 50, 2, Profile::default(), vec![starts], true);
    world.want(WorkerId(1), None);
    world
}

#[test]
fn a_want_during_another_ranks_start_is_granted_afterwards() {
    let mut world = starting_beside_resident();
    let gone = Account { evicted: Bytes::gib(4), ..Account::nothing(GPU, FLOOR) };
    world.workers.get_mut(&WorkerId(0)).unwrap().held = vec![gone.clone()];
    world.tell(Event::Returned { worker: WorkerId(0), gpu: GPU, bytes: Bytes::gib(4) });
    world.tell(Event::Changed { worker: WorkerId(0), accounts: vec![gone] });
    let actions = world.tell(Event::Want { worker: WorkerId(0), deadline: None });
    assert!(actions.is_empty(), "nothing was granted: {actions:?}");
    let accounts = world.workers[&WorkerId(0)].held.clone();
    world.tell(Event::Failed { worker: WorkerId(0), what: Task::Refill, accounts });
    assert_eq!(world.arbiter.state(WorkerId(1)), Some("starting"), "another's failure is not its own");
    let actions = world.tell(Event::Refilled { worker: WorkerId(1), accounts: vec![] });
    assert!(matches!(actions[..], [Action::Grant { worker: WorkerId(0), .. }, ..]), "{actions:?}");
}

#[test]
fn a_start_that_ends_by_death_does_not_change_link_predictions() {
    let mut world = starting_beside_resident();
    world.pass(MS(20_000));
    world.die(WorkerId(1));
    let gone = Account { evicted: Bytes::gib(4), ..Account::nothing(GPU, FLOOR) };
    world.tell(Event::Changed { worker: WorkerId(0), accounts: vec![gone] });
    let wake = crate::Overview::of(&world.arbiter).workers[&WorkerId(0)].wake;
    assert!(wake < MS(150), "4 GiB at 50 GB/s, not {wake:?}");
}

#[test]
fn one_starts_at_a_time() {
    let mut world = six(0);
    for id in 0..2 {
        let held = Account { room: Bytes::gib(4), ..Account::nothing(GPU, FLOOR) };
        world.join_as(id, id, 1, Profile::default(), vec![held], true);
        world.want(WorkerId(id), None);
    }
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("starting"));
    assert_eq!(world.arbiter.state(WorkerId(1)), Some("waiting"));
    world.pass(MS(100_000));
    let worker = world.workers.get_mut(&WorkerId(0)).unwrap();
    worker.held[0] =
        Account { lease: Bytes::gib(4), resident: Bytes::gib(4), ..Account::nothing(GPU, FLOOR) };
    world.answer(WorkerId(0));
    assert_eq!(world.arbiter.state(WorkerId(0)), Some("resident"));
    assert_eq!(world.arbiter.state(WorkerId(1)), Some("starting"));
}

#[test]
fn copies_go_to_an_idle_gpu_then_to_the_host_then_to_files() {
    let settings = Settings { peers: true, host_budget: Bytes::gib(10), ..Settings::default() };
    let mut world = World::new(settings, &[(20, 24), (20, 24)]);
    let dirty = |id: u64, hosted: u64| {
        let bytes = Bytes::gib(6);
        let held = Account::nothing(GPU, FLOOR);
        (id, Account { lease: bytes, resident: bytes, dirty: bytes, hosted: Bytes::gib(hosted), ..held })
    };
    for (id, held) in [dirty(0, 0), dirty(1, 0), dirty(2, 9)] {
        world.join(id, id, 1, Profile::default(), vec![held]);
    }
    let tier = |world: &mut World, worker: u64| {
        let actions = world.tell(Event::Shrink { worker: WorkerId(worker), within: DRAIN });
        actions
            .iter()
            .find_map(|a| if let Action::Shrink { tier, .. } = a { Some(*tier) } else { None })
            .unwrap()
    };
    assert_eq!(tier(&mut world, 0), Tier::Peer(GpuId(1)));
    world.settings.peers = false;
    assert_eq!(tier(&mut world, 1), Tier::Peer(GpuId(1)));
    assert_eq!(tier(&mut world, 2), Tier::File);
}

/// Copies in flight to the host count before their worker reports them, and possibly written memory is copied too.
#[test]
fn copies_under_way_and_unknown_ones_count_against_the_host_budget() {
    let gib = Bytes::gib;
    let settings = Settings { host_budget: gib(10), ..Settings::default() };
    let mut world = World::new(settings, &[(20, 24)]);
    let held = |dirty: u64, unknown: u64| Account {
        lease: gib(6),
        resident: gib(6),
        dirty: gib(dirty),
        unknown: gib(unknown),
        ..Account::nothing(GPU, FLOOR)
    };
    for (id, held) in [held(5, 0), held(5, 0), held(0, 5), held(0, 0)].into_iter().enumerate() {
        world.join(id as u64, id as u64, 1, Profile::default(), vec![held]);
    }
    let tier = |world: &mut World, worker: u64| {
        let actions = world.tell(Event::Shrink { worker: WorkerId(worker), within: DRAIN });
        let tier = |a: &Action| if let Action::Shrink { tier, .. } = a { Some(*tier) } else { None };
        actions.iter().find_map(tier).unwrap()
    };
    assert_eq!(tier(&mut world, 0), Tier::Host);
    assert_eq!(tier(&mut world, 1), Tier::File, "5 of 10 GiB are on their way");
    assert_eq!(tier(&mut world, 2), Tier::File, "5 GiB may have been written");
    assert_eq!(tier(&mut world, 3), Tier::Host, "nothing is copied");
    // A worker known only from the journal may have copies in all of the host budget.
    let mut world = World::new(Settings { host_budget: gib(10), ..Settings::default() }, &[(20, 24)]);
    world.join(0, 0, 1, Profile::default(), vec![held(5, 0)]);
    world.tell(Event::Expected(crate::Joined::alone(WorkerId(9), vec![held(0, 0)])));
    assert_eq!(tier(&mut world, 0), Tier::File);
}

#[test]
fn the_same_events_give_the_same_actions() {
    let mut world = six(4);
    // Decisions as JSON text.
    let mut log: Vec<(u64, String)> = Vec::new();
    let mut first = Arbiter::new(world.settings.clone());
    let mut events = vec![(0, Event::Capacity { gpu: GPU, budget: Bytes::gib(23), total: Bytes::gib(140) })];
    for (id, worker) in &world.workers {
        events.push((0, Event::Joined(crate::Joined::alone(*id, worker.held.clone()))));
    }
    for step in 0..400_u64 {
        let worker = WorkerId(step * 7 % 4);
        events.push((
            step * 37,
            match step % 5 {
                0 | 3 => Event::Want { worker, deadline: None },
                1 => Event::Activity { worker, activity: UseState::Busy, idle_for: Duration::ZERO },
                2 => Event::Returned { worker, gpu: GPU, bytes: Bytes::gib(step % 3) },
                _ if step % 2 == 0 => Event::Parked { worker },
                _ => Event::Refilled { worker, accounts: Vec::new() },
            },
        ));
    }
    let told = events.into_iter().map(|(at, event)| {
        log.push((at, serde_json::to_string(&event).unwrap()));
        first.step(event, MS(at))
    });
    let told = told.collect::<Vec<_>>();
    assert!(told.iter().flatten().count() > 50);
    let mut again = Arbiter::new(world.settings.clone());
    for ((at, text), told) in log.into_iter().zip(told) {
        assert_eq!(again.step(serde_json::from_str(&text).unwrap(), MS(at)), told);
    }
    assert!(first == again);
    world.silence();
}

#[test]
fn a_refill_does_not_need_room_to_grow() {
    let (gpu, a, b) = (GpuId(0), WorkerId(1), WorkerId(2));
    let (gib, mib, s) = (Bytes::gib, Bytes::mib, Duration::from_secs);
    let mut arbiter = Arbiter::new(Settings::default());
    arbiter.step(Event::Capacity { gpu, budget: gib(10), total: gib(10) }, s(0));
    // Two contexts of 0.5 GiB; A has 8.5 GiB of the 9 that are left, by growths that were granted.
    let resident = Account {
        lease: mib(8704),
        resident: mib(8704),
        dirty: mib(8704),
        ..Account::nothing(gpu, mib(512))
    };
    arbiter.step(Event::Joined(Joined::alone(a, vec![resident.clone()])), s(0));
    arbiter.step(
        Event::Joined(Joined::alone(b, vec![Account { evicted: gib(2), ..Account::nothing(gpu, mib(512)) }])),
        s(0),
    );
    arbiter.step(Event::Activity { worker: a, activity: UseState::Idle, idle_for: s(0) }, s(1));
    // B wants 2 GiB: 1.5 GiB of A leave.
    let actions = arbiter.step(Event::Want { worker: b, deadline: None }, s(5));
    let taken = actions
        .iter()
        .find_map(|action| match action {
            Action::Shrink { worker, bytes, .. } if *worker == a => Some(*bytes),
            _ => None,
        })
        .unwrap();
    assert_eq!(taken, mib(1536));
    let left = mib(8704 - 1536);
    arbiter.step(Event::Returned { worker: a, gpu, bytes: taken }, s(6));
    // What is evicted asks for lease.growth beside it: 1 GiB by default.
    let held = Account {
        lease: left,
        resident: left,
        dirty: left,
        evicted: taken,
        room: gib(1),
        ..Account::nothing(gpu, mib(512))
    };
    arbiter.step(Event::Shrunk { worker: a, accounts: vec![held.clone()] }, s(6));
    arbiter.step(
        Event::Refilled {
            worker: b,
            accounts: vec![Account {
                lease: gib(2),
                resident: gib(2),
                dirty: gib(2),
                ..Account::nothing(gpu, mib(512))
            }],
        },
        s(7),
    );
    arbiter.step(Event::Activity { worker: b, activity: UseState::Idle, idle_for: s(0) }, s(8));
    // A's next use. B is idle, and has all that A had.
    arbiter.step(Event::Changed { worker: a, accounts: vec![held] }, s(20));
    let actions = arbiter.step(Event::Want { worker: a, deadline: Some(s(30)) }, s(20));
    assert!(
        !actions.iter().any(|action| matches!(action, Action::Deny { .. })),
        "denied for good: {actions:?}"
    );
}
