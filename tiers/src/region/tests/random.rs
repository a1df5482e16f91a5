//! Random programs of mallocs, frees, partial shrinks and refills, with failures, beside what the bytes must be.

use std::collections::BTreeMap;

use glake_device::{Fault, Injected, Verb, When};
use proptest::prelude::*;

use super::*;
use crate::{ByteRange, Residency};

#[derive(Clone, Debug)]
enum Op {
    Malloc { kib: u64, elsewhere: bool },
    Free { which: usize },
    Live { which: usize, from: u64, to: u64 },
    Shrink { mib: u64, fault: Option<u64> },
    Refill { mib: u64, fault: Option<u64> },
    Settle,
    Trim,
}

fn op() -> impl Strategy<Value = Op> {
    let fault = || prop::option::weighted(0.3, 1..40u64);
    prop_oneof![
        6 => (prop_oneof![1..1024u64, 1025..3000u64, 2000..7000u64], prop::bool::weighted(0.2))
            .prop_map(|(kib, elsewhere)| Op::Malloc { kib, elsewhere }),
        4 => any::<usize>().prop_map(|which| Op::Free { which }),
        2 => (any::<usize>(), 0..7000u64, 0..7000u64)
            .prop_map(|(which, one, two)| Op::Live { which, from: one.min(two), to: one.max(two) }),
        3 => (prop_oneof![1..24u64, Just(1 << 20)], fault()).prop_map(|(mib, fault)| Op::Shrink { mib, fault }),
        3 => (prop_oneof![1..24u64, Just(1 << 20)], fault()).prop_map(|(mib, fault)| Op::Refill { mib, fault }),
        1 => Just(Op::Settle),
        1 => Just(Op::Trim),
    ]
}

fn run(program: Vec<Op>) {
    let mut fixture = fixture();
    let mut elsewhere: Vec<(Block, u8)> = Vec::new();
    let mut defined = Defined::default();
    for (step, op) in program.into_iter().enumerate() {
        let seed = u8::try_from(step % 250).unwrap();
        match op {
            Op::Malloc { kib, elsewhere: other } => {
                let asked = if other {
                    fixture.pool.malloc(Bytes::kib(kib), fixture.here)
                } else {
                    fixture.pool.malloc_in(fixture.region.domain, Bytes::kib(kib), fixture.here)
                };
                match asked {
                    Ok(block) => {
                        fixture.pool.write(block.address, &pattern(seed, block.size)).unwrap();
                        if other { &mut elsewhere } else { &mut fixture.live }.push((block, seed));
                    }
                    Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                }
            }
            Op::Free { which } if !fixture.live.is_empty() => {
                let which = which % fixture.live.len();
                defined.0.remove(&fixture.live[which].0.address.0);
                fixture.free(which);
            }
            Op::Live { which, from, to } if !fixture.live.is_empty() => {
                let (block, _) = fixture.live[which % fixture.live.len()];
                defined.say(
                    &fixture,
                    block,
                    Bytes::kib(from).min(block.size),
                    Bytes::kib(to).min(block.size),
                );
            }
            Op::Shrink { mib, fault } => {
                set(&fixture, fault);
                let shrunk = fixture.shrink_by(Bytes::mib(mib));
                fixture.faults.set(&[]);
                assert!(shrunk.is_ok() || fault.is_some(), "{shrunk:?}");
            }
            Op::Refill { mib, fault } => {
                set(&fixture, fault);
                let refilled = fixture.refill_by(Bytes::mib(mib));
                fixture.faults.set(&[]);
                if let Err(RegionError::Stopped { source, .. }) = &refilled {
                    let full = matches!(**source, RegionError::Pool(ref error) if error.is_out_of_memory());
                    assert!(full || fault.is_some(), "{source}");
                }
            }
            Op::Settle => fixture.pool.settle().unwrap(),
            Op::Trim => _ = fixture.pool.trim(Bytes::ZERO).unwrap(),
            Op::Free { .. } | Op::Live { .. } => {}
        }
        fixture.assert_sound();
        assert_eq!(fixture.pool.reserved(), fixture.used(), "reserved counts every physical byte");
        let here: Vec<_> = fixture.pool.records().standing(fixture.region.domain).unwrap();
        for (view, residency) in &here {
            assert_eq!(view.state, residency.to_allocator(), "the allocator knows {residency}");
        }
        if here.iter().all(|(_, residency)| matches!(residency, Residency::Resident { .. })) {
            defined.assert_bytes(&fixture);
        }
    }
    for (block, seed) in elsewhere {
        let mut bytes = vec![0; usize::try_from(block.size.get()).unwrap()];
        fixture.pool.read(block.address, &mut bytes).unwrap();
        assert!(bytes == pattern(seed, block.size), "{block:?} of another domain");
        fixture.pool.free(block.address).unwrap();
    }
    fixture.pool.settle().unwrap();
    // Once more all the way out and back, with all the room that there is.
    fixture.shrink().unwrap();
    fixture.pool.set_memory_fraction(1.0);
    fixture.refill().unwrap();
    defined.assert_bytes(&fixture);
    fixture.end();
}

/// Of blocks of which something was said, by where they begin: the bytes that have counted ever since they were written.
#[derive(Default)]
struct Defined(BTreeMap<u64, (Bytes, Bytes)>);

impl Defined {
    fn say(&mut self, fixture: &Fixture, block: Block, start: Bytes, end: Bytes) {
        fixture.pool.live_bytes().set(block.address, &[ByteRange { start, end }]).unwrap();
        let (first, last) = self.0.get(&block.address.0).copied().unwrap_or((Bytes::ZERO, block.size));
        self.0.insert(block.address.0, (start.max(first), end.min(last)));
    }

    fn assert_bytes(&self, fixture: &Fixture) {
        for (block, seed) in &fixture.live {
            let (start, end) = self.0.get(&block.address.0).copied().unwrap_or((Bytes::ZERO, block.size));
            let mut found = vec![0; usize::try_from(end.saturating_sub(start).get()).unwrap()];
            fixture.pool.read(Address(block.address.0 + start.get()), &mut found).unwrap();
            let expected = pattern(*seed, block.size);
            let from = usize::try_from(start.get()).unwrap();
            assert!(found[..] == expected[from..from + found.len()], "{start} to {end} of {block:?}");
        }
    }
}

/// Releases that fail in a trim leak their memory, so the driver fails elsewhere.
pub(super) fn set(fixture: &Fixture, fault: Option<u64>) {
    let verbs = [Verb::Map, Verb::Create, Verb::SetAccess, Verb::Unmap, Verb::Copy, Verb::EventRecordContext];
    let Some(nth) = fault else { return };
    let verb = verbs[usize::try_from(nth).unwrap() % verbs.len()];
    let when = When::Nth(nth / 4 + 1);
    fixture.faults.set(&[Fault { verb: Some(verb), when, error: Injected::Failed(1) }]);
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 500, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_keep_every_byte(program in prop::collection::vec(op(), 1..40)) {
        run(program);
    }
}
