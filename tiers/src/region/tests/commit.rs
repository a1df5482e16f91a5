//! Parts of live blocks without memory: their extents alone go, refills pass them over, and no other byte is touched.

use glake_device::owned::Digests;
use glake_device::{Fault, Injected, Verb, When};

use super::*;
use crate::region::refill::POISON;
use crate::{Place, Residency};

/// The extents of the block, the largest that there are.
const PIECE: Bytes = Bytes::mib(8);
/// Of three extents in one block the second and the third, and some bytes before them.
const PART: (Bytes, Bytes) = (Bytes::new((8 << 20) - 4096), Bytes::new((16 << 20) + 4096));

impl Fixture {
    pub(super) fn commit(&self, address: Address, size: Bytes) -> Result<Bytes> {
        self.region.commit(
            address,
            size,
            TransferContext { mover: &self.mover, checks: None, fill: false },
            &NoWait,
        )
    }

    /// The bytes of a block in a range.
    fn read(&self, block: Block, start: Bytes, size: Bytes) -> Vec<u8> {
        let mut found = vec![0; usize::try_from(size.get()).unwrap()];
        self.pool.read(at(block, start), &mut found).unwrap();
        found
    }

    /// A block has its bytes but for a range of them.
    fn assert_around(&self, (block, seed): (Block, u8), start: Bytes, end: Bytes) {
        let expected = pattern(seed, block.size);
        let [from, to] = [start, end].map(|at| usize::try_from(at.get()).unwrap());
        assert!(self.read(block, Bytes::ZERO, start) == expected[..from]);
        assert!(self.read(block, end, block.size.saturating_sub(end)) == expected[to..]);
    }
}

fn at(block: Block, start: Bytes) -> Address {
    Address(block.address.0 + start.get())
}

fn with_block() -> (Fixture, Block) {
    let mut fixture = fixture();
    fixture.add(EXTENT);
    let block = fixture.add(Bytes::mib(24));
    fixture.add(Bytes::kib(40));
    (fixture, block)
}

#[test]
fn the_extents_that_lie_in_it_go_and_come_back_with_any_bytes() {
    let (fixture, block) = with_block();
    let before = fixture.used();
    let gone = fixture.region.decommit(at(block, PART.0), PART.1).unwrap();
    assert_eq!((gone.freed, gone.skipped.len()), (Bytes::mib(16), 0));
    assert_eq!(fixture.used(), before.saturating_sub(Bytes::mib(16)));
    assert_eq!(fixture.region.sizes(), (fixture.used(), Bytes::ZERO), "nothing has to come back");
    assert_eq!(fixture.region.decommitted(), Bytes::mib(16));
    assert!(fixture.region.is_whole() && fixture.region.is_usable());
    assert!(fixture.pool.is_decommitted(at(block, Bytes::mib(16)), Bytes::new(1)));
    assert!(!fixture.pool.is_decommitted(at(block, Bytes::ZERO), Bytes::mib(8)));
    assert!(fixture.pool.read(at(block, Bytes::mib(8)), &mut [0]).is_err());
    fixture.assert_around(fixture.live[1], PIECE, block.size);
    fixture.assert_sound();
    // Again: there is nothing left to give.
    assert_eq!(fixture.region.decommit(at(block, PART.0), PART.1).unwrap().freed, Bytes::ZERO);
    // A shrink and a refill pass it over.
    let shrunk = fixture.shrink().unwrap();
    assert_eq!(
        (shrunk.copied, fixture.used()),
        (fixture.live_bytes().saturating_sub(Bytes::mib(16)), Bytes::ZERO)
    );
    assert_eq!(fixture.region.places(), [(Place::Host, fixture.region.sizes().1)]);
    fixture.refill().unwrap();
    assert_eq!(fixture.used(), before.saturating_sub(Bytes::mib(16)));
    fixture.assert_around(fixture.live[1], PIECE, block.size);
    // A byte of an extent commits all of it, and no other.
    assert_eq!(fixture.commit(at(block, Bytes::mib(9)), Bytes::new(1)).unwrap(), PIECE);
    assert_eq!(fixture.commit(at(block, Bytes::mib(9)), Bytes::new(1)).unwrap(), Bytes::ZERO);
    fixture.read(block, Bytes::mib(8), PIECE);
    assert!(fixture.pool.is_decommitted(block.address, block.size));
    assert_eq!(fixture.commit(block.address, block.size).unwrap(), PIECE);
    assert_eq!((fixture.used(), fixture.region.decommitted()), (before, Bytes::ZERO));
    let bytes = pattern(3, block.size);
    fixture.pool.write(block.address, &bytes).unwrap();
    assert!(fixture.read(block, Bytes::ZERO, block.size) == bytes, "it is memory as any");
    fixture.end();
}

#[test]
fn what_is_evicted_is_decommitted_without_a_copy() {
    let (fixture, block) = with_block();
    fixture.shrink().unwrap();
    let pinned = fixture.host.statistics().in_use;
    fixture.region.decommit(at(block, PART.0), PART.1).unwrap();
    assert_eq!(fixture.host.statistics().in_use, pinned.saturating_sub(Bytes::mib(16)), "its copies go");
    assert!(!fixture.region.is_whole());
    let back = fixture.refill().unwrap();
    assert_eq!(back.copied, fixture.live_bytes().saturating_sub(Bytes::mib(16)));
    fixture.assert_around(fixture.live[1], PIECE, block.size);
    assert_eq!(fixture::wrong_bytes(&fixture.pool, &[fixture.live[0], fixture.live[2]]), 0);
    fixture.end();
}

#[test]
fn a_stitched_block_gives_what_is_all_its_own() {
    let mut fixture = fixture();
    fixture.furnish();
    let (stitched, _) = fixture.live[4];
    let gone = fixture.region.decommit(stitched.address, stitched.size).unwrap();
    // Seven MiB over four extents: the last is shared with what comes behind.
    assert_eq!(gone.freed, Bytes::mib(6));
    let others: Vec<_> = fixture.live.iter().filter(|(block, _)| *block != stitched).copied().collect();
    assert_eq!(fixture::wrong_bytes(&fixture.pool, &others), 0);
    fixture.assert_sound();
    assert_eq!(fixture.commit(stitched.address, stitched.size).unwrap(), Bytes::mib(6));
    let bytes = pattern(9, stitched.size);
    fixture.pool.write(stitched.address, &bytes).unwrap();
    fixture.live[4].1 = 9;
    fixture.shrink().unwrap();
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.end();
}

#[test]
fn it_is_freed_as_any_block() {
    for commits in [false, true] {
        let (mut fixture, block) = with_block();
        fixture.region.decommit(block.address, block.size).unwrap();
        if commits {
            fixture.commit(at(block, Bytes::mib(4)), EXTENT).unwrap();
        }
        fixture.free(1);
        assert!(matches!(
            fixture.region.decommit(block.address, block.size),
            Err(RegionError::Pool(PoolError::UnknownAddress { .. }))
        ));
        let other = fixture.add(Bytes::mib(12));
        fixture.assert_bytes();
        assert!(!fixture.pool.is_decommitted(other.address, other.size));
        fixture.shrink().unwrap();
        fixture.refill().unwrap();
        fixture.assert_bytes();
        fixture.end();
    }
}

/// What other streams use of a block is nobody's before they have done so, whatever else of the block has no memory.
#[test]
fn what_is_freed_in_part_waits_for_the_streams_that_use_it() {
    let mut fixture = fixture();
    fixture.furnish();
    let large = fixture.add(Bytes::mib(12));
    let (stitched, _) = fixture.live[4];
    for (block, rest) in [(large, Bytes::mib(4)), (stitched, Bytes::mib(2))] {
        let stream = OwnedStream::new(&fixture.mover.driver, GPU).unwrap();
        let other = PoolStream::of(&*fixture.mover.driver, GPU, stream.id()).unwrap();
        fixture.region.decommit(at(block, rest), block.size.saturating_sub(rest)).unwrap();
        assert!(fixture.pool.record_stream(block.address, other));
        let writes = [Touch { address: block.address, size: rest }];
        let work =
            move |memory: &mut dyn glake_device::KernelMemory| memory.write(block.address, &[1; 64]).unwrap();
        fixture.sim.enqueue_kernel(GPU, stream.id(), &[], &writes, Duration::from_millis(5), work).unwrap();
        let index = fixture.live.iter().position(|(known, _)| *known == block).unwrap();
        fixture.free(index);
        // Each is written at once: over what the kernel uses that is a fault of the simulator's.
        for _ in 0..6 {
            fixture.add(Bytes::mib(2));
        }
        stream.synchronize().unwrap();
        drop(stream);
        fixture.assert_bytes();
        fixture.assert_sound();
    }
    fixture.end();
}

#[test]
fn what_others_know_or_nobody_may_change_stays() {
    let (fixture, block) = with_block();
    fixture.region.fix(block.address).unwrap();
    let stays = fixture.region.decommit(block.address, block.size).unwrap();
    assert_eq!((stays.freed, stays.skipped.len()), (Bytes::ZERO, 3));
    assert!(stays.skipped.iter().all(|skipped| skipped.reason == SkipReason::Fixed));
    fixture.region.unfix(block.address).unwrap();
    let shared = fixture.pool.export(block.address, 0..usize::MAX).unwrap();
    let stays = fixture.region.decommit(block.address, block.size).unwrap();
    assert!(
        stays.freed.is_zero() && stays.skipped.iter().all(|skipped| skipped.reason == SkipReason::Exported)
    );
    drop(shared);
    fixture.assert_bytes();
    let outside = fixture.region.decommit(at(block, Bytes::mib(1)), block.size).unwrap_err();
    assert!(matches!(outside, RegionError::Pool(PoolError::OutsideBlock { .. })), "{outside}");
    let hold = fixture.pool.clock().hold();
    let refused = fixture.region.decommit(fixture.live[0].0.address, EXTENT).unwrap_err();
    assert!(
        matches!(refused, RegionError::Pool(PoolError::Driver(DriverError::Capturing { .. }))),
        "{refused}"
    );
    drop(hold);
    fixture.assert_bytes();
    fixture.end();

    let mut sealed = fixture_of(Policy::Sealed, CopyPolicy::Drop, Bytes::MAX);
    let block = sealed.add(EXTENT);
    sealed.region.seal(false).unwrap();
    let refused = sealed.region.decommit(block.address, block.size).unwrap_err();
    assert!(matches!(refused, RegionError::Sealed { .. }), "{refused}");
    sealed.assert_bytes();
    sealed.region.unseal().unwrap();
    sealed.end();
}

#[test]
fn work_that_was_enqueued_before_ends_first() {
    let (fixture, block) = with_block();
    let stream = OwnedStream::new(&fixture.mover.driver, PEER).unwrap();
    let writes = [Touch { address: block.address, size: block.size }];
    let work =
        move |memory: &mut dyn glake_device::KernelMemory| memory.write(block.address, &[1; 64]).unwrap();
    fixture.sim.enqueue_kernel(PEER, stream.id(), &[], &writes, Duration::from_millis(5), work).unwrap();
    fixture.region.decommit(block.address, block.size).unwrap();
    assert!(fixture.sim.now() >= Duration::from_millis(5));
    drop(stream);
    fixture.end();
}

#[test]
fn without_memory_a_commit_stops_and_goes_on() {
    let (fixture, block) = with_block();
    fixture.region.decommit(block.address, block.size).unwrap();
    // One extent more than there are, of 64 MiB.
    assert_eq!(fixture.used(), Bytes::mib(4));
    fixture.pool.set_memory_fraction(12.0 / 64.0);
    let full = fixture.commit(block.address, block.size).unwrap_err();
    assert!(matches!(full, RegionError::Pool(ref error) if error.is_out_of_memory()), "{full}");
    fixture.assert_sound();
    fixture.pool.set_memory_fraction(1.0);
    assert_eq!(fixture.commit(block.address, block.size).unwrap(), Bytes::mib(16));
    fixture.end();
}

#[test]
fn what_is_committed_is_poisoned_where_bytes_are_checked() {
    let (fixture, block) = with_block();
    fixture.region.decommit(at(block, Bytes::mib(8)), PIECE).unwrap();
    let digests = Digests::new(fixture.pool.completion_events(), GPU).unwrap();
    let context = TransferContext { mover: &fixture.mover, checks: Some(&digests), fill: true };
    fixture.region.commit(block.address, block.size, context, &NoWait).unwrap();
    assert!(fixture.read(block, Bytes::mib(8), PIECE).iter().all(|byte| *byte == POISON));
    fixture.assert_around(fixture.live[1], PIECE, Bytes::mib(16));
    drop(digests);
    fixture.end();
}

#[test]
fn a_captured_graphs_pool_stays() {
    let (fixture, block) = with_block();
    fixture.pool.keep_addresses(fixture.region.domain);
    let refused = fixture.region.decommit(block.address, block.size).unwrap_err();
    assert!(matches!(refused, RegionError::Captured { .. }), "{refused}");
    fixture.assert_bytes();
    fixture.end();
}

/// A cache that is made, decommitted and freed again and again takes addresses once.
#[test]
fn addresses_of_what_was_freed_are_used_again() {
    let mut fixture = fixture();
    let own = fixture.pool.add_domain(DomainOptions::own_pool(), None);
    let options = RegionOptions { extent: EXTENT, ..RegionOptions::of("own") };
    let region = Region::over(&fixture.pool, own, options);
    // Together more than the addresses of the pool: twice the device's memory.
    for round in 0..24 {
        let block = fixture.pool.malloc_in(own, Bytes::mib(16), fixture.here).unwrap();
        assert_eq!(region.decommit(block.address, block.size).unwrap().freed, Bytes::mib(16), "{round}");
        fixture.pool.free(block.address).unwrap();
        assert_eq!(region.decommitted(), Bytes::ZERO, "nothing of it is anybody's");
        let other = fixture.add(Bytes::mib(8));
        fixture.assert_bytes();
        let index = fixture.live.iter().position(|(known, _)| *known == other).unwrap();
        fixture.free(index);
        fixture.pool.trim(Bytes::ZERO).unwrap();
        fixture.pool.check().unwrap();
    }
    fixture.pool.release_domain(own).unwrap();
    drop(region);
    fixture.end();
}

#[test]
fn bytes_of_several_blocks_are_looked_at() {
    let mut fixture = fixture();
    let [one, two] = [0, 1].map(|_| fixture.add(EXTENT));
    let (low, high) = if one.address < two.address { (one, two) } else { (two, one) };
    fixture.region.decommit(high.address, high.size).unwrap();
    let adjoin = low.address.0 + low.size.get() == high.address.0;
    assert!(adjoin && fixture.pool.is_decommitted(low.address, Bytes::mib(3)));
    assert!(!fixture.pool.is_decommitted(low.address, low.size));
    fixture.commit(high.address, high.size).unwrap();
    assert!(!fixture.pool.is_decommitted(low.address, Bytes::mib(4)));
    fixture.end();
}

/// A commit that failed halfway is gone on with by the same call.
#[test]
fn the_same_commit_goes_on_after_a_failure() {
    for verb in [Verb::Create, Verb::Map, Verb::SetAccess] {
        for nth in 1..=3 {
            let (fixture, block) = with_block();
            fixture.region.decommit(block.address, block.size).unwrap();
            fixture.faults.set(&[Fault {
                verb: Some(verb),
                when: When::Nth(nth),
                error: Injected::Failed(1),
            }]);
            _ = fixture.commit(block.address, block.size);
            fixture.faults.set(&[]);
            fixture.commit(block.address, block.size).unwrap();
            let bytes = pattern(31, block.size);
            fixture.pool.write(block.address, &bytes).unwrap();
            assert!(fixture.read(block, Bytes::ZERO, block.size) == bytes, "{verb:?} {nth}");
            fixture.end();
        }
    }
}

/// Whatever call of the driver fails: an error, no other byte is touched, and both directions go on.
#[test]
fn a_failure_anywhere() {
    for (commits, verb) in [
        (false, Verb::EventRecordContext),
        (false, Verb::Unmap),
        (false, Verb::Release),
        (true, Verb::Create),
        (true, Verb::Map),
        (true, Verb::SetAccess),
    ] {
        for nth in 1..=3 {
            let (fixture, block) = with_block();
            if commits {
                fixture.region.decommit(block.address, block.size).unwrap();
            }
            fixture.faults.set(&[Fault {
                verb: Some(verb),
                when: When::Nth(nth),
                error: Injected::Failed(1),
            }]);
            let failed = match commits {
                true => fixture.commit(block.address, block.size).map(|_| ()),
                false => fixture.region.decommit(block.address, block.size).map(|_| ()),
            };
            fixture.faults.set(&[]);
            fixture.assert_sound();
            assert_eq!(fixture::wrong_bytes(&fixture.pool, &[fixture.live[0], fixture.live[2]]), 0);
            let standing = fixture.pool.records().standing(fixture.region.domain);
            let is_done = |residency: &Residency| residency.is_decommitted() || *residency == Residency::NEW;
            assert!(
                failed.is_err() || standing.iter().all(|(_, residency)| is_done(residency)),
                "{verb:?} {nth}"
            );
            fixture.region.decommit(block.address, block.size).unwrap();
            assert_eq!(fixture.region.decommitted(), block.size, "{verb:?} {nth}");
            fixture.commit(block.address, block.size).unwrap();
            fixture.refill().unwrap();
            assert!(fixture.region.is_whole() && fixture.region.decommitted().is_zero());
            fixture.end();
        }
    }
}

#[test]
fn what_is_decommitted_stays_leased() {
    let lease = Lease::new(GPU, crate::LeaseOptions::default());
    let mut fixture = fixture_under(Some(lease.clone()), Policy::Keep, CopyPolicy::Drop, Bytes::MAX);
    lease.set(Some(Bytes::mib(12)));
    let block = fixture.add(Bytes::mib(12));
    fixture.region.decommit(block.address, block.size).unwrap();
    assert_eq!((lease.view().leased, lease.view().made), (Some(Bytes::mib(12)), Bytes::ZERO));
    fixture.commit(block.address, block.size).unwrap();
    assert_eq!(lease.view().made, Bytes::mib(12));
    fixture.end();
}
