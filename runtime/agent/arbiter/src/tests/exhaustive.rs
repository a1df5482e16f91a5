//! Exhaustive test of three workers on a GPU with room for one and a half: every order of their events, up to a depth.

use std::collections::HashSet;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use glake_units::Bytes;

use super::world::World;
use crate::{Event, GpuId, Settings, UseState, WorkerId};

fn fingerprint(world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish()
}

/// Returns the worlds after every possible next event.
fn successors(world: &World) -> Vec<World> {
    let mut next = Vec::new();
    let mut then = |change: &dyn Fn(&mut World)| {
        let mut copy = world.clone();
        change(&mut copy);
        next.push(copy);
    };
    for (&id, worker) in &world.workers {
        if !world.open.contains(&id) {
            then(&|world| world.want(id, None));
        } else {
            then(&|world| _ = world.tell(Event::Cancel { worker: id }));
        }
        if !worker.queue.is_empty() {
            then(&|world| world.answer(id));
            then(&|world| world.fail(id));
        }
        // The second worker has no safe points.
        let runs = if id == WorkerId(1) { UseState::Running } else { UseState::Busy };
        let other = if worker.activity == UseState::Idle { runs } else { UseState::Idle };
        if other == UseState::Idle || worker.held[0].evicted.is_zero() && worker.locked.is_none() {
            then(&|world| world.does(id, other));
        }
        if worker.locked == Some(true) {
            let (gpu, bytes, within) = (GpuId(0), Bytes::gib(1), Duration::from_secs(1));
            then(&|world| _ = world.tell(Event::Refill { worker: id }));
            then(&|world| _ = world.tell(Event::Grow { worker: id, gpu, bytes, within }));
        }
        if worker.asked.is_some() {
            for outcome in [Some(true), Some(false), None] {
                then(&|world| world.drive(id, outcome));
            }
        }
        then(&|world| world.die(id));
    }
    if let Some(deadline) = world.arbiter.next_deadline() {
        then(&|world| {
            world.now = world.now.max(deadline);
            world.tell(Event::Tick);
        });
    }
    if world.dead.values().any(|dead| !dead.is_zero()) {
        then(&|world| world.measure(GpuId(0)));
    }
    next
}

#[test]
fn soak_three_workers_on_one_gpu_in_every_order() {
    every_order(3, None);
}

#[test]
fn soak_two_workers_that_are_checkpointed_in_every_order() {
    every_order(2, Some(Duration::from_secs(5)));
}

fn every_order(workers: u64, checkpoint_after: Option<Duration>) {
    let depth = if std::env::var_os("GLAKE_SOAK").is_some() { 9 } else { 6 };
    let longest_wait = Duration::from_secs(20);
    let settings = Settings { longest_wait, checkpoint_after, ..Settings::default() };
    let mut first = World::new(settings, &[(8, 10)]);
    (0..workers).for_each(|id| first.join_asleep(id, Bytes::gib(4)));
    // After the time in which a new worker is no victim.
    first.pass(Duration::from_secs(1));
    first.want(WorkerId(0), None);
    first.answer(WorkerId(0));
    let mut seen = HashSet::from([fingerprint(&first)]);
    let mut layer = vec![first];
    for _ in 0..depth {
        let mut below = Vec::new();
        for world in &layer {
            for next in successors(world) {
                if seen.insert(fingerprint(&next)) {
                    below.push(next);
                }
            }
        }
        layer = below;
    }
    let mut ends = layer.len();
    for mut world in layer {
        world.silence();
        ends -= 1;
    }
    assert_eq!(ends, 0);
    println!("{} states of depth {depth}", seen.len());
}
