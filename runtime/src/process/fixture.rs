//! Test parts of a process without the process itself: two simulated devices.

use std::sync::Arc;

use glake_device::topology::Topology;
use glake_device::{DeviceId, Driver as _, Stream};
use glake_sim::{Clock, SimOptions, SimTopology, Simulator};
use glake_units::Bytes;

use super::agent::AgentHandle;
use super::copies::Copies;
use super::device_registry::{DeviceRegistry, Opened};
use super::imports::Imports;
use super::observers::Observers;
use super::pools::Pools;
use super::regions::Regions;
use super::sharing::Sharing;
use super::streams::Streams;
use crate::config::Config;

/// Parts of one process, each created by itself.
pub(super) struct Parts {
    pub(super) sim: Arc<Simulator>,
    pub(super) registry: Arc<DeviceRegistry>,
    pub(super) streams: Arc<Streams>,
    pub(super) pools: Pools,
    pub(super) copies: Copies,
    pub(super) sharing: Sharing,
    pub(super) regions: Regions,
}

impl Parts {
    pub(super) fn new() -> Parts {
        Parts::with(Clock::Wall)
    }

    pub(super) fn with(clock: Clock) -> Parts {
        let topology = SimTopology::uniform(2, Bytes::gib(1));
        let links = Some(Topology::from(&topology));
        let options = SimOptions { topology, clock, strict_ordering: false, ..SimOptions::default() };
        let sim = Arc::new(Simulator::new(options).unwrap());
        let opened =
            Opened { driver: sim.clone(), devices: sim.devices().unwrap(), links, mappings: u64::MAX };
        let config = Config::default();
        let agent = AgentHandle::new(2, &config.lease);
        let observers = Observers::new(2, agent.clone(), agent.activity.clone());
        let registry =
            Arc::new(DeviceRegistry::new(opened, observers, config.pool, config.transfer, &config.lease));
        let imports = Arc::<Imports>::default();
        let streams = Arc::new(Streams::new(&registry));
        let regions = Regions::new(&registry, config.tiers, &imports);
        Parts {
            pools: Pools::new(&registry, &streams, regions.set()),
            copies: Copies::new(&registry, &streams, regions.set()),
            sharing: Sharing::new(&registry, &imports),
            streams,
            registry,
            regions,
            sim,
        }
    }

    /// Allocates a block in the default pool of a device.
    pub(super) fn block(&self, device: u32, size: Bytes) -> glake_device::Address {
        let started = self.registry.started(self.registry.device(device.into()).unwrap()).unwrap();
        let stream = self.streams.of(&*self.sim, DeviceId(device), Stream(0)).unwrap();
        started.pool.malloc(size, stream).unwrap().address
    }
}
