//! What a clock says, step by step.

use std::collections::HashSet;
use std::sync::Arc;

use fastrand::Rng;
use glake_units::{Bandwidth, Bytes};
use proptest::prelude::*;

use super::tapes::wild;
use crate::{Clock, ItemId, Links, Pack, Plan, Preset, Request, Step, TapeError, Verdict};

fn plan(seed: u64, steps: usize, part: u64, preset: usize) -> Arc<Plan> {
    let preset = [Preset::Fit, Preset::Memory, Preset::Hybrid][preset];
    let tape = wild(seed, steps);
    let request = Request::new(Bytes::ZERO, Links::new(Bandwidth(2.0), Bandwidth(2.0))).preset(preset);
    let floor = Plan::floor(&tape, &request).unwrap();
    let budget = floor.saturating_add(Bytes::kib(part));
    Arc::new(Plan::new(&tape, &Request { budget, ..request }).unwrap())
}

/// What was told of a pass so far.
#[derive(Debug, Default)]
struct Told {
    reloaded: HashSet<ItemId>,
    settled: Vec<ItemId>,
    ahead: u64,
    used: HashSet<ItemId>,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn each_copy_is_issued_once_in_time_and_within_the_window(
        seed: u64, steps in 1_usize..150, part in 0_u64..4000, preset in 0_usize..3,
    ) {
        let plan = plan(seed, steps, part, preset);
        let tape = Arc::clone(plan.tape());
        let (mut clock, mut told) = (Clock::new(Arc::clone(&plan)), Told::default());
        for (at, step) in tape.steps().iter().enumerate() {
            prop_assert_eq!(clock.next(), Some(*step));
            let orders = match *step {
                Step::Pack(item) => {
                    let (id, orders) = clock.packed(&tape.items()[item.index()].pack());
                    prop_assert_eq!(id, item);
                    orders
                }
                Step::Unpack(item) => clock.unpacked(item).unwrap(),
            };
            prop_assert_eq!(orders.position.0, at);
            told.settled.extend_from_slice(orders.settle);
            for &item in orders.reload {
                prop_assert_eq!(plan.verdict(item), Some(Verdict::Offload));
                prop_assert!(told.settled.contains(&item), "{} is reloaded before it has been copied", item);
                prop_assert!(told.reloaded.insert(item), "{} is reloaded twice", item);
                prop_assert_eq!(plan.reload_at(item).unwrap(), orders.position);
                told.ahead += tape.items()[item.index()].pack().bytes.get();
            }
            let (replay, verdict) = (orders.replay, orders.verdict);
            if let Some(scope) = replay {
                // Stored leaves of a replayed scope are used with the first of it.
                for (index, other) in tape.items().iter().enumerate() {
                    let id = ItemId::new(index);
                    if other.pack().scope == Some(scope) && told.reloaded.contains(&id) && told.used.insert(id) {
                        told.ahead -= other.pack().bytes.get();
                    }
                }
            }
            if let Step::Unpack(item) = *step {
                prop_assert_eq!(plan.verdict(item), Some(verdict));
                if verdict == Verdict::Offload {
                    prop_assert!(told.reloaded.contains(&item), "{} is unpacked and not reloaded", item);
                    if told.used.insert(item) {
                        told.ahead -= tape.items()[item.index()].pack().bytes.get();
                    }
                }
            }
            prop_assert!(told.ahead <= plan.window().get(), "{} {}", told.ahead, plan.window());
        }
        prop_assert!(told.settled.is_sorted());
        prop_assert_eq!(clock.diverged(), None);
    }

    /// Another pass from some step on: packs are offloaded, each unpack finds its item, and no copy begins twice.
    #[test]
    fn a_pass_that_diverges_goes_on_on_demand(
        seed: u64, steps in 1_usize..100, part in 0_u64..2000, preset in 0_usize..3, cut in 0.0_f64..1.0, other: u64,
    ) {
        let plan = plan(seed, steps, part, preset);
        let tape = Arc::clone(plan.tape());
        let mut clock = Clock::new(Arc::clone(&plan));
        let mut rng = Rng::with_seed(other);
        let (mut verdicts, mut reloaded) = (Vec::new(), HashSet::new());
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let cut = (tape.steps().len() as f64 * cut) as usize;
        for at in 0..cut + 60 {
            let planned = tape.steps().get(at).copied().filter(|_| at < cut);
            let step = planned.unwrap_or_else(|| {
                let any = ItemId::new(rng.usize(0..verdicts.len().max(1)));
                if verdicts.is_empty() || rng.bool() { Step::Pack(any) } else { Step::Unpack(any) }
            });
            let orders = match step {
                Step::Pack(item) if at < cut => clock.packed(&tape.items()[item.index()].pack()).1,
                Step::Pack(_) => clock.packed(&Pack::new(Bytes::gib(1 + rng.u64(0..9)))).1,
                Step::Unpack(item) => clock.unpacked(item).unwrap(),
            };
            for &item in orders.reload {
                prop_assert!(reloaded.insert(item), "{} is reloaded twice", item);
                prop_assert_eq!(verdicts[item.index()], Verdict::Offload);
            }
            let verdict = orders.verdict;
            match step {
                Step::Pack(_) => verdicts.push(verdict),
                Step::Unpack(item) if verdict == Verdict::Offload => prop_assert!(reloaded.contains(&item)),
                Step::Unpack(_) => {}
            }
            if at >= cut && matches!(step, Step::Pack(_)) {
                prop_assert_eq!(verdict, Verdict::Offload);
                prop_assert!(clock.diverged().is_some_and(|from| from.0 >= cut && from.0 <= at));
            }
        }
    }
}

#[test]
fn what_is_freed_is_reloaded_on_demand_once_more() {
    let plan = plan(1, 2, 0, 0);
    let mut clock = Clock::new(plan);
    let huge = Pack::new(Bytes::gib(1));
    let (item, _) = clock.packed(&huge);
    assert_eq!(clock.unpacked(item).unwrap().reload, [item]);
    assert_eq!(clock.unpacked(item).unwrap().reload, []);
    clock.freed(item);
    assert_eq!(clock.unpacked(item).unwrap().reload, [item]);
    let none = ItemId::new(9);
    assert_eq!(clock.unpacked(none).unwrap_err(), TapeError::UnknownItem { item: none, packed: 1 });
}
