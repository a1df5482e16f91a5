//! Copies that share blocks of another GPU's memory.

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
    let one = || bed.region.refill(EXTENT, bed.transit(true), &Impatient).unwrap();
    while one().away > Bytes::ZERO {
        assert_eq!(taken(&bed).0, 1);
    }
    assert_eq!((taken(&bed).0, bed.wrong_bytes()), (0, 0));
    bed.assert_no_copies();
    bed.end();
}

#[test]
fn where_a_block_for_all_does_not_fit_each_copy_has_its_own() {
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

fn stopped(error: RegionError) {
    assert!(matches!(error, RegionError::Stopped { .. }), "{error}");
}
