//! The memory of this process: a driver, and a pool for each device that is used.
//!
//! ```text
//! malloc(device, size, stream handle)                          free(address)
//!   └► devices[device] ── started at first use                    └► the pool that owns the address
//!        └► streams: handle ─► PoolStream, remembered by the thread
//!             └► private pools: does a filter take the stream?  ─► domain      one load while none is open
//!                  └► GpuPool::malloc_in ─► address, or a Shortage in torch's words
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
//! assert_eq!(process.stats(0)?.all.allocated_bytes.current, 20 << 20);
//! process.free(address)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod checkpoint;
mod device;
mod error;
mod history;
mod imports;
mod made;
mod observers;
mod private;
mod shortage;
mod snapshot;
mod stats;
mod streams;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use glake_device::owned::Epochs;
use glake_device::sim::{Clock, SimOptions, Simulator, mapping_budget};
use glake_device::{Address, DeviceId, Driver, DriverError, Recorder, Stream};
use glake_stitch::StitchError;
use glake_tiers::{GpuWaits, LiveBlock, PoolError};
use glake_units::Bytes;

use crate::backend::{Backend, BackendError};
use crate::config::{self, Config, DeviceChoice};
use crate::share::Exporter;
pub use checkpoint::PoolCheckpoint;
use device::{DeviceMemory, Started};
pub use error::ProcessError;
use history::Action;
use imports::Imports;
use made::MadeStreams;
use observers::Observers;
pub use observers::{OnMapping, OnShortage};
pub use private::{Filter, PoolId};
pub use shortage::Shortage;
pub use snapshot::{BlockView, SegmentView};
pub use stats::{DeviceStats, OwnStats, PoolStats, Stat};
use streams::Streams;

type Result<T> = std::result::Result<T, ProcessError>;

/// A live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Whose memory it is.
    pub device: DeviceId,
    /// Where it begins.
    pub address: Address,
    /// How long it is.
    pub size: Bytes,
    /// What was asked for.
    pub requested: Bytes,
}

/// The memory of a process.
#[derive(Debug)]
pub struct Process {
    name: String,
    /// Counts and times every call; a hit makes none.
    recorder: Arc<Recorder>,
    driver: Arc<dyn Driver>,
    /// One clock for all pools: a capture on any device holds it.
    epochs: Arc<Epochs>,
    devices: Vec<DeviceMemory>,
    /// How many mappings a device can have.
    mappings: u64,
    config: config::Pool,
    streams: Streams,
    made: MadeStreams,
    observers: Arc<Observers>,
    /// No thread of ours may call the driver any more, nor may what only keeps books.
    stopped: AtomicBool,
    exporter: Exporter,
    imports: Imports,
}

impl Process {
    /// Opens the devices. Pools start when their device is used first.
    ///
    /// # Errors
    /// [`ProcessError::NoDriver`] where there is no driver, unless the configuration asks for the simulator:
    /// `auto` means CUDA here, so that no program computes on simulated memory unawares.
    pub fn start(config: Config) -> Result<Process> {
        let choice = match config.device.choice {
            DeviceChoice::Auto => DeviceChoice::Cuda,
            choice => choice,
        };
        let backend = Backend::find(&choice).map_err(not_there)?;
        let name = backend.name();
        let (driver, mappings): (Arc<dyn Driver>, _) = match backend {
            Backend::Cuda(cuda) => (cuda, u64::MAX),
            Backend::Sim { model, .. } => {
                // An alias cuts address space at its ends too.
                let mappings = mapping_budget() / 5 * 4 / (model.gpus.len() as u64).max(1);
                let options =
                    SimOptions { topology: model, clock: Clock::Wall, strict_ordering: false, shared: None };
                (Arc::new(Simulator::new(options)?), mappings)
            }
        };
        let config = config.pool;
        let devices = driver.devices()?.into_iter().map(|info| DeviceMemory::new(info, &config));
        let devices: Vec<DeviceMemory> = devices.collect();
        let recorder = Arc::new(Recorder::measured(driver));
        let driver: Arc<dyn Driver> = recorder.clone();
        let epochs = Epochs::new(driver.clone());
        Ok(Process {
            name,
            recorder,
            observers: Observers::new(devices.len()),
            stopped: AtomicBool::new(false),
            driver,
            epochs,
            devices,
            mappings,
            config,
            streams: Streams::new(),
            made: MadeStreams::default(),
            exporter: Exporter::new(),
            imports: Imports::default(),
        })
    }

    /// What it runs on: `cuda`, `sim:h200x4`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many devices there are.
    pub fn device_count(&self) -> usize {
        self.devices.len()
    }

    /// Hands out a block, for work on a stream of that device.
    ///
    /// # Errors
    /// [`ProcessError::OutOfMemory`] after everything that may be taken back was; what the pool or the driver refuses.
    #[inline]
    pub fn malloc(&self, device: i64, size: Bytes, raw: Stream) -> Result<Address> {
        let memory = self.device(device)?;
        let started = self.started(memory)?;
        // Sizes that cannot even be rounded up end here.
        if size > memory.info.memory {
            return Err(self.short(memory, started, size, raw, None));
        }
        let stream = self.streams.of(&*self.driver, memory.id(), raw)?;
        let capture = || self.driver.capture_state(memory.id(), raw).ok();
        let domain = started.private.domain_of(&started.pool, raw, capture);
        let block = match started.pool.malloc_in(domain, size, stream) {
            Ok(block) => block,
            Err(error) => return Err(self.refused(memory, size, raw, error)),
        };
        if self.observers.history.is_on() {
            let pool = started.private.name(domain).unwrap_or_default();
            let place = (block.address.0, block.size.get());
            self.observers.history.note(Action::Alloc, memory.id(), place, raw, pool);
        }
        Ok(block.address)
    }

    /// Takes a block back. Its own stream may have its bytes at once.
    ///
    /// # Errors
    /// [`ProcessError::UnknownAddress`]; nothing changes then.
    #[inline]
    pub fn free(&self, address: Address) -> Result<()> {
        if self.observers.history.is_on() {
            self.note_free(address);
        }
        // Nobody may open it any more once its bytes can be others'.
        self.exporter.forget_block(address);
        for started in self.devices.iter().filter_map(DeviceMemory::started) {
            match started.pool.free(address) {
                Ok(_) => return Ok(()),
                Err(PoolError::UnknownAddress { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(ProcessError::UnknownAddress { address })
    }

    #[cold]
    fn note_free(&self, address: Address) {
        for memory in &self.devices {
            let Some((size, _)) = memory.started().and_then(|started| started.pool.block(address)) else {
                continue;
            };
            for action in [Action::FreeRequested, Action::FreeCompleted] {
                self.observers.history.note(
                    action,
                    memory.id(),
                    (address.0, size.get()),
                    Stream(0),
                    PoolId::default(),
                );
            }
        }
    }

    /// The live block that an address lies in.
    pub fn find(&self, address: Address) -> Option<Found> {
        self.devices.iter().find_map(|memory| {
            let LiveBlock { address, size, requested, .. } = memory.started()?.pool.find(address)?;
            Some(Found { device: memory.id(), address, size, requested })
        })
    }

    /// Says that work of a stream uses a block that was allocated for another.
    ///
    /// # Errors
    /// [`ProcessError::UnknownAddress`]; what the driver answers of the stream.
    pub fn record_stream(&self, address: Address, raw: Stream) -> Result<()> {
        for memory in &self.devices {
            let Some(started) = memory.started() else { continue };
            if started.pool.block(address).is_none() {
                continue;
            }
            let stream = self.streams.of(&*self.driver, memory.id(), raw)?;
            if started.pool.record_stream(address, stream) {
                return Ok(());
            }
        }
        Err(ProcessError::UnknownAddress { address })
    }

    /// A stream of a device that does not synchronise with the legacy one, for programs without a CUDA runtime: those on
    /// the simulated device have no other.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn create_stream(&self, device: i64) -> Result<Stream> {
        Ok(self.made.create(&self.driver, self.device(device)?.id())?)
    }

    /// Destroys a stream of [`Process::create_stream`]; its work still runs to its end.
    ///
    /// # Errors
    /// [`ProcessError::UnknownStream`].
    pub fn destroy_stream(&self, device: i64, raw: Stream) -> Result<()> {
        let device = self.device(device)?.id();
        if !self.made.destroy(device, raw) {
            return Err(ProcessError::UnknownStream { device, stream: raw });
        }
        self.epochs.forget(device, raw);
        self.streams.forget(device, raw);
        Ok(())
    }

    /// How many calls of the driver were made so far, on all threads and devices, and how long they took on the host.
    pub fn driver_calls(&self) -> (u64, Duration) {
        let counters = self.recorder.counters();
        (counters.calls(), counters.time())
    }

    /// Waits for pending frees, then releases free memory until at most `keep` is reserved on the device, or on each if
    /// none is named; returns how much went. While a capture is open nothing is waited for.
    ///
    /// # Errors
    /// What the driver answers; every device is tried.
    pub fn trim(&self, device: Option<i64>, keep: Bytes) -> Result<Bytes> {
        let devices = match device {
            Some(device) => std::slice::from_ref(self.device(device)?),
            None => &self.devices,
        };
        let trimmed = devices.iter().filter_map(DeviceMemory::started).map(|started| {
            started.settle()?;
            // A trim also closes slabs that their streams would use again.
            if started.pool.reserved() <= keep { Ok(Bytes::ZERO) } else { Ok(started.pool.trim(keep)?) }
        });
        self.imports.settle();
        // All first: the first failure shall not keep the other devices from it.
        let trimmed: Vec<Result<Bytes>> = trimmed.collect();
        trimmed.into_iter().sum()
    }

    /// The largest request that would be served now, with stitching and growing; starts the device's pool.
    ///
    /// # Errors
    /// What the driver answers when asked for its free memory.
    pub fn largest(&self, device: i64) -> Result<Bytes> {
        Ok(self.started(self.device(device)?)?.pool.largest()?)
    }

    /// Changes the part of a device's memory that may be reserved; its pool need not have started.
    ///
    /// # Errors
    /// [`ProcessError::BadFraction`].
    pub fn set_fraction(&self, device: i64, fraction: f64) -> Result<()> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(ProcessError::BadFraction { fraction });
        }
        self.device(device)?.set_fraction(fraction, self.config.limit);
        Ok(())
    }

    /// The part of a device's memory that may be reserved.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`].
    pub fn fraction(&self, device: i64) -> Result<f64> {
        Ok(self.device(device)?.fraction())
    }

    /// Makes a private pool, or adds an owner to it.
    ///
    /// # Errors
    /// What starting the device's pool meets.
    pub fn create_pool(&self, device: i64, id: PoolId) -> Result<()> {
        let started = self.started(self.device(device)?)?;
        started.private.create(&started.pool, id);
        Ok(())
    }

    /// Sends allocations on streams that the filter takes (`None`: on all) to a private pool from now on, the newest such
    /// pool first. It adds an owner. Until it is known that no capture follows, no epoch is recorded on the device.
    ///
    /// # Errors
    /// [`ProcessError::PoolOpen`] where they go there already.
    pub fn begin_pool(&self, device: i64, id: PoolId, filter: Option<Filter>) -> Result<()> {
        let started = self.started(self.device(device)?)?;
        started.private.begin(&started.pool, id, filter)
    }

    /// Ends what [`Process::begin_pool`] began; the pool stays.
    ///
    /// # Errors
    /// [`ProcessError::UnknownPool`] where nothing was begun.
    pub fn end_pool(&self, device: i64, id: PoolId) -> Result<()> {
        let started = self.named(device, id)?;
        started.private.end(&started.pool, id)
    }

    /// One owner of a private pool less. The last one gives it up: its memory goes back once its blocks are freed.
    ///
    /// # Errors
    /// [`ProcessError::UnknownPool`].
    pub fn release_pool(&self, device: i64, id: PoolId) -> Result<()> {
        let started = self.named(device, id)?;
        started.private.release(&started.pool, id)
    }

    /// How many owners a private pool has; 0 where there is none.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`].
    pub fn pool_owners(&self, device: i64, id: PoolId) -> Result<u32> {
        Ok(self.device(device)?.started().map_or(0, |started| started.private.owners(id)))
    }

    /// Calls `visit` with the address and the size of every live block of a private pool.
    ///
    /// # Errors
    /// [`ProcessError::UnknownPool`].
    pub fn pool_blocks(&self, device: i64, id: PoolId, mut visit: impl FnMut(Address, Bytes)) -> Result<()> {
        let started = self.named(device, id)?;
        let domain = started.private.domain(&started.pool, id)?;
        started.pool.blocks_of(domain).into_iter().for_each(|block| visit(block.address, block.size));
        Ok(())
    }

    /// Releases what is free in a private pool, after pending frees were waited for: not for the pool of a graph that may
    /// be replayed. Returns how much went.
    ///
    /// # Errors
    /// [`ProcessError::UnknownPool`]; what the driver answers.
    pub fn trim_pool(&self, device: i64, id: PoolId) -> Result<Bytes> {
        let started = self.named(device, id)?;
        let domain = started.private.domain(&started.pool, id)?;
        started.settle()?;
        Ok(started.pool.trim_domain(domain)?)
    }

    /// Lets work of a device touch another's pool memory, what there is and what comes; twice is no error.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`]; what the driver answers, above all where the two cannot reach each other.
    pub fn enable_peer(&self, device: i64, peer: i64) -> Result<()> {
        let (device, memory) = (self.device(device)?.id(), self.device(peer)?);
        self.started(memory)?.pool.enable_peer(device)?;
        self.imports.enable_peer(device, memory.id())
    }

    /// Makes the live block that an address lies in available to other processes of the same user, until it is freed: a
    /// handle for [`Process::open_shared`] there, and where the address lies in what that opens.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Share`], above all where `pool.exportable` is off.
    pub fn share(&self, address: Address) -> Result<(Arc<[u8]>, Bytes)> {
        let found = self.find(address).ok_or(ProcessError::InNoBlock { address })?;
        let started = self.started(self.device(found.device.0.into())?)?;
        let shared = self.exporter.share(found.address, || started.pool.export(found.address))?;
        Ok((shared.handle, shared.offset.saturating_add(Bytes::new(address.0 - found.address.0))))
    }

    /// Maps what another process shared, for work of a device and of those that may touch its pool. The same handle opened
    /// again gives the same address.
    ///
    /// # Errors
    /// [`ProcessError::Share`]; what the driver answers.
    pub fn open_shared(&self, handle: &[u8], device: i64) -> Result<Address> {
        let memory = self.device(device)?;
        let peers = self.started(memory)?.pool.peers();
        self.imports.open(handle, &self.epochs, memory.id(), peers)
    }

    /// Ends one use of what [`Process::open_shared`] mapped. With the last it is unmapped, once all work that was enqueued
    /// before is done, which is waited for; where a capture is open, at a later call.
    ///
    /// # Errors
    /// [`ProcessError::NotOpen`].
    pub fn close_shared(&self, base: Address) -> Result<()> {
        self.imports.close(base)
    }

    /// Everything that is counted for a device; zeroes where its pool has not started.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`].
    pub fn stats(&self, device: i64) -> Result<DeviceStats> {
        let started = self.device(device)?.started();
        Ok(started.map_or_else(DeviceStats::default, |started| {
            let pool = &started.pool;
            // Whether a wait is over is asked of the driver.
            let waits =
                if self.stopped.load(Ordering::Acquire) { GpuWaits::default() } else { pool.gpu_waits() };
            DeviceStats::of(&pool.stats(), started.times_settled(), pool.epoch_lag(), waits)
        }))
    }

    /// Starts the peaks of a device from what is now.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`].
    pub fn reset_peaks(&self, device: i64) -> Result<()> {
        if let Some(started) = self.device(device)?.started() {
            started.pool.reset_peaks();
        }
        Ok(())
    }

    /// Starts the totals of a device, and what was done, from zero.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`].
    pub fn reset_totals(&self, device: i64) -> Result<()> {
        if let Some(started) = self.device(device)?.started() {
            started.reset_totals();
        }
        Ok(())
    }

    /// Every mapped range of a device, and what lies in it.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`].
    pub fn segments(&self, device: i64) -> Result<Vec<SegmentView>> {
        Ok(self.segments_of(self.device(device)?))
    }

    /// Starts or stops to keep events, the last `most` of them.
    pub fn keep_history(&self, on: bool, most: u64, clear: bool) {
        self.observers.history.keep(on, most, clear);
    }

    /// Whether events are kept.
    pub fn keeps_history(&self) -> bool {
        self.observers.history.is_on()
    }

    /// Who is told of every request that is about to be refused for want of memory; replaces who was told before.
    pub fn on_shortage(&self, observer: Option<OnShortage>) {
        self.observers.watch_shortage(observer);
    }

    /// Who is told of every range that is mapped and unmapped; replaces who was told before.
    pub fn on_mapping(&self, observer: Option<OnMapping>) {
        self.observers.watch_mapping(observer);
    }

    /// Ends the threads that keep epochs going. From then on no thread of ours calls the driver: frees are bookkeeping,
    /// and a miss on a caller's thread does what ticks would have done.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.devices.iter().filter_map(DeviceMemory::started).for_each(Started::stop);
    }

    #[inline]
    fn device(&self, device: i64) -> Result<&DeviceMemory> {
        let found = usize::try_from(device).ok().and_then(|index| self.devices.get(index));
        found.ok_or(ProcessError::NoSuchDevice { device, count: self.devices.len() })
    }

    #[inline]
    fn started<'a>(&self, memory: &'a DeviceMemory) -> Result<&'a Started> {
        match memory.started() {
            Some(started) => Ok(started),
            None => {
                let others = self.devices.iter().map(DeviceMemory::id).filter(|id| *id != memory.id());
                let peers = if self.config.peer_access { others.collect() } else { Vec::new() };
                memory.start(&self.epochs, &self.config, self.mappings, peers, &self.observers)
            }
        }
    }

    /// A device that has private pools.
    fn named(&self, device: i64, id: PoolId) -> Result<&Started> {
        let memory = self.device(device)?;
        memory.started().ok_or(ProcessError::UnknownPool { device: memory.id(), id })
    }

    /// Out of memory, told in full; anything else as it is.
    #[cold]
    fn refused(&self, memory: &DeviceMemory, wanted: Bytes, raw: Stream, error: PoolError) -> ProcessError {
        match memory.started().filter(|_| error.is_out_of_memory()) {
            Some(started) => self.short(memory, started, wanted, raw, Some(&error)),
            None => error.into(),
        }
    }

    #[cold]
    fn short(
        &self,
        memory: &DeviceMemory,
        started: &Started,
        wanted: Bytes,
        raw: Stream,
        error: Option<&PoolError>,
    ) -> ProcessError {
        let stats = started.pool.stats();
        let total = memory.info.memory;
        let reserved = Bytes::new(stats.all.reserved_bytes.current);
        let free = self.driver.memory_info(memory.id()).map(|info| info.free);
        let limit = match error {
            Some(PoolError::Refused { source: StitchError::OutOfMemory { limit, .. }, .. }) => *limit,
            _ => total,
        };
        let shortage = Shortage {
            device: memory.id(),
            wanted,
            total,
            free: free.unwrap_or_else(|_| total.saturating_sub(reserved)),
            limit,
            reserved,
            allocated: Bytes::new(stats.all.allocated_bytes.current),
            stitchable: stats.waste.soft,
            pending: stats.waste.stream,
        };
        if self.observers.history.is_on() {
            let place = (shortage.free.get(), wanted.get());
            self.observers.history.note(Action::OutOfMemory, memory.id(), place, raw, PoolId::default());
        }
        self.observers.tell_shortage(&shortage);
        ProcessError::OutOfMemory(Box::new(shortage))
    }
}

/// Why there is no backend, said to a library's user.
fn not_there(error: BackendError) -> ProcessError {
    match error {
        BackendError::Driver(DriverError::NoDriver { library, found }) => {
            ProcessError::NoDriver { library, found }
        }
        BackendError::Driver(error) => ProcessError::Driver(error),
        BackendError::Topology(error) => ProcessError::Topology(error),
    }
}
