//! Worked example that visits every state of the model.
//!
//! Chunks of 2 MiB by number; `3+2` are two chunks from number 3. The device has 22 chunks; blocks from 4 MiB on are
//! stitched, and an idle stitched block serves requests of half its size and more.
//!
//! | step | state | served by | free afterwards | idle stitched | made |
//! |---|---|---|---|---|---|
//! | a: 10 MiB | S4 | new 0+5 | | | 5 |
//! | b: 6 MiB | S4 | new 6+3 | | | 8 |
//! | c: 8 MiB | S4 | new 10+4 | | | 12 |
//! | free b | | | 6+3 | | 12 |
//! | d: 5 MiB, 3 chunks | S1 | 6+3 | | | 12 |
//! | free a | | | 0+5 | | 12 |
//! | e: 4 MiB | S2 | 0+2, split off | 2+3 | | 12 |
//! | free d | | | 2+3, 6+3 | | 12 |
//! | f: 10 MiB | S3 | 6+3 2+2, stitched | 4+1 | | 12 |
//! | free f | | | 2+3 (joined), 6+3 | 6+3 2+2 | 12 |
//! | g: 10 MiB | S1 | 6+3 2+2, as it is | 4+1 | | 12 |
//! | free g | | | 2+3, 6+3 | 6+3 2+2 | 12 |
//! | h: 8 MiB | S2 | 6+3 2+1, of the stitched | 3+2 | | 12 |
//! | free h | | | 2+3, 6+3 | 6+3 2+2 | 12 |
//! | i: 16 MiB | S4 | new 15+2, stitched: 6+3 2+3 15+2 | | | 14 |
//! | free c | | | 10+4 | | 14 |
//! | j: 32 MiB | S5 | 10+4 goes back to the device; 16 more do not fit: refused | | | 10 |
//! | free i | | | 2+3, 6+3, 15+2 | 6+3 2+2; 6+3 2+3 15+2 | 10 |
//! | free e | | | 0+5, 6+3, 15+2 | the same | 10 |
//! | k: 40 MiB, stream 1 | S5 | all goes back, and the stitched blocks with it; new 18+20 | | | 20 |
//!
//! Maps: 5 + 3 + 4 chunks made, 5 stitched for f, 2 made and 8 stitched for i, 20 made for k: 47. Stitches: 2.

use super::*;

#[derive(Clone, Copy)]
enum Step {
    Allocate { mib: u64, stream: u16, fit: Fit, refused: bool },
    Free { name: char },
}

/// Row of the table above.
struct Row {
    name: char,
    step: Step,
    free: &'static [(u64, u64)],
    idle: &'static [&'static [(u64, u64)]],
    made: u64,
}

const fn asks(mib: u64, fit: Fit) -> Step {
    Step::Allocate { mib, stream: 0, fit, refused: false }
}

const fn row(
    name: char,
    step: Step,
    free: &'static [(u64, u64)],
    idle: &'static [&'static [(u64, u64)]],
    made: u64,
) -> Row {
    Row { name, step, free, idle, made }
}

const fn frees(name: char) -> Step {
    Step::Free { name }
}

const F: &[(u64, u64)] = &[(6, 3), (2, 2)];
const I: &[(u64, u64)] = &[(6, 3), (2, 3), (15, 2)];

const TABLE: &[Row] = &[
    row('a', asks(10, Fit::Insufficient), &[], &[], 5),
    row('b', asks(6, Fit::Insufficient), &[], &[], 8),
    row('c', asks(8, Fit::Insufficient), &[], &[], 12),
    row(' ', frees('b'), &[(6, 3)], &[], 12),
    row('d', asks(5, Fit::Exact), &[], &[], 12),
    row(' ', frees('a'), &[(0, 5)], &[], 12),
    row('e', asks(4, Fit::Single), &[(2, 3)], &[], 12),
    row(' ', frees('d'), &[(2, 3), (6, 3)], &[], 12),
    row('f', asks(10, Fit::Multiple), &[(4, 1)], &[], 12),
    row(' ', frees('f'), &[(2, 3), (6, 3)], &[F], 12),
    row('g', asks(10, Fit::Exact), &[(4, 1)], &[], 12),
    row(' ', frees('g'), &[(2, 3), (6, 3)], &[F], 12),
    row('h', asks(8, Fit::Single), &[(3, 2)], &[], 12),
    row(' ', frees('h'), &[(2, 3), (6, 3)], &[F], 12),
    row('i', asks(16, Fit::Insufficient), &[], &[], 14),
    row(' ', frees('c'), &[(10, 4)], &[], 14),
    row('j', Step::Allocate { mib: 32, stream: 0, fit: Fit::OutOfMemory, refused: true }, &[], &[], 10),
    row(' ', frees('i'), &[(2, 3), (6, 3), (15, 2)], &[F, I], 10),
    row(' ', frees('e'), &[(0, 5), (6, 3), (15, 2)], &[F, I], 10),
    row('k', Step::Allocate { mib: 40, stream: 1, fit: Fit::OutOfMemory, refused: false }, &[], &[], 20),
];

fn block(name: char) -> BlockId {
    BlockId(u32::from(name) - u32::from('a'))
}

fn pairs(ranges: &[Range]) -> Vec<(u64, u64)> {
    ranges.iter().map(|range| (range.start, range.len)).collect()
}

#[test]
fn every_step_is_as_worked_out() {
    let knobs = Knobs { fragment_limit: Bytes::mib(4), reuse_limit: 2.0, ..Knobs::default() };
    let mut model = GmLake::new(knobs, Bytes::mib(44));
    for (number, row) in TABLE.iter().enumerate() {
        match row.step {
            Step::Allocate { mib, stream, fit, refused } => {
                let outcome = model.allocate(block(row.name), Bytes::mib(mib), StreamIndex(stream), 0);
                assert_eq!(outcome.is_err(), refused, "step {number}");
                assert_eq!(model.last_fit(), Some(fit), "step {number}");
            }
            Step::Free { name } => model.free_completed(block(name), 0).unwrap(),
        }
        model.check();
        let stream = StreamIndex(0);
        let idle: Vec<_> = model.stitched.inactive(stream).iter().map(|ranges| pairs(ranges)).collect();
        assert_eq!(pairs(&model.free[&stream].all()), row.free, "free after step {number}");
        assert_eq!(idle, row.idle, "idle stitched blocks after step {number}");
        assert_eq!(model.reserved(), Bytes::mib(2 * row.made), "made after step {number}");
    }
    assert_eq!(model.counters().extent_maps, 47);
    assert_eq!(model.counters().stitches, 2);
}

#[test]
fn knobs_do_what_the_tutorial_says() {
    let run = |knobs: Knobs| {
        let mut model = GmLake::new(knobs, Bytes::mib(200));
        for (name, mib) in [('a', 40), ('b', 20), ('c', 40)] {
            model.allocate(block(name), Bytes::mib(mib), StreamIndex(0), 0).unwrap();
        }
        for name in ['a', 'c'] {
            model.free_completed(block(name), 0).unwrap();
        }
        model.allocate(block('d'), Bytes::mib(80), StreamIndex(0), 0).unwrap();
        model.free_completed(block('d'), 0).unwrap();
        let idle = model.stitched.inactive(StreamIndex(0)).len();
        model.allocate(block('e'), Bytes::mib(60), StreamIndex(0), 0).unwrap();
        model.check();
        (model.reserved().get() >> 20, model.counters().stitches, idle)
    };
    let stitching = Knobs { fragment_limit: Bytes::mib(64), ..Knobs::default() };
    assert_eq!(run(stitching), (100, 1, 1), "the idle block of 80 serves 60");
    assert_eq!(
        run(Knobs { reuse_limit: 1.0, ..stitching }),
        (160, 1, 1),
        "it is too large, and 60 is below 64"
    );
    assert_eq!(run(Knobs { fragment_limit: Bytes::mib(81), ..stitching }), (180, 0, 0), "80 is below 81");
    assert_eq!(run(Knobs { stitch_last: true, ..stitching }), (180, 0, 0), "the device had room");
    assert_eq!(run(Knobs { auto_gc: Bytes::mib(1), ..stitching }), (100, 1, 1), "in use when collected");
}

/// Idle stitched blocks are unmapped once stitched blocks map more than `auto_gc`.
#[test]
fn idle_stitched_blocks_are_collected() {
    let knobs = Knobs {
        fragment_limit: Bytes::mib(2),
        auto_gc: Bytes::mib(100),
        reuse_limit: 1.0,
        ..Knobs::default()
    };
    let mut model = GmLake::new(knobs, Bytes::MAX);
    for (name, mib) in [('a', 40), ('b', 2), ('c', 40)] {
        model.allocate(block(name), Bytes::mib(mib), StreamIndex(0), 0).unwrap();
    }
    model.free_completed(block('a'), 0).unwrap();
    model.free_completed(block('c'), 0).unwrap();
    model.allocate(block('d'), Bytes::mib(80), StreamIndex(0), 0).unwrap();
    model.free_completed(block('d'), 0).unwrap();
    assert_eq!(model.stitched.inactive(StreamIndex(0)).len(), 1);
    // 80 + 60 MiB are mapped: the idle 80 MiB are unmapped.
    model.allocate(block('e'), Bytes::mib(60), StreamIndex(0), 0).unwrap();
    model.free_completed(block('e'), 0).unwrap();
    let idle = model.stitched.inactive(StreamIndex(0));
    assert_eq!(idle.len(), 1);
    assert_eq!(idle[0].iter().map(|range| range.len).sum::<u64>(), 30);
    model.check();
}
