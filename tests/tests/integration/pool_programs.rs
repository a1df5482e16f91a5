//! Random programs on a pool, with real bytes: every block is marked by a kernel of its stream and looked at before it is
//! freed; the device refuses whatever no event orders, so a byte given away too early is refused or seen. Streams are destroyed with work
//! under way and nobody tells the pool, blocks are shared, graphs' pools go back to checkpoints and are released while they run.
//!
//! 3 x 150 programs; a million steps: `PROPTEST_CASES=4200 cargo nextest run --locked --release -p glake-tests --test integration pool_programs`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use glake_device::DriverError;
use glake_device::owned::CaptureHold;
use glake_stitch::{Allocator, Borrow, DomainId, DomainOptions};
use glake_tests::pool::{Fixture, Lane, Ledger, Shape, Stamp, Verdicts};
use glake_tiers::{Block, BlockLife, Checkpoint, LiveBlock, PoolError, PoolOptions, PoolStream, Restored};
use glake_units::Bytes;
use proptest::prelude::*;

/// The last one is the one that captures.
const STREAMS: usize = 4;
const CAPTURING: usize = STREAMS - 1;

#[derive(Clone, Debug)]
enum Op {
    Malloc { size: u64, stream: usize, domain: usize, plain: bool },
    Free { which: usize },
    Use { which: usize, stream: usize },
    Hold { which: usize, stream: usize },
    Step { count: usize },
    Tick,
    Settle,
    Trim { keep: u64 },
    Fraction { eighths: u32 },
    AddDomain { private: bool },
    ReleaseDomain { which: usize },
    Capture,
    DestroyStream { which: usize },
    Share { which: usize },
    Checkpoint { which: usize },
    Restore { which: usize },
}

fn op() -> impl Strategy<Value = Op> {
    let size = prop_oneof![3 => 1..1u64 << 20, 4 => 1 << 20..12u64 << 20, 1 => 12 << 20..70u64 << 20];
    prop_oneof![
        14 => (size, 0..STREAMS, 0..4usize, prop::bool::weighted(0.2))
            .prop_map(|(size, stream, domain, plain)| Op::Malloc { size, stream, domain, plain }),
        12 => any::<usize>().prop_map(|which| Op::Free { which }),
        3 => (any::<usize>(), 0..CAPTURING).prop_map(|(which, stream)| Op::Use { which, stream }),
        4 => (any::<usize>(), 0..CAPTURING).prop_map(|(which, stream)| Op::Hold { which, stream }),
        4 => (1..12usize).prop_map(|count| Op::Step { count }),
        4 => Just(Op::Tick),
        1 => Just(Op::Settle),
        1 => (0..80u64 << 20).prop_map(|keep| Op::Trim { keep }),
        1 => (3..=8u32).prop_map(|eighths| Op::Fraction { eighths }),
        1 => any::<bool>().prop_map(|private| Op::AddDomain { private }),
        1 => any::<usize>().prop_map(|which| Op::ReleaseDomain { which }),
        1 => Just(Op::Capture),
        1 => (0..STREAMS).prop_map(|which| Op::DestroyStream { which }),
        2 => any::<usize>().prop_map(|which| Op::Share { which }),
        1 => any::<usize>().prop_map(|which| Op::Checkpoint { which }),
        1 => any::<usize>().prop_map(|which| Op::Restore { which }),
    ]
}

/// A block, whose it is, and whether the capture under way has it.
#[derive(Debug)]
struct Held {
    /// No other block has it, whatever address it gets.
    number: u64,
    stamp: Stamp,
    domain: DomainId,
    /// Who works on it: the stream that it was allocated for, or what took its place.
    stream: usize,
    home: PoolStream,
    captured: bool,
}

#[derive(Debug)]
struct Capture {
    domain: DomainId,
    _hold: CaptureHold,
}

struct Run {
    fixture: Fixture,
    lanes: Vec<Lane>,
    ledger: Ledger,
    verdicts: Verdicts,
    blocks: Vec<Held>,
    domains: Vec<DomainId>,
    capture: Option<Capture>,
    checkpoints: Vec<(DomainId, Checkpoint)>,
    /// Which blocks were shared.
    shared: Vec<(u64, BlockLife)>,
    seeds: u64,
}

impl Run {
    fn new(borrow: Borrow) -> Self {
        let shape = Shape { memory: Bytes::mib(96), borrow, ..Shape::default() };
        let fixture =
            Fixture::with(shape, |_| (), PoolOptions { exportable: true, ..PoolOptions::default() });
        Run {
            lanes: (0..STREAMS).map(|_| fixture.lane()).collect(),
            fixture,
            ledger: Ledger::default(),
            verdicts: Verdicts::default(),
            blocks: Vec::new(),
            domains: vec![Allocator::default_domain()],
            capture: None,
            checkpoints: Vec::new(),
            shared: Vec::new(),
            seeds: 0,
        }
    }

    /// Work takes from 0 to 40 us, each piece another time.
    fn time(&mut self) -> Duration {
        self.seeds += 1;
        Duration::from_micros(self.seeds * 7 % 41)
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Malloc { size, stream, domain, plain } => {
                self.malloc(Bytes::new(size), stream, domain, plain)
            }
            Op::Free { which } if !self.blocks.is_empty() => self.free(which % self.blocks.len()),
            Op::Use { which, stream } if !self.blocks.is_empty() => {
                self.lend(which % self.blocks.len(), stream);
            }
            Op::Hold { which, stream } if !self.blocks.is_empty() => {
                self.hold_for(which % self.blocks.len(), stream);
            }
            Op::Step { count } => (0..count).for_each(|_| _ = self.fixture.sim.step()),
            Op::Tick => self.fixture.pool.tick().unwrap(),
            Op::Settle => match self.fixture.pool.settle() {
                Ok(()) => {}
                Err(PoolError::Driver(DriverError::Capturing { .. })) if self.capture.is_some() => {}
                Err(error) => panic!("{error}"),
            },
            Op::Trim { keep } => drop(self.fixture.pool.trim(Bytes::new(keep)).unwrap()),
            Op::Fraction { eighths } => self.fixture.pool.set_memory_fraction(f64::from(eighths) / 8.0),
            Op::AddDomain { private } if self.domains.len() < 4 => {
                let options = if private { DomainOptions::private_pool() } else { DomainOptions::default() };
                self.domains.push(self.fixture.pool.add_domain(options, None));
            }
            Op::ReleaseDomain { which } if self.domains.len() > 1 => {
                let domain = self.domains.remove(1 + which % (self.domains.len() - 1));
                self.fixture.pool.release_domain(domain).unwrap();
                assert!(self.fixture.pool.release_domain(domain).is_err());
            }
            Op::Capture if self.capture.is_none() => self.begin_capture(),
            Op::Capture => self.end_capture(),
            Op::DestroyStream { which } if which != CAPTURING || self.capture.is_none() => {
                // As a program does: its work goes on, and what takes its place comes after it.
                let next = self.fixture.lane();
                next.follows(&self.lanes[which]);
                self.lanes[which] = next;
            }
            Op::Share { which } if !self.blocks.is_empty() => self.share(which % self.blocks.len()),
            Op::Checkpoint { which } => {
                let domain = self.domains[which % self.domains.len()];
                // Nothing of a stitched domain is to be claimed.
                if let Ok(checkpoint) = self.fixture.pool.checkpoint(domain) {
                    self.checkpoints.push((domain, checkpoint));
                }
            }
            Op::Restore { which } if !self.checkpoints.is_empty() && self.capture.is_none() => {
                let (domain, checkpoint) = self.checkpoints[which % self.checkpoints.len()].clone();
                self.restore(domain, &checkpoint);
            }
            _ => {}
        }
    }

    fn malloc(&mut self, size: Bytes, stream: usize, domain: usize, plain: bool) {
        let captured = stream == CAPTURING && self.capture.is_some();
        let domain = match &self.capture {
            Some(capture) if captured => capture.domain,
            _ => self.domains[domain % self.domains.len()],
        };
        let (pool, lane) = (&self.fixture.pool, self.lanes[stream].pool);
        let asked =
            if plain { pool.malloc_plain(domain, size, lane) } else { pool.malloc_in(domain, size, lane) };
        let block = match asked {
            Ok(block) => block,
            Err(error) if error.is_out_of_memory() => return,
            Err(PoolError::Driver(DriverError::Capturing { .. })) if self.capture.is_some() => return,
            Err(error) => panic!("{error}"),
        };
        assert_eq!(pool.is_plain(block.address), plain);
        assert_eq!(self.fixture.sim.ipc_handle(block.address).is_ok(), plain);
        assert!(block.size >= size && block.size.is_aligned(Bytes::new(512)));
        self.ledger.take(block, domain);
        self.hold(block, domain, stream, self.lanes[stream].pool, captured);
    }

    fn hold(&mut self, block: Block, domain: DomainId, stream: usize, home: PoolStream, captured: bool) {
        let time = self.time();
        let (number, stamp) = (self.seeds, Stamp { block, seed: self.seeds });
        stamp.write(&self.lanes[stream], time).unwrap();
        self.blocks.push(Held { number, stamp, domain, stream, home, captured });
    }

    fn free(&mut self, index: usize) {
        // What was handed out on the capturing stream before the capture is not the capture's to look at.
        if self.capture.is_some() && self.blocks[index].stream == CAPTURING && !self.blocks[index].captured {
            return;
        }
        let Held { stamp, stream, home, .. } = self.blocks.swap_remove(index);
        let time = self.time();
        stamp.verify(&self.lanes[stream], time, &self.verdicts).unwrap();
        self.record(stamp.block, stream, home);
        self.give(stamp.block);
    }

    /// A stream that took the place of a block's own is another one to the pool.
    fn record(&self, block: Block, stream: usize, home: PoolStream) {
        let pool = self.lanes[stream].pool;
        assert!(pool == home || self.fixture.pool.record_stream(block.address, pool));
    }

    fn share(&mut self, index: usize) {
        let Held { number, stamp, .. } = self.blocks[index];
        let exported = match self.fixture.pool.export(stamp.block.address, 0..1) {
            Err(PoolError::Plain { address, .. }) => return assert!(self.fixture.pool.is_plain(address)),
            exported => exported.unwrap(),
        };
        assert_eq!((exported.base, exported.size), (stamp.block.address, stamp.block.size));
        self.shared.push((number, exported.life));
    }

    /// Goes back to a checkpoint, or stays as it is where the pool or its memory is gone.
    fn restore(&mut self, domain: DomainId, checkpoint: &Checkpoint) {
        let Restored { freed, claimed } = match self.fixture.pool.restore(domain, checkpoint) {
            Ok(restored) => restored,
            Err(PoolError::Refused { .. }) => return,
            Err(error) => panic!("{error}"),
        };
        let same = |live: &LiveBlock, held: &Held| {
            (live.address, live.size) == (held.stamp.block.address, held.stamp.block.size)
        };
        let (before, others): (Vec<Held>, Vec<Held>) =
            std::mem::take(&mut self.blocks).into_iter().partition(|held| held.domain == domain);
        self.blocks = others;
        assert_eq!(before.len(), freed.len());
        before.iter().for_each(|held| self.ledger.give(held.stamp.block));
        let mut before: Vec<Held> = before.into_iter().collect();
        for live in &claimed {
            let block = Block { address: live.address, size: live.size };
            self.ledger.take(block, domain);
            match before.iter().position(|held| same(live, held)) {
                Some(at) => self.blocks.push(before.swap_remove(at)),
                // The program knows what every stream still does with such bytes: it waits for all of them here.
                None => {
                    let home = self.lanes.iter().position(|lane| lane.pool.key == live.stream);
                    let stream = home.unwrap_or(0);
                    for other in 0..STREAMS {
                        self.lanes[stream].follows(&self.lanes[other]);
                    }
                    // A stream that is gone: whoever has its place is another one to the pool.
                    let gone = PoolStream { key: live.stream, ..self.lanes[stream].pool };
                    self.hold(block, domain, stream, gone, false);
                }
            }
        }
    }

    fn give(&mut self, block: Block) {
        self.ledger.give(block);
        assert_eq!(self.fixture.pool.free(block.address).unwrap(), block.size);
        assert!(matches!(self.fixture.pool.free(block.address), Err(PoolError::UnknownAddress { .. })));
    }

    /// Another stream reads a block, as a program may: ordered after its marking, recorded, and never joined again.
    fn lend(&mut self, index: usize, stream: usize) {
        let Held { stamp, stream: own, .. } = self.blocks[index];
        if own == CAPTURING {
            return;
        }
        self.lanes[stream].follows(&self.lanes[own]);
        let time = self.time();
        stamp.verify(&self.lanes[stream], time, &self.verdicts).unwrap();
        assert!(self.fixture.pool.record_stream(stamp.block.address, self.lanes[stream].pool));
    }

    /// Another stream reads a block, and it is said until when.
    fn hold_for(&mut self, index: usize, stream: usize) {
        let Held { stamp, stream: own, .. } = self.blocks[index];
        if own == CAPTURING {
            return;
        }
        self.lanes[stream].follows(&self.lanes[own]);
        let time = self.time();
        stamp.verify(&self.lanes[stream], time, &self.verdicts).unwrap();
        self.lanes[stream].holds(&self.fixture.pool, stamp.block);
    }

    fn begin_capture(&mut self) {
        let domain = self.fixture.pool.add_domain(DomainOptions::private_pool(), None);
        let _hold = self.fixture.pool.clock().hold();
        self.lanes[CAPTURING].begin_capture();
        self.capture = Some(Capture { domain, _hold });
    }

    /// Ends the capture, which nothing may have broken, and launches it: its pool is given up when its blocks are.
    fn end_capture(&mut self) {
        let Some(capture) = self.capture.take() else { return };
        self.lanes[CAPTURING].end_capture();
        self.blocks.iter_mut().for_each(|held| held.captured = false);
        self.fixture.pool.release_domain(capture.domain).unwrap();
    }

    fn check(&self) {
        self.fixture.pool.check().unwrap_or_else(|broken| panic!("{broken}"));
        self.ledger.compare(&self.fixture.pool);
        self.verdicts.assert_clean();
        for (number, life) in &self.shared {
            let lives = self.blocks.iter().any(|held| held.number == *number);
            assert_eq!(life.has_ended(), !lives, "a share ends with its block, and not before");
        }
    }

    /// Everything is freed, done and trimmed: nothing is left anywhere.
    fn end(mut self) {
        self.end_capture();
        while !self.blocks.is_empty() {
            self.free(0);
        }
        for domain in self.domains.split_off(1) {
            self.fixture.pool.release_domain(domain).unwrap();
        }
        self.fixture.run_dry();
        self.verdicts.assert_clean();
        let Run { fixture, lanes, .. } = self;
        drop(lanes);
        fixture.end();
    }
}

fn run(borrow: Borrow, program: &[Op]) {
    let mut run = Run::new(borrow);
    for op in program {
        run.apply(op);
        run.check();
    }
    run.end()
}

fn programs() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 1..160)
}

/// How many of each kind.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(150)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn completed(program in programs()) {
        run(Borrow::Completed, &program);
    }

    #[test]
    fn off(program in programs()) {
        run(Borrow::Off, &program);
    }

    #[test]
    fn wait(program in programs()) {
        run(Borrow::Wait, &program);
    }
}
