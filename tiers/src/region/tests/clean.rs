//! What is copied while nobody uses it: a shrink counts on it only where the bytes are still the same.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};

use glake_device::owned::Digests;
use glake_device::{Fault, Injected, When};

use super::*;
use crate::{Clean, CleanCounts, Cleaned, HostStatistics};

struct Idle {
    fixture: Fixture,
    digests: Arc<Digests>,
    /// The last use that was told of.
    used: Cell<u64>,
}

fn idle_with(budget: Bytes) -> Idle {
    let mut fixture = fixture_of(Policy::Keep, CopyPolicy::Drop, budget);
    fixture.furnish();
    idle_of(fixture)
}

/// One large block, one over two extents, a small one, and host memory that is pinned.
fn idle_with_little() -> Idle {
    let mut fixture = fixture();
    for size in [EXTENT, Bytes::mib(3), Bytes::kib(40)] {
        fixture.add(size);
    }
    fixture.host.prepare(Bytes::mib(12)).unwrap();
    idle_of(fixture)
}

fn idle_of(fixture: Fixture) -> Idle {
    let digests = Arc::new(Digests::new(fixture.pool.completion_events(), GPU).unwrap());
    Idle { fixture, digests, used: Cell::new(1) }
}

fn idle() -> Idle {
    idle_with(Bytes::MAX)
}

impl Idle {
    fn ask<'a>(&'a self, after_use: u64, keep_going: &'a dyn Fn() -> bool) -> Clean<'a> {
        let Fixture { host, mover, .. } = &self.fixture;
        Clean { host, mover, digests: &self.digests, after_use, keep_going }
    }

    fn clean(&self, after_use: u64) -> Cleaned {
        self.fixture.region.void_clean(after_use);
        self.used.set(after_use);
        self.fixture.region.clean(self.ask(after_use, &|| true)).unwrap()
    }

    fn counts(&self) -> CleanCounts {
        self.fixture.region.clean_counts(self.used.get())
    }

    /// Out and back, with the right bytes; returns what was copied on the way out, and what was clean.
    fn cycle(&self) -> (Bytes, Bytes) {
        let shrunk = self.fixture.shrink().unwrap();
        assert_eq!((shrunk.resident, self.fixture.used()), (Bytes::ZERO, Bytes::ZERO));
        self.fixture.assert_sound();
        self.fixture.refill().unwrap();
        self.fixture.assert_bytes();
        (shrunk.copied, shrunk.clean)
    }

    fn write(&mut self, index: usize, seed: u8) {
        let (block, _) = self.fixture.live[index];
        self.fixture.pool.write(block.address, &pattern(seed, block.size)).unwrap();
        self.fixture.live[index].1 = seed;
    }

    fn end(self) {
        drop(self.digests);
        self.fixture.end();
    }
}

#[test]
fn what_is_clean_leaves_without_a_copy() {
    let idle = idle();
    let live = idle.fixture.live_bytes();
    let before = idle.fixture.used();
    assert_eq!(idle.clean(1), Cleaned { copied: live, unchanged: Bytes::ZERO, whole: true });
    assert_eq!(idle.fixture.used(), before, "it stays on its GPU");
    idle.fixture.assert_bytes();
    assert_eq!(idle.counts().clean, live);
    assert_eq!(idle.clean(1), Cleaned { whole: true, ..Cleaned::default() }, "nothing is left to do");
    let HostStatistics { in_use, retained, .. } = idle.fixture.host.statistics();
    assert!(in_use.is_zero() && retained >= live, "it can be given up");
    assert_eq!(idle.cycle(), (Bytes::ZERO, live));
    // What came back has no copy any more.
    assert_eq!(idle.cycle(), (live, Bytes::ZERO));
    let counts = idle.counts();
    assert_eq!((counts.clean, counts.released, counts.refused), (Bytes::ZERO, live, Bytes::ZERO));
    idle.end();
}

#[test]
fn a_write_that_nobody_told_of_is_found() {
    let mut idle = idle();
    let live = idle.fixture.live_bytes();
    idle.clean(1);
    idle.write(1, 201);
    let (copied, clean) = idle.cycle();
    assert_eq!((copied, clean), (EXTENT, live.saturating_sub(EXTENT)));
    assert_eq!(idle.counts().refused, EXTENT);
    idle.end();
}

/// Zeros, filled while they are copied, and zeros again: the copy is not what the extent holds, though its digest before and after is
/// the same.
#[test]
fn bytes_that_change_while_they_are_copied_and_change_back_are_found() {
    let idle = idle();
    let (pool, live) = (idle.fixture.pool.clone(), idle.fixture.live.clone());
    let meddle = move |_: &[(Span, Span)]| {
        for (block, seed) in &live {
            pool.write(block.address, &pattern(seed.wrapping_add(1), block.size)).unwrap();
        }
        Ok(())
    };
    *idle.fixture.mover.meddle.lock() = Some(Box::new(meddle));
    idle.clean(1);
    *idle.fixture.mover.meddle.lock() = None;
    for (block, seed) in &idle.fixture.live {
        idle.fixture.pool.write(block.address, &pattern(*seed, block.size)).unwrap();
    }
    let live = idle.fixture.live_bytes();
    assert_eq!(idle.cycle(), (live, Bytes::ZERO));
    assert_eq!(idle.counts().refused, live);
    idle.end();
}

#[test]
fn a_use_voids_copies_and_what_did_not_change_is_not_copied_again() {
    let mut idle = idle();
    let live = idle.fixture.live_bytes();
    idle.clean(1);
    idle.fixture.region.void_clean(2);
    assert_eq!((idle.counts().clean, idle.counts().voided), (Bytes::ZERO, live));
    assert_eq!(idle.cycle(), (live, Bytes::ZERO), "a void copy counts for nothing");
    idle.clean(2);
    idle.write(2, 77);
    let rest = live.saturating_sub(EXTENT);
    assert_eq!(idle.clean(3), Cleaned { copied: EXTENT, unchanged: rest, whole: true });
    assert_eq!(idle.cycle(), (Bytes::ZERO, live));
    idle.end();
}

#[test]
fn an_allocation_and_a_free_void_the_copies_of_their_extents() {
    let mut idle = idle();
    let (small, large) = (idle.fixture.add(Bytes::kib(30)), idle.fixture.add(EXTENT));
    let live = idle.fixture.live_bytes();
    idle.clean(1);
    let at = idle.fixture.live.iter().position(|(block, _)| block.address == small.address).unwrap();
    idle.fixture.free(at);
    let at = idle.fixture.live.iter().position(|(block, _)| block.address == large.address).unwrap();
    idle.fixture.free(at);
    idle.fixture.pool.settle().unwrap();
    let (copied, clean) = idle.cycle();
    assert!(!copied.is_zero() && !clean.is_zero());
    assert_eq!(copied.saturating_add(clean), idle.fixture.live_bytes());
    idle.clean(1);
    let added = idle.fixture.add(Bytes::kib(40));
    let (copied, clean) = idle.cycle();
    assert!(copied >= added.size && copied.saturating_add(clean) == idle.fixture.live_bytes());
    assert!(idle.counts().voided > Bytes::ZERO && idle.counts().released < live.saturating_add(live));
    idle.end();
}

#[test]
fn a_block_that_is_written_to_voids_the_copies_of_its_extents_at_once() {
    let idle = idle();
    let live = idle.fixture.live_bytes();
    idle.clean(1);
    let region = &idle.fixture.region;
    let before = region.state_number().unwrap();
    let (block, _) = idle.fixture.live[0];
    region.void_block(block.address);
    assert_eq!((idle.counts().clean, idle.counts().voided), (live.saturating_sub(EXTENT), EXTENT));
    assert_ne!(region.state_number().unwrap(), before, "the cleaner looks again");
    assert_eq!(idle.clean(1), Cleaned { copied: Bytes::ZERO, unchanged: EXTENT, whole: true });
    idle.cycle();
    idle.end();
}

#[test]
fn what_is_written_to_while_it_is_copied_is_not_clean() {
    let idle = idle();
    let (region, live) = (&idle.fixture.region, idle.fixture.live_bytes());
    let (block, _) = idle.fixture.live[0];
    let asked = Cell::new(0);
    // The second question is the one before the first piece.
    let goes_on = || {
        asked.set(asked.get() + 1);
        if asked.get() == 2 {
            region.void_block(block.address);
        }
        true
    };
    assert_eq!(region.clean(idle.ask(1, &goes_on)).unwrap().copied, live);
    assert!(idle.counts().clean < live);
    assert_eq!(idle.clean(1).copied, Bytes::ZERO, "it is compared");
    assert_eq!(idle.counts().clean, live);
    idle.cycle();
    idle.end();
}

/// The same bytes may be handed out again.
#[test]
fn a_free_voids_at_once() {
    let mut idle = idle();
    idle.clean(1);
    let before = idle.counts().clean;
    idle.fixture.free(0);
    assert!(idle.counts().clean < before);
    idle.cycle();
    idle.end();
}

/// Whoever moves extents, or maps memory, waits neither for host memory nor for the digest: they are had while nothing is held.
#[test]
fn nothing_is_held_between_pieces() {
    let idle = idle();
    let region = &idle.fixture.region;
    let goes_on = || {
        assert!(region.turn.try_lock().is_some());
        idle.fixture.pool.trim(Bytes::ZERO).unwrap();
        true
    };
    assert!(region.clean(idle.ask(1, &goes_on)).unwrap().whole);
    idle.cycle();
    idle.end();
}

#[test]
fn host_memory_can_be_pinned_ahead_while_it_is_wanted() {
    let mut fixture = fixture_of(Policy::Keep, CopyPolicy::Prepare, Bytes::mib(24));
    fixture.furnish();
    let idle = idle_of(fixture);
    let (region, host) = (&idle.fixture.region, &idle.fixture.host);
    let sizes = region.sizes_to_prepare();
    assert_eq!(sizes.iter().copied().sum::<Bytes>(), idle.fixture.live_bytes());
    assert!(host.prepare_while(&sizes, || false));
    assert_eq!(host.statistics().pinned, Bytes::ZERO, "nobody wants it any more");
    assert!(host.prepare_while(&sizes, || true));
    let pinned = host.statistics().pinned;
    assert!(pinned >= idle.fixture.live_bytes());
    idle.cycle();
    assert_eq!(host.statistics().pinned, pinned, "a shrink pins nothing more");
    idle.clean(1);
    assert_eq!(region.sizes_to_prepare(), [], "what is clean has its memory");
    idle.cycle();
    idle.end();
}

#[test]
fn another_store_than_the_hosts_gets_a_copy_of_its_own() {
    let idle = idle();
    idle.clean(1);
    let peer = PoolOptions {
        completion_events: Some(idle.fixture.pool.completion_events().clone()),
        ..PoolOptions::default()
    };
    let peer = Arc::new(GpuPool::new(idle.fixture.mover.driver.clone(), PEER, peer).unwrap());
    let context = TransferContext { mover: &idle.fixture.mover, checks: None, fill: false };
    let shrunk = idle.fixture.region.shrink(Bytes::MAX, &Store::Peer(peer.clone()), context).unwrap();
    assert_eq!((shrunk.copied, shrunk.clean), (idle.fixture.live_bytes(), Bytes::ZERO));
    idle.fixture.refill().unwrap();
    idle.fixture.assert_bytes();
    assert_eq!(idle.fixture.host.statistics().retained, Bytes::ZERO);
    peer.settle().unwrap();
    peer.trim(Bytes::ZERO).unwrap();
    drop(peer);
    idle.end();
}

#[test]
fn copies_go_first_where_host_memory_is_short() {
    let idle = idle_with(Bytes::mib(24));
    let live = idle.fixture.live_bytes();
    assert!(idle.clean(1).whole);
    let clean = idle.counts().clean;
    assert_eq!(clean, live);
    let mut taken = Vec::new();
    for _ in 0..4 {
        taken.push(idle.fixture.host.take(Bytes::mib(4)).unwrap());
    }
    assert!(idle.counts().clean < clean && !idle.counts().reclaimed.is_zero());
    assert!(!idle.clean(2).whole, "nobody is asked for memory that others have");
    taken.truncate(1);
    assert_eq!(idle.fixture.host.statistics().in_use, Bytes::mib(4));
    let (copied, clean) = idle.cycle();
    assert_eq!(copied.saturating_add(clean), live);
    drop(taken);
    idle.end();
}

#[test]
fn all_can_be_pinned_ahead_though_copies_hold_some() {
    let idle = idle_with(Bytes::mib(24));
    idle.clean(1);
    idle.fixture.host.prepare(Bytes::mib(24)).unwrap();
    assert_eq!(idle.counts().clean, Bytes::ZERO);
    idle.cycle();
    idle.end();
}

#[test]
fn it_stops_when_it_is_told_and_goes_on_there() {
    let idle = idle();
    let asked = RefCell::new(0);
    let twice = || {
        *asked.borrow_mut() += 1;
        *asked.borrow() < 4
    };
    let cleaned = idle.fixture.region.clean(idle.ask(1, &twice)).unwrap();
    assert!(!cleaned.whole && !cleaned.copied.is_zero() && cleaned.copied < idle.fixture.live_bytes());
    let rest = idle.clean(1);
    assert!(rest.whole);
    assert_eq!(cleaned.copied.saturating_add(rest.copied), idle.fixture.live_bytes());
    idle.cycle();
    idle.end();
}

/// Between two looks at an extent its last block is freed, and its memory trimmed.
#[test]
fn an_extent_may_go_while_it_is_cleaned() {
    let mut idle = idle();
    let (block, _) = idle.fixture.live.remove(0);
    let begun = Cell::new(0);
    let goes_on = || {
        begun.set(begun.get() + 1);
        if begun.get() == 2 {
            idle.fixture.pool.free(block.address).unwrap();
            idle.fixture.pool.settle().unwrap();
            assert!(idle.fixture.pool.trim(Bytes::ZERO).unwrap() >= EXTENT);
        }
        true
    };
    assert!(idle.fixture.region.clean(idle.ask(1, &goes_on)).unwrap().whole);
    assert_eq!(idle.counts().clean, idle.fixture.live_bytes());
    idle.cycle();
    idle.end();
}

#[test]
fn what_is_given_up_or_fixed_or_sealed_strictly_is_not_cleaned() {
    for (policy, strict) in [(Policy::Discard, false), (Policy::Sealed, true), (Policy::Sealed, false)] {
        let mut fixture = fixture_of(policy, CopyPolicy::Drop, Bytes::MAX);
        let (fixed, _) = (fixture.add(EXTENT), fixture.add(EXTENT));
        fixture.region.fix(fixed.address).unwrap();
        if policy == Policy::Sealed {
            fixture.region.seal(strict).unwrap();
        }
        let idle = idle_of(fixture);
        let expected = if policy == Policy::Sealed && !strict { EXTENT } else { Bytes::ZERO };
        assert_eq!(idle.clean(1), Cleaned { copied: expected, unchanged: Bytes::ZERO, whole: true });
        idle.end();
    }
}

/// A call of the driver fails while it is cleaned, and while it is compared: nothing is lost, nothing is wrong.
#[test]
fn a_failure_at_any_call_loses_nothing() {
    let calls = {
        let idle = idle_with_little();
        idle.fixture.recorder.take_log();
        idle.clean(1);
        idle.fixture.region.void_clean(2);
        idle.clean(2);
        let calls = idle.fixture.recorder.take_log().len();
        idle.end();
        calls
    };
    assert!(calls > 10, "{calls}");
    for nth in 1..=u64::try_from(calls).unwrap() {
        let idle = idle_with_little();
        idle.fixture.faults.set(&[Fault { verb: None, when: When::Nth(nth), error: Injected::Failed(1) }]);
        for after_use in [1, 2] {
            idle.fixture.region.void_clean(after_use);
            let _ = idle.fixture.region.clean(idle.ask(after_use, &|| true));
        }
        idle.fixture.faults.set(&[]);
        idle.fixture.assert_sound();
        idle.fixture.assert_bytes();
        idle.cycle();
        idle.end();
    }
}

#[test]
fn a_shrink_of_what_is_clean_fails_at_any_call_and_goes_on() {
    let calls = {
        let idle = idle_with_little();
        idle.clean(1);
        idle.fixture.recorder.take_log();
        idle.fixture.shrink().unwrap();
        let calls = idle.fixture.recorder.take_log().len();
        idle.fixture.refill().unwrap();
        idle.end();
        calls
    };
    for nth in 1..=u64::try_from(calls).unwrap() {
        let idle = idle_with_little();
        idle.clean(1);
        idle.fixture.faults.set(&[Fault { verb: None, when: When::Nth(nth), error: Injected::Failed(1) }]);
        let _ = idle.fixture.shrink();
        idle.fixture.faults.set(&[]);
        idle.fixture.assert_sound();
        idle.cycle();
        idle.end();
    }
}

/// One thread cleans; another allocates, writes, frees, trims, shrinks and refills as if there were none.
#[test]
fn a_program_notices_nothing_of_the_cleaner() {
    let mut idle = idle();
    let over = AtomicBool::new(false);
    let mover = Native::new(&idle.fixture.mover.driver);
    let Idle { fixture, digests, .. } = &mut idle;
    let (host, pool, region, here) = (&fixture.host, &fixture.pool, &fixture.region, fixture.here);
    let live = &mut fixture.live;
    std::thread::scope(|scope| {
        let cleaner = scope.spawn(|| {
            let mut after_use = 0;
            while !over.load(Ordering::Relaxed) {
                after_use += 1;
                region.void_clean(after_use);
                let keep_going: &dyn Fn() -> bool = &|| !over.load(Ordering::Relaxed);
                region.clean(Clean { host, mover: &mover, digests, after_use, keep_going }).unwrap();
            }
        });
        let mut state = 1_u64;
        for step in 0..150_u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(step | 1);
            let pick = usize::try_from(state >> 33).unwrap();
            match pick % 6 {
                0 | 1 if live.len() < 12 => {
                    let block = region.malloc(Bytes::kib(1 + state % 3000), here).unwrap();
                    let seed = u8::try_from(step % 251).unwrap();
                    // The simulator refuses a write of the host's beside a copy that reads.
                    let bytes = pattern(seed, block.size);
                    while pool.write(block.address, &bytes).is_err() {}
                    live.push((block, seed));
                }
                0..=2 if !live.is_empty() => {
                    let (block, _) = live.remove(pick % live.len());
                    pool.free(block.address).unwrap();
                }
                3 => pool.settle().unwrap(),
                4 => _ = pool.trim(Bytes::ZERO).unwrap(),
                _ => assert_eq!(fixture::wrong_bytes(pool, live), 0),
            }
        }
        over.store(true, Ordering::Relaxed);
        cleaner.join().unwrap();
    });
    idle.fixture.assert_bytes();
    idle.cycle();
    drop(mover);
    idle.end();
}
