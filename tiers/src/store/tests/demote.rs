//! Copies go from the host's memory to files while nobody needs them, and come back from there.

use std::cell::Cell;

use super::faults::assert_sound;
use super::*;
use crate::{Demotion, FileError};

impl Fixture {
    fn demote_while(&self, amount: Bytes, keep_going: &dyn Fn() -> bool) -> Result<Bytes, RegionError> {
        self.region.demote(amount, Demotion { files: &self.files, host: &self.host, keep_going })
    }

    fn demote(&self, amount: Bytes) -> Result<Bytes, RegionError> {
        self.demote_while(amount, &|| true)
    }

    fn hosted(&self) -> Bytes {
        self.region.holding().hosted
    }

    fn at(&self, place: Place) -> usize {
        self.residencies().into_iter().filter(|found| *found == Residency::Evicted { at: place }).count()
    }
}

#[test]
fn copies_go_to_files_and_come_back() {
    for (checked, only_some) in [(false, false), (true, false), (true, true)] {
        let mut fixture = fixture();
        fixture.furnish();
        let (block, _) = fixture.live[0];
        if only_some {
            let live = ByteRange { start: Bytes::ZERO, end: block.size };
            fixture.pool.live_bytes().set(block.address, &[live]).unwrap();
        }
        assert_eq!(fixture.demote(Bytes::MAX).unwrap(), Bytes::ZERO, "all of it is on the GPU");
        for _ in 0..2 {
            fixture.shrink(To::Host, checked).unwrap();
            let extents = fixture.at(Place::Host);
            assert_eq!(fixture.demote(Bytes::MAX).unwrap(), fixture.live_bytes());
            assert_eq!((fixture.hosted(), fixture.host.statistics().in_use), (Bytes::ZERO, Bytes::ZERO));
            assert_eq!((fixture.at(Place::Host), fixture.at(Place::File)), (0, extents));
            let held = fixture.region.holding();
            assert!(!held.evicted.is_zero() && held.in_files == held.evicted && held.in_peers.is_zero());
            assert_eq!(fixture.files.statistics().files, extents as u64);
            assert_eq!(fixture.demote(Bytes::MAX).unwrap(), Bytes::ZERO);
            assert_eq!(fixture.refill(checked).unwrap().copied, fixture.live_bytes());
            assert_eq!(fixture.wrong_bytes(), 0);
            fixture.assert_no_copies();
        }
        fixture.end();
    }
}

#[test]
fn so_much_goes_as_is_asked_for_and_the_last_first() {
    let mut fixture = fixture();
    fixture.furnish();
    fixture.shrink(To::Host, true).unwrap();
    let before = fixture.hosted();
    assert_eq!(fixture.demote(Bytes::ZERO).unwrap(), Bytes::ZERO);
    let freed = fixture.demote(Bytes::new(1)).unwrap();
    assert_eq!((fixture.at(Place::File), fixture.hosted()), (1, before.saturating_sub(freed)));
    let standing = fixture.pool.records().standing(fixture.region.domain());
    let last = standing.iter().max_by_key(|(view, _)| view.offset).unwrap();
    assert_eq!(last.1, Residency::Evicted { at: Place::File });
    // What is on its GPU has no copy that could go.
    fixture.refill(true).unwrap();
    assert_eq!((fixture.demote(Bytes::MAX).unwrap(), fixture.wrong_bytes()), (Bytes::ZERO, 0));
    fixture.end();
}

/// Before any piece: it ends there, everything comes back, everything is freed.
#[test]
fn whatever_happens_meanwhile_goes_first() {
    for what in ["ends", "refills", "frees"] {
        for piece in 1.. {
            let mut fixture = fixture();
            fixture.furnish();
            fixture.shrink(To::Host, true).unwrap();
            let asked = Cell::new(0);
            let keep_going = || {
                asked.set(asked.get() + 1);
                if asked.get() == piece {
                    match what {
                        "refills" => _ = fixture.refill(true).unwrap(),
                        "frees" => {
                            for (block, _) in &fixture.live {
                                fixture.pool.free(block.address).unwrap();
                            }
                        }
                        _ => return false,
                    }
                }
                true
            };
            let freed = fixture.demote_while(Bytes::MAX, &keep_going).unwrap();
            let reached = asked.get() >= piece;
            assert!(!reached || freed < fixture.live_bytes(), "{what}, piece {piece}");
            if what == "frees" && reached {
                fixture.live.clear();
            }
            let files = fixture.at(Place::File) as u64;
            assert!(fixture.files.statistics().files <= files, "{what}, piece {piece}: files of nobody");
            assert_sound(&fixture);
            fixture.refill(true).unwrap();
            assert_eq!(fixture.wrong_bytes(), 0, "{what}, piece {piece}");
            fixture.end();
            if !reached {
                assert!(piece > 8, "every extent is asked about twice");
                break;
            }
        }
    }
}

#[test]
fn what_cannot_be_written_stays_where_it_is() {
    let mut fixture = fixture();
    fixture.furnish();
    fixture.shrink(To::Host, true).unwrap();
    let before = fixture.hosted();
    let closed = FileTier::open(&fixture.root.path().join("closed")).unwrap();
    closed.close().unwrap();
    let demotion = Demotion { files: &closed, host: &fixture.host, keep_going: &|| true };
    let refused = fixture.region.demote(Bytes::MAX, demotion);
    assert!(matches!(refused, Err(RegionError::File(FileError::Closed { .. }))), "{refused:?}");
    assert_eq!((fixture.hosted(), fixture.at(Place::File)), (before, 0));
    assert_sound(&fixture);
    fixture.refill(true).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0);
    fixture.end();
}
