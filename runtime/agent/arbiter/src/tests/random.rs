//! Random events: workers die, exceed leases, are late or stop, the clock stands still, the capacity falls, the agent restarts. Runs 10,000
//! events; a million with `GLAKE_SOAK`.

use std::time::Duration;

use glake_units::Bytes;
use proptest::collection::vec;
use proptest::prelude::*;

use super::world::{DRAIN, FLOOR, World};
use crate::{Account, Event, GpuId, Preempt, Profile, Settings, UseState, WorkerId};

#[derive(Clone, Debug)]
enum Op {
    Join { gib: u64, asleep: bool, starting: bool, rank: bool, profile: Profile },
    JoinAgain(u64),
    Die(u64),
    Want(u64, Option<u64>),
    Cancel(u64),
    Does(u64, UseState),
    Answer(u64),
    Fail(u64),
    Stop(u64),
    Lie(u64, u64),
    Grow(u64, u64),
    Shrink(u64),
    Drive(u64, Option<bool>),
    Lose(u64),
    Pass(u64),
    Capacity(u64),
    Measure,
    Restart(u64, u64),
}

fn op() -> impl Strategy<Value = Op> {
    let who = || 0..8_u64;
    let activity = prop_oneof![
        Just(UseState::Idle),
        Just(UseState::Busy),
        Just(UseState::Running),
        Just(UseState::Capturing)
    ];
    let preempt = prop_oneof![1 => Just(Preempt::Never), 1 => Just(Preempt::Idle), 4 => Just(Preempt::Step)];
    let most = proptest::option::weighted(0.2, (0..2_000_u64).prop_map(Duration::from_millis));
    let profile = (-1..2, 0..2_u32, preempt, most)
        .prop_map(|(priority, tenant, preempt, max_pause)| Profile { priority, tenant, preempt, max_pause });
    prop_oneof![
        6 => (0..9_u64, any::<bool>(), any::<bool>(), any::<bool>(), profile)
            .prop_map(|(gib, asleep, starting, rank, profile)| Op::Join { gib, asleep, starting, rank, profile }),
        1 => who().prop_map(Op::JoinAgain),
        2 => who().prop_map(Op::Die),
        12 => (who(), proptest::option::of(0..5_000_u64)).prop_map(|(who, deadline)| Op::Want(who, deadline)),
        3 => who().prop_map(Op::Cancel),
        8 => (who(), activity).prop_map(|(who, activity)| Op::Does(who, activity)),
        24 => who().prop_map(Op::Answer),
        2 => who().prop_map(Op::Fail),
        1 => who().prop_map(Op::Stop),
        1 => (who(), 0..5_u64).prop_map(|(who, gib)| Op::Lie(who, gib)),
        4 => (who(), 0..3_u64).prop_map(|(who, gib)| Op::Grow(who, gib)),
        1 => who().prop_map(Op::Shrink),
        8 => (who(), prop_oneof![4 => Just(Some(true)), 1 => Just(Some(false)), 1 => Just(None)])
            .prop_map(|(who, outcome)| Op::Drive(who, outcome)),
        1 => who().prop_map(Op::Lose),
        12 => prop_oneof![Just(0), 1..50_u64, 100..2_000_u64, 10_000..90_000_u64].prop_map(Op::Pass),
        1 => (2..30_u64).prop_map(Op::Capacity),
        3 => Just(Op::Measure),
        1 => (any::<u64>(), any::<u64>()).prop_map(|(journal, back)| Op::Restart(journal, back)),
    ]
}

/// Carries out one random event.
fn apply(world: &mut World, op: Op, next: &mut u64) {
    let ids: Vec<WorkerId> = world.workers.keys().copied().collect();
    let of = |who: u64| ids.get(usize::try_from(who).unwrap_or(0) % ids.len().max(1)).copied();
    match op {
        Op::Join { gib, asleep, starting, rank, profile } => {
            if ids.len() > 12 {
                return;
            }
            let gpu = GpuId(u16::try_from(*next % 2).unwrap_or(0));
            let room = world.arbiter.limit(gpu).saturating_sub(world.arbiter.claimed(gpu));
            let (bytes, asleep) = (Bytes::gib(gib), asleep || room < Bytes::gib(gib + 1));
            let nothing = Account { discardable: Bytes::mib(300), ..Account::nothing(gpu, FLOOR) };
            let held = match asleep {
                true => Account { evicted: bytes, room: Bytes::mib(200), growth: Bytes::mib(700), ..nothing },
                false => Account { lease: bytes, resident: bytes, dirty: Bytes::mib(100 * gib), ..nothing },
            };
            // Two consecutive workers are ranks of one gang.
            let (gang, ranks) = if rank { (100 + *next / 2, 2) } else { (*next, 1) };
            world.join_as(*next, gang, ranks, profile, vec![held], starting);
            *next += 1;
        }
        Op::JoinAgain(who) => of(who).into_iter().for_each(|id| world.tell_joined(id, Event::Joined)),
        Op::Die(who) => of(who).into_iter().for_each(|id| world.die(id)),
        Op::Want(who, deadline) => {
            of(who).into_iter().for_each(|id| world.want(id, deadline.map(Duration::from_millis)));
        }
        Op::Cancel(who) => of(who).into_iter().for_each(|worker| _ = world.tell(Event::Cancel { worker })),
        Op::Does(who, activity) => of(who).into_iter().for_each(|id| world.does(id, activity)),
        Op::Answer(who) => of(who).into_iter().for_each(|id| world.answer(id)),
        Op::Fail(who) => of(who).into_iter().for_each(|id| world.fail(id)),
        Op::Stop(who) => {
            if let Some(worker) = of(who).and_then(|id| world.workers.get_mut(&id)) {
                worker.stopped = !worker.stopped;
            }
        }
        Op::Lie(who, gib) => {
            let Some(id) = of(who) else { return };
            let gpu = world.workers[&id].held[0].gpu;
            let physical = vec![(id, Bytes::gib(gib))];
            let begun = world.now;
            world.tell(Event::Measured { gpu, begun, used: Bytes::gib(gib), physical });
            world.tell(Event::Returned { worker: WorkerId(u64::MAX), gpu, bytes: Bytes::MAX });
        }
        Op::Grow(who, gib) => {
            let Some(worker) = of(who) else { return };
            let (gpu, within) = (world.workers[&worker].held[0].gpu, Duration::from_millis(200 + 900 * gib));
            world.tell(Event::Grow { worker, gpu, bytes: Bytes::gib(gib), within });
        }
        Op::Shrink(who) => {
            of(who).into_iter().for_each(|worker| _ = world.tell(Event::Shrink { worker, within: DRAIN }))
        }
        Op::Lose(who) => of(who).into_iter().for_each(|id| world.lose(id)),
        Op::Drive(who, outcome) => of(who).into_iter().for_each(|id| world.drive(id, outcome)),
        Op::Pass(millis) => world.pass(Duration::from_millis(millis)),
        Op::Capacity(gib) => {
            world.capacity.values_mut().for_each(|capacity| capacity.0 = Bytes::gib(gib));
            world.tell_capacity();
        }
        Op::Measure => [GpuId(0), GpuId(1)].into_iter().for_each(|gpu| world.measure(gpu)),
        Op::Restart(journal, back) => {
            world.restart(|id| journal >> (id % 64) & 1 == 1, |id| back >> (id % 64) & 1 == 1)
        }
    }
}

#[test]
fn soak_random_events_keep_every_invariant() {
    let events = if std::env::var_os("GLAKE_SOAK").is_some() { 1_000_000 } else { 10_000 };
    let mut config = ProptestConfig::with_cases(events / 250);
    config.failure_persistence = None;
    config.max_shrink_iters = 4_000;
    proptest!(config, |(ops in vec(op(), 250), peers in any::<bool>(), after in proptest::option::of(0..20_u64))| {
        let checkpoint_after = after.map(Duration::from_secs);
        let settings = Settings { peers, host_budget: Bytes::gib(20), checkpoint_after, ..Settings::default() };
        let mut world = World::new(settings, &[(20, 24), (20, 24)]);
        world.checks_overviews = true;
        let mut next = 0;
        for op in ops {
            apply(&mut world, op, &mut next);
        }
        world.silence();
    });
}
