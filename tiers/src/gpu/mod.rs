//! The memory of one GPU, handed out in blocks.
//!
//! ```text
//! malloc ─► core.take ──hit──────────────────────────────────────────► block     one short lock, no driver
//!             └ miss ─► growth lock ─► core.plan ─► execute on driver ─► commit ─► block
//!                                         ▲              └ failed ─► undo ─► abort ─► error
//! free ───► core.free                     └── epochs: recorded, polled, passed to the core
//! ```
//!
//! The core's lock is held for pure work only; the driver is called under the growth lock alone, so that hits and frees
//! of other threads go on meanwhile. One growing plan a device at a time: the driver serialises these calls anyhow.
//!
//! Invariant: every extent of the core that is resident is a key of `held.extents` between two plans, mapped where the core says; one
//! that is evicted is none, and mapped nowhere.

mod checkpoint;
mod clock;
mod domain;
mod drain;
mod edge;
mod error;
mod evict;
mod execute;
mod export;
mod fixed;
mod lag;
mod observer;
mod peer;
mod peer_blocks;
mod protect;
mod report;
mod stream;
mod waits;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use glake_device::owned::{CaptureHold, DeviceSet, Epochs, Extent, Reservation};
use glake_device::{Address, DeviceId, Driver, DriverError, ExtentProperties, Place, Stream};
use glake_stitch::{
    Allocator, Broken, DomainId, ExtentId, Grant, Outcome, Plan, Request, Settings, StitchError, StreamKey,
};
use glake_units::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;

pub use checkpoint::{Checkpoint, Restored};
use clock::EpochClock;
use edge::Edges;
pub use error::PoolError;
use evict::ExtentRecord;
pub(crate) use evict::{CompletionPoint, Eviction};
use export::Lives;
pub use export::{BlockLife, Exported, SharedExtent};
pub use lag::EpochLag;
pub use observer::MappingObserver;
use peer::Reach;
use peer_blocks::PeerBlocks;
pub use report::LiveBlock;
pub use stream::PoolStream;
pub use waits::GpuWaits;
use waits::WaitTimes;

type Result<T> = std::result::Result<T, PoolError>;

/// How a pool is made.
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// The core's knobs; `None`: the defaults for the device's memory.
    pub settings: Option<Settings>,
    /// The clock of the driver's completions; `None`: one of its own. Pools of one process share one: a pool whose memory
    /// peers may touch records events in their contexts too, so a [`CaptureHold`] of any pool must stop them all.
    pub epochs: Option<Arc<Epochs>>,
    /// Devices whose work may touch the pool's memory from the start: see [`GpuPool::enable_peer`].
    pub peers: Vec<DeviceId>,
    /// Whether other processes may be given the memory of the default domain, and of domains that name no properties: see
    /// [`GpuPool::export`]. Without effect where the driver exports no memory of the device.
    pub exportable: bool,
    /// Told of every range that is mapped and unmapped.
    pub observer: Option<Arc<dyn MappingObserver>>,
}

/// A block handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Where it begins, in the GPU's address space.
    pub address: Address,
    /// How long it is: the request rounded up to 512 bytes.
    pub size: Bytes,
}

/// What only plans touch.
#[derive(Debug)]
struct PlanState {
    extents: FxHashMap<ExtentId, Extent>,
    properties: FxHashMap<DomainId, ExtentProperties>,
    streams: FxHashMap<StreamKey, Stream>,
    /// Whose blocks are copies of what other GPUs gave up.
    peer_blocks: PeerBlocks,
}

/// The memory of one GPU.
#[derive(Debug)]
pub struct GpuPool {
    device: DeviceId,
    driver: Arc<dyn Driver>,
    /// All that the driver shows.
    devices: DeviceSet,
    epochs: Arc<Epochs>,
    /// Before the extents: what is dropped first unmaps them.
    reservation: Arc<Reservation>,
    core: Mutex<Allocator>,
    held: Mutex<PlanState>,
    /// Of extents whose bytes are elsewhere, or somewhere else too. Taken before the core's lock.
    kept: Mutex<FxHashMap<ExtentId, ExtentRecord>>,
    /// Taken before the core's lock.
    pins: Mutex<fixed::Pins>,
    lives: Lives,
    clock: Mutex<EpochClock>,
    /// Whether something was freed since the clock last looked.
    freed: AtomicBool,
    /// Woken by the first free after a pause: the threads of all tickers.
    sleepers: Mutex<Vec<std::thread::Thread>>,
    edges: Edges,
    waits: Mutex<WaitTimes>,
    observer: Option<Arc<dyn MappingObserver>>,
    reach: Reach,
    /// What extents are like where their domain does not say.
    properties: ExtentProperties,
    /// Whether the driver exports memory of the device at all.
    exports: bool,
    poison: OnceLock<String>,
}

impl GpuPool {
    /// A pool that owns nothing but addresses yet.
    ///
    /// # Errors
    /// [`PoolError::NoSuchDevice`], a knob out of range, or what the driver answers.
    pub fn new(driver: Arc<dyn Driver>, device: DeviceId, options: PoolOptions) -> Result<Self> {
        let devices = driver.devices()?;
        let info = devices.iter().find(|info| info.id == device);
        let info = info.ok_or(PoolError::NoSuchDevice { device, count: devices.len() })?;
        let exportable = options.exportable && info.exportable;
        let properties = ExtentProperties { place: Place::Gpu(device), exportable, gpu_direct: false };
        let granularity = driver.granularity(properties)?;
        let mut settings = options.settings.unwrap_or_else(|| Settings::for_memory(info.memory));
        settings.granularity = granularity;
        let core = Allocator::new(settings).map_err(|source| PoolError::Refused { device, source })?;
        let epochs = options.epochs.unwrap_or_else(|| Epochs::new(driver.clone()));
        if !Arc::ptr_eq(epochs.driver(), &driver) {
            return Err(PoolError::OtherDriver { device });
        }
        let reservation = Arc::new(Reservation::new(&epochs, device, core.address_space())?);
        let edges = Edges::new(&driver, device)?;
        let held = PlanState {
            extents: FxHashMap::default(),
            properties: FxHashMap::from_iter([(Allocator::default_domain(), properties)]),
            streams: FxHashMap::default(),
            peer_blocks: PeerBlocks::default(),
        };
        let pool = GpuPool {
            device,
            driver,
            devices: devices.iter().map(|info| info.id).collect(),
            epochs,
            reservation,
            core: Mutex::new(core),
            held: Mutex::new(held),
            kept: Mutex::default(),
            pins: Mutex::default(),
            lives: Lives::default(),
            clock: Mutex::default(),
            freed: AtomicBool::new(false),
            sleepers: Mutex::default(),
            edges,
            waits: Mutex::default(),
            observer: options.observer,
            reach: Reach::of(device),
            properties,
            exports: info.exportable,
            poison: OnceLock::new(),
        };
        options.peers.into_iter().try_for_each(|peer| pool.enable_peer(peer))?;
        Ok(pool)
    }

    /// Whose memory it is.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Hands out a block of the default domain, for work on `stream`.
    ///
    /// # Errors
    /// [`PoolError::Refused`] or [`PoolError::DeviceFull`] when there is not enough memory, after everything that may be
    /// taken back was and every pending free was waited for; [`PoolError::CaptureOpen`] where that could not be;
    /// [`PoolError::Driver`]; [`PoolError::Poisoned`].
    pub fn malloc(&self, size: Bytes, stream: PoolStream) -> Result<Block> {
        self.malloc_in(Allocator::default_domain(), size, stream)
    }

    /// Hands out a block of a domain.
    ///
    /// # Errors
    /// As [`GpuPool::malloc`].
    pub fn malloc_in(&self, domain: DomainId, size: Bytes, stream: PoolStream) -> Result<Block> {
        self.usable()?;
        let request = Request { size, stream: stream.key, domain };
        match self.hit(&request) {
            Some(grant) if !grant.edge && grant.waits.is_empty() => Ok(self.handed_out(&grant)),
            hit => self.malloc_in_order(&request, stream, hit),
        }
    }

    /// A free piece that fits. The core's part is compiled into it, and a hit's grant is not passed on: a copy reads as a
    /// whole what was just written in parts, and has to wait for it.
    #[inline]
    fn hit(&self, request: &Request) -> Option<Grant> {
        let mut core = self.core.lock();
        let grant = core.take(request)?;
        Some(self.edges.owe(grant, request.stream))
    }

    /// Hands out a block that is no hit, or one that its stream has to wait for.
    #[inline(never)]
    fn malloc_in_order(
        &self,
        request: &Request,
        stream: PoolStream,
        mut hit: Option<Grant>,
    ) -> Result<Block> {
        loop {
            let grant = match hit {
                Some(grant) => grant,
                None => self.malloc_slowly(request, stream)?,
            };
            if self.order(&grant, stream)? {
                return Ok(self.handed_out(&grant));
            }
            hit = self.hit(request);
        }
    }

    /// Takes a block back; returns its size. Its stream may have its bytes at once, others when its epoch has passed.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; nothing changes then.
    pub fn free(&self, address: Address) -> Result<Bytes> {
        let offset = self.offset(address)?;
        let (freed, emptied) = {
            let mut core = self.core.lock();
            let freed = core.free(offset);
            if freed.is_ok() {
                self.lives.end(offset);
            }
            (freed, core.take_emptied())
        };
        if !emptied.is_empty() {
            self.drop_emptied(&emptied);
        }
        let freed = freed.map_err(|_| PoolError::UnknownAddress { device: self.device, address })?;
        self.note_freed();
        Ok(freed)
    }

    /// Says that work of another stream uses a block; returns whether a block of this pool begins there.
    pub fn record_stream(&self, address: Address, stream: PoolStream) -> bool {
        self.offset(address).is_ok_and(|offset| self.core.lock().record_stream(offset, stream.key))
    }

    /// Releases free memory until at most `keep` is reserved, or nothing is left to release; what is freed but may still
    /// be in use stays, and so does what a private pool keeps until it is released. Returns how much went.
    ///
    /// # Errors
    /// [`PoolError::Driver`]: the pool is as it was; [`PoolError::Poisoned`].
    pub fn trim(&self, keep: Bytes) -> Result<Bytes> {
        self.tick()?;
        let mut held = self.growth()?;
        let before = self.core.lock().reserved_bytes();
        let plan = self.core.lock().plan_trim(keep);
        if let Some(plan) = plan {
            self.carry_out(&mut held, &plan, StreamKey::default())?;
        }
        Ok(before.saturating_sub(self.core.lock().reserved_bytes()))
    }

    /// Releases all free memory of one domain, also of a private pool that keeps its own from [`GpuPool::trim`]: nothing may
    /// count on it any more, such as a captured graph that writes to it when it is replayed. Returns how much went.
    ///
    /// # Errors
    /// As [`GpuPool::trim`], and [`PoolError::Refused`] where there is no such domain.
    pub fn trim_domain(&self, domain: DomainId) -> Result<Bytes> {
        self.tick()?;
        let mut held = self.growth()?;
        let before = self.reserved();
        let plan = self.core.lock().plan_trim_domain(domain).map_err(|source| self.refused(source))?;
        if let Some(plan) = plan {
            self.carry_out(&mut held, &plan, StreamKey::default())?;
        }
        Ok(before.saturating_sub(self.reserved()))
    }

    /// Changes the most that may be reserved, as a part of the device's memory.
    pub fn set_memory_fraction(&self, fraction: f64) {
        let mut core = self.core.lock();
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let limit = (core.settings().memory.get() as f64 * fraction.clamp(0.0, 1.0)) as u64;
        core.set_limit(Bytes::new(limit));
    }

    /// The most that may be reserved, as a part of the device's memory.
    #[allow(clippy::cast_precision_loss)]
    pub fn memory_fraction(&self) -> f64 {
        let core = self.core.lock();
        core.settings().limit.get() as f64 / core.settings().memory.get() as f64
    }

    /// While it lives no epoch is recorded: to be held around a capture, which an epoch would break.
    pub fn hold_epochs(&self) -> CaptureHold {
        self.epochs.hold()
    }

    /// The clock of the driver's completions.
    pub fn epochs(&self) -> &Arc<Epochs> {
        &self.epochs
    }

    /// The address of offset 0.
    pub fn base(&self) -> Address {
        self.reservation.start()
    }

    /// Checks the core's invariants: slow, for tests and suspicion.
    ///
    /// # Errors
    /// The first that is broken.
    pub fn check(&self) -> std::result::Result<(), Broken> {
        let _quiet = self.held.lock();
        self.core.lock().check()
    }

    /// Copies bytes of a block to the host and returns when they are there. The caller orders it after the work that
    /// wrote them.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] outside the pool; the driver's answer where nothing is mapped.
    pub fn read(&self, from: Address, into: &mut [u8]) -> Result<()> {
        self.usable()?;
        self.reservation.read(self.offset(from)?, into).map_err(|error| self.failed(error))
    }

    /// Copies bytes of the host into a block and returns when they are there.
    ///
    /// # Errors
    /// As [`GpuPool::read`].
    pub fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.usable()?;
        self.reservation.write(self.offset(to)?, bytes).map_err(|error| self.failed(error))
    }

    fn malloc_slowly(&self, request: &Request, stream: PoolStream) -> Result<Grant> {
        self.epochs.know(self.device, stream.raw);
        self.tick()?;
        self.note_lag();
        let mut held = self.growth()?;
        held.streams.insert(stream.key, stream.raw);
        let mut grow = true;
        loop {
            let outcome = {
                let mut core = self.core.lock();
                core.plan(request, grow).map(|outcome| match outcome {
                    Outcome::Ready(grant) => Outcome::Ready(self.edges.owe(grant, request.stream)),
                    other => other,
                })
            };
            match outcome.map_err(|source| self.out_of_memory(source, grow))? {
                Outcome::Ready(grant) => return Ok(grant),
                Outcome::Work(plan) => match self.carry_out(&mut held, &plan, request.stream) {
                    Ok(Some(grant)) => {
                        self.report_stitch(&plan, request);
                        self.collect(&mut held, request.stream);
                        return Ok(grant);
                    }
                    Ok(None) => grow = true,
                    Err(PoolError::Driver(error)) if error.is_out_of_memory() && grow => grow = false,
                    Err(error) => return Err(error),
                },
                // What is waited for may need memory of another thread first.
                Outcome::Wait(epoch) => {
                    drop(held);
                    match self.wait(epoch) {
                        Err(PoolError::Driver(DriverError::Capturing { .. })) => {
                            let refusal = self.core.lock().refuse(request.size);
                            return Err(PoolError::CaptureOpen { device: self.device, refusal });
                        }
                        waited => waited?,
                    }
                    held = self.growth()?;
                }
            }
        }
    }

    /// Executes a plan and commits it, or undoes and aborts it.
    fn carry_out(&self, held: &mut PlanState, plan: &Plan, stream: StreamKey) -> Result<Option<Grant>> {
        match self.execute(held, plan) {
            Ok(()) => {
                let mut core = self.core.lock();
                Ok(core.commit(plan.id).map(|grant| self.edges.owe(grant, stream)))
            }
            Err(error) => {
                self.core.lock().abort(plan.id);
                Err(error)
            }
        }
    }

    /// Unmaps idle aliases above their limit. The block that made them too many is there all the same: where this fails
    /// they stay, for the next time.
    fn collect(&self, held: &mut PlanState, stream: StreamKey) {
        let plan = self.core.lock().plan_due_collection();
        let done = plan.map_or(Ok(None), |plan| self.carry_out(held, &plan, stream));
        if let Err(error) = done {
            tracing::warn!(target: "glake::stitch", %error, "idle aliases could not be unmapped");
        }
    }

    fn report_stitch(&self, plan: &Plan, request: &Request) {
        if let Some(stitch) = &plan.stitch {
            tracing::info!(
                target: "glake::stitch",
                device = self.device.0,
                stream = request.stream.0,
                wanted = stitch.wanted.get(),
                ranges = stitch.ranges,
                extents = stitch.extents,
                grown = stitch.grown.get(),
                "stitched"
            );
        }
    }

    /// The growth lock, if the pool is still of use.
    fn growth(&self) -> Result<MutexGuard<'_, PlanState>> {
        let held = self.held.lock();
        self.usable().map(|()| held)
    }

    fn usable(&self) -> Result<()> {
        match self.poison.get() {
            Some(cause) => Err(PoolError::Poisoned { device: self.device, cause: cause.clone() }),
            None => Ok(()),
        }
    }

    /// The error to report for the driver's answer; a lost context ends the pool.
    fn failed(&self, error: DriverError) -> PoolError {
        if error.is_sticky() { self.poisoned(error.to_string()) } else { PoolError::Driver(error) }
    }

    fn poisoned(&self, cause: String) -> PoolError {
        let cause = self.poison.get_or_init(|| cause).clone();
        PoolError::Poisoned { device: self.device, cause }
    }

    /// There is something for an epoch to cover: wakes who records it.
    fn note_freed(&self) {
        if !self.freed.load(Ordering::Relaxed) {
            self.freed.store(true, Ordering::Release);
            self.sleepers.lock().iter().for_each(std::thread::Thread::unpark);
        }
    }

    fn handed_out(&self, grant: &Grant) -> Block {
        Block { address: self.address(grant.offset), size: grant.size }
    }

    fn address(&self, offset: Bytes) -> Address {
        Address(self.reservation.start().0 + offset.get())
    }

    fn offset(&self, address: Address) -> Result<Bytes> {
        let offset = address.0.checked_sub(self.reservation.start().0).map(Bytes::new);
        let inside = offset.filter(|&offset| offset < self.reservation.size());
        inside.ok_or(PoolError::UnknownAddress { device: self.device, address })
    }

    fn refused(&self, source: StitchError) -> PoolError {
        PoolError::Refused { device: self.device, source }
    }

    fn out_of_memory(&self, refusal: StitchError, grow: bool) -> PoolError {
        if grow { self.refused(refusal) } else { PoolError::DeviceFull { device: self.device, refusal } }
    }
}
