//! The memory of this process: a driver, and a pool for each device that is used.
//!
//! ```text
//! malloc(device, size, stream handle)                          free(address)
//!   └► devices[device] ── started at first use                    └► the pool that owns the address
//!        └► streams: handle ─► PoolStream, remembered: no lock
//!             └► private pools: does a filter take the stream?  ─► domain      one load while none is open
//!                  └► GpuPool::malloc_in ─► address, or a Shortage
//! ```
//!
//! It is what a library serves a program from that knows addresses, device numbers and stream handles only. Nothing here
//! is global: `ffi` keeps the one process that a program has, tests have several.
//!
//! ```
//! use glake_device::Stream;
//! use glake_runtime::config::{Environment, Sources};
//! use glake_runtime::process::Process;
//! use glake_units::Bytes;
//!
//! let environment = Environment::from_iter([("GLAKE_DEVICE", "sim")]);
//! let process = Process::start(Sources { environment, ..Sources::default() }.load()?)?;
//! let address = process.malloc(0, Bytes::mib(20), Stream(0))?;
//! assert_eq!(process.reports().stats(0)?.all.allocated_bytes.current, 20 << 20);
//! process.free(address)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod activity;
mod agent;
mod copies;
mod counters;
mod device;
mod device_registry;
mod engine;
mod error;
#[cfg(test)]
#[cfg(not(schedules))]
mod fixture;
mod gate;
mod leases;
mod observers;
mod offload;
mod pools;
mod private;
mod refusal;
mod regions;
mod sharing;
mod shortage;
mod snapshot;
mod streams;
#[cfg(test)]
#[cfg(not(schedules))]
mod tests;

use std::sync::Arc;

use glake_device::topology::Topology;
use glake_device::{Address, DeviceId, Driver, Recorder, Stream};
use glake_sim::{Clock, SimOptions, Simulator, mapping_budget};
use glake_tiers::{PoolError, Restored};
use glake_units::Bytes;

use crate::backend::Backend;
use crate::config::{Config, DeviceChoice};
use agent::AgentHandle;
pub use agent::AgentLink;
pub use copies::{Copies, CopyAsk, Form};
use device::{DeviceMemory, Started};
use device_registry::{DeviceRegistry, Opened};
pub use error::{AgentError, ErrorKind, ProcessError};
pub use gate::{Ballot, Gate, GateView, Tags, UseId, WhenClosed};
pub use leases::Leases;
use observers::Action;
pub use observers::{Observers, OnLease, OnMapping, OnShortage};
pub use offload::{
    CheckState, ItemId, LeafPart, Offload, Pack, PackedItem, Preset, SaveId, ScopeId, Sites, StreamedPlace,
    UseOrders, UsePhase, Verdict,
};
pub use pools::{PoolCheckpoint, Pools};
pub use private::{Filter, PoolId};
pub use regions::{
    Hook, LiveCallback, MemoryUsage, Moved, Refill, RefillReport, RegionView, Regions, Shrink, ShrinkReport,
    SkippedExtent, Tier,
};
use regions::{RegionFlags, Target};
use sharing::Imports;
pub use sharing::Sharing;
pub use shortage::{Denial, Grantor, InTorchWords, Shortage};
pub use snapshot::{BlockView, Reports, SegmentView};
pub use streams::Streams;

type Result<T> = std::result::Result<T, ProcessError>;

/// Description of a live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Device of the memory.
    pub device: DeviceId,
    /// Start address of the block.
    pub address: Address,
    /// Size of the block, rounded up by the pool.
    pub size: Bytes,
    /// Size that the program requested.
    pub requested: Bytes,
}

/// Memory of a process: allocation and free, and access to the parts for all other operations.
#[derive(Debug)]
pub struct Process {
    /// Agent connection; the first field, so that its threads end before the state they use is dropped.
    agent: AgentLink,
    name: String,
    driver: Arc<dyn Driver>,
    /// Devices of the registry, without an extra indirection.
    devices: Arc<[DeviceMemory]>,
    registry: Arc<DeviceRegistry>,
    observers: Arc<Observers>,
    flags: Arc<RegionFlags>,
    regions: Regions,
    streams: Arc<Streams>,
    pools: Pools,
    copies: Copies,
    offload: Offload,
    sharing: Sharing,
    leases: Leases,
    reports: Reports,
}

impl Process {
    /// Opens the devices. A pool starts when its device is used first.
    ///
    /// # Errors
    /// [`ProcessError::NoDriver`] if there is no driver and the configuration does not ask for the simulator: `auto` means CUDA here, so
    /// that no program computes on simulated memory unintentionally.
    pub fn start(config: Config) -> Result<Process> {
        Process::start_on(config, |driver| driver)
    }

    /// Starts like [`Process::start`], with a wrapper around the driver that can inject failures or record calls.
    ///
    /// # Errors
    /// As [`Process::start`].
    pub fn start_on(
        config: Config,
        around: impl FnOnce(Arc<dyn Driver>) -> Arc<dyn Driver>,
    ) -> Result<Process> {
        let choice = match config.device.choice {
            DeviceChoice::Auto => DeviceChoice::Cuda,
            choice => choice,
        };
        let backend = Backend::find(&choice).map_err(refusal::not_there)?;
        let name = backend.name();
        // No agent can know of simulated GPUs that only this process sees.
        let joins_by_itself = !matches!(&backend, Backend::Sim { shared: None, .. });
        let (driver, mappings, links): (Arc<dyn Driver>, _, _) = match backend {
            Backend::Cuda(cuda) => (cuda, u64::MAX, None),
            Backend::Sim { model, shared, .. } => {
                // An alias also splits address space at its ends.
                let mappings = mapping_budget() / 5 * 4 / (model.gpus.len() as u64).max(1);
                let links = Topology::from(&model);
                let (clock, strict_ordering) = (Clock::Wall, false);
                let options =
                    SimOptions { topology: model, clock, strict_ordering, shared, ..SimOptions::default() };
                (Arc::new(Simulator::new(options)?), mappings, Some(links))
            }
        };
        let driver = around(driver);
        let devices = driver.devices()?;
        let recorder = Arc::new(Recorder::measured(driver));
        let driver: Arc<dyn Driver> = recorder.clone();
        let opened = Opened { driver: driver.clone(), devices, links, mappings };
        let agent = AgentHandle::new(opened.devices.len(), &config.lease);
        let observers = Observers::new(opened.devices.len(), agent.clone(), agent.activity.clone());
        observers.counters.belongs_to(&name);
        let registry =
            Arc::new(DeviceRegistry::new(opened, observers, config.pool, config.transfer, &config.lease));
        let imports = Arc::<Imports>::default();
        let streams = Arc::new(Streams::new(&registry));
        let regions = Regions::new(&registry, config.tiers, &imports);
        let set = regions.set();
        Ok(Process {
            agent: AgentLink::new(&agent, &registry, set, config.launch, config.agent, joins_by_itself),
            name,
            driver,
            devices: registry.devices.clone(),
            observers: registry.observers.clone(),
            flags: set.flags.clone(),
            pools: Pools::new(&registry, &streams, set),
            copies: Copies::new(&registry, &streams, set),
            offload: Offload::new(&registry, &streams, set),
            sharing: Sharing::new(&registry, &imports),
            leases: Leases::new(&registry),
            reports: Reports {
                recorder,
                registry: registry.clone(),
                streams: streams.clone(),
                regions: set.clone(),
            },
            streams,
            regions,
            registry,
        })
    }

    /// Returns the name of the driver and topology, such as `cuda` or `sim:h200x4`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the driver, wrapped to count its calls.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Returns the streams of the program.
    pub fn streams(&self) -> &Streams {
        &self.streams
    }

    /// Returns the private pools of the process.
    pub fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Returns the regions and their gate.
    pub fn regions(&self) -> &Regions {
        &self.regions
    }

    /// Returns the copies of the process.
    pub fn copies(&self) -> &Copies {
        &self.copies
    }

    /// Returns the offloaded bytes of live blocks.
    pub fn offload(&self) -> &Offload {
        &self.offload
    }

    /// Returns the access for other devices and processes.
    pub fn sharing(&self) -> &Sharing {
        &self.sharing
    }

    /// Returns the leases of the process.
    pub fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Returns the connection to the agent that controls the leases.
    pub fn agent(&self) -> &AgentLink {
        &self.agent
    }

    /// Returns the reports about the process's memory.
    pub fn reports(&self) -> &Reports {
        &self.reports
    }

    /// Returns the observers and the history of events.
    pub fn observers(&self) -> &Observers {
        &self.observers
    }

    /// Returns the number of devices.
    pub fn device_count(&self) -> usize {
        self.devices.len()
    }

    /// Allocates a block for work on a stream of that device.
    ///
    /// # Errors
    /// [`ProcessError::OutOfMemory`] after all reclaimable memory was reclaimed; errors of the pool and the driver.
    #[inline]
    pub fn malloc(&self, device: i64, size: Bytes, raw: Stream) -> Result<Address> {
        let memory = self.device(device)?;
        let started = self.started(memory)?;
        let stream = self.streams.of(&*self.driver, memory.id(), raw)?;
        let capture = || self.driver.capture_state(memory.id(), raw).ok();
        let routed = started.private.domain_of(&started.pool, raw, capture);
        let is_quiet = self.flags.is_quiet();
        let target =
            if is_quiet { Target::of(routed) } else { self.regions.set().target_of(started, routed)? };
        let domain = target.domain;
        let block = match target.malloc(started, size, stream) {
            Ok(block) => block,
            Err(error) => return Err(self.registry.refused(memory, size, raw, error)),
        };
        if !is_quiet {
            self.regions.set().handed_out(started, domain, block.address);
        }
        if self.observers.history.is_on() {
            let pool = started.private.name(domain).unwrap_or_default();
            let place = (block.address.0, block.size.get());
            self.observers.history.note(Action::Alloc, memory.id(), place, raw, pool);
        }
        Ok(block.address)
    }

    /// Frees a block. Its own stream may reuse the bytes at once.
    ///
    /// # Errors
    /// [`ProcessError::UnknownAddress`]; nothing changes then.
    #[inline]
    pub fn free(&self, address: Address) -> Result<()> {
        if self.observers.history.is_on() {
            self.note_free(address);
        }
        self.offload.before_free(address);
        // The pool ends its exports; an open descriptor would keep the memory.
        self.sharing.forget_block(address);
        let domain =
            if self.flags.is_any_evicted() { self.regions.set().domain_to_free(address) } else { None };
        for started in self.devices.iter().filter_map(DeviceMemory::started) {
            match started.pool.free(address) {
                Ok(_) => {
                    if self.flags.is_any_evicted() {
                        self.regions.set().freed(domain);
                    }
                    return Ok(());
                }
                Err(PoolError::UnknownAddress { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(ProcessError::UnknownAddress { address })
    }

    #[cold]
    fn note_free(&self, address: Address) {
        for memory in self.devices.iter() {
            let Some(started) = memory.started() else { continue };
            let Some(block) = started.pool.find(address).filter(|block| block.address == address) else {
                continue;
            };
            let stream = self.streams.handle(block.stream).unwrap_or(Stream(0));
            let pool = started.private.name(block.domain).unwrap_or_default();
            for action in [Action::FreeRequested, Action::FreeCompleted] {
                let place = (address.0, block.size.get());
                self.observers.history.note(action, memory.id(), place, stream, pool);
            }
        }
    }

    /// Returns the live block that contains an address.
    pub fn find(&self, address: Address) -> Option<Found> {
        self.registry.find(address)
    }

    /// Records that work on a stream, of any device, uses a block that was allocated for another stream.
    ///
    /// # Errors
    /// [`ProcessError::UnknownAddress`]; the driver's error for an invalid stream handle, in which case the block counts as used by some
    /// stream.
    pub fn record_stream(&self, address: Address, raw: Stream) -> Result<()> {
        for memory in self.devices.iter() {
            let Some(started) = memory.started() else { continue };
            if started.pool.block(address).is_none() {
                continue;
            }
            return self.streams.record(started, address, raw);
        }
        Err(ProcessError::UnknownAddress { address })
    }

    /// Waits for pending frees, then releases free memory until at most `keep` is reserved on the device, or on each device if none is
    /// named. Returns the released bytes. Does not wait during a capture.
    ///
    /// # Errors
    /// The driver's error, after all devices were tried.
    pub fn trim(&self, device: Option<i64>, keep: Bytes) -> Result<Bytes> {
        let devices = match device {
            Some(device) => std::slice::from_ref(self.device(device)?),
            None => &*self.devices,
        };
        self.sharing.settle();
        self.offload.trim();
        let trim = |started: &Started| {
            started.settle()?;
            // A trim also closes slabs that their streams would use again.
            if started.pool.reserved() <= keep { Ok(Bytes::ZERO) } else { Ok(started.pool.trim(keep)?) }
        };
        // All devices first: one failure must not stop the others.
        let trimmed: Vec<Result<Bytes>> =
            devices.iter().filter_map(DeviceMemory::started).map(trim).collect();
        self.regions.set().given_up();
        trimmed.into_iter().sum()
    }

    /// Restores exactly the blocks of a checkpoint as live, at their addresses ([`glake_tiers::GpuPool::restore`]).
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the pool does not exist; the pool's error, with the live blocks unchanged.
    pub fn restore(&self, checkpoint: &PoolCheckpoint) -> Result<Restored> {
        let restored = self.pools.restore(checkpoint)?;
        // The pool has ended these exports before their bytes could be reused; their descriptors are closed here.
        self.sharing.forget_ended();
        Ok(restored)
    }

    /// Returns the largest request that would succeed now, with stitching and growth. Starts the device's pool.
    ///
    /// # Errors
    /// The driver's error when it is asked for its free memory.
    pub fn largest(&self, device: i64) -> Result<Bytes> {
        Ok(self.started(self.device(device)?)?.pool.report().largest()?)
    }

    /// Sets the fraction of a device's memory that may be reserved; its pool need not have started.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the fraction is out of range.
    pub fn set_fraction(&self, device: i64, fraction: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(ProcessError::invalid(format!(
                "a memory fraction of {fraction} is out of range: 0 to 1 is allowed"
            )));
        }
        self.device(device)?.set_fraction(fraction, self.registry.config.limit);
        Ok(())
    }

    /// Returns the fraction of a device's memory that may be reserved.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`].
    pub fn fraction(&self, device: i64) -> Result<f64> {
        Ok(self.device(device)?.fraction())
    }

    /// Ends the threads that poll completion points and share blocks, and removes this process's files, so that their contents are lost.
    /// From then on no library thread calls the driver: frees only do bookkeeping, and a miss does the work of the ended threads on the
    /// caller's thread.
    pub fn stop(&self) {
        self.registry.stop();
        self.regions.set().gate.stop();
        self.agent.stop();
        self.regions.stop_background();
        self.sharing.stop();
        if let Some(engine) = self.registry.engine.made() {
            engine.stop();
        }
        self.devices.iter().filter_map(DeviceMemory::started).for_each(Started::stop);
        self.regions.set().stores.end_files();
    }

    #[inline]
    fn device(&self, device: i64) -> Result<&DeviceMemory> {
        self.registry.device(device)
    }

    #[inline]
    fn started<'a>(&self, memory: &'a DeviceMemory) -> Result<&'a Started> {
        self.registry.started(memory)
    }
}
