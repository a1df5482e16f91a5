//! Four threads on one pool: each does what a program may, at random, and hands some of its blocks to the others.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use glake_device::DriverError;
use glake_sim::Clock;
use glake_stitch::{Allocator, Borrow, DomainId, DomainOptions};
use glake_tests::pool::{Fixture, Lane, Ledger, Shape, Stamp, Verdicts};
use glake_tiers::{PoolError, Ticker};
use glake_units::Bytes;
use parking_lot::Mutex;

const THREADS: usize = 4;
/// Each thread has two streams; the last of all is the one that captures.
const STREAMS: usize = 2 * THREADS + 1;
const CAPTURING: usize = STREAMS - 1;

/// What the threads have in common.
struct Shared {
    fixture: Fixture,
    lanes: Vec<Lane>,
    ledger: Mutex<Ledger>,
    verdicts: Verdicts,
    /// Blocks that whoever comes next frees.
    handed: Mutex<Vec<Held>>,
    /// How many captures are open.
    captures: Mutex<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    stamp: Stamp,
    stream: usize,
}

struct Worker<'a> {
    shared: &'a Shared,
    index: usize,
    random: u64,
    domains: Vec<DomainId>,
    blocks: Vec<Held>,
}

impl Worker<'_> {
    /// A number below `end` (xorshift64*, Vigna 2016).
    fn below(&mut self, end: u64) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % end
    }

    fn time(&mut self) -> Duration {
        Duration::from_micros(self.below(40))
    }

    fn run(&mut self, rounds: u64) {
        for _ in 0..rounds {
            let pool = &self.shared.fixture.pool;
            match self.below(40) {
                0..=15 => self.malloc(),
                16..=27 => self.free(),
                28..=29 => self.lend(),
                30..=33 => _ = self.shared.fixture.sim.step(),
                34 => pool.tick().unwrap(),
                35 => self.may_meet_a_capture(pool.settle()),
                36 => {
                    pool.trim(Bytes::mib(self.below(100))).unwrap();
                }
                37 => pool.set_memory_fraction(0.5 + self.below(6) as f64 / 10.0),
                38 => self.change_domains(),
                _ => self.capture(),
            }
        }
    }

    fn size(&mut self) -> Bytes {
        match self.below(9) {
            0..=3 => Bytes::new(1 + self.below(1 << 20)),
            8 => Bytes::new(self.below(40 << 20)),
            _ => Bytes::new((1 << 20) + self.below(10 << 20)),
        }
    }

    fn malloc(&mut self) {
        // Now and then a stream of another thread: two threads may be at one stream at once.
        let owner = if self.below(4) == 0 { self.below(THREADS as u64) } else { self.index as u64 };
        let stream = usize::try_from(2 * owner + self.below(2)).unwrap();
        let which = self.below(self.domains.len() as u64);
        let domain = self.domains[usize::try_from(which).unwrap()];
        let held = self.take(domain, stream);
        self.blocks.extend(held);
    }

    /// A new marked block.
    fn take(&mut self, domain: DomainId, stream: usize) -> Option<Held> {
        let size = self.size();
        let lane = &self.shared.lanes[stream];
        let block = match self.shared.fixture.pool.malloc_in(domain, size, lane.pool) {
            Ok(block) => block,
            Err(error) if error.is_out_of_memory() => return None,
            Err(error) => {
                self.may_meet_a_capture(Err(error));
                return None;
            }
        };
        self.shared.ledger.lock().take(block, domain);
        let stamp = Stamp { block, seed: self.random };
        stamp.write(lane, self.time()).unwrap();
        Some(Held { stamp, stream })
    }

    fn pick(&mut self) -> Option<Held> {
        let count = self.blocks.len() as u64;
        (count > 0).then(|| usize::try_from(self.below(count)).unwrap()).map(|at| self.blocks.swap_remove(at))
    }

    fn free(&mut self) {
        match (self.below(3), self.pick()) {
            (0, Some(held)) => self.shared.handed.lock().push(held),
            (1, mine) => {
                let theirs = self.shared.handed.lock().pop();
                self.blocks.extend(mine);
                theirs.into_iter().for_each(|held| self.give(held));
            }
            (_, mine) => mine.into_iter().for_each(|held| self.give(held)),
        }
    }

    fn give(&mut self, Held { stamp, stream }: Held) {
        let time = self.time();
        stamp.verify(&self.shared.lanes[stream], time, &self.shared.verdicts).unwrap();
        self.shared.ledger.lock().give(stamp.block);
        assert_eq!(self.shared.fixture.pool.free(stamp.block.address).unwrap(), stamp.block.size);
    }

    /// Another thread's stream reads a block, is recorded, and is never joined again.
    fn lend(&mut self) {
        let Some(held) = self.pick() else { return };
        let other = usize::try_from(self.below(CAPTURING as u64)).unwrap();
        let (from, to) = (&self.shared.lanes[held.stream], &self.shared.lanes[other]);
        let time = self.time();
        to.follows(from);
        held.stamp.verify(to, time, &self.shared.verdicts).unwrap();
        assert!(self.shared.fixture.pool.record_stream(held.stamp.block.address, to.pool));
        self.blocks.push(held);
    }

    fn change_domains(&mut self) {
        let pool = &self.shared.fixture.pool;
        if self.domains.len() < 3 {
            let private = self.below(2) == 0;
            let options = if private { DomainOptions::private_pool() } else { DomainOptions::default() };
            self.domains.push(pool.add_domain(options, None));
        } else {
            pool.release_domain(self.domains.remove(1)).unwrap();
        }
    }

    /// A capture with a private pool, while the others go on. There is one capturing stream.
    fn capture(&mut self) {
        let Some(mut open) = self.shared.captures.try_lock() else { return };
        *open += 1;
        let pool = &self.shared.fixture.pool;
        let lane = &self.shared.lanes[CAPTURING];
        let domain = pool.add_domain(DomainOptions::private_pool(), None);
        let hold = pool.clock().hold();
        lane.begin_capture();
        let mut inside = Vec::new();
        for _ in 0..self.below(6) {
            inside.extend(self.take(domain, CAPTURING));
            if self.below(2) == 0 {
                inside.pop().into_iter().for_each(|held| self.give(held));
            }
            std::thread::yield_now();
        }
        lane.end_capture();
        drop(hold);
        pool.release_domain(domain).unwrap();
        inside.into_iter().for_each(|held| self.give(held));
    }

    /// Completion points that have to wait for the end of a capture are no fault.
    fn may_meet_a_capture(&self, answer: Result<(), PoolError>) {
        match answer {
            Ok(()) => {}
            Err(PoolError::Driver(DriverError::Capturing { .. })) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

fn stress(seed: u64, borrow: Borrow, clock: Clock, rounds: u64) {
    let fixture = Fixture::new(Shape { memory: Bytes::mib(128), borrow, clock, ..Shape::default() });
    let shared = Shared {
        lanes: (0..STREAMS).map(|_| fixture.lane()).collect(),
        fixture,
        ledger: Mutex::default(),
        verdicts: Verdicts::default(),
        handed: Mutex::default(),
        captures: Mutex::default(),
    };
    let ticker = (clock == Clock::Wall)
        .then(|| Ticker::start(&shared.fixture.pool, Duration::from_millis(1)).unwrap());
    let left: Vec<Held> = std::thread::scope(|scope| {
        let workers = (0..THREADS).map(|index| {
            let random = seed * 1000 + index as u64 + 1;
            let domains = vec![Allocator::default_domain()];
            let mut worker = Worker { shared: &shared, index, random, domains, blocks: Vec::new() };
            scope.spawn(move || {
                worker.run(rounds);
                for domain in worker.domains.split_off(1) {
                    worker.shared.fixture.pool.release_domain(domain).unwrap();
                }
                worker.blocks
            })
        });
        let workers: Vec<_> = workers.collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    shared.fixture.pool.check().unwrap_or_else(|broken| panic!("seed {seed}: {broken}"));
    shared.ledger.lock().compare(&shared.fixture.pool);
    let mut last = Worker { shared: &shared, index: 0, random: 1, domains: Vec::new(), blocks: left };
    last.blocks.append(&mut shared.handed.lock());
    std::mem::take(&mut last.blocks).into_iter().for_each(|held| last.give(held));
    shared.lanes.iter().for_each(Lane::synchronize);
    shared.verdicts.assert_clean();
    assert!(*shared.captures.lock() > 0, "seed {seed}: no capture was open");
    assert!(shared.fixture.pool.counters().stitches > 0, "seed {seed}: nothing was stitched");
    drop(ticker);
    let Shared { fixture, lanes, .. } = shared;
    drop(lanes);
    fixture.end();
}

#[test]
fn completed_in_virtual_time() {
    (1..=8).for_each(|seed| stress(seed, Borrow::Completed, Clock::Virtual, 800));
}

#[test]
fn waiting_in_virtual_time() {
    (11..=16).for_each(|seed| stress(seed, Borrow::Wait, Clock::Virtual, 800));
}

#[test]
fn completed_with_a_ticker() {
    (21..=24).for_each(|seed| stress(seed, Borrow::Completed, Clock::Wall, 800));
}
