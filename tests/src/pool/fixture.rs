//! A pool on a simulated GPU.

use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::{OwnedEvent, OwnedStream};
use glake_device::{DeviceId, Driver, EventKind, Faults, Recorder, StreamId};
use glake_sim::{Census, Clock, SimOptions, SimTopology, Simulator};
use glake_stitch::{Borrow, Settings};
use glake_tiers::{Block, GpuPool, PoolOptions, PoolStream};
use glake_units::Bytes;

use super::assert_empty;

/// What a bed is made like.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// The GPU's memory.
    pub memory: Bytes,
    /// The size of extents.
    pub extent: Bytes,
    /// Reuse across streams.
    pub borrow: Borrow,
    /// What time is.
    pub clock: Clock,
}

impl Default for Shape {
    /// 64 MiB in extents of 4 MiB, in virtual time.
    fn default() -> Self {
        let (memory, extent) = (Bytes::mib(64), Bytes::mib(4));
        Shape { memory, extent, borrow: Borrow::Completed, clock: Clock::Virtual }
    }
}

/// A pool over faults over a recorder over a simulator: what is made to fail does not reach the log.
#[derive(Debug)]
pub struct Fixture {
    /// The device.
    pub sim: Arc<Simulator>,
    /// What reaches it.
    pub recorder: Arc<Recorder>,
    /// What does not.
    pub faults: Arc<Faults>,
    /// All of it, as the pool sees it.
    pub driver: Arc<dyn Driver>,
    /// The pool.
    pub pool: Arc<GpuPool>,
}

/// A stream, as the device and as the pool know it.
#[derive(Debug)]
pub struct Lane {
    sim: Arc<Simulator>,
    stream: OwnedStream,
    event: OwnedEvent,
    /// As the pool knows it.
    pub pool: PoolStream,
}

/// The only GPU of a bed.
pub(super) const GPU: DeviceId = DeviceId(0);

#[allow(clippy::unwrap_used)]
impl Fixture {
    /// A new device with a pool on it.
    pub fn new(shape: Shape) -> Self {
        Self::tuned(shape, |_| ())
    }

    /// A new device with a pool of other knobs on it.
    pub fn tuned(shape: Shape, tune: impl FnOnce(&mut Settings)) -> Self {
        Self::with(shape, tune, PoolOptions::default())
    }

    /// A new device with a pool of other knobs and options on it.
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

    /// A new stream.
    pub fn lane(&self) -> Lane {
        let device: Arc<dyn Driver> = self.sim.clone();
        let stream = OwnedStream::new(&device, GPU).unwrap();
        let event = OwnedEvent::new(&device, GPU, EventKind::Plain).unwrap();
        let pool = PoolStream::of(&*device, GPU, stream.id()).unwrap();
        Lane { sim: self.sim.clone(), stream, event, pool }
    }

    /// How many calls have reached the device.
    pub fn calls(&self) -> u64 {
        self.recorder.counters().calls()
    }

    /// Ends a test that has freed everything: no gauge, no memory, and without the pool nothing at all is left.
    ///
    /// # Panics
    /// Something is.
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

    /// Lets time pass until nothing enqueued is left that can be done.
    pub fn run_dry(&self) {
        while self.sim.step() {}
    }
}

#[allow(clippy::unwrap_used)]
impl Lane {
    /// Enqueues work that takes time and touches nothing.
    pub fn busy(&self, time: Duration) {
        self.sim.enqueue_kernel(GPU, self.pool.raw, &[], &[], time, |_| {}).unwrap();
    }

    /// Makes what is enqueued here from now on wait for what was enqueued there so far.
    pub fn follows(&self, other: &Lane) {
        other.event.record(other.pool.raw).unwrap();
        self.stream.wait_for(other.event.id()).unwrap();
    }

    /// Holds a block until what was enqueued here so far is done.
    pub fn holds(&self, pool: &GpuPool, block: Block) {
        let driver: Arc<dyn Driver> = self.sim.clone();
        let event = Arc::new(OwnedEvent::new(&driver, GPU, EventKind::Plain).unwrap());
        event.record(self.pool.raw).unwrap();
        let holds = pool.read_holds();
        let of = holds.identify(block.address, block.size).unwrap();
        _ = holds.hold(of, &event, StreamId(self.pool.key.0)).unwrap();
    }

    /// What is enqueued here is recorded from now on, instead of run.
    pub fn begin_capture(&self) {
        self.sim.begin_capture(GPU, self.pool.raw).unwrap();
    }

    /// Ends the capture and launches it here; nothing may have broken it.
    pub fn end_capture(&self) {
        let graph = self.sim.end_capture(GPU, self.pool.raw).unwrap();
        self.sim.launch_graph(&graph, GPU, self.pool.raw).unwrap();
    }

    /// Waits on the host for its work.
    pub fn synchronize(&self) {
        self.stream.synchronize().unwrap();
    }

    /// The simulator that it is a stream of.
    pub fn sim(&self) -> &Arc<Simulator> {
        &self.sim
    }
}
