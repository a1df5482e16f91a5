//! A simulated server with an engine on it.

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

/// What a server is made like.
#[derive(Clone, Debug)]
pub struct ServerShape {
    /// The GPUs and their links.
    pub topology: SimTopology,
    /// Whether the device refuses what no event orders.
    pub strict: bool,
    /// What the engine may use; its relays are all GPUs.
    pub options: EngineOptions,
}

impl ServerShape {
    /// Four equal GPUs of so much memory, strict.
    pub fn four(memory: Bytes) -> Self {
        ServerShape::of(SimTopology::uniform(4, memory))
    }

    /// A server by the name of its model, strict.
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

/// GPUs that reach each other, a pool on each, and an engine whose relays are ready.
#[derive(Debug)]
pub struct Server {
    /// The devices.
    pub sim: Arc<Simulator>,
    /// What makes calls fail.
    pub faults: Arc<Faults>,
    /// All of it, as pools and engine see it.
    pub driver: Arc<dyn Driver>,
    /// The clock of its completions.
    pub completion_events: Arc<CompletionEvents>,
    /// A pool on each GPU, lent to all others.
    pub pools: Vec<Arc<GpuPool>>,
    /// The engine.
    pub engine: Arc<Engine>,
}

#[allow(clippy::unwrap_used)]
impl Server {
    /// A new server.
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

    /// Every GPU.
    pub fn devices(&self) -> DeviceSet {
        self.pools.iter().map(|pool| pool.device()).collect()
    }

    /// Pinned host memory, zero.
    pub fn pinned(&self, size: Bytes) -> Arc<Registration> {
        Arc::new(Registration::new(&self.completion_events, Pages::new(size, 1).unwrap()).unwrap())
    }

    /// Ends a test that has freed everything: nothing at all is left.
    ///
    /// # Panics
    /// Something is.
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
