//! A pool on a simulated GPU, streams that enqueue work on it, byte patterns that reveal foreign writes, and a model of its live blocks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::{OwnedEvent, OwnedStream};
use glake_device::{
    Address, DeviceId, Driver, DriverError, EventKind, Faults, KernelMemory, Recorder, StreamId, Touch,
};
use glake_sim::{Census, Clock, SimOptions, SimTopology, Simulator, pattern};
use glake_stitch::{BlockInfo, Borrow, DomainId, Gauge, PoolGauges, Segment, SegmentKind, Settings, Stats};
use glake_tiers::{Block, GpuPool, PoolError, PoolOptions, PoolStream};
use glake_units::Bytes;
use parking_lot::Mutex;

/// Configuration of a [`Fixture`].
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Memory of the GPU.
    pub memory: Bytes,
    /// Size of an extent.
    pub extent: Bytes,
    /// Policy for reuse across streams.
    pub borrow: Borrow,
    /// Clock of the simulator: virtual or wall time.
    pub clock: Clock,
}

impl Default for Shape {
    /// 64 MiB in extents of 4 MiB, in virtual time.
    fn default() -> Self {
        let (memory, extent) = (Bytes::mib(64), Bytes::mib(4));
        Shape { memory, extent, borrow: Borrow::Completed, clock: Clock::Virtual }
    }
}

/// A pool on a fault injector on a recorder on a simulator. Calls that the fault injector refuses do not reach the recorder.
#[derive(Debug)]
pub struct Fixture {
    /// Simulated device.
    pub sim: Arc<Simulator>,
    /// Log and counters of the calls that reach the device.
    pub recorder: Arc<Recorder>,
    /// Fault injector.
    pub faults: Arc<Faults>,
    /// Top of the stack, as passed to the pool.
    pub driver: Arc<dyn Driver>,
    /// Pool under test.
    pub pool: Arc<GpuPool>,
}

/// A stream together with the pool's handle for it.
#[derive(Debug)]
pub struct Lane {
    sim: Arc<Simulator>,
    stream: OwnedStream,
    event: OwnedEvent,
    /// Stream handle of the pool.
    pub pool: PoolStream,
}

/// Device of every [`Fixture`].
const GPU: DeviceId = DeviceId(0);

#[allow(clippy::unwrap_used)]
impl Fixture {
    /// Returns a new device with a pool of default settings.
    pub fn new(shape: Shape) -> Self {
        Self::tuned(shape, |_| ())
    }

    /// Returns a new device with a pool whose settings `tune` has changed.
    pub fn tuned(shape: Shape, tune: impl FnOnce(&mut Settings)) -> Self {
        Self::with(shape, tune, PoolOptions::default())
    }

    /// Returns a new device with a pool of changed settings and options.
    pub fn with(shape: Shape, tune: impl FnOnce(&mut Settings), options: PoolOptions) -> Self {
        let topology = SimTopology::uniform(1, shape.memory);
        let machine = SimOptions { topology, clock: shape.clock, ..SimOptions::default() };
        let sim = Arc::new(Simulator::new(machine).unwrap());
        let recorder = Arc::new(Recorder::measured(sim.clone()).with_log());
        let faults = Arc::new(Faults::new(recorder.clone()));
        let driver: Arc<dyn Driver> = faults.clone();
        let mut settings = Settings::for_memory(shape.memory);
        settings.extent = shape.extent;
        settings.borrow = shape.borrow;
        tune(&mut settings);
        let options = PoolOptions { settings: Some(settings), ..options };
        let pool = Arc::new(GpuPool::new(driver.clone(), GPU, options).unwrap());
        Fixture { sim, recorder, faults, driver, pool }
    }

    /// Creates a stream.
    pub fn lane(&self) -> Lane {
        let device: Arc<dyn Driver> = self.sim.clone();
        let stream = OwnedStream::new(&device, GPU).unwrap();
        let event = OwnedEvent::new(&device, GPU, EventKind::Plain).unwrap();
        let pool = PoolStream::of(&*device, GPU, stream.id()).unwrap();
        Lane { sim: self.sim.clone(), stream, event, pool }
    }

    /// Returns the number of calls that have reached the device.
    pub fn calls(&self) -> u64 {
        self.recorder.counters().calls()
    }

    /// Ends a test that has freed all its blocks: checks that gauges and memory are zero, and that the device is empty without the pool.
    ///
    /// # Panics
    /// Something is left.
    pub fn end(self) {
        self.pool.settle().unwrap();
        self.pool.tick().unwrap();
        let holds = self.pool.read_holds();
        assert_eq!((holds.count(), holds.freed_bytes()), (0, Bytes::ZERO), "a hold is left");
        self.pool.trim(Bytes::ZERO).unwrap();
        self.pool.check().unwrap();
        assert_empty(&self.pool);
        let census = self.sim.census();
        assert_eq!((census.reservations, census.mappings, census.extents), (1, 0, 0));
        let sim = self.sim.clone();
        drop(self);
        assert_eq!(sim.census(), Census::default());
    }

    /// Advances virtual time until no enqueued work can run.
    pub fn run_dry(&self) {
        while self.sim.step() {}
    }
}

#[allow(clippy::unwrap_used)]
impl Lane {
    /// Enqueues work that takes `time` and touches no memory.
    pub fn busy(&self, time: Duration) {
        self.sim.enqueue_kernel(GPU, self.pool.raw, &[], &[], time, |_| {}).unwrap();
    }

    /// Orders work enqueued on this stream from now on after all work enqueued on `other` so far.
    pub fn follows(&self, other: &Lane) {
        other.event.record(other.pool.raw).unwrap();
        self.stream.wait_for(other.event.id()).unwrap();
    }

    /// Holds a block until the work enqueued on this stream so far completes.
    pub fn holds(&self, pool: &GpuPool, block: Block) {
        let driver: Arc<dyn Driver> = self.sim.clone();
        let event = Arc::new(OwnedEvent::new(&driver, GPU, EventKind::Plain).unwrap());
        event.record(self.pool.raw).unwrap();
        let holds = pool.read_holds();
        let of = holds.identify(block.address, block.size).unwrap();
        _ = holds.hold(of, &event, StreamId(self.pool.key.0)).unwrap();
    }

    /// Begins a capture: work enqueued on this stream is recorded instead of run.
    pub fn begin_capture(&self) {
        self.sim.begin_capture(GPU, self.pool.raw).unwrap();
    }

    /// Ends the capture and launches its graph on this stream. Panics if the capture was invalidated.
    pub fn end_capture(&self) {
        let graph = self.sim.end_capture(GPU, self.pool.raw).unwrap();
        self.sim.launch_graph(&graph, GPU, self.pool.raw).unwrap();
    }

    /// Waits on the host until the stream is idle.
    pub fn synchronize(&self) {
        self.stream.synchronize().unwrap();
    }

    /// Returns the simulator of the stream.
    pub fn sim(&self) -> &Arc<Simulator> {
        &self.sim
    }
}

const WHOLE: u64 = 128 << 10;
const END: u64 = 1 << 10;
const STRIDE: u64 = 64 << 10;
const GRANULE: u64 = 2 << 20;

/// A byte pattern that identifies one block. Writes by any other party change it.
///
/// Small blocks are marked whole; large ones at their ends, around every possible boundary of an extent, and with 64 bytes every 64 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Marked block.
    pub block: Block,
    /// Seed of the pattern.
    pub seed: u64,
}

/// Mismatches found by kernels.
#[derive(Clone, Debug, Default)]
pub struct Verdicts(Arc<Mutex<Vec<String>>>);

impl Verdicts {
    /// Asserts that no mismatch was found so far.
    ///
    /// # Panics
    /// A mismatch was found.
    pub fn assert_clean(&self) {
        let found = self.0.lock();
        assert!(found.is_empty(), "{} blocks were disturbed, the first: {}", found.len(), found[0]);
    }
}

impl Stamp {
    /// Enqueues a kernel that writes the pattern.
    ///
    /// # Errors
    /// Errors of the device, above all memory in use by another stream.
    pub fn write(self, lane: &Lane, time: Duration) -> Result<(), DriverError> {
        let body = move |memory: &mut dyn KernelMemory| {
            for (offset, length) in self.marks() {
                // The next wait reports an invalid access.
                let _ = memory.write(self.at(offset), &self.pattern(offset, length));
            }
        };
        sim(lane).enqueue_kernel(GPU, lane.pool.raw, &[], &self.touch(), time, body)
    }

    /// Enqueues a kernel that compares the block with the pattern.
    ///
    /// # Errors
    /// Errors of the device, above all an unordered write to the block.
    pub fn verify(self, lane: &Lane, time: Duration, verdicts: &Verdicts) -> Result<(), DriverError> {
        let verdicts = verdicts.clone();
        let body = move |memory: &mut dyn KernelMemory| {
            let wrong = self.wrong(|at, bytes| memory.read(at, bytes).is_ok());
            verdicts.0.lock().extend(wrong);
        };
        sim(lane).enqueue_kernel(GPU, lane.pool.raw, &self.touch(), &[], time, body)
    }

    /// Writes the pattern from the host.
    ///
    /// # Errors
    /// Errors of the pool.
    pub fn write_now(self, pool: &GpuPool) -> Result<(), PoolError> {
        let mut marks = self.marks().into_iter();
        marks.try_for_each(|(offset, length)| pool.write(self.at(offset), &self.pattern(offset, length)))
    }

    /// Asserts from the host that the block holds the pattern.
    ///
    /// # Panics
    /// The bytes differ.
    pub fn assert_on(self, pool: &GpuPool) {
        let wrong = self.wrong(|at, bytes| pool.read(at, bytes).is_ok());
        assert_eq!(wrong, None);
    }

    fn wrong(self, mut read: impl FnMut(Address, &mut [u8]) -> bool) -> Option<String> {
        let mut bytes = Vec::new();
        self.marks().into_iter().find_map(|(offset, length)| {
            let pattern = self.pattern(offset, length);
            bytes.clear();
            bytes.resize(pattern.len(), 0);
            let same = read(self.at(offset), &mut bytes) && bytes == pattern;
            (!same).then(|| format!("{:?} of pattern {} at {offset:#x}", self.block, self.seed))
        })
    }

    fn at(self, offset: u64) -> Address {
        Address(self.block.address.0 + offset)
    }

    fn touch(self) -> [Touch; 1] {
        [Touch { address: self.block.address, size: self.block.size }]
    }

    /// Returns the marked ranges as offset and length, in whole words.
    fn marks(self) -> Vec<(u64, u64)> {
        let size = self.block.size.get();
        if size <= WHOLE {
            return vec![(0, size)];
        }
        let mut marks = vec![(0, END), (size - END, END)];
        let first = self.block.address.0.next_multiple_of(GRANULE) - self.block.address.0;
        let inside = |offset: &u64| *offset >= END && offset + END <= size;
        marks.extend((first..size).step_by(2 << 20).filter(inside).map(|at| (at - END / 2, END)));
        marks.extend((STRIDE..size - END).step_by(64 << 10).map(|at| (at, 64)));
        marks
    }

    #[allow(clippy::unwrap_used)]
    fn pattern(self, offset: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        pattern::fill(&mut bytes, offset, self.seed);
        bytes
    }
}

fn sim(lane: &Lane) -> &Simulator {
    lane.sim()
}

/// Model of the live blocks: the end and the domain of each, by start address.
#[derive(Debug, Default)]
pub struct Ledger {
    live: BTreeMap<u64, (u64, DomainId)>,
}

impl Ledger {
    /// Records an allocated block.
    ///
    /// # Panics
    /// The block overlaps a live block.
    pub fn take(&mut self, block: Block, domain: DomainId) {
        let (start, end) = (block.address.0, block.address.0 + block.size.get());
        let before = self.live.range(..end).next_back();
        assert!(before.is_none_or(|(_, (other, _))| *other <= start), "{block:?} lies over {before:x?}");
        self.live.insert(start, (end, domain));
    }

    /// Records that a block is about to be freed.
    ///
    /// # Panics
    /// The block is not live.
    pub fn give(&mut self, block: Block) {
        let known = self.live.remove(&block.address.0);
        assert!(known.is_some_and(|(end, _)| end == block.address.0 + block.size.get()), "{block:?}");
    }

    /// Compares the model with the pool's report: each block lies within one segment of its domain, and segments do not overlap.
    ///
    /// # Panics
    /// They differ.
    pub fn compare(&self, pool: &GpuPool) {
        let mut segments = pool.report().segments();
        let start_of = |segment: &Segment| pool.address_of(segment.offset).0;
        segments.sort_by_key(start_of);
        let apart = segments.windows(2).all(|two| start_of(&two[0]) + two[0].size.get() <= start_of(&two[1]));
        assert!(apart, "segments share addresses");
        for (&start, &(end, domain)) in &self.live {
            let at = segments.partition_point(|segment| start_of(segment) <= start);
            let segment = at.checked_sub(1).map(|at| &segments[at]);
            let holds = segment.is_some_and(|segment| {
                segment.domain == domain && end <= start_of(segment) + segment.size.get()
            });
            assert!(holds, "{start:#x}..{end:#x} of {domain:?} lies in {segment:?}");
        }
        let home = segments.iter().filter(|segment| segment.kind != SegmentKind::Stitched);
        let held: u64 = home.map(|segment| segment.size.get()).sum();
        assert_eq!(held, pool.reserved().get(), "segments at home are what is reserved");
        let blocks = segments.iter().flat_map(|segment| &segment.blocks).filter(|block| block.live);
        assert_eq!(blocks.count(), self.live.len());
    }
}

/// State of a pool and its device that a failing call must not change.
#[derive(Debug, PartialEq)]
pub struct Picture {
    segments: Vec<Segment>,
    gauges: Vec<u64>,
    mappings: (u64, Bytes),
    reserved: Bytes,
    census: Census,
}

impl Picture {
    /// Reads the state. Excludes the distribution of free bytes among streams and the number of cached events: both change with time, even
    /// if a call fails.
    pub fn of(fixture: &Fixture) -> Self {
        let mut segments = fixture.pool.report().segments();
        segments.sort_by_key(|segment| segment.offset);
        for segment in &mut segments {
            segment.blocks.dedup_by(join);
            segment.blocks.iter_mut().filter(|block| !block.live).for_each(|block| block.stream = None);
        }
        let stats = fixture.pool.stats();
        Picture {
            segments,
            gauges: currents(&stats).map(|gauge| gauge.current).collect(),
            mappings: (stats.mappings, stats.alias_bytes),
            reserved: fixture.pool.reserved(),
            census: Census { events: 0, ..fixture.sim.census() },
        }
    }
}

fn join(next: &mut BlockInfo, block: &mut BlockInfo) -> bool {
    let joined = !next.live && !block.live;
    if joined {
        block.size = block.size.saturating_add(next.size);
    }
    joined
}

fn gauges(pool: &PoolGauges) -> [Gauge; 7] {
    [
        pool.allocation,
        pool.allocated_bytes,
        pool.requested_bytes,
        pool.extents,
        pool.reserved_bytes,
        pool.active,
        pool.active_bytes,
    ]
}

fn currents(stats: &Stats) -> impl Iterator<Item = Gauge> {
    [stats.all, stats.small_pool, stats.large_pool].into_iter().flat_map(|pool| gauges(&pool))
}

/// Asserts that the pool holds no memory and all its gauges are zero.
///
/// # Panics
/// The pool holds memory.
pub fn assert_empty(pool: &GpuPool) {
    let stats = pool.stats();
    for gauge in currents(&stats) {
        assert_eq!(gauge.current, 0, "a gauge is left: {stats:?}");
        assert_eq!(gauge.allocated, gauge.freed, "{stats:?}");
    }
    assert_eq!((stats.mappings, stats.alias_bytes, stats.idle_alias_bytes), (0, Bytes::ZERO, Bytes::ZERO));
    assert_eq!(stats.waste, Default::default());
    assert!(pool.report().segments().is_empty());
    assert_eq!((pool.reserved(), pool.report().free_ranges()), (Bytes::ZERO, 0));
}
