//! Random programs on the models: no two live blocks share a byte, and all memory is accounted for.

use glake_units::Bytes;
use proptest::prelude::*;

use super::{Caching, Expandable, GmLake, Knobs};
use crate::trace::{BlockId, StreamIndex};
use crate::{Refusal, Subject};

#[derive(Clone, Debug)]
enum Step {
    Allocate { bytes: u64, stream: u16 },
    Free { which: prop::sample::Index, completed: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let size =
        prop_oneof![1_u64..4096, 4096_u64..(1 << 20), (1_u64 << 20)..(12 << 20), (10_u64 << 20)..(60 << 20)];
    let step = prop_oneof![
        3 => (size, 0_u16..2).prop_map(|(bytes, stream)| Step::Allocate { bytes, stream }),
        2 => (any::<prop::sample::Index>(), any::<bool>())
            .prop_map(|(which, completed)| Step::Free { which, completed }),
    ];
    prop::collection::vec(step, 1..200)
}

/// Runs a program and calls `check` with the live blocks after every step.
fn run<S: Subject>(model: &mut S, steps: &[Step], check: impl Fn(&S, &[(BlockId, u64)])) {
    let mut live: Vec<(BlockId, u64)> = Vec::new();
    let mut pending = Vec::new();
    for (step, block) in steps.iter().zip((0..).map(BlockId)) {
        match step {
            Step::Allocate { bytes, stream } => {
                match model.allocate(block, Bytes::new(*bytes), StreamIndex(*stream), 0) {
                    Ok(()) => live.push((block, *bytes)),
                    Err(Refusal::OutOfMemory { .. }) => {}
                    Err(failed) => panic!("{failed}"),
                }
            }
            Step::Free { which, completed } if !live.is_empty() => {
                let (block, _) = live.swap_remove(which.index(live.len()));
                model.free_requested(block, 0).unwrap();
                if *completed {
                    model.free_completed(block, 0).unwrap();
                } else {
                    pending.push(block);
                }
            }
            Step::Free { .. } => {}
        }
        check(model, &live);
    }
    for block in pending.into_iter().chain(live.into_iter().map(|(block, _)| block)) {
        model.free_completed(block, 0).unwrap();
        check(model, &[]);
    }
}

fn disjoint(live: &[(BlockId, u64)], span: impl Fn(BlockId) -> Option<(u64, u64)>) {
    let mut spans: Vec<_> = live
        .iter()
        .map(|&(block, bytes)| {
            let (address, size) = span(block).expect("a live block has a place");
            assert!(size >= bytes && address % 512 == 0);
            (address, address + size)
        })
        .collect();
    spans.sort_unstable();
    assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "two live blocks share a byte");
}

proptest! {
    #[test]
    fn caching_keeps_live_blocks_apart(steps in steps(), limit_mib in 100_u64..600) {
        let mut model = Caching::new(Bytes::mib(limit_mib));
        run(&mut model, &steps, |model, live| {
            model.check();
            assert!(model.reserved() <= Bytes::mib(limit_mib));
            disjoint(live, |block| model.span(block));
        });
    }

    #[test]
    fn expandable_keeps_live_blocks_apart(steps in steps(), limit_mib in 100_u64..600) {
        let mut model = Expandable::new(Bytes::mib(limit_mib));
        run(&mut model, &steps, |model, live| {
            model.check();
            assert!(model.reserved() <= Bytes::mib(limit_mib));
            disjoint(live, |block| model.span(block));
        });
    }

    #[test]
    fn gmlake_keeps_live_blocks_apart(
        steps in steps(),
        limit_mib in 100_u64..600,
        fragment_limit_mib in 2_u64..40,
        auto_gc_mib in 50_u64..2000,
        stitch_last: bool,
        join: bool,
    ) {
        let knobs = Knobs {
            fragment_limit: Bytes::mib(fragment_limit_mib),
            auto_gc: Bytes::mib(auto_gc_mib),
            stitch_last,
            ..Knobs::default()
        };
        let model = GmLake::new(knobs, Bytes::mib(limit_mib));
        let mut model = if join { model } else { model.without_joining() };
        run(&mut model, &steps, |model, _| {
            model.check();
            assert!(model.reserved() <= Bytes::mib(limit_mib));
        });
    }
}
