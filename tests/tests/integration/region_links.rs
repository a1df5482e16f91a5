//! Regions that leave and come back over every link of a simulated server, one or several at once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use glake_device::owned::{DeviceSet, OwnedStream, Span};
use glake_device::{Address, DeviceId, Fault, Injected, KernelMemory, Stream, Touch, Verb, When};
use glake_sim::pattern;
use glake_tests::transfer::{Server, ServerShape};
use glake_tiers::{
    Block, FileTier, HostOptions, HostPool, Mark, MoveError, Mover, Moving, NoWait, PoolStream, Refilled,
    Region, RegionError, RegionOptions, Shrunk, Store, TransferContext,
};
use glake_transfer::{LinkMover, Priority};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};

const GPU: DeviceId = DeviceId(0);
const SIZE: Bytes = Bytes::mib(24);

/// A region of a GPU, with blocks whose bytes tell their places.
struct Weights {
    region: Region,
    blocks: Vec<Block>,
    seed: u64,
}

struct Fixture {
    server: Server,
    host: Arc<HostPool>,
    weights: Weights,
    mover: LinkMover,
}

fn fixture(shape: ServerShape) -> Fixture {
    let server = Server::new(shape);
    let host = HostOptions { arena: Bytes::mib(32), threads: 1, ..HostOptions::default() };
    let host = HostPool::new(&server.completion_events, host).unwrap();
    let weights = Weights::new(&server, GPU, 1);
    let mover = LinkMover::new(&server.engine, GPU, Priority::Normal).unwrap();
    Fixture { server, host, weights, mover }
}

fn four() -> Fixture {
    fixture(ServerShape::four(Bytes::mib(192)))
}

fn bytes(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(SIZE.get()).unwrap()];
    pattern::fill(&mut bytes, 0, seed);
    bytes
}

impl Weights {
    fn new(server: &Server, device: DeviceId, seed: u64) -> Weights {
        let pool = &server.pools[device.0 as usize];
        let options =
            RegionOptions { extent: Bytes::mib(32), ..RegionOptions::of(format!("weights {seed}")) };
        let region = Region::new(pool, options);
        let stream = PoolStream::of(&*server.driver, device, Stream::LEGACY).unwrap();
        let blocks: Vec<Block> = (0..3).map(|_| region.malloc(SIZE, stream).unwrap()).collect();
        for (block, part) in blocks.iter().zip(0..) {
            pool.write(block.address, &bytes(seed * 10 + part)).unwrap();
        }
        Weights { region, blocks, seed }
    }

    fn shrink(&self, to: &Store, mover: &dyn Mover) -> Result<Shrunk, RegionError> {
        self.region.shrink(Bytes::MAX, to, TransferContext { mover, checks: None, fill: false })
    }

    fn refill(&self, mover: &dyn Mover) -> Result<Refilled, RegionError> {
        self.region.refill(Bytes::MAX, TransferContext { mover, checks: None, fill: false }, &NoWait)
    }

    fn assert_bytes(&self) {
        for (block, part) in self.blocks.iter().zip(0..) {
            let mut found = vec![0; usize::try_from(SIZE.get()).unwrap()];
            self.region.pool().read(block.address, &mut found).unwrap();
            assert!(pattern::matches(&found, self.seed * 10 + part), "block {part} of {}", self.seed);
        }
    }

    /// Out and back, a few times.
    fn cycle(&self, to: &Store, out: &dyn Mover, back: &dyn Mover) {
        for _ in 0..3 {
            let gone = self.shrink(to, out).unwrap();
            assert_eq!((gone.resident, gone.copied), (Bytes::ZERO, Bytes::mib(72)));
            let back = self.refill(back).unwrap();
            assert_eq!((back.evicted, back.copied), (Bytes::ZERO, Bytes::mib(72)));
            self.assert_bytes();
        }
    }

    fn end(self) {
        for block in self.blocks {
            self.region.pool().free(block.address).unwrap();
        }
    }
}

impl Fixture {
    fn host(&self) -> Store {
        Store::Host(self.host.clone())
    }

    fn shrink(&self) -> Result<Shrunk, RegionError> {
        self.weights.shrink(&self.host(), &self.mover)
    }

    fn refill(&self) -> Result<Refilled, RegionError> {
        self.weights.refill(&self.mover)
    }

    fn addresses(&self) -> Vec<Address> {
        self.weights.blocks.iter().map(|block| block.address).collect()
    }

    /// How many other GPUs carried bytes both ways.
    fn relays(&self) -> usize {
        let done = self.server.engine.statistics();
        let others = self.server.devices().iter().filter(|device| *device != GPU);
        let ways = |relay: &DeviceId| {
            let carried = done.paths.iter().filter(|path| path.relay == *relay && !path.bytes.is_zero());
            carried.map(|path| path.direction.index()).collect::<std::collections::BTreeSet<_>>().len()
        };
        others.filter(|relay| ways(relay) == 2).count()
    }

    fn end(self) {
        let Fixture { server, host, weights, mover } = self;
        weights.end();
        assert_eq!(host.statistics().in_use, Bytes::ZERO);
        drop((mover, host));
        server.end();
    }
}

#[test]
fn bytes_leave_and_come_back_over_other_gpus_links() {
    let fixture = four();
    let before = fixture.addresses();
    let gone = fixture.shrink().unwrap();
    assert_eq!((gone.resident, gone.copied), (Bytes::ZERO, Bytes::mib(72)));
    assert_eq!(fixture.weights.region.sizes().0, Bytes::ZERO);
    let back = fixture.refill().unwrap();
    assert_eq!((back.evicted, back.copied), (Bytes::ZERO, Bytes::mib(72)));
    assert_eq!(fixture.addresses(), before);
    fixture.weights.assert_bytes();
    assert_eq!(fixture.relays(), 3);
    fixture.end();
}

#[test]
fn a_copy_that_is_refused_anywhere_loses_nothing() {
    for error in [Injected::Failed(1), Injected::NotReady] {
        for nth in 1..12 {
            let fixture = four();
            fixture.server.faults.set(&[Fault { verb: Some(Verb::Copy), when: When::Nth(nth), error }]);
            let gone = fixture.shrink();
            fixture.server.faults.set(&[]);
            if gone.is_err() {
                fixture.shrink().unwrap();
            }
            assert_eq!(fixture.weights.region.sizes().0, Bytes::ZERO);
            fixture.server.faults.set(&[Fault { verb: Some(Verb::Copy), when: When::Nth(nth), error }]);
            let back = fixture.refill();
            fixture.server.faults.set(&[]);
            assert!(nth > 4 || fixture.server.faults.injected() == 2, "fewer copies than that");
            if back.is_err() {
                fixture.refill().unwrap();
            }
            fixture.weights.assert_bytes();
            fixture.end();
        }
    }
}

/// A mover whose copies are waited for only once it is let go.
#[derive(Debug)]
struct Held<'a> {
    links: &'a LinkMover,
    marked: mpsc::SyncSender<()>,
    latch: Arc<Latch>,
}

#[derive(Debug, Default)]
struct Latch(Mutex<bool>, Condvar);

/// Opens it, however its owner ends.
struct Opening(Arc<Latch>);

impl Drop for Opening {
    fn drop(&mut self) {
        *self.0.0.lock() = true;
        self.0.1.notify_all();
    }
}

#[derive(Debug)]
struct HeldCopy(Box<dyn Moving>, Arc<Latch>);

impl Mover for Held<'_> {
    fn enqueue(&self, copies: &[(Span, Span)]) -> Result<Box<dyn Moving>, MoveError> {
        Ok(Box::new(HeldCopy(self.links.enqueue(copies)?, self.latch.clone())))
    }

    fn mark(&self) -> Result<Arc<dyn Mark>, MoveError> {
        let mark = self.links.mark();
        self.marked.send(())?;
        mark
    }
}

impl Moving for HeldCopy {
    fn wait(self: Box<Self>) -> Result<(), MoveError> {
        let mut open = self.1.0.lock();
        self.1.1.wait_while(&mut open, |open| !*open);
        drop(open);
        self.0.wait()
    }
}

#[test]
fn streams_of_all_gpus_wait_for_what_is_on_its_way_over_every_link() {
    let fixture = fixture(ServerShape::named("h20x8"));
    let sim = &fixture.server.sim;
    let streams: Vec<OwnedStream> = fixture
        .server
        .devices()
        .iter()
        .map(|device| OwnedStream::new(&fixture.server.driver, device).unwrap())
        .collect();
    // The program's own kernels are to touch it.
    for stream in &streams {
        fixture.server.pools[0].peer_access().enable(stream.device()).unwrap();
    }
    fixture.shrink().unwrap();
    let (marked, marks) = mpsc::sync_channel(1);
    let held = Held { links: &fixture.mover, marked, latch: Arc::default() };
    let (right, run) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    std::thread::scope(|scope| {
        let _opening = Opening(held.latch.clone());
        scope.spawn(|| fixture.weights.refill(&held).unwrap());
        marks.recv().unwrap();
        for stream in &streams {
            // It returns before the copies are done; what comes behind it does not begin before.
            fixture.weights.region.wait(stream.device(), stream.id()).unwrap();
            for (block, seed) in fixture.weights.blocks.iter().zip(fixture.weights.seed * 10..) {
                let touch = Touch { address: block.address, size: SIZE };
                let (right, run) = (right.clone(), run.clone());
                let work = move |memory: &mut dyn KernelMemory| {
                    let mut found = vec![0; usize::try_from(SIZE.get()).unwrap()];
                    memory.read(touch.address, &mut found).unwrap();
                    right.fetch_add(usize::from(pattern::matches(&found, seed)), Ordering::Relaxed);
                    run.fetch_add(1, Ordering::Relaxed);
                };
                let time = Duration::from_micros(1);
                sim.enqueue_kernel(stream.device(), stream.id(), &[touch], &[], time, work).unwrap();
            }
        }
        assert_eq!(run.load(Ordering::Relaxed), 0, "the copies are under way");
        streams.iter().for_each(|stream| stream.synchronize().unwrap());
        assert_eq!(right.load(Ordering::Relaxed), streams.len() * fixture.weights.blocks.len());
    });
    fixture.weights.assert_bytes();
    assert!(fixture.relays() >= 3, "{:?}", fixture.server.engine.statistics());
    drop(streams);
    fixture.end();
}

#[test]
fn one_mover_serves_several_threads() {
    let fixture = fixture(ServerShape::named("h20x8"));
    let directory = tempfile::tempdir().unwrap();
    let files = Arc::new(FileTier::open(&directory.path().join("extents")).unwrap());
    let stores = [
        fixture.host(),
        Store::Peer(fixture.server.pools[6].clone()),
        // Three threads more.
        Store::File { files: files.clone(), host: fixture.host.clone() },
    ];
    let others: Vec<Weights> = (2..5).map(|seed| Weights::new(&fixture.server, GPU, seed)).collect();
    std::thread::scope(|scope| {
        for (weights, store) in others.iter().zip(&stores) {
            scope.spawn(|| weights.cycle(store, &fixture.mover, &fixture.mover));
        }
        fixture.weights.cycle(&fixture.host(), &fixture.mover, &fixture.mover);
    });
    assert!(fixture.relays() >= 3, "{:?}", fixture.server.engine.statistics());
    assert_eq!(files.statistics().files, 0);
    others.into_iter().for_each(Weights::end);
    drop(stores);
    fixture.end();
}

#[test]
fn movers_of_several_gpus_share_the_links() {
    let fixture = fixture(ServerShape::named("h200x4"));
    let others: Vec<Weights> =
        (1..4).map(|gpu| Weights::new(&fixture.server, DeviceId(gpu), u64::from(gpu) + 1)).collect();
    let (engine, host) = (&fixture.server.engine, fixture.host());
    std::thread::scope(|scope| {
        for weights in others.iter().chain([&fixture.weights]) {
            let host = &host;
            scope.spawn(move || {
                let mover =
                    || LinkMover::new(engine, weights.region.pool().device(), Priority::Normal).unwrap();
                weights.cycle(host, &mover(), &mover());
            });
        }
    });
    assert_eq!(engine.statistics().lost_copies, 0);
    others.into_iter().for_each(Weights::end);
    drop(host);
    fixture.end();
}

/// By the model: what the driver's own calls take is not in it.
#[test]
fn four_links_take_a_region_out_and_bring_it_back() {
    let fixture = fixture(ServerShape::named("h200x4"));
    let (size, all) = (Bytes::mib(128), Bytes::mib(1024));
    let options = RegionOptions { extent: size, ..RegionOptions::of("large") };
    let region = Region::new(&fixture.server.pools[0], options);
    let on = PoolStream::of(&*fixture.server.driver, GPU, Stream::LEGACY).unwrap();
    let blocks: Vec<Block> = (0..8).map(|_| region.malloc(size, on).unwrap()).collect();
    let link = Duration::from_secs_f64(all.get() as f64 / 55.5e9);
    let context = TransferContext { mover: &fixture.mover, checks: None, fill: false };
    let timed = |work: &dyn Fn() -> Bytes| {
        let start = fixture.server.sim.now();
        assert_eq!(work(), all);
        link.as_secs_f64() / (fixture.server.sim.now() - start).as_secs_f64()
    };
    let out = || region.shrink(Bytes::MAX, &fixture.host(), context).unwrap().copied;
    let back = || region.refill(Bytes::MAX, context, &NoWait).unwrap().copied;
    let [_, _, out, back] = [timed(&out), timed(&back), timed(&out), timed(&back)];
    println!("of one link: out {out:.2}, back {back:.2}");
    // No relay may touch its memory: the driver opens and unmaps it faster so.
    let pool = &fixture.server.pools[0];
    assert!(blocks.iter().all(|block| pool.reach_of(block.address, size).0 == DeviceSet::of(GPU)));
    assert!(out >= 2.4 && back >= 3.0, "{out:.2} {back:.2}");
    for block in blocks {
        fixture.server.pools[0].free(block.address).unwrap();
    }
    drop(region);
    fixture.end();
}
