//! A simulated server with a copy engine, and random programs of copies on it.

mod litmus;
mod state;

use std::sync::Arc;

use glake_device::owned::{CompletionEvents, DeviceSet, Pages, Registration};
use glake_device::topology::Topology;
use glake_device::{DeviceId, Driver, Faults};
use glake_sim::{Census, SimOptions, SimTopology, Simulator};
use glake_tiers::{GpuPool, PoolOptions};
use glake_transfer::paths::{GpuLinks, PathGraph};
use glake_transfer::{Engine, EngineOptions};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};

pub use litmus::{Litmus, Tally};

/// Configuration of a [`Server`].
#[derive(Clone, Debug)]
pub struct ServerShape {
    /// GPUs and their links.
    pub topology: SimTopology,
    /// Whether the device refuses accesses that no event orders.
    pub strict: bool,
    /// Options of the engine; all GPUs become its relays.
    pub options: EngineOptions,
}

impl ServerShape {
    /// Returns four equal GPUs with strict ordering.
    pub fn four(memory: Bytes) -> Self {
        ServerShape::of(SimTopology::uniform(4, memory))
    }

    /// Returns the simulator's model of that name, with strict ordering.
    ///
    /// # Panics
    /// There is no model of that name.
    #[allow(clippy::unwrap_used)]
    pub fn named(name: &str) -> Self {
        ServerShape::of(glake_sim::load(name).unwrap())
    }

    fn of(topology: SimTopology) -> Self {
        let options = EngineOptions { streams: 16, shared_gpus: true, ..EngineOptions::default() };
        ServerShape { topology, strict: true, options }
    }
}

/// GPUs with access to each other, a pool on each, and an engine whose relays are ready.
#[derive(Debug)]
pub struct Server {
    /// Simulated devices.
    pub sim: Arc<Simulator>,
    /// Fault injector.
    pub faults: Arc<Faults>,
    /// Top of the stack, as passed to pools and engine.
    pub driver: Arc<dyn Driver>,
    /// Completion events that pools and engine share.
    pub completion_events: Arc<CompletionEvents>,
    /// A pool on each GPU, mapped on all others.
    pub pools: Vec<Arc<GpuPool>>,
    /// Engine under test.
    pub engine: Arc<Engine>,
}

#[allow(clippy::unwrap_used)]
impl Server {
    /// Creates the server and waits until its relays are ready.
    pub fn new(shape: ServerShape) -> Self {
        let ServerShape { topology, strict, options } = shape;
        let graph = PathGraph::conservative(&GpuLinks::of(&Topology::from(&topology)));
        let machine = SimOptions { topology, strict_ordering: strict, ..SimOptions::default() };
        let sim = Arc::new(Simulator::new(machine).unwrap());
        let faults = Arc::new(Faults::new(sim.clone()));
        let driver: Arc<dyn Driver> = faults.clone();
        let completion_events = CompletionEvents::new(driver.clone());
        let ids: Vec<DeviceId> = driver.devices().unwrap().iter().map(|info| info.id).collect();
        let pool = |&device: &DeviceId| {
            let options =
                PoolOptions { completion_events: Some(completion_events.clone()), ..PoolOptions::default() };
            let pool = GpuPool::new(driver.clone(), device, options).unwrap();
            ids.iter().for_each(|relay| pool.peer_access().lend_to(*relay).unwrap());
            Arc::new(pool)
        };
        let pools = ids.iter().map(pool).collect();
        let options = EngineOptions { relays: ids.iter().copied().collect(), ..options };
        let engine = Engine::new(completion_events.clone(), graph, options).unwrap();
        let server = Server { sim, faults, driver, completion_events, pools, engine };
        server.start_relays();
        server
    }

    fn start_relays(&self) {
        let started = Arc::new((Mutex::new(false), Condvar::new()));
        let tell = started.clone();
        let after = move |_: &Engine| {
            *tell.0.lock() = true;
            tell.1.notify_all();
        };
        self.engine.start_relays(after).unwrap();
        let mut done = started.0.lock();
        while !*done {
            started.1.wait(&mut done);
        }
    }

    /// Returns all GPUs.
    pub fn devices(&self) -> DeviceSet {
        self.pools.iter().map(|pool| pool.device()).collect()
    }

    /// Returns zeroed pinned host memory.
    pub fn pinned(&self, size: Bytes) -> Arc<Registration> {
        Arc::new(Registration::new(&self.completion_events, Pages::new(size, 1).unwrap()).unwrap())
    }

    /// Ends a test that has freed all its memory: checks that pools and devices are empty.
    ///
    /// # Panics
    /// Something is left.
    pub fn end(self) {
        for pool in &self.pools {
            pool.settle().unwrap();
            pool.trim(Bytes::ZERO).unwrap();
            pool.check().unwrap();
            assert_eq!(pool.reserved(), Bytes::ZERO);
        }
        let sim = self.sim.clone();
        self.engine.stop();
        drop(self);
        assert_eq!(sim.census(), Census::default());
    }
}
