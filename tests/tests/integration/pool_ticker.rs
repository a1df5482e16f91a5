//! The thread that keeps completion points going.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use glake_device::Verb;
use glake_sim::{Census, Clock};
use glake_stitch::DomainOptions;
use glake_tests::pool::{Fixture, Lane, Shape, Stamp};
use glake_tiers::Ticker;
use glake_units::Bytes;

const INTERVAL: Duration = Duration::from_millis(2);
const LONG: Duration = Duration::from_secs(3600);
/// Far more than any of it takes.
const TIMEOUT: Duration = Duration::from_secs(10);

fn fixture() -> (Fixture, Ticker, [Lane; 2]) {
    let fixture = Fixture::new(Shape { clock: Clock::Wall, ..Shape::default() });
    let ticker = Ticker::start(&fixture.pool, INTERVAL).unwrap();
    let lanes = [fixture.lane(), fixture.lane()];
    (fixture, ticker, lanes)
}

/// Waits until it is so; how long that took.
fn until(what: &str, so: impl Fn() -> bool) -> Duration {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < TIMEOUT, "{what}: not after {TIMEOUT:?}");
        std::thread::sleep(Duration::from_micros(200));
    }
    start.elapsed()
}

/// Waits until no call has reached the device for ten intervals.
fn idle(fixture: &Fixture) {
    until("it goes to sleep", || {
        let calls = fixture.calls();
        std::thread::sleep(10 * INTERVAL);
        fixture.calls() == calls && !fixture.pool.clock().is_ticking()
    });
}

#[test]
fn what_is_freed_becomes_anyones() {
    let (fixture, _ticker, [owner, taker]) = fixture();
    for round in 0..5 {
        let stamp = Stamp { block: fixture.pool.malloc(Bytes::mib(60), owner.pool).unwrap(), seed: round };
        stamp.write(&owner, Duration::from_millis(1)).unwrap();
        fixture.pool.free(stamp.block.address).unwrap();
        until("its completion point passes", || !fixture.pool.clock().is_ticking());
        let calls = fixture.calls();
        let block = fixture.pool.malloc(Bytes::mib(60), taker.pool).unwrap();
        assert_eq!(block, stamp.block);
        if round > 0 {
            assert_eq!(fixture.calls(), calls, "a hit");
        }
        Stamp { block, seed: 99 }.write(&taker, Duration::ZERO).unwrap();
        fixture.pool.free(block.address).unwrap();
        until("its completion point passes", || !fixture.pool.clock().is_ticking());
    }
}

#[test]
fn it_sleeps_while_there_is_nothing_to_do_and_wakes_again() {
    let (fixture, _ticker, [lane, _]) = fixture();
    idle(&fixture);
    for _ in 0..3 {
        let block = fixture.pool.malloc(Bytes::mib(3), lane.pool).unwrap();
        idle(&fixture);
        fixture.pool.free(block.address).unwrap();
        until("it is woken by a free", || !fixture.pool.clock().is_ticking());
        idle(&fixture);
        let domain = fixture.pool.add_domain(DomainOptions::private_pool(), None);
        fixture.pool.release_domain(domain).unwrap();
        until("it is woken by a domain that is released", || !fixture.pool.clock().is_ticking());
    }
}

#[test]
fn every_ticker_of_a_pool_is_woken() {
    let (fixture, first, [lane, _]) = fixture();
    let woken = |which: &str| {
        idle(&fixture);
        let block = fixture.pool.malloc(Bytes::mib(3), lane.pool).unwrap();
        fixture.pool.free(block.address).unwrap();
        until(which, || !fixture.pool.clock().is_ticking());
    };
    woken("the first");
    drop(first);
    let second = Ticker::start(&fixture.pool, INTERVAL).unwrap();
    woken("one that came after another had ended");
    let third = Ticker::start(&fixture.pool, INTERVAL).unwrap();
    drop(second);
    woken("one that came beside another, which then ended");
    drop(Ticker::start(&fixture.pool, INTERVAL).unwrap());
    woken("one beside which another came and ended");
    drop(third);
}

#[test]
fn frees_do_not_make_it_tick_more_often() {
    let (fixture, _ticker, [lane, _]) = fixture();
    let start = Instant::now();
    while start.elapsed() < 20 * INTERVAL {
        let block = fixture.pool.malloc(Bytes::mib(3), lane.pool).unwrap();
        fixture.pool.free(block.address).unwrap();
    }
    let elapsed = start.elapsed().as_millis() / INTERVAL.as_millis();
    let recorded = fixture.recorder.counters().of(Verb::EventRecordContext).calls;
    assert!(u128::from(recorded) <= elapsed + 2, "{recorded} completion points in {elapsed} intervals");
}

#[test]
fn nothing_is_recorded_while_a_capture_is_open() {
    let (fixture, _ticker, [captured, other]) = fixture();
    let block = fixture.pool.malloc(Bytes::mib(3), other.pool).unwrap();
    idle(&fixture);
    let hold = fixture.pool.clock().hold();
    captured.begin_capture();
    fixture.pool.free(block.address).unwrap();
    let before = fixture.recorder.counters();
    std::thread::sleep(10 * INTERVAL);
    let since = fixture.recorder.counters().since(&before);
    assert_eq!(since.calls(), 0);
    captured.end_capture();
    drop(hold);
    until("the first completion point after the capture covers it", || !fixture.pool.clock().is_ticking());
}

#[test]
fn dropping_it_ends_it_at_once() {
    let fixture = Fixture::new(Shape { clock: Clock::Wall, ..Shape::default() });
    let lane = fixture.lane();
    let asleep = Ticker::start(&fixture.pool, LONG).unwrap();
    drop(asleep);
    let pausing = Ticker::start(&fixture.pool, LONG).unwrap();
    let block = fixture.pool.malloc(Bytes::mib(3), lane.pool).unwrap();
    fixture.pool.free(block.address).unwrap();
    std::thread::sleep(INTERVAL);
    let start = Instant::now();
    drop(pausing);
    assert!(start.elapsed() < TIMEOUT);
}

#[test]
fn a_pool_is_dropped_on_any_thread() {
    for round in 0..20 {
        let (fixture, ticker, [lane, other]) = fixture();
        let block = fixture.pool.malloc(Bytes::mib(3), lane.pool).unwrap();
        Stamp { block, seed: 1 }.write(&lane, Duration::from_micros(100)).unwrap();
        fixture.pool.free(block.address).unwrap();
        drop((lane, other));
        let Fixture { sim, pool, .. } = fixture;
        // Before the ticker, after it, or whichever is first: its thread may be the last to hold the pool.
        match round % 3 {
            0 => drop((ticker, pool)),
            1 => drop((pool, ticker)),
            _ => {
                let thread = std::thread::spawn(move || drop(pool));
                drop(ticker);
                thread.join().unwrap();
            }
        }
        assert_eq!(sim.census(), Census::default(), "round {round}");
    }
}

/// The function is called after ticks and before each sleep; the thread sleeps as long as it says, and for good without a time.
#[test]
fn a_function_that_looks_on_decides_how_long_the_thread_sleeps() {
    let fixture = Fixture::new(Shape { clock: Clock::Wall, ..Shape::default() });
    let lane = fixture.lane();
    let (ticks, looks) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let look = {
        let (ticks, looks) = (ticks.clone(), looks.clone());
        move |has_ticked: bool| {
            ticks.fetch_add(usize::from(has_ticked), Ordering::SeqCst);
            // It asks for two more calls, and for none then.
            (looks.fetch_add(1, Ordering::SeqCst) < 2).then_some(INTERVAL)
        }
    };
    let _ticker = Ticker::start_with(&fixture.pool, INTERVAL, look).unwrap();
    until("it was called as often as it asked for", || looks.load(Ordering::SeqCst) >= 3);
    idle(&fixture);
    let before = looks.load(Ordering::SeqCst);
    std::thread::sleep(20 * INTERVAL);
    assert_eq!((looks.load(Ordering::SeqCst), ticks.load(Ordering::SeqCst)), (before, 0), "nothing wakes it");
    let block = fixture.pool.malloc(Bytes::mib(60), lane.pool).unwrap();
    fixture.pool.free(block.address).unwrap();
    until("it ticks", || ticks.load(Ordering::SeqCst) > 0);
}
