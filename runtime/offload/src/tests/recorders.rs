//! Passes as a recorder gets them.

use std::time::Duration;

use glake_units::Bytes;

use super::tapes::wild;
use crate::{ItemId, Pack, Position, Recorder, ScopeId, Step, Tape, TapeError};

const MIB: Pack = Pack::new(Bytes::mib(1));

#[test]
fn a_pass_ends_when_no_handle_lives() -> Result<(), TapeError> {
    let mut recorder = Recorder::new();
    assert!(!recorder.is_over(), "it has not begun");
    let item = recorder.packed(MIB);
    recorder.shared(item)?;
    recorder.unpacked(item)?;
    recorder.dropped(item)?;
    assert_eq!((recorder.live(), recorder.is_over()), (1, false));
    recorder.unpacked(item)?;
    recorder.dropped(item)?;
    assert!(recorder.is_over());
    assert_eq!(recorder.dropped(item), Err(TapeError::NoHandle { item }));
    assert_eq!(recorder.unpacked(item), Err(TapeError::NoHandle { item }));
    let other = ItemId::new(7);
    assert_eq!(recorder.released(other), Err(TapeError::UnknownItem { item: other, packed: 1 }));
    let tape = recorder.finish();
    assert_eq!(tape.steps(), [Step::Pack(item), Step::Unpack(item), Step::Unpack(item)]);
    assert_eq!(tape.items()[0].unpacks(), [Position(1), Position(2)]);
    assert_eq!(tape.items()[0].dropped(), Position(3));
    Ok(())
}

/// A branch that nothing uses, and a pass that an exception ends: handles go without an unpack.
#[test]
fn items_may_never_be_unpacked() -> Result<(), TapeError> {
    let mut recorder = Recorder::new();
    let (used, unused) = (recorder.packed(MIB), recorder.packed(MIB));
    recorder.unpacked(used)?;
    recorder.dropped(used)?;
    recorder.dropped(unused)?;
    assert!(recorder.is_over());
    let tape = recorder.finish();
    assert_eq!(tape.unused(), 1);
    assert_eq!(tape.items()[1].dropped(), Position(3));
    let mut ended = Recorder::new();
    ended.packed(MIB);
    assert_eq!(ended.finish().items()[0].dropped(), Position(1));
    Ok(())
}

#[test]
fn an_item_is_held_until_its_scope_has_packed_its_last_where_nobody_says_more() -> Result<(), TapeError> {
    let layer = |scope| MIB.within(ScopeId(scope));
    let mut recorder = Recorder::new();
    let items = [layer(0), layer(0), MIB, layer(1), layer(1)].map(|pack| recorder.packed(pack));
    recorder.released(items[3])?;
    let tape = recorder.finish();
    let released: Vec<usize> = tape.items().iter().map(|item| item.released().0).collect();
    assert_eq!(released, [2, 2, 3, 5, 5]);
    Ok(())
}

fn pass(sizes: &[u64], order: &[usize]) -> crate::Tape {
    let mut recorder = Recorder::new();
    let items: Vec<ItemId> =
        sizes.iter().map(|bytes| recorder.packed(Pack::new(Bytes::new(*bytes)))).collect();
    recorder.sampled(Bytes::new(sizes[0]));
    for &at in order {
        recorder.unpacked(items[at]).unwrap();
    }
    recorder.mark(Duration::from_micros(sizes[0]));
    recorder.finish()
}

#[test]
fn a_later_pass_diverges_by_order_and_size() {
    let tape = pass(&[1000, 2000], &[1, 0]);
    assert_eq!(tape.divergence(&pass(&[1000, 2000], &[1, 0])), None);
    assert_eq!(tape.divergence(&pass(&[990, 2000], &[1, 0])), None, "smaller, of one bucket");
    assert_eq!(tape.divergence(&pass(&[1001, 2000], &[1, 0])), Some(Position(0)), "larger");
    assert_eq!(tape.divergence(&pass(&[1000, 1000], &[1, 0])), Some(Position(1)), "of another bucket");
    assert_eq!(tape.divergence(&pass(&[1000, 2000], &[0, 1])), Some(Position(2)));
    assert_eq!(tape.divergence(&pass(&[1000, 2000], &[1])), Some(Position(3)));
    assert_eq!(tape.divergence(&pass(&[1000, 2000], &[1, 0, 0])), Some(Position(4)));
}

#[test]
fn a_tape_widened_by_a_pass_of_its_class_holds_for_both() {
    let (mut tape, larger) = (pass(&[1000, 2000], &[1, 0]), pass(&[1010, 1990], &[1, 0]));
    assert_eq!(tape.class(), larger.class());
    assert!(tape.divergence(&larger).is_some());
    let before = tape.clone();
    assert!(tape.widen(&larger));
    assert_eq!((tape.divergence(&larger), tape.divergence(&before)), (None, None));
    assert_eq!(tape.rest_at(Position(0)), Bytes::new(1010));
    assert_eq!(tape.time(), Duration::from_micros(1000), "the lesser of both");
    let other = pass(&[1000, 4000], &[1, 0]);
    assert!(other.class() != tape.class() && !tape.widen(&other));
    assert_ne!(tape.class(), pass(&[1000, 2000], &[0, 1]).class());
}

#[test]
fn of_two_passes_each_part_takes_the_lesser_time() {
    let timed = |bytes: u64, times: [u64; 4]| {
        let mut recorder = Recorder::new();
        let items = [(); 2].map(|()| recorder.packed(Pack::new(Bytes::new(bytes))));
        for item in items.into_iter().rev() {
            recorder.unpacked(item).unwrap();
            recorder.dropped(item).unwrap();
        }
        (1..).zip(times).for_each(|(at, time)| recorder.mark_at(Position(at), Duration::from_millis(time)));
        recorder.finish()
    };
    let times = |tape: &Tape| (1..=4).map(|at| tape.time_at(Position(at)).as_millis()).collect::<Vec<_>>();
    let mut tape = timed(1000, [100, 110, 120, 130]);
    assert!(tape.widen(&timed(1000, [10, 100, 110, 300])));
    assert_eq!(times(&tape), [10, 20, 30, 40]);
    // A smaller pass takes less time for fewer bytes.
    let mut larger = timed(1010, [202, 303, 404, 505]);
    assert!(larger.widen(&timed(1000, [100, 300, 400, 500])));
    assert_eq!(times(&larger), [101, 202, 303, 404]);
}

/// Keys are kept over processes and versions.
#[test]
fn a_class_is_stable() {
    assert_eq!(pass(&[1000, 2000], &[1, 0]).class().to_string(), "3845c11bbc178674");
    for seed in 0..20 {
        let tape = wild(seed, 60);
        assert_eq!((tape.class(), tape.divergence(&wild(seed, 60))), (wild(seed, 60).class(), None));
    }
}
