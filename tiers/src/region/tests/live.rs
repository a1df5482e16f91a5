//! Live ranges: what counts comes back, what does not is neither copied nor promised, and no other block has anything of it.

use glake_device::owned::Digests;

use super::*;
use crate::region::refill::POISON;
use crate::{ByteRange, Residency};

fn range(start: Bytes, end: Bytes) -> ByteRange {
    ByteRange { start, end }
}

fn kib(start: u64, end: u64) -> ByteRange {
    range(Bytes::kib(start), Bytes::kib(end))
}

impl Fixture {
    fn say(&self, block: Block, ranges: &[ByteRange]) {
        self.pool.live_bytes().set(block.address, ranges).unwrap();
    }

    /// Bytes of a block.
    fn bytes(&self, block: Block) -> Vec<u8> {
        let mut found = vec![0; usize::try_from(block.size.get()).unwrap()];
        self.pool.read(block.address, &mut found).unwrap();
        found
    }

    /// In these ranges a block has its bytes; returns the bytes outside of them.
    fn assert_within(&self, (block, seed): (Block, u8), ranges: &[ByteRange]) -> Vec<u8> {
        let (found, expected) = (self.bytes(block), pattern(seed, block.size));
        let live = |at: usize| {
            let at = Bytes::new(at as u64);
            ranges.iter().any(|range| range.start <= at && at < range.end)
        };
        for at in (0..found.len()).filter(|at| live(*at)) {
            assert_eq!(found[at], expected[at], "byte {at} of {block:?}");
        }
        found.into_iter().enumerate().filter(|(at, _)| !live(*at)).map(|(_, byte)| byte).collect()
    }

    /// Out and back, with what is not copied filled.
    fn checked(&self) -> Shrunk {
        let digests = Digests::new(self.pool.completion_events(), GPU).unwrap();
        let context = TransferContext { mover: &self.mover, checks: Some(&digests), fill: true };
        let shrunk = self.region.shrink(Bytes::MAX, &Store::Host(self.host.clone()), context).unwrap();
        self.region.refill(Bytes::MAX, context, &NoWait).unwrap();
        shrunk
    }
}

#[test]
fn only_what_is_live_is_copied() {
    let mut fixture = fixture();
    let large = fixture.add(Bytes::mib(6));
    let whole = fixture.add(Bytes::mib(2));
    let small = fixture.add(Bytes::kib(8));
    let ranges = [kib(1, 3), range(Bytes::new(2 << 20), Bytes::new((3 << 20) + 1)), kib(6143, 6144)];
    fixture.say(large, &ranges);
    fixture.say(small, &[kib(4, 5)]);
    let shrunk = fixture.shrink().unwrap();
    let copied = 2048 + (1 << 20) + 512 + 1024 + (2 << 20) + 1024;
    assert_eq!(shrunk.copied, Bytes::new(copied));
    assert_eq!(shrunk.undefined, fixture.live_bytes().saturating_sub(shrunk.copied));
    assert_eq!(shrunk.resident, Bytes::ZERO);
    assert_eq!(fixture.refill().unwrap().copied, shrunk.copied);
    fixture.assert_within(fixture.live[0], &ranges);
    fixture.assert_within(fixture.live[2], &[kib(4, 5)]);
    assert_eq!(fixture::wrong_bytes(&fixture.pool, &fixture.live[1..2]), 0, "{whole:?}");
    fixture.assert_sound();
    // Once more: what was undefined is not copied still. Taken back, all is.
    assert_eq!(fixture.shrink().unwrap().copied, shrunk.copied);
    fixture.refill().unwrap();
    fixture.pool.live_bytes().clear(large.address).unwrap();
    fixture.pool.live_bytes().clear(small.address).unwrap();
    for (block, seed) in &fixture.live {
        fixture.pool.write(block.address, &pattern(*seed, block.size)).unwrap();
    }
    let all = fixture.shrink().unwrap();
    assert_eq!((all.copied, all.undefined), (fixture.live_bytes(), Bytes::ZERO));
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.end();
}

#[test]
fn what_is_not_copied_is_poisoned_where_bytes_are_checked() {
    let mut fixture = fixture();
    fixture.furnish();
    let stitched = fixture.live[4].0;
    assert_eq!(stitched.size, Bytes::mib(7));
    let ranges = [kib(100, 5000)];
    fixture.say(stitched, &ranges);
    let (gone, _) = fixture.live[5];
    fixture.say(gone, &[]);
    let shrunk = fixture.checked();
    let undefined = Bytes::mib(7).saturating_sub(Bytes::kib(4900)).saturating_add(gone.size);
    assert_eq!(shrunk.undefined, undefined);
    for (index, ranges) in [(4, &ranges[..]), (5, &[])] {
        let outside = fixture.assert_within(fixture.live[index], ranges);
        assert!(outside.iter().all(|byte| *byte == POISON), "{index}");
    }
    for index in [0, 1, 2, 3, 6, 7] {
        assert_eq!(fixture::wrong_bytes(&fixture.pool, &fixture.live[index..=index]), 0, "{index}");
    }
    fixture.end();
}

#[test]
fn where_nothing_is_live_nothing_is_copied() {
    let mut fixture = fixture_of(Policy::Keep, CopyPolicy::Drop, Bytes::ZERO);
    let block = fixture.add(Bytes::mib(4));
    fixture.say(block, &[]);
    let shrunk = fixture.shrink().unwrap();
    assert_eq!((shrunk.freed, shrunk.copied), (Bytes::mib(4), Bytes::ZERO), "without host memory");
    assert_eq!(shrunk.undefined, Bytes::mib(4));
    assert_eq!(fixture.refill().unwrap().copied, Bytes::ZERO);
    fixture.pool.write(block.address, &pattern(0, block.size)).unwrap();
    fixture.assert_bytes();
    fixture.end();
}

#[test]
fn the_next_block_at_an_address_is_live_as_a_whole() {
    let mut fixture = fixture();
    let first = fixture.add(Bytes::mib(2));
    fixture.say(first, &[]);
    let asked = fixture.pool.live_bytes().ask(first.address).unwrap();
    fixture.free(0);
    let second = fixture.add(Bytes::mib(2));
    assert_eq!(first.address, second.address);
    assert_eq!(fixture.pool.live_bytes().asked(asked), None);
    fixture.pool.live_bytes().answer(asked, Some(&[])).unwrap();
    assert_eq!(fixture.shrink().unwrap().copied, Bytes::mib(2));
    // Said of one that is evicted, it holds from the next time on, for its bytes are in the copy.
    fixture.say(second, &[kib(0, 1)]);
    fixture.refill().unwrap();
    fixture.assert_bytes();
    assert_eq!(fixture.shrink().unwrap().copied, Bytes::kib(1));
    // Freed while it is evicted, it takes that with it.
    fixture.free(0);
    fixture.refill().unwrap();
    fixture.add(Bytes::mib(2));
    assert_eq!(fixture.shrink().unwrap().copied, Bytes::mib(2));
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.end();
}

#[test]
fn an_answer_counts_until_the_next_one() {
    let mut fixture = fixture();
    let block = fixture.add(Bytes::mib(2));
    let pool = fixture.pool.clone();
    let live = pool.live_bytes();
    let asked = live.ask(block.address).unwrap();
    assert_eq!(live.asked(asked), Some(fixture.region.domain));
    for (answer, copied) in
        [(Some(&[kib(0, 512)][..]), 512), (None, 2048), (Some(&[kib(1, 9), kib(0, 2)]), 9)]
    {
        live.answer(asked, answer).unwrap();
        assert_eq!(fixture.shrink().unwrap().copied, Bytes::kib(copied));
        fixture.refill().unwrap();
    }
    let wrong = live.answer(asked, Some(&[kib(0, 4096)])).unwrap_err();
    assert!(matches!(wrong, PoolError::OutsideBlock { .. }), "{wrong}");
    assert_eq!(fixture.shrink().unwrap().copied, Bytes::mib(2), "a wrong answer is none");
    fixture.refill().unwrap();
    let other = live.ask(block.address).unwrap();
    live.answer(asked, Some(&[])).unwrap();
    assert_eq!(fixture.shrink().unwrap().copied, Bytes::mib(2), "who asked before is asked no more");
    fixture.refill().unwrap();
    live.answer(other, Some(&[])).unwrap();
    assert_eq!(fixture.shrink().unwrap().copied, Bytes::ZERO);
    fixture.refill().unwrap();
    drop(pool);
    fixture.end();
}

#[test]
fn what_leaves_its_block_is_refused_and_changes_nothing() {
    let mut fixture = fixture();
    let block = fixture.add(Bytes::kib(1536));
    fixture.say(block, &[kib(0, 64)]);
    for wrong in [kib(0, 1537), kib(5, 4)] {
        let refused = fixture.pool.live_bytes().set(block.address, &[kib(0, 1), wrong]).unwrap_err();
        assert!(matches!(refused, PoolError::OutsideBlock { .. }), "{refused}");
    }
    let inside = Address(block.address.0 + 512);
    assert!(matches!(fixture.pool.live_bytes().set(inside, &[]), Err(PoolError::UnknownAddress { .. })));
    assert!(matches!(fixture.pool.live_bytes().clear(inside), Err(PoolError::UnknownAddress { .. })));
    assert_eq!(fixture.shrink().unwrap().copied, Bytes::kib(64));
    fixture.refill().unwrap();
    fixture.assert_within(fixture.live[0], &[kib(0, 64)]);
    fixture.end();
}

/// A retained copy that holds more than what counts is good, one that holds less is none.
#[test]
fn a_retained_copy_has_all_that_counts() {
    let mut fixture = fixture_of(Policy::Sealed, CopyPolicy::Retain, Bytes::MAX);
    let (one, _) = (fixture.add(Bytes::mib(2)), fixture.add(Bytes::mib(2)));
    fixture.region.seal(false).unwrap();
    let retained = |fixture: &Fixture| {
        let standing = fixture.pool.records().standing(fixture.region.domain);
        standing.iter().filter(|(_, residency)| *residency != Residency::NEW).count()
    };
    assert_eq!(fixture.shrink().unwrap().copied, Bytes::mib(4));
    fixture.refill().unwrap();
    // Less counts: nothing is copied, and all comes back.
    fixture.say(one, &[kib(0, 512)]);
    assert_eq!(retained(&fixture), 2);
    let shrunk = fixture.shrink().unwrap();
    assert_eq!((shrunk.copied, shrunk.undefined), (Bytes::ZERO, Bytes::ZERO));
    fixture.refill().unwrap();
    fixture.assert_bytes();
    // All over again, and only that is in the copy.
    fixture.region.unseal().unwrap();
    fixture.region.seal(false).unwrap();
    let shrunk = fixture.shrink().unwrap();
    assert_eq!((shrunk.copied, shrunk.undefined), (Bytes::kib(2560), Bytes::kib(1536)));
    fixture.refill().unwrap();
    assert_eq!(retained(&fixture), 2);
    let again = fixture.shrink().unwrap();
    assert_eq!((again.copied, again.undefined), (Bytes::ZERO, Bytes::kib(1536)));
    fixture.refill().unwrap();
    // More counts than the copy has: it goes at once.
    fixture.say(one, &[kib(0, 513)]);
    assert_eq!(retained(&fixture), 1);
    assert_eq!(fixture.shrink().unwrap().copied, Bytes::new((512 << 10) + 1024));
    // While it is evicted: it comes back from what there is, and is kept no longer than that.
    fixture.pool.live_bytes().clear(one.address).unwrap();
    fixture.refill().unwrap();
    assert_eq!(retained(&fixture), 1);
    // What did not count once has been lost then.
    fixture.assert_within(fixture.live[0], &[kib(0, 512)]);
    assert_eq!(fixture.shrink().unwrap().copied, Bytes::mib(2));
    fixture.refill().unwrap();
    fixture.end();
}
