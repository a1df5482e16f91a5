//! Rig of `glake demo` and the benches: the GPUs of a backend with an engine over their links, and regions whose bytes are compared.
//!
//! ```text
//! Backend ─► Rig ─┬ Engine    its relays ready, or none     ─► LinkMover
//!                 ├ GpuPool   open to the relays            ─► Region ─► Filled: written, shrunk, refilled, compared
//!                 └ HostPool  near to the links of the paths
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use glake_abi::client::CudaAllocator;
use glake_device::owned::{Buffer, CompletionEvents, DeviceSet, OwnedStream, Span};
use glake_device::topology::Topology;
use glake_device::{Address, Counters, DeviceId, DeviceInfo, Driver, DriverError, Recorder, Verb};
use glake_runtime::backend::{Backend, BackendError};
use glake_runtime::calibrations::Calibrations;
use glake_runtime::config::{self, Config, MultiPath};
use glake_runtime::pool;
use glake_sim::pattern::{fill, matching};
use glake_sim::{Census, Clock, SimOptions, Simulator, mapping_budget};
use glake_tiers::{
    AvailableMemory, Block, GpuPool, HostError, HostOptions, HostPool, NoWait, PoolError, PoolOptions,
    Refilled, Region, RegionError, Shrunk, Store, TransferContext, nodes_of,
};
use glake_transfer::{Engine, EngineOptions, TransferError};
use glake_units::Bytes;
use parking_lot::Mutex;

/// Timeout for setting up relays.
const RELAY_TIMEOUT: Duration = Duration::from_secs(30);

/// Options of a rig.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RigOptions {
    /// GPU whose memory is used.
    pub(crate) target: u32,
    /// Number of GPUs whose links serve copies, the target included; `None`: all.
    pub(crate) paths: Option<u32>,
    /// Memory of each simulated GPU; `None`: the model's.
    pub(crate) memory: Option<Bytes>,
    /// Whether copies on simulated GPUs take time but move no bytes.
    pub(crate) times_only: bool,
}

/// Error of opening a rig.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum RigError {
    /// Error of the backend.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Error of the driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Error of the engine.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// Unknown GPU.
    #[error("GPU {device} does not exist: {count} are here, counted from 0")]
    NoSuchGpu {
        /// Index of the requested GPU.
        device: u32,
        /// Number of GPUs present.
        count: u32,
    },
    /// The host lacks memory for the bytes of simulated GPUs.
    #[error(
        "simulated GPUs keep their bytes in this machine's memory: {asked} were asked for with their copies, and {available} are available \
         to this process and its control group; ask for fewer bytes, or free memory"
    )]
    NoHostMemory {
        /// Size of the memory on GPUs and of its copies in host memory.
        asked: Bytes,
        /// Memory that this process can still use.
        available: Bytes,
    },
    /// More paths requested than GPUs present.
    #[error(
        "--paths {paths}: {count} GPUs are here, so ask for 1 to {count}, or leave --paths out for all of them"
    )]
    TooManyPaths {
        /// Requested number of paths.
        paths: u32,
        /// Number of GPUs present.
        count: u32,
    },
}

/// Checks that a target and a number of paths exist on a server of `count` GPUs.
///
/// # Errors
/// [`RigError::NoSuchGpu`], [`RigError::TooManyPaths`].
pub(crate) fn check(count: u32, target: u32, paths: Option<u32>) -> Result<(), RigError> {
    match paths {
        _ if target >= count => Err(RigError::NoSuchGpu { device: target, count }),
        Some(paths) if paths > count => Err(RigError::TooManyPaths { paths, count }),
        _ => Ok(()),
    }
}

/// Checks that this machine has memory for `asked` bytes on GPUs and in their copies, if the GPUs are simulated. Their memory is made without
/// pages, so that only a check in advance keeps the operating system from killing a process.
///
/// # Errors
/// [`RigError::NoHostMemory`].
pub(crate) fn check_host_memory(backend: &Backend, asked: Bytes) -> Result<(), RigError> {
    match (backend, AvailableMemory::of_host().least()) {
        (Backend::Sim { .. }, Some(available)) if asked > available => {
            Err(RigError::NoHostMemory { asked, available })
        }
        _ => Ok(()),
    }
}

/// Memory of a simulated GPU from one of the driver's allocators for programs.
pub(crate) struct ForeignMemory {
    simulator: Arc<Simulator>,
    whole: Span,
}

impl ForeignMemory {
    /// Returns a part of the memory.
    pub(crate) fn part(&self, offset: Bytes, size: Bytes) -> Option<Span> {
        self.whole.part(offset, size)
    }
}

impl Drop for ForeignMemory {
    fn drop(&mut self) {
        // The simulator waits for its work, and goes soon itself.
        let _ = self.simulator.plain_free(self.whole.start());
    }
}

/// GPUs of a backend with an engine whose relays are ready.
#[derive(Debug)]
pub(crate) struct Rig {
    target: DeviceInfo,
    topology: Topology,
    engine: Arc<Engine>,
    calibrated: bool,
    driver: Arc<dyn Driver>,
    recorder: Arc<Recorder>,
    simulator: Option<Arc<Simulator>>,
    times_only: bool,
    begun: Instant,
}

impl Rig {
    /// Opens a rig and waits until its relays are ready. If no GPU becomes a relay, each copy uses one link.
    ///
    /// # Errors
    /// [`RigError`].
    pub(crate) fn open(backend: &Backend, config: &Config, options: RigOptions) -> Result<Rig, RigError> {
        let (driver, simulator) = driver(backend, options)?;
        let recorder = Arc::new(Recorder::measured(driver));
        let driver: Arc<dyn Driver> = recorder.clone();
        let infos = driver.devices()?;
        let count = u32::try_from(infos.len()).unwrap_or(u32::MAX);
        check(count, options.target, options.paths)?;
        let target = infos.iter().find(|info| info.id.0 == options.target).cloned();
        let target = target.ok_or(RigError::NoSuchGpu { device: options.target, count })?;
        let topology = backend.topology()?;
        let graph = Calibrations::of(&topology, config.transfer.calibrations.as_deref()).graph();
        let calibrated = graph.is_calibrated();
        let relays = relays(&infos, target.id, config, options.paths);
        let transfer = &config.transfer;
        let wanted = EngineOptions {
            relays,
            graphs: transfer.graphs,
            // It measures what all links give, and makes contexts on all GPUs for that.
            shared_gpus: true,
            ..EngineOptions::default()
        };
        let engine = Engine::new(CompletionEvents::new(driver.clone()), graph, wanted)?;
        if !relays.is_empty() {
            // Its context, which its memory takes in any case: copies of its streams are forked from the first one on.
            drop(OwnedStream::new(&driver, target.id)?);
            let (ready, is_ready) = mpsc::channel();
            engine.start_relays(move |_| {
                // Nobody listens any more once that time is over.
                let _ = ready.send(());
            })?;
            // Those that are not ready by then are no relays, and copies take the links that there are.
            let _ = is_ready.recv_timeout(RELAY_TIMEOUT);
        }
        let times_only = simulator.is_some() && options.times_only;
        let begun = Instant::now();
        Ok(Rig { target, topology, engine, calibrated, driver, recorder, simulator, times_only, begun })
    }

    /// Returns the counters of driver calls so far.
    pub(crate) fn calls(&self) -> Counters {
        self.recorder.counters()
    }

    /// Returns the GPU whose memory is used.
    pub(crate) fn target(&self) -> &DeviceInfo {
        &self.target
    }

    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(crate) fn completion_events(&self) -> &Arc<CompletionEvents> {
        self.engine.completion_events()
    }

    /// Returns whether the engine uses measured link rates.
    pub(crate) fn is_calibrated(&self) -> bool {
        self.calibrated
    }

    pub(crate) fn is_simulated(&self) -> bool {
        self.simulator.is_some()
    }

    /// Returns whether copies move bytes.
    pub(crate) fn moves_bytes(&self) -> bool {
        !self.times_only
    }

    /// Returns the time since the rig was opened. Simulated GPUs have virtual time, which passes while a caller waits for their work.
    pub(crate) fn now(&self) -> Duration {
        self.simulator.as_ref().map_or_else(|| self.begun.elapsed(), |simulator| simulator.now())
    }

    /// Returns the bytes copied so far, by the GPU whose link carried them.
    pub(crate) fn carried(&self) -> Vec<(DeviceId, u64)> {
        let paths = self.engine.statistics().paths;
        paths.iter().map(|path| (path.relay, path.bytes.get())).collect()
    }

    /// Returns the other GPUs whose links serve the target's copies.
    pub(crate) fn relays(&self) -> DeviceSet {
        self.engine.relays().without(DeviceSet::of(self.target.id))
    }

    /// Returns the free memory of a GPU.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn free_memory(&self, device: DeviceId) -> Result<Bytes, DriverError> {
        Ok(self.driver.memory_info(device)?.free)
    }

    /// Creates a pool of a GPU's memory that the relays can access.
    ///
    /// # Errors
    /// As [`GpuPool::new`].
    pub(crate) fn pool(&self, device: DeviceId, knobs: &config::Pool) -> Result<Arc<GpuPool>, PoolError> {
        let memory = self.driver.memory_info(device)?.total;
        // As of a machine: an alias cuts address space at its ends too.
        let mappings = if self.is_simulated() { mapping_budget() / 5 * 4 } else { u64::MAX };
        let settings = Some(pool::settings(knobs, memory, mappings));
        let options = PoolOptions {
            settings,
            completion_events: Some(self.completion_events().clone()),
            ..PoolOptions::default()
        };
        let pool = GpuPool::new(self.driver.clone(), device, options)?;
        for relay in self.engine.relays().without(DeviceSet::of(device)).iter() {
            if let Err(error) = pool.peer_access().lend_to(relay) {
                tracing::warn!(target: "glake::copies", %relay, %device, %error, "no relay of copies to this memory");
            }
        }
        Ok(Arc::new(pool))
    }

    /// Allocates memory of the target that the relays can access; if a relay cannot reach it, memory for the target alone.
    ///
    /// # Errors
    /// As [`Buffer::new`].
    pub(crate) fn buffer(&self, size: Bytes) -> Result<Arc<Buffer>, DriverError> {
        let of = |reach| Buffer::new(self.completion_events(), self.target.id, size, reach);
        let buffer = match of(self.relays()) {
            Err(error) if !error.is_out_of_memory() && !error.is_sticky() => of(DeviceSet::EMPTY),
            made => made,
        };
        Ok(Arc::new(buffer?))
    }

    /// Allocates memory of the target with one of the driver's allocators.
    ///
    /// # Errors
    /// [`DriverError::Unsupported`] unless GPUs are simulated: `glake_abi::client` allocates such memory on real GPUs.
    pub(crate) fn foreign_memory(
        &self,
        size: Bytes,
        by: CudaAllocator,
    ) -> Result<ForeignMemory, DriverError> {
        let refused = || DriverError::Unsupported { verb: Verb::Create, code: 801 };
        let simulator = self.simulator.clone().ok_or_else(refused)?;
        let start = match by {
            CudaAllocator::Plain => simulator.plain_alloc(self.target.id, size)?,
            CudaAllocator::Mempool => simulator.async_alloc(self.target.id, size)?,
        };
        let whole = simulator.span(start, size, DeviceSet::of(self.target.id))?;
        Ok(ForeignMemory { simulator, whole })
    }

    /// Creates a pool of host memory for the paths' copies. No memory is pinned yet.
    ///
    /// # Errors
    /// As [`HostPool::new`].
    pub(crate) fn host(&self) -> Result<Arc<HostPool>, HostError> {
        let devices = self.engine.relays().union(DeviceSet::of(self.target.id));
        // What a simulated device copies fits a smaller one.
        let arena = if self.is_simulated() { Bytes::mib(32) } else { HostOptions::default().arena };
        let nodes = nodes_of(&self.topology, devices);
        HostPool::new(
            self.completion_events(),
            HostOptions { devices, nodes, arena, ..HostOptions::default() },
        )
    }

    /// Closes the rig. Returns the objects that are still alive on simulated GPUs; `None` on real GPUs.
    pub(crate) fn end(self) -> Option<Census> {
        let simulator = self.simulator.clone();
        drop(self);
        simulator.map(|simulator| simulator.census())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.engine.stop();
    }
}

type Opened = (Arc<dyn Driver>, Option<Arc<Simulator>>);

/// Returns the driver of a backend, and the simulator if the backend is simulated.
///
/// # Errors
/// [`DriverError::Os`]: the system has no memory for simulated GPUs.
pub(crate) fn driver(backend: &Backend, part: RigOptions) -> Result<Opened, DriverError> {
    match backend {
        Backend::Cuda(cuda) => Ok((cuda.clone(), None)),
        Backend::Sim { model, .. } => {
            let mut topology = model.clone();
            for gpu in &mut topology.gpus {
                gpu.memory = part.memory.unwrap_or(gpu.memory);
            }
            let options = SimOptions {
                topology,
                clock: Clock::Virtual,
                strict_ordering: false,
                times_only: part.times_only,
                ..SimOptions::default()
            };
            let simulator = Arc::new(Simulator::new(options)?);
            Ok((simulator.clone(), Some(simulator)))
        }
    }
}

/// Selects relays for the target's copies: the first other GPUs that the configuration does not exclude.
fn relays(infos: &[DeviceInfo], target: DeviceId, config: &Config, paths: Option<u32>) -> DeviceSet {
    let others = usize::try_from(paths.unwrap_or(u32::MAX).saturating_sub(1)).unwrap_or(usize::MAX);
    // This program is one process, whichever launcher started it: local ranks do not count.
    if others == 0 || config.transfer.multi_path == MultiPath::Never {
        return DeviceSet::EMPTY;
    }
    let excluded =
        |info: &DeviceInfo| config.transfer.exclude.iter().any(|gpu| gpu.is(info.id.0, info.pci.as_deref()));
    let relays = infos.iter().filter(|info| info.id != target && !excluded(info)).take(others);
    relays.map(|info| info.id).collect()
}

/// Size in bytes of the parts that are written and compared.
const CHUNK: usize = 4 << 20;
/// Maximum number of threads that write and compare bytes. More threads would wait for the same link.
const THREADS: usize = 8;

/// Region whose blocks contain a pattern of their positions.
#[derive(Debug)]
pub(crate) struct Filled {
    region: Region,
    blocks: Vec<Block>,
}

/// Position of a byte that differs from the written one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Index of the block, from 0.
    pub(crate) block: u64,
    /// Offset in the block.
    pub(crate) at: u64,
    /// Address of the block.
    pub(crate) address: Address,
}

/// Part of a block: its address, its offset in the block, the block's index and its length.
type Part = (Address, u64, u64, usize);

impl Filled {
    /// Writes the pattern to all blocks of a region.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn new(region: Region, blocks: Vec<Block>) -> Result<Filled, PoolError> {
        let filled = Filled { region, blocks };
        filled.each_part(|bytes, (address, at, block, length)| {
            fill(&mut bytes[..length], at, block);
            filled.region.pool().write(address, &bytes[..length])
        })?;
        Ok(filled)
    }

    pub(crate) fn region(&self) -> &Region {
        &self.region
    }

    /// Returns the size of all blocks.
    pub(crate) fn live(&self) -> Bytes {
        self.blocks.iter().map(|block| block.size).sum()
    }

    /// Evicts the whole region.
    ///
    /// # Errors
    /// See [`Region::shrink`].
    pub(crate) fn shrink(&self, to: &Store, context: TransferContext<'_>) -> Result<Shrunk, RegionError> {
        self.region.shrink(Bytes::MAX, to, context)
    }

    /// Refills the whole region.
    ///
    /// # Errors
    /// See [`Region::refill`].
    pub(crate) fn refill(&self, context: TransferContext<'_>) -> Result<Refilled, RegionError> {
        self.region.refill(Bytes::MAX, context, &NoWait)
    }

    /// Compares every byte with the pattern. Returns a difference, if any.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn compare(&self) -> Result<Option<Difference>, PoolError> {
        let found = Mutex::new(None);
        self.each_part(|bytes, (address, at, block, length)| {
            bytes[..length].fill(0);
            self.region.pool().read(address, &mut bytes[..length])?;
            let same = matching(&bytes[..length], at, block);
            if same < length as u64 {
                *found.lock() = Some(Difference { block, at: at + same, address: Address(address.0 - at) });
            }
            Ok(())
        })?;
        Ok(found.into_inner())
    }

    /// Visits every part once, on several threads, each with its own buffer.
    fn each_part(
        &self,
        visit: impl Fn(&mut [u8], Part) -> Result<(), PoolError> + Sync,
    ) -> Result<(), PoolError> {
        let parts: Vec<Part> =
            (0..).zip(&self.blocks).flat_map(|(number, block)| parts(number, *block)).collect();
        let (next, cores) = (AtomicU64::new(0), thread::available_parallelism().map_or(1, usize::from));
        let work = || {
            let mut bytes = vec![0; CHUNK];
            loop {
                let mine = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap_or(usize::MAX);
                let Some(part) = parts.get(mine) else { return Ok(()) };
                visit(&mut bytes, *part)?;
            }
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..cores.min(THREADS)).map(|_| scope.spawn(work)).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(outcome) => outcome,
                Err(panic) => std::panic::resume_unwind(panic),
            })
        })
    }

    /// Frees all blocks of the region.
    ///
    /// # Errors
    /// See [`glake_tiers::GpuPool::free`].
    pub(crate) fn end(self) -> Result<(), PoolError> {
        self.blocks.iter().try_for_each(|block| self.region.pool().free(block.address).map(|_| ()))
    }
}

fn parts(number: u64, block: Block) -> impl Iterator<Item = Part> {
    (0..block.size.get()).step_by(CHUNK).map(move |at| {
        let length = usize::try_from(block.size.get() - at).unwrap_or(CHUNK).min(CHUNK);
        (Address(block.address.0 + at), at, number, length)
    })
}

#[cfg(test)]
mod tests {
    use glake_sim::load;

    use super::*;
    use glake_runtime::config::Gpu;

    fn open(options: RigOptions, config: &Config) -> Result<Rig, RigError> {
        let backend = Backend::Sim { model: load("h200x4").unwrap(), shared: None, instead_of: None };
        Rig::open(&backend, config, options)
    }

    fn set(ids: &[u32]) -> DeviceSet {
        ids.iter().copied().map(DeviceId).collect()
    }

    #[test]
    fn relays_are_the_others_up_to_the_paths() {
        let mut config = Config::default();
        let relays = |paths, config: &Config| {
            let memory = Some(Bytes::mib(64));
            let options = RigOptions { target: 1, paths, memory, ..RigOptions::default() };
            let rig = open(options, config).unwrap();
            assert!(rig.free_memory(DeviceId(0)).is_ok());
            let relays = rig.relays();
            assert_eq!(rig.end(), Some(Census::default()));
            relays
        };
        assert_eq!(relays(None, &config), set(&[0, 2, 3]));
        assert_eq!(relays(Some(2), &config), set(&[0]));
        assert_eq!(relays(Some(1), &config), DeviceSet::EMPTY);
        config.transfer.exclude = vec![Gpu::Index(0)];
        assert_eq!(relays(None, &config), set(&[2, 3]));
        config.transfer.multi_path = MultiPath::Never;
        assert_eq!(relays(None, &config), DeviceSet::EMPTY);
    }

    #[test]
    fn a_gpu_that_is_not_there_is_named() {
        let options = RigOptions { target: 4, ..RigOptions::default() };
        let error = open(options, &Config::default()).unwrap_err().to_string();
        assert_eq!(error, "GPU 4 does not exist: 4 are here, counted from 0");
    }
}
