//! Copies in another GPU's memory: what shares a block, and what is released while others are copied.

use glake_device::{Fault, Injected, Verb, When};

use super::faults::{assert_sound, stopped};
use super::*;

/// Live blocks, and memory of the peer.
fn taken(bed: &Bed) -> (u64, Bytes) {
    (bed.peer.stats().all.allocation.current, bed.peer.reserved())
}

#[test]
fn the_copies_of_a_shrink_share_a_block_until_the_last_one_goes() {
    let mut bed = bed();
    bed.furnish();
    bed.shrink(To::Peer, true).unwrap();
    assert_eq!(taken(&bed).0, 1);
    let one = || bed.region.refill(EXTENT, bed.context(true), &NoWait).unwrap();
    while one().away > Bytes::ZERO {
        assert_eq!(taken(&bed).0, 1);
    }
    assert_eq!((taken(&bed).0, bed.wrong_bytes()), (0, 0));
    bed.assert_no_copies();
    bed.end();
}

#[test]
fn a_copy_lies_in_two_blocks_where_one_is_full() {
    let mut bed = bed();
    // The middle of each extent is free. Six copies and a half fill a shared block.
    let holes: Vec<Block> = (0..13)
        .map(|_| {
            bed.add(Bytes::kib(1248));
            let hole = bed.region.malloc(Bytes::kib(1600), bed.here).unwrap();
            bed.add(Bytes::kib(1248));
            hole
        })
        .collect();
    for hole in holes {
        bed.pool.free(hole.address).unwrap();
    }
    bed.pool.settle().unwrap();
    let live = bed.live_bytes();
    assert_eq!((bed.residencies().len(), live), (13, Bytes::kib(13 * 2496)));
    for checked in [true, false] {
        let gone = bed.shrink(To::Peer, checked).unwrap();
        assert_eq!((gone.copied, gone.left), (live, Bytes::ZERO));
        assert_eq!(taken(&bed).0, 2, "one block is full, the other one as large as the rest");
        bed.refill(checked).unwrap();
        assert_eq!(bed.wrong_bytes(), 0);
        bed.assert_no_copies();
    }
    bed.end();
}

#[test]
fn where_a_block_for_all_does_not_fit_copies_take_what_there_is() {
    let mut bed = bed();
    bed.furnish();
    // Live bytes need five extents, of which three fit: a block for all does not, nor for the four that are left then.
    bed.peer.set_memory_fraction(12.0 / 64.0);
    stopped(bed.shrink(To::Peer, true).unwrap_err());
    assert_eq!(taken(&bed), (3, Bytes::mib(12)));
    bed.refill(true).unwrap();
    assert_eq!(bed.wrong_bytes(), 0);
    bed.assert_no_copies();
    bed.end();
}

/// More extents than are unmapped at a time.
const MANY: u64 = 24;

fn bed_of_many() -> Bed {
    let extent = Bytes::mib(2);
    let mut bed = bed_of(Ground { extent, ..Ground::default() });
    for _ in 0..MANY {
        bed.add(extent);
    }
    bed
}

#[test]
fn what_left_is_released_while_others_are_copied() {
    let bed = bed_of_many();
    let taken = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let (sim, seen) = (bed.sim.clone(), taken.clone());
    bed.meddle(move |_| {
        seen.lock().push(bed::used(&sim, GPU).get() >> 21);
        Ok(())
    });
    let (report, all) = (bed.shrink(To::Peer, true).unwrap(), bed.live_bytes());
    assert_eq!((report.freed, report.copied, report.left), (all, all, Bytes::ZERO));
    let taken = std::mem::take(&mut *taken.lock());
    assert_eq!(taken[..=16], [MANY; 17], "nothing goes before copies ran");
    assert!(taken[17..].is_sorted_by(|one, next| *one == next + 1), "one with each copy: {taken:?}");
    bed.refill(true).unwrap();
    assert_eq!(bed.wrong_bytes(), 0);
    bed.end();
}

#[test]
fn any_call_that_fails_in_any_round() {
    for verb in [Verb::Create, Verb::SetAccess, Verb::Copy, Verb::Unmap, Verb::Release] {
        let calls = if verb == Verb::Unmap { &[1, 2][..] } else { &[1, 15, 16, 17, MANY] };
        for nth in calls {
            let bed = bed_of_many();
            let error = Injected::Failed(1);
            bed.faults.set(&[Fault { verb: Some(verb), when: When::Nth(*nth), error }]);
            let failed = bed.shrink(To::Peer, false);
            bed.faults.set(&[]);
            // Several copies share a block: fewer calls make and open memory than there are copies.
            if let Err(error) = failed {
                stopped(error);
            } else {
                assert!(matches!(verb, Verb::Create | Verb::SetAccess) && *nth > 4, "{verb:?} {nth}");
            }
            assert_sound(&bed);
            let report = bed.shrink(To::Peer, true).unwrap();
            assert_eq!((report.left, bed.used(GPU)), (Bytes::ZERO, Bytes::ZERO), "{verb:?} {nth}");
            bed.refill(true).unwrap();
            assert_eq!(bed.wrong_bytes(), 0, "{verb:?} {nth}");
            bed.end();
        }
    }
}
