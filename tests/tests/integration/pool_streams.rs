//! Which stream gets whose bytes, and when, with kernels under way.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::mpsc;
use std::time::Duration;

use glake_device::{DeviceId, DriverError, Fault, Injected, Verb, When};
use glake_sim::Clock;
use glake_stitch::Borrow;
use glake_tests::pool::{Fixture, Shape, Stamp, Verdicts};
use glake_tiers::{Block, PoolError};
use glake_units::Bytes;

const GPU: DeviceId = DeviceId(0);
const US: fn(u64) -> Duration = Duration::from_micros;

fn overlap(one: Block, other: Block) -> bool {
    one.address.0 < other.address.0 + other.size.get() && other.address.0 < one.address.0 + one.size.get()
}

fn fixture(borrow: Borrow) -> Fixture {
    Fixture::new(Shape { borrow, ..Shape::default() })
}

#[test]
fn a_kernel_nobody_recorded_still_reads_its_bytes() {
    let fixture = fixture(Borrow::Completed);
    let (owner, reader, taker) = (fixture.lane(), fixture.lane(), fixture.lane());
    let verdicts = Verdicts::default();
    let stamp = Stamp { block: fixture.pool.malloc(Bytes::mib(8), owner.pool).unwrap(), seed: 1 };
    stamp.write(&owner, US(1)).unwrap();
    reader.follows(&owner);
    stamp.verify(&reader, US(1000), &verdicts).unwrap();
    fixture.pool.free(stamp.block.address).unwrap();

    let mut taken = Vec::new();
    for seed in 2..8 {
        let other = Stamp { block: fixture.pool.malloc(Bytes::mib(8), taker.pool).unwrap(), seed };
        assert!(!overlap(other.block, stamp.block), "taken while it is read");
        other.write(&taker, US(1)).unwrap();
        taken.push(other);
        fixture.pool.tick().unwrap();
    }
    fixture.run_dry();
    verdicts.assert_clean();
    fixture.pool.tick().unwrap();
    let next = fixture.pool.malloc(Bytes::mib(8), taker.pool).unwrap();
    assert_eq!(next, stamp.block, "done, so anyone's");
    Stamp { block: next, seed: 9 }.write(&taker, US(1)).unwrap();
}

#[test]
fn its_own_stream_takes_a_block_at_once() {
    let fixture = fixture(Borrow::Completed);
    let lane = fixture.lane();
    let block = fixture.pool.malloc(Bytes::mib(8), lane.pool).unwrap();
    Stamp { block, seed: 1 }.write(&lane, US(1000)).unwrap();
    fixture.pool.free(block.address).unwrap();
    let calls = fixture.calls();
    assert_eq!(fixture.pool.malloc(Bytes::mib(8), lane.pool).unwrap(), block);
    assert_eq!(fixture.calls(), calls, "a hit asks nothing of the driver");
    Stamp { block, seed: 2 }.write(&lane, US(1)).unwrap();
}

#[test]
fn a_recorded_block_is_nobodys_before_its_point() {
    for size in [Bytes::kib(64), Bytes::mib(8)] {
        let fixture = fixture(Borrow::Completed);
        let (owner, reader) = (fixture.lane(), fixture.lane());
        let verdicts = Verdicts::default();
        let stamp = Stamp { block: fixture.pool.malloc(size, owner.pool).unwrap(), seed: 1 };
        stamp.write(&owner, US(1)).unwrap();
        reader.follows(&owner);
        stamp.verify(&reader, US(1000), &verdicts).unwrap();
        assert!(fixture.pool.record_stream(stamp.block.address, reader.pool));
        fixture.pool.free(stamp.block.address).unwrap();
        let active = fixture.pool.stats().all.active_bytes.current;
        assert_eq!(active, size.get(), "active until it is complete");

        for lane in [&owner, &reader] {
            fixture.pool.tick().unwrap();
            let other = fixture.pool.malloc(size, lane.pool).unwrap();
            assert!(!overlap(other, stamp.block));
            Stamp { block: other, seed: 2 }.write(lane, US(1)).unwrap();
        }
        fixture.run_dry();
        verdicts.assert_clean();
        fixture.pool.tick().unwrap();
        assert_eq!(fixture.pool.stats().all.active.current, 2);
        assert_eq!(fixture.pool.malloc(size, owner.pool).unwrap(), stamp.block);
    }
}

/// Eight blocks of 8 MiB fill the device; three are freed, so that only an alias holds 20 MiB.
fn holes(fixture: &Fixture, lane: &glake_tests::pool::Lane) -> Vec<Block> {
    let blocks: Vec<Block> = (0..8).map(|_| fixture.pool.malloc(Bytes::mib(8), lane.pool).unwrap()).collect();
    for &block in &blocks {
        Stamp { block, seed: 1 }.write(lane, US(100)).unwrap();
    }
    for block in [blocks[0], blocks[2], blocks[4]] {
        fixture.pool.free(block.address).unwrap();
    }
    blocks
}

fn edges(fixture: &Fixture) -> (u64, u64) {
    let counters = fixture.recorder.counters();
    (counters.of(Verb::EventRecord).calls, counters.of(Verb::StreamWaitEvent).calls)
}

#[test]
fn bytes_that_change_their_address_get_a_completion_edge() {
    let fixture = fixture(Borrow::Completed);
    let lane = fixture.lane();
    holes(&fixture, &lane);
    assert_eq!(edges(&fixture), (0, 0));
    let alias = fixture.pool.malloc(Bytes::mib(20), lane.pool).unwrap();
    assert_eq!((edges(&fixture), fixture.pool.counters().edges), ((1, 1), 1), "into the alias");
    Stamp { block: alias, seed: 2 }.write(&lane, US(100)).unwrap();
    fixture.pool.free(alias.address).unwrap();
    let home = fixture.pool.malloc(Bytes::mib(8), lane.pool).unwrap();
    assert_eq!((edges(&fixture), fixture.pool.counters().edges), ((2, 2), 2), "and back home");
    Stamp { block: home, seed: 3 }.write(&lane, US(100)).unwrap();
    let covered = fixture.pool.malloc(Bytes::mib(8), lane.pool).unwrap();
    assert_eq!(edges(&fixture), (2, 2), "one edge covers all that came before it");
    Stamp { block: covered, seed: 4 }.write(&lane, US(100)).unwrap();
    fixture.pool.free(home.address).unwrap();
    fixture.pool.free(covered.address).unwrap();
    fixture.pool.settle().unwrap();
    fixture.pool.malloc(Bytes::mib(20), lane.pool).unwrap();
    assert_eq!(edges(&fixture), (2, 2), "what is complete needs none");
}

/// Free slabs are lent to aliases: a slab that comes back needs the edge as any other bytes do.
#[test]
fn a_slab_that_was_in_an_alias_gets_its_edge() {
    let fixture = fixture(Borrow::Completed);
    let lane = fixture.lane();
    // 40 MiB of slabs, of which runs of 8 MiB and more come free; 24 MiB that stay.
    let small: Vec<Block> = (0..40).map(|_| fixture.pool.malloc(Bytes::mib(1), lane.pool).unwrap()).collect();
    fixture.pool.malloc(Bytes::mib(24), lane.pool).unwrap();
    for (_, block) in small.iter().enumerate().filter(|(index, _)| index % 10 != 9) {
        fixture.pool.free(block.address).unwrap();
    }
    fixture.pool.settle().unwrap();
    let alias = fixture.pool.malloc(Bytes::mib(12), lane.pool).unwrap();
    assert_eq!(fixture.pool.counters().stitches, 1);
    Stamp { block: alias, seed: 1 }.write(&lane, US(100)).unwrap();
    fixture.pool.free(alias.address).unwrap();
    let before = edges(&fixture);
    for seed in 2..38 {
        let block = fixture.pool.malloc(Bytes::mib(1), lane.pool).unwrap();
        Stamp { block, seed }.write(&lane, US(1)).unwrap();
    }
    assert_eq!(edges(&fixture), (before.0 + 1, before.1 + 1), "one covers all");
}

#[test]
fn a_borrower_waits_for_its_lender_on_the_device() {
    let fixture = fixture(Borrow::Wait);
    let (lender, borrower) = (fixture.lane(), fixture.lane());
    let verdicts = Verdicts::default();
    let stamp = Stamp { block: fixture.pool.malloc(Bytes::mib(60), lender.pool).unwrap(), seed: 1 };
    stamp.write(&lender, US(1)).unwrap();
    stamp.verify(&lender, US(500), &verdicts).unwrap();
    fixture.pool.free(stamp.block.address).unwrap();
    let block = fixture.pool.malloc(Bytes::mib(60), borrower.pool).unwrap();
    assert_eq!(
        (block, fixture.sim.now()),
        (stamp.block, Duration::ZERO),
        "at once, without a wait on the host"
    );
    assert_eq!(fixture.pool.counters().stream_waits, 1);
    Stamp { block, seed: 2 }.write(&borrower, US(10)).unwrap();
    borrower.synchronize();
    verdicts.assert_clean();
    assert!(fixture.sim.now() >= US(511), "{:?}: the borrower ran first", fixture.sim.now());
}

#[test]
fn a_stream_that_is_gone_breaks_nothing() {
    let rules = [Borrow::Off, Borrow::Completed, Borrow::Wait];
    for (borrow, whole) in rules.into_iter().flat_map(|borrow| [(borrow, true), (borrow, false)]) {
        let fixture = fixture(borrow);
        if !whole {
            // As before CUDA 12.5: a completion point is an event of every stream that is known.
            let lacks = Fault {
                verb: Some(Verb::EventRecordContext),
                when: When::From(1),
                error: Injected::Unsupported,
            };
            fixture.faults.set(&[lacks]);
        }
        let stays = fixture.lane();
        let verdicts = Verdicts::default();
        for seed in 1..4 {
            let goes = fixture.lane();
            let size = Bytes::mib(18);
            let stamp = Stamp { block: fixture.pool.malloc(size, goes.pool).unwrap(), seed };
            stamp.write(&goes, US(1)).unwrap();
            stamp.verify(&goes, US(500), &verdicts).unwrap();
            fixture.pool.free(stamp.block.address).unwrap();
            // Its work runs on.
            drop(goes);
            let blocks = [16, 16].map(|mib| fixture.pool.malloc(Bytes::mib(mib), stays.pool).unwrap());
            for block in blocks {
                Stamp { block, seed: 9 }.write(&stays, US(1)).unwrap();
                fixture.pool.free(block.address).unwrap();
            }
        }
        fixture.run_dry();
        verdicts.assert_clean();
        fixture.pool.settle().unwrap();
        fixture.pool.trim(Bytes::ZERO).unwrap();
        assert_eq!(fixture.pool.stats().all.reserved_bytes.current, 0, "{borrow:?}, {whole}");
    }
}

#[test]
fn a_capturing_stream_neither_lends_nor_borrows() {
    let fixture = fixture(Borrow::Wait);
    let (captured, other) = (fixture.lane(), fixture.lane());
    let there = fixture.pool.malloc(Bytes::mib(16), captured.pool).unwrap();
    let here = fixture.pool.malloc(Bytes::mib(16), other.pool).unwrap();
    Stamp { block: there, seed: 1 }.write(&captured, US(10)).unwrap();
    Stamp { block: here, seed: 1 }.write(&other, US(10)).unwrap();
    fixture.pool.free(there.address).unwrap();
    fixture.pool.free(here.address).unwrap();
    let hold = fixture.pool.clock().hold();
    fixture.sim.begin_capture(GPU, captured.pool.raw).unwrap();
    let large = Bytes::mib(20);
    let apart = fixture.pool.malloc(large, other.pool).unwrap();
    assert!(!overlap(apart, there));
    Stamp { block: apart, seed: 2 }.write(&other, US(10)).unwrap();
    let apart = fixture.pool.malloc(large, captured.pool).unwrap();
    assert!(!overlap(apart, here));
    fixture.sim.end_capture(GPU, captured.pool.raw).unwrap();
    drop(hold);
}

/// A growth that fails half way, and a trim, leave a capture that is open alone.
#[test]
fn nothing_breaks_a_capture() {
    let fixture = fixture(Borrow::Completed);
    let (captured, other) = (fixture.lane(), fixture.lane());
    let taken = fixture.sim.plain_alloc(GPU, Bytes::mib(40)).unwrap();
    let hold = fixture.pool.clock().hold();
    fixture.sim.begin_capture(GPU, captured.pool.raw).unwrap();
    assert!(fixture.pool.malloc(Bytes::mib(30), other.pool).unwrap_err().is_out_of_memory());
    let kept = fixture.pool.malloc(Bytes::kib(1025), other.pool).unwrap();
    fixture.pool.trim(Bytes::ZERO).unwrap();
    fixture.pool.free(kept.address).unwrap();
    fixture.pool.tick().unwrap();
    let refused = fixture.pool.settle();
    assert!(matches!(refused, Err(PoolError::Driver(DriverError::Capturing { .. }))), "{refused:?}");
    let full = fixture.pool.malloc(Bytes::mib(23), captured.pool);
    assert!(full.is_err(), "what is freed waits for the end of the capture");
    fixture.sim.end_capture(GPU, captured.pool.raw).unwrap();
    drop(hold);
    fixture.sim.plain_free(taken).unwrap();
    fixture.pool.settle().unwrap();
}

/// A stream that waits for what nothing enqueued yet will write.
fn stuck(fixture: &Fixture, lane: &glake_tests::pool::Lane) -> glake_device::Address {
    let flag = fixture.sim.plain_alloc(GPU, Bytes::new(4)).unwrap();
    fixture.sim.enqueue_wait(GPU, lane.pool.raw, flag, 1).unwrap();
    flag
}

#[test]
fn a_kernel_that_waits_for_later_work_does_not_stop_malloc() {
    let fixture = fixture(Borrow::Completed);
    let (waiting, other) = (fixture.lane(), fixture.lane());
    let flag = stuck(&fixture, &waiting);
    let block = fixture.pool.malloc(Bytes::mib(20), waiting.pool).unwrap();
    Stamp { block, seed: 1 }.write(&waiting, US(10)).unwrap();
    fixture.pool.free(block.address).unwrap();
    for _ in 0..4 {
        let block = fixture.pool.malloc(Bytes::mib(9), other.pool).unwrap();
        Stamp { block, seed: 2 }.write(&other, US(10)).unwrap();
        fixture.pool.tick().unwrap();
    }
    assert_eq!(fixture.sim.now(), Duration::ZERO, "nobody waited on the host");
    let last = fixture.pool.malloc(Bytes::mib(20), other.pool);
    assert!(matches!(last, Err(PoolError::Driver(DriverError::Deadlock { .. }))), "{last:?}");
    fixture.sim.enqueue_signal(GPU, other.pool.raw, flag, 1).unwrap();
    let block = fixture.pool.malloc(Bytes::mib(20), other.pool).unwrap();
    Stamp { block, seed: 3 }.write(&other, US(10)).unwrap();
}

/// While one thread waits on the host, the work that it waits for can still be given memory by another.
#[test]
fn a_waiting_thread_stops_no_other() {
    let fixture = Fixture::new(Shape { clock: Clock::Wall, ..Shape::default() });
    let (waiting, other, third) = (fixture.lane(), fixture.lane(), fixture.lane());
    let flag = stuck(&fixture, &waiting);
    let block = fixture.pool.malloc(Bytes::mib(50), waiting.pool).unwrap();
    fixture.pool.free(block.address).unwrap();
    std::thread::scope(|scope| {
        let (done, is_done) = mpsc::channel();
        let settles = scope.spawn(|| fixture.pool.settle());
        let at_the_last_rung = scope.spawn(|| fixture.pool.malloc(Bytes::mib(60), third.pool));
        let (fixture, other) = (&fixture, &other);
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            // Both are misses, the driver makes memory for them.
            fixture.pool.malloc(Bytes::mib(3), other.pool).unwrap();
            fixture.pool.malloc(Bytes::new(1), other.pool).unwrap();
            fixture.pool.tick().unwrap();
            done.send(()).unwrap();
        });
        let served = is_done.recv_timeout(Duration::from_secs(10));
        fixture.sim.enqueue_signal(GPU, other.pool.raw, flag, 1).unwrap();
        served.expect("malloc waits for a thread that waits");
        settles.join().unwrap().unwrap();
        assert!(at_the_last_rung.join().unwrap().unwrap_err().is_out_of_memory());
    });
}
