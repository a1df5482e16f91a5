//! What is offloaded of a process of simulated GPUs that refuse whatever no stream or event orders: real bytes, every freed block overwritten.

mod budgets;
mod checks;
mod copies;
mod faults;
mod links;
mod programs;
mod refusals;
mod reserved;

use std::sync::Arc;
use std::time::Duration;

use glake_device::topology::Topology;
use glake_device::{Address, DeviceId, Driver, Faults, KernelMemory, Recorder, Stream, Touch};
use glake_sim::{SimOptions, SimTopology, Simulator, pattern};
use glake_tiers::GpuPool;
use glake_transfer::paths::Direction;
use glake_units::Bytes;
use parking_lot::Mutex;

use super::super::device_registry::{DeviceRegistry, Opened};
use super::super::regions::{Refill, Regions, Shrink};
use super::super::streams::Streams;
use super::super::{ProcessError, Result};
use super::Offload;
use crate::config::Config;
use crate::metrics::OffloadStats;
use crate::process::agent::AgentHandle;
use crate::process::observers::Observers;
use crate::process::sharing::Imports;

const GPU: DeviceId = DeviceId(0);
const NONE: Duration = Duration::ZERO;
const US: fn(u64) -> Duration = Duration::from_micros;

/// A process of two GPUs of 32 MiB, without its threads.
struct Scene {
    sim: Arc<Simulator>,
    recorder: Arc<Recorder>,
    faults: Arc<Faults>,
    registry: Arc<DeviceRegistry>,
    streams: Arc<Streams>,
    regions: Regions,
    offload: Offload,
    /// The program's.
    own: Stream,
    other: Stream,
    wrong: Arc<Mutex<Vec<String>>>,
}

/// A block with a pattern: `seed` says which, `skipped` how many words of it lie before the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Written {
    address: Address,
    size: Bytes,
    seed: u64,
    skipped: u64,
}

impl Written {
    fn bytes(self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.size.get()).unwrap()];
        pattern::fill(&mut bytes, self.skipped * 8, self.seed);
        bytes
    }

    fn is(self, found: &[u8]) -> bool {
        pattern::matching(found, self.skipped * 8, self.seed) == self.size.get()
    }

    /// A part of it, in words.
    fn part(self, from: u64, words: u64) -> Written {
        let address = Address(self.address.0 + from * 8);
        Written { address, size: Bytes::new(words * 8), skipped: self.skipped + from, ..self }
    }

    fn touch(self) -> [Touch; 1] {
        [Touch { address: self.address, size: self.size }]
    }
}

impl Scene {
    fn new() -> Scene {
        Scene::with(|_| ())
    }

    fn with(tune: impl FnOnce(&mut Config)) -> Scene {
        Scene::of(Bytes::mib(32), tune)
    }

    /// GPUs with so much memory.
    fn of(memory: Bytes, tune: impl FnOnce(&mut Config)) -> Scene {
        let topology = SimTopology::uniform(2, memory);
        let links = Some(Topology::from(&topology));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let recorder = Arc::new(Recorder::measured(sim.clone()));
        let faults = Arc::new(Faults::new(recorder.clone()));
        let mut config = Config::default();
        (config.tiers.host_spare, config.tiers.host_arena) = (Bytes::ZERO, Bytes::mib(16));
        tune(&mut config);
        let devices = sim.devices().unwrap();
        let opened = Opened { driver: faults.clone(), devices, links, mappings: u64::MAX };
        let agent = AgentHandle::new(opened.devices.len(), &config.lease);
        let observers = Observers::new(opened.devices.len(), agent.clone(), agent.activity.clone());
        let registry =
            Arc::new(DeviceRegistry::new(opened, observers, config.pool, config.transfer, &config.lease));
        let imports = Arc::<Imports>::default();
        let streams = Arc::new(Streams::new(&registry));
        let regions = Regions::new(&registry, config.tiers, &imports);
        let offload = Offload::new(&registry, &streams, regions.set());
        for memory in registry.devices.iter() {
            registry.started(memory).unwrap().stop();
        }
        let (own, other) = (streams.create(0).unwrap(), streams.create(0).unwrap());
        Scene {
            sim,
            recorder,
            faults,
            registry,
            streams,
            regions,
            offload,
            own,
            other,
            wrong: Arc::default(),
        }
    }

    fn pool(&self) -> &Arc<GpuPool> {
        &self.registry.started(self.registry.device(0).unwrap()).unwrap().pool
    }

    fn malloc_on(&self, stream: Stream, size: Bytes) -> Result<Address> {
        let stream = self.streams.of(&*self.sim, GPU, stream).unwrap();
        Ok(self.pool().malloc(size, stream)?.address)
    }

    fn malloc(&self, size: Bytes) -> Address {
        self.malloc_on(self.own, size).unwrap()
    }

    /// As the process frees a block.
    fn free(&self, address: Address) {
        self.offload.before_free(address);
        self.pool().free(address).unwrap();
    }

    /// A kernel of a stream writes a pattern.
    fn write_on(&self, stream: Stream, written: Written, time: Duration) {
        let body = move |memory: &mut dyn KernelMemory| {
            let _ = memory.write(written.address, &written.bytes());
        };
        let touch = written.touch();
        self.sim.enqueue_kernel(GPU, stream, &[], &touch, time, body).unwrap();
    }

    /// A new block, written on the program's stream.
    fn written(&self, size: Bytes, seed: u64) -> Written {
        let written = Written { address: self.malloc(size), size, seed, skipped: 0 };
        self.write_on(self.own, written, US(5));
        written
    }

    /// A kernel of a stream looks whether a pattern is there.
    fn check_on(&self, stream: Stream, written: Written, time: Duration) {
        let wrong = self.wrong.clone();
        let body = move |memory: &mut dyn KernelMemory| {
            let mut found = vec![0; usize::try_from(written.size.get()).unwrap()];
            if memory.read(written.address, &mut found).is_err() || !written.is(&found) {
                wrong.lock().push(format!("{written:?}"));
            }
        };
        self.sim.enqueue_kernel(GPU, stream, &written.touch(), &[], time, body).unwrap();
    }

    /// A block that is handed out now and overwritten: whoever still reads there would see it.
    fn poisoned(&self, size: Bytes) -> Address {
        let poison = Written { address: self.malloc(size), size, seed: u64::MAX >> 24, skipped: 0 };
        self.write_on(self.own, poison, US(1));
        poison.address
    }

    /// Holds a queue up for a while.
    fn delay(&self, direction: Direction, time: Duration) {
        let queue = self.offload.queues.of(GPU, direction).unwrap();
        let stream = queue.lock().stream();
        self.sim.enqueue_kernel(GPU, stream, &[], &[], time, |_| {}).unwrap();
    }

    /// Waits on the host for a queue.
    fn synchronize(&self, direction: Direction) {
        let queue = self.offload.queues.of(GPU, direction).unwrap();
        let stream = queue.lock().stream();
        self.sim.stream_synchronize(GPU, stream).unwrap();
    }

    fn stats(&self) -> OffloadStats {
        self.offload.statistics()
    }

    fn shrink(&self) {
        self.regions.shrink(&Shrink::default()).unwrap();
        self.regions.refill(&Refill::default()).unwrap();
    }

    fn run_dry(&self) {
        while self.sim.step() {}
    }

    /// Nothing is left: no entry, no host memory in hands, no hold, no memory of GPUs.
    fn end(self) {
        self.run_dry();
        assert_eq!(*self.wrong.lock(), Vec::<String>::new());
        self.pool().settle().unwrap();
        self.pool().tick().unwrap();
        assert_eq!(self.pool().read_holds().count(), 0, "a hold is left");
        assert!(!self.offload.checks.are_any_watched(), "a block is still to be looked at");
        let stats = self.stats();
        assert_eq!((stats.entries, stats.host_bytes, stats.held_bytes), (0, 0, 0), "{stats:?}");
        self.offload.trim();
        assert_eq!(self.stats().host_pinned_bytes, 0);
        let host = self.regions.set().stores.host(GPU).unwrap().statistics();
        assert_eq!((host.in_use, host.retained), (Bytes::ZERO, Bytes::ZERO), "a host block is left");
        self.pool().trim(Bytes::ZERO).unwrap();
        self.pool().check().unwrap();
        assert_eq!(self.pool().reserved(), Bytes::ZERO);
    }
}
