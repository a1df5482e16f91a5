//! Test of starvation: a want waits at most a quantum and a switch for each earlier want.

use std::collections::BTreeMap;
use std::time::Duration;

use glake_units::Bytes;
use proptest::prelude::*;

use super::world::World;
use crate::{Action, Settings, UseState, WorkerId};

/// Time of a worker to carry out a command.
const STEP: Duration = Duration::from_millis(30);

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// All workers run forever, every other one without safe points, and the GPU has room for a part of them.
    #[test]
    fn waits_are_bounded(count in 2..7_u64, fit in 1..4_u64, gib in 1..8_u64) {
        let budget = fit * (gib + 1) + count;
        let mut world = World::new(Settings::default(), &[(budget, budget + 10)]);
        for id in 0..count {
            world.join_asleep(id, Bytes::gib(gib));
        }
        let mut since: BTreeMap<WorkerId, Duration> = BTreeMap::new();
        // A turn is at most three quanta.
        let quantum = Settings::default().least_quantum.max(Duration::from_millis(gib * 80)) * 3;
        let behind = Settings::default().resume_after;
        let bound = (quantum + STEP * 8) * u32::try_from(count).unwrap() + behind;
        let mut longest = Duration::ZERO;
        for _ in 0..2_000 {
            for id in (0..count).map(WorkerId) {
                let worker = &world.workers[&id];
                let resident = worker.held[0].evicted.is_zero();
                if let Some(command) = worker.queue.front().cloned() {
                    let admitted = matches!(command, Action::Admit { .. });
                    world.answer(id);
                    if admitted {
                        longest = longest.max(world.now - since.remove(&id).unwrap_or(world.now));
                        let without = id.0 % 2 == 1;
                        world.does(id, if without { UseState::Running } else { UseState::Busy });
                    }
                } else if !resident && !since.contains_key(&id) {
                    since.insert(id, world.now);
                    world.want(id, None);
                }
            }
            let waiting = since.values().map(|since| world.now - *since).max().unwrap_or_default();
            prop_assert!(longest.max(waiting) <= bound, "{longest:?}, {waiting:?} of {bound:?}");
            world.pass(STEP);
        }
        prop_assert!(fit >= count || longest > Duration::ZERO);
    }
}
