//! Copies in another GPU's memory: what shares a block, and what is released while others are copied.

use glake_device::{Fault, Injected, Verb, When};

use super::faults::{assert_sound, stopped};
use super::*;

/// Live blocks, and memory of the peer.
fn taken(fixture: &Fixture) -> (u64, Bytes) {
    (fixture.peer.stats().all.allocation.current, fixture.peer.reserved())
}

#[test]
fn the_copies_of_a_shrink_share_a_block_until_the_last_one_goes() {
    let mut fixture = fixture();
    fixture.furnish();
    fixture.shrink(To::Peer, true).unwrap();
    assert_eq!(taken(&fixture).0, 1);
    let one = || fixture.region.refill(EXTENT, fixture.context(true), &NoWait).unwrap();
    while one().evicted > Bytes::ZERO {
        assert_eq!(taken(&fixture).0, 1);
    }
    assert_eq!((taken(&fixture).0, fixture.wrong_bytes()), (0, 0));
    fixture.assert_no_copies();
    fixture.end();
}

#[test]
fn a_copy_lies_in_two_blocks_where_one_is_full() {
    let mut fixture = fixture();
    // The middle of each extent is free. Six copies and a half fill a shared block.
    let holes: Vec<Block> = (0..13)
        .map(|_| {
            fixture.add(Bytes::kib(1248));
            let hole = fixture.region.malloc(Bytes::kib(1600), fixture.here).unwrap();
            fixture.add(Bytes::kib(1248));
            hole
        })
        .collect();
    for hole in holes {
        fixture.pool.free(hole.address).unwrap();
    }
    fixture.pool.settle().unwrap();
    let live = fixture.live_bytes();
    assert_eq!((fixture.residencies().len(), live), (13, Bytes::kib(13 * 2496)));
    for checked in [true, false] {
        let gone = fixture.shrink(To::Peer, checked).unwrap();
        assert_eq!((gone.copied, gone.resident), (live, Bytes::ZERO));
        assert_eq!(taken(&fixture).0, 2, "one block is full, the other one as large as the rest");
        fixture.refill(checked).unwrap();
        assert_eq!(fixture.wrong_bytes(), 0);
        fixture.assert_no_copies();
    }
    fixture.end();
}

#[test]
fn where_a_block_for_all_does_not_fit_copies_take_what_there_is() {
    let mut fixture = fixture();
    fixture.furnish();
    // Live bytes need five extents, of which three fit: a block for all does not, nor for the four that are left then.
    fixture.peer.set_memory_fraction(12.0 / 64.0);
    stopped(fixture.shrink(To::Peer, true).unwrap_err());
    assert_eq!(taken(&fixture), (3, Bytes::mib(12)));
    fixture.refill(true).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0);
    fixture.assert_no_copies();
    fixture.end();
}

/// More extents than are unmapped at a time.
const MANY: u64 = 24;

fn bed_of_many() -> Fixture {
    let extent = Bytes::mib(2);
    let mut fixture = fixture_of(Harness { extent, ..Harness::default() });
    for _ in 0..MANY {
        fixture.add(extent);
    }
    fixture
}

#[test]
fn what_left_is_released_while_others_are_copied() {
    let fixture = bed_of_many();
    let taken = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let (sim, seen) = (fixture.sim.clone(), taken.clone());
    fixture.meddle(move |_| {
        seen.lock().push(fixture::used(&sim, GPU).get() >> 21);
        Ok(())
    });
    let (report, all) = (fixture.shrink(To::Peer, true).unwrap(), fixture.live_bytes());
    assert_eq!((report.freed, report.copied, report.resident), (all, all, Bytes::ZERO));
    let taken = std::mem::take(&mut *taken.lock());
    assert_eq!(taken[..=16], [MANY; 17], "nothing goes before copies ran");
    assert!(taken[17..].is_sorted_by(|one, next| *one == next + 1), "one with each copy: {taken:?}");
    fixture.refill(true).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0);
    fixture.end();
}

#[test]
fn any_call_that_fails_in_any_round() {
    for verb in [Verb::Create, Verb::SetAccess, Verb::Copy, Verb::Unmap, Verb::Release] {
        let calls = if verb == Verb::Unmap { &[1, 2][..] } else { &[1, 15, 16, 17, MANY] };
        for nth in calls {
            let fixture = bed_of_many();
            let error = Injected::Failed(1);
            fixture.faults.set(&[Fault { verb: Some(verb), when: When::Nth(*nth), error }]);
            let failed = fixture.shrink(To::Peer, false);
            fixture.faults.set(&[]);
            // Several copies share a block: fewer calls make and open memory than there are copies.
            if let Err(error) = failed {
                stopped(error);
            } else {
                assert!(matches!(verb, Verb::Create | Verb::SetAccess) && *nth > 4, "{verb:?} {nth}");
            }
            assert_sound(&fixture);
            let report = fixture.shrink(To::Peer, true).unwrap();
            assert_eq!((report.resident, fixture.used(GPU)), (Bytes::ZERO, Bytes::ZERO), "{verb:?} {nth}");
            fixture.refill(true).unwrap();
            assert_eq!(fixture.wrong_bytes(), 0, "{verb:?} {nth}");
            fixture.end();
        }
    }
}
