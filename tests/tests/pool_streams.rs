//! Which stream gets whose bytes, and when, with kernels under way.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::mpsc;
use std::time::Duration;

use glake_device::{DeviceId, DriverError, Fault, Injected, Verb, When};
use glake_sim::Clock;
use glake_stitch::{Borrow, WaitRules};
use glake_tests::pool::{Bed, Shape, Stamp, Verdicts};
use glake_tiers::{Block, PoolError};
use glake_units::Bytes;

const GPU: DeviceId = DeviceId(0);
const US: fn(u64) -> Duration = Duration::from_micros;

fn overlap(one: Block, other: Block) -> bool {
    one.address.0 < other.address.0 + other.size.get() && other.address.0 < one.address.0 + one.size.get()
}

fn bed(borrow: Borrow) -> Bed {
    Bed::new(Shape { borrow, ..Shape::default() })
}

#[test]
fn a_kernel_nobody_recorded_still_reads_its_bytes() {
    let bed = bed(Borrow::Completed);
    let (owner, reader, taker) = (bed.lane(), bed.lane(), bed.lane());
    let verdicts = Verdicts::default();
    let stamp = Stamp { block: bed.pool.malloc(Bytes::mib(8), owner.pool).unwrap(), seed: 1 };
    stamp.write(&owner, US(1)).unwrap();
    reader.follows(&owner);
    stamp.verify(&reader, US(1000), &verdicts).unwrap();
    bed.pool.free(stamp.block.address).unwrap();

    let mut taken = Vec::new();
    for seed in 2..8 {
        let other = Stamp { block: bed.pool.malloc(Bytes::mib(8), taker.pool).unwrap(), seed };
        assert!(!overlap(other.block, stamp.block), "taken while it is read");
        other.write(&taker, US(1)).unwrap();
        taken.push(other);
        bed.pool.tick().unwrap();
    }
    bed.run_dry();
    verdicts.assert_clean();
    bed.pool.tick().unwrap();
    let next = bed.pool.malloc(Bytes::mib(8), taker.pool).unwrap();
    assert_eq!(next, stamp.block, "done, so anyone's");
    Stamp { block: next, seed: 9 }.write(&taker, US(1)).unwrap();
}

#[test]
fn its_own_stream_takes_a_block_at_once() {
    let bed = bed(Borrow::Completed);
    let lane = bed.lane();
    let block = bed.pool.malloc(Bytes::mib(8), lane.pool).unwrap();
    Stamp { block, seed: 1 }.write(&lane, US(1000)).unwrap();
    bed.pool.free(block.address).unwrap();
    let calls = bed.calls();
    assert_eq!(bed.pool.malloc(Bytes::mib(8), lane.pool).unwrap(), block);
    assert_eq!(bed.calls(), calls, "a hit asks nothing of the driver");
    Stamp { block, seed: 2 }.write(&lane, US(1)).unwrap();
}

#[test]
fn a_recorded_block_is_nobodys_before_its_epoch() {
    for size in [Bytes::kib(64), Bytes::mib(8)] {
        let bed = bed(Borrow::Completed);
        let (owner, reader) = (bed.lane(), bed.lane());
        let verdicts = Verdicts::default();
        let stamp = Stamp { block: bed.pool.malloc(size, owner.pool).unwrap(), seed: 1 };
        stamp.write(&owner, US(1)).unwrap();
        reader.follows(&owner);
        stamp.verify(&reader, US(1000), &verdicts).unwrap();
        assert!(bed.pool.record_stream(stamp.block.address, reader.pool));
        bed.pool.free(stamp.block.address).unwrap();
        let active = bed.pool.stats().all.active_bytes.current;
        assert_eq!(active, size.get(), "active until it is complete");

        for lane in [&owner, &reader] {
            bed.pool.tick().unwrap();
            let other = bed.pool.malloc(size, lane.pool).unwrap();
            assert!(!overlap(other, stamp.block));
            Stamp { block: other, seed: 2 }.write(lane, US(1)).unwrap();
        }
        bed.run_dry();
        verdicts.assert_clean();
        bed.pool.tick().unwrap();
        assert_eq!(bed.pool.stats().all.active.current, 2);
        assert_eq!(bed.pool.malloc(size, owner.pool).unwrap(), stamp.block);
    }
}

/// Eight blocks of 8 MiB fill the device; three are freed, so that only an alias holds 20 MiB.
fn holes(bed: &Bed, lane: &glake_tests::pool::Lane) -> Vec<Block> {
    let blocks: Vec<Block> = (0..8).map(|_| bed.pool.malloc(Bytes::mib(8), lane.pool).unwrap()).collect();
    for &block in &blocks {
        Stamp { block, seed: 1 }.write(lane, US(100)).unwrap();
    }
    for block in [blocks[0], blocks[2], blocks[4]] {
        bed.pool.free(block.address).unwrap();
    }
    blocks
}

fn edges(bed: &Bed) -> (u64, u64) {
    let counters = bed.recorder.counters();
    (counters.of(Verb::EventRecord).calls, counters.of(Verb::StreamWaitEvent).calls)
}

#[test]
fn bytes_that_change_their_address_get_a_completion_edge() {
    let bed = bed(Borrow::Completed);
    let lane = bed.lane();
    holes(&bed, &lane);
    assert_eq!(edges(&bed), (0, 0));
    let alias = bed.pool.malloc(Bytes::mib(20), lane.pool).unwrap();
    assert_eq!((edges(&bed), bed.pool.counters().edges), ((1, 1), 1), "into the alias");
    Stamp { block: alias, seed: 2 }.write(&lane, US(100)).unwrap();
    bed.pool.free(alias.address).unwrap();
    let home = bed.pool.malloc(Bytes::mib(8), lane.pool).unwrap();
    assert_eq!((edges(&bed), bed.pool.counters().edges), ((2, 2), 2), "and back home");
    Stamp { block: home, seed: 3 }.write(&lane, US(100)).unwrap();
    let covered = bed.pool.malloc(Bytes::mib(8), lane.pool).unwrap();
    assert_eq!(edges(&bed), (2, 2), "one edge covers all that came before it");
    Stamp { block: covered, seed: 4 }.write(&lane, US(100)).unwrap();
    bed.pool.free(home.address).unwrap();
    bed.pool.free(covered.address).unwrap();
    bed.pool.settle().unwrap();
    bed.pool.malloc(Bytes::mib(20), lane.pool).unwrap();
    assert_eq!(edges(&bed), (2, 2), "what is complete needs none");
}

/// Free slabs are lent to aliases: a slab that comes back needs the edge as any other bytes do.
#[test]
fn a_slab_that_was_in_an_alias_gets_its_edge() {
    let bed = bed(Borrow::Completed);
    let lane = bed.lane();
    // 40 MiB of slabs, of which runs of 8 MiB and more come free; 24 MiB that stay.
    let small: Vec<Block> = (0..40).map(|_| bed.pool.malloc(Bytes::mib(1), lane.pool).unwrap()).collect();
    bed.pool.malloc(Bytes::mib(24), lane.pool).unwrap();
    for (_, block) in small.iter().enumerate().filter(|(index, _)| index % 10 != 9) {
        bed.pool.free(block.address).unwrap();
    }
    bed.pool.settle().unwrap();
    let alias = bed.pool.malloc(Bytes::mib(12), lane.pool).unwrap();
    assert_eq!(bed.pool.counters().stitches, 1);
    Stamp { block: alias, seed: 1 }.write(&lane, US(100)).unwrap();
    bed.pool.free(alias.address).unwrap();
    let before = edges(&bed);
    for seed in 2..38 {
        let block = bed.pool.malloc(Bytes::mib(1), lane.pool).unwrap();
        Stamp { block, seed }.write(&lane, US(1)).unwrap();
    }
    assert_eq!(edges(&bed), (before.0 + 1, before.1 + 1), "one covers all");
}

#[test]
fn a_borrower_waits_for_its_lender_on_the_device() {
    let bed = bed(Borrow::Wait(WaitRules::default()));
    let (lender, borrower) = (bed.lane(), bed.lane());
    let verdicts = Verdicts::default();
    let stamp = Stamp { block: bed.pool.malloc(Bytes::mib(60), lender.pool).unwrap(), seed: 1 };
    stamp.write(&lender, US(1)).unwrap();
    stamp.verify(&lender, US(500), &verdicts).unwrap();
    bed.pool.free(stamp.block.address).unwrap();
    let block = bed.pool.malloc(Bytes::mib(60), borrower.pool).unwrap();
    assert_eq!((block, bed.sim.now()), (stamp.block, Duration::ZERO), "at once, without a wait on the host");
    assert_eq!(bed.pool.counters().stream_waits, 1);
    Stamp { block, seed: 2 }.write(&borrower, US(10)).unwrap();
    borrower.synchronize();
    verdicts.assert_clean();
    assert!(bed.sim.now() >= US(511), "{:?}: the borrower ran first", bed.sim.now());
}

#[test]
fn a_stream_that_is_gone_breaks_nothing() {
    let rules = [Borrow::Off, Borrow::Completed, Borrow::Wait(WaitRules::default())];
    for (borrow, whole) in rules.into_iter().flat_map(|borrow| [(borrow, true), (borrow, false)]) {
        let bed = bed(borrow);
        if !whole {
            // As before CUDA 12.5: an epoch is an event of every stream that is known.
            let lacks = Fault {
                verb: Some(Verb::EventRecordContext),
                when: When::From(1),
                error: Injected::Unsupported,
            };
            bed.faults.set(&[lacks]);
        }
        let stays = bed.lane();
        let verdicts = Verdicts::default();
        for seed in 1..4 {
            let goes = bed.lane();
            let size = Bytes::mib(18);
            let stamp = Stamp { block: bed.pool.malloc(size, goes.pool).unwrap(), seed };
            stamp.write(&goes, US(1)).unwrap();
            stamp.verify(&goes, US(500), &verdicts).unwrap();
            bed.pool.free(stamp.block.address).unwrap();
            // Its work runs on.
            drop(goes);
            let blocks = [16, 16].map(|mib| bed.pool.malloc(Bytes::mib(mib), stays.pool).unwrap());
            for block in blocks {
                Stamp { block, seed: 9 }.write(&stays, US(1)).unwrap();
                bed.pool.free(block.address).unwrap();
            }
        }
        bed.run_dry();
        verdicts.assert_clean();
        bed.pool.settle().unwrap();
        bed.pool.trim(Bytes::ZERO).unwrap();
        assert_eq!(bed.pool.stats().all.reserved_bytes.current, 0, "{borrow:?}, {whole}");
    }
}

#[test]
fn a_capturing_stream_neither_lends_nor_borrows() {
    let bed = bed(Borrow::Wait(WaitRules::default()));
    let (captured, other) = (bed.lane(), bed.lane());
    let there = bed.pool.malloc(Bytes::mib(16), captured.pool).unwrap();
    let here = bed.pool.malloc(Bytes::mib(16), other.pool).unwrap();
    Stamp { block: there, seed: 1 }.write(&captured, US(10)).unwrap();
    Stamp { block: here, seed: 1 }.write(&other, US(10)).unwrap();
    bed.pool.free(there.address).unwrap();
    bed.pool.free(here.address).unwrap();
    let hold = bed.pool.hold_epochs();
    bed.sim.begin_capture(GPU, captured.pool.raw).unwrap();
    let large = Bytes::mib(20);
    let apart = bed.pool.malloc(large, other.pool).unwrap();
    assert!(!overlap(apart, there));
    Stamp { block: apart, seed: 2 }.write(&other, US(10)).unwrap();
    let apart = bed.pool.malloc(large, captured.pool).unwrap();
    assert!(!overlap(apart, here));
    bed.sim.end_capture(GPU, captured.pool.raw).unwrap();
    drop(hold);
}

/// A growth that fails half way, and a trim, leave a capture that is open alone.
#[test]
fn nothing_breaks_a_capture() {
    let bed = bed(Borrow::Completed);
    let (captured, other) = (bed.lane(), bed.lane());
    let taken = bed.sim.plain_alloc(GPU, Bytes::mib(40)).unwrap();
    let hold = bed.pool.hold_epochs();
    bed.sim.begin_capture(GPU, captured.pool.raw).unwrap();
    assert!(bed.pool.malloc(Bytes::mib(30), other.pool).unwrap_err().is_out_of_memory());
    let kept = bed.pool.malloc(Bytes::kib(1025), other.pool).unwrap();
    bed.pool.trim(Bytes::ZERO).unwrap();
    bed.pool.free(kept.address).unwrap();
    bed.pool.tick().unwrap();
    let refused = bed.pool.settle();
    assert!(matches!(refused, Err(PoolError::Driver(DriverError::Capturing { .. }))), "{refused:?}");
    let full = bed.pool.malloc(Bytes::mib(23), captured.pool);
    assert!(full.is_err(), "what is freed waits for the end of the capture");
    bed.sim.end_capture(GPU, captured.pool.raw).unwrap();
    drop(hold);
    bed.sim.plain_free(taken).unwrap();
    bed.pool.settle().unwrap();
}

/// A stream that waits for what nothing enqueued yet will write.
fn stuck(bed: &Bed, lane: &glake_tests::pool::Lane) -> glake_device::Address {
    let flag = bed.sim.plain_alloc(GPU, Bytes::new(4)).unwrap();
    bed.sim.enqueue_wait(GPU, lane.pool.raw, flag, 1).unwrap();
    flag
}

#[test]
fn a_kernel_that_waits_for_later_work_does_not_stop_malloc() {
    let bed = bed(Borrow::Completed);
    let (waiting, other) = (bed.lane(), bed.lane());
    let flag = stuck(&bed, &waiting);
    let block = bed.pool.malloc(Bytes::mib(20), waiting.pool).unwrap();
    Stamp { block, seed: 1 }.write(&waiting, US(10)).unwrap();
    bed.pool.free(block.address).unwrap();
    for _ in 0..4 {
        let block = bed.pool.malloc(Bytes::mib(9), other.pool).unwrap();
        Stamp { block, seed: 2 }.write(&other, US(10)).unwrap();
        bed.pool.tick().unwrap();
    }
    assert_eq!(bed.sim.now(), Duration::ZERO, "nobody waited on the host");
    let last = bed.pool.malloc(Bytes::mib(20), other.pool);
    assert!(matches!(last, Err(PoolError::Driver(DriverError::Deadlock { .. }))), "{last:?}");
    bed.sim.enqueue_signal(GPU, other.pool.raw, flag, 1).unwrap();
    let block = bed.pool.malloc(Bytes::mib(20), other.pool).unwrap();
    Stamp { block, seed: 3 }.write(&other, US(10)).unwrap();
}

/// While one thread waits on the host, the work that it waits for can still be given memory by another.
#[test]
fn a_waiting_thread_stops_no_other() {
    let bed = Bed::new(Shape { clock: Clock::Wall, ..Shape::default() });
    let (waiting, other, third) = (bed.lane(), bed.lane(), bed.lane());
    let flag = stuck(&bed, &waiting);
    let block = bed.pool.malloc(Bytes::mib(50), waiting.pool).unwrap();
    bed.pool.free(block.address).unwrap();
    std::thread::scope(|scope| {
        let (done, is_done) = mpsc::channel();
        let settles = scope.spawn(|| bed.pool.settle());
        let at_the_last_rung = scope.spawn(|| bed.pool.malloc(Bytes::mib(60), third.pool));
        let (bed, other) = (&bed, &other);
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            // Both are misses, the driver makes memory for them.
            bed.pool.malloc(Bytes::mib(3), other.pool).unwrap();
            bed.pool.malloc(Bytes::new(1), other.pool).unwrap();
            bed.pool.tick().unwrap();
            done.send(()).unwrap();
        });
        let served = is_done.recv_timeout(Duration::from_secs(10));
        bed.sim.enqueue_signal(GPU, other.pool.raw, flag, 1).unwrap();
        served.expect("malloc waits for a thread that waits");
        settles.join().unwrap().unwrap();
        assert!(at_the_last_rung.join().unwrap().unwrap_err().is_out_of_memory());
    });
}
