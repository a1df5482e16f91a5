//! Random programs of mallocs, frees, partial shrinks and refills, with failures, beside what the bytes must be.

use std::cell::Cell;
use std::collections::BTreeMap;

use glake_device::{Fault, Injected, Verb, When};
use proptest::prelude::*;

use super::*;
use crate::{ByteRange, FileStatistics, FileTier, Residency};

#[derive(Clone, Debug)]
enum Op {
    Malloc {
        kib: u64,
        elsewhere: bool,
    },
    Free {
        which: usize,
    },
    Live {
        which: usize,
        from: u64,
        to: u64,
    },
    Decommit {
        which: usize,
        from: u64,
        to: u64,
        fault: Option<u64>,
    },
    Commit {
        which: usize,
        from: u64,
        to: u64,
        fault: Option<u64>,
    },
    Shrink {
        mib: u64,
        fault: Option<u64>,
    },
    Refill {
        mib: u64,
        fault: Option<u64>,
    },
    /// Some comes back before this piece.
    Demote {
        mib: u64,
        refill_before: u64,
    },
    Settle,
    Trim,
}

fn op() -> impl Strategy<Value = Op> {
    let fault = || prop::option::weighted(0.3, 1..40u64);
    let range = || {
        (any::<usize>(), 0..7000u64, 0..7000u64)
            .prop_map(|(which, one, two)| (which, one.min(two), one.max(two)))
    };
    prop_oneof![
        6 => (prop_oneof![1..1024u64, 1025..3000u64, 2000..7000u64], prop::bool::weighted(0.2))
            .prop_map(|(kib, elsewhere)| Op::Malloc { kib, elsewhere }),
        4 => any::<usize>().prop_map(|which| Op::Free { which }),
        2 => range().prop_map(|(which, from, to)| Op::Live { which, from, to }),
        2 => (range(), fault()).prop_map(|((which, from, to), fault)| Op::Decommit { which, from, to, fault }),
        2 => (range(), fault()).prop_map(|((which, from, to), fault)| Op::Commit { which, from, to, fault }),
        3 => (prop_oneof![1..24u64, Just(1 << 20)], fault()).prop_map(|(mib, fault)| Op::Shrink { mib, fault }),
        3 => (prop_oneof![1..24u64, Just(1 << 20)], fault()).prop_map(|(mib, fault)| Op::Refill { mib, fault }),
        2 => (prop_oneof![1..24u64, Just(1 << 20)], 0..12u64)
            .prop_map(|(mib, refill_before)| Op::Demote { mib, refill_before }),
        1 => Just(Op::Settle),
        1 => Just(Op::Trim),
    ]
}

fn run(program: Vec<Op>) {
    let mut fixture = fixture();
    let mut elsewhere: Vec<(Block, u8)> = Vec::new();
    let mut defined = Defined::default();
    let folder = tempfile::tempdir().unwrap();
    let files = FileTier::open(&folder.path().join("extents")).unwrap();
    for (step, op) in program.into_iter().enumerate() {
        let seed = u8::try_from(step % 250).unwrap();
        match op {
            Op::Malloc { kib, elsewhere: other }
                if fixture.has_room(&[fixture.region.domain], Bytes::kib(kib)) =>
            {
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
                let (block, start, end) = part_of(&fixture, which, from, to);
                fixture.pool.live_bytes().set(block.address, &[ByteRange { start, end }]).unwrap();
                defined.lose(block, Bytes::ZERO, start);
                defined.lose(block, end, block.size);
            }
            Op::Decommit { which, from, to, fault } if !fixture.live.is_empty() => {
                let (block, start, end) = part_of(&fixture, which, from, to);
                set(&fixture, fault);
                let size = end.saturating_sub(start);
                let gone = fixture.region.decommit(Address(block.address.0 + start.get()), size);
                fixture.faults.set(&[]);
                assert!(gone.is_ok() || fault.is_some(), "{gone:?}");
                defined.lose(block, start, end);
            }
            Op::Commit { which, from, to, fault } if !fixture.live.is_empty() => {
                let (block, start, end) = part_of(&fixture, which, from, to);
                set(&fixture, fault);
                let made = fixture.commit(Address(block.address.0 + start.get()), end.saturating_sub(start));
                fixture.faults.set(&[]);
                if let Err(error) = &made {
                    let full = matches!(error, RegionError::Pool(error) if error.is_out_of_memory());
                    assert!(full || fault.is_some(), "{error}");
                }
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
            Op::Demote { mib, refill_before } => {
                let asked = Cell::new(0);
                let keep_going = || {
                    asked.set(asked.get() + 1);
                    if asked.get() == refill_before {
                        // Where there is no room it stays.
                        drop(fixture.refill_by(Bytes::mib(4)));
                    }
                    asked.get() < 2 * refill_before + 2
                };
                let (host, keep_going) = (&fixture.host, &keep_going as &dyn Fn() -> bool);
                let before = fixture.region.holding().hosted;
                let freed =
                    fixture.region.demote(Bytes::mib(mib), Demotion { files: &files, host, keep_going });
                let after = fixture.region.holding().hosted;
                assert!(before.saturating_sub(after) >= freed.unwrap());
            }
            Op::Settle => fixture.pool.settle().unwrap(),
            Op::Trim => _ = fixture.pool.trim(Bytes::ZERO).unwrap(),
            Op::Malloc { .. }
            | Op::Free { .. }
            | Op::Live { .. }
            | Op::Decommit { .. }
            | Op::Commit { .. } => {}
        }
        fixture.assert_sound();
        assert_eq!(fixture.pool.reserved(), fixture.used(), "reserved counts every physical byte");
        let here: Vec<_> = fixture.pool.records().standing(fixture.region.domain);
        for (view, residency) in &here {
            assert_eq!(view.state, residency.to_allocator(), "the allocator knows {residency}");
        }
        let is_here = |residency: Residency| {
            matches!(residency, Residency::Resident { .. }) || residency.is_decommitted()
        };
        if here.iter().all(|(_, residency)| is_here(*residency)) {
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
    assert_eq!(files.statistics(), FileStatistics::default());
}

/// A part of a live block, of a byte at least.
fn part_of(fixture: &Fixture, which: usize, from: u64, to: u64) -> (Block, Bytes, Bytes) {
    let (block, _) = fixture.live[which % fixture.live.len()];
    let end = Bytes::kib(to.max(1)).min(block.size);
    (block, Bytes::kib(from).min(end.saturating_sub(Bytes::new(1))), end)
}

/// Of blocks, by where they begin: the bytes that have not counted at some time since they were written.
#[derive(Default)]
struct Defined(BTreeMap<u64, Vec<(Bytes, Bytes)>>);

impl Defined {
    fn lose(&mut self, block: Block, start: Bytes, end: Bytes) {
        self.0.entry(block.address.0).or_default().push((start, end));
    }

    /// The parts of a block that hold what was written.
    fn parts(&self, block: Block) -> Vec<(Bytes, Bytes)> {
        let mut lost = self.0.get(&block.address.0).cloned().unwrap_or_default();
        lost.sort_unstable();
        let (mut parts, mut at) = (Vec::new(), Bytes::ZERO);
        for (start, end) in lost.into_iter().chain([(block.size, block.size)]) {
            if start > at {
                parts.push((at, start));
            }
            at = at.max(end);
        }
        parts
    }

    fn assert_bytes(&self, fixture: &Fixture) {
        for (block, seed) in &fixture.live {
            let expected = pattern(*seed, block.size);
            for (start, end) in self.parts(*block) {
                let mut found = vec![0; usize::try_from(end.saturating_sub(start).get()).unwrap()];
                fixture.pool.read(Address(block.address.0 + start.get()), &mut found).unwrap();
                let from = usize::try_from(start.get()).unwrap();
                assert!(found[..] == expected[from..from + found.len()], "{start} to {end} of {block:?}");
            }
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

#[test]
fn a_program_that_asks_for_more_than_the_gpu_has() {
    let one = [Op::Malloc { kib: 6000, elsewhere: false }, Op::Shrink { mib: 1 << 20, fault: None }];
    run(std::iter::repeat_n(one, 16).flatten().collect());
}
