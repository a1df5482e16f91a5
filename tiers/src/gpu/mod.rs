//! The memory of one GPU, handed out in blocks.
//!
//! ```text
//! GpuPool ─► Blocks ─► Core        hits and frees: one short lock
//!              ├► Miss ─► Growth ─► Execution        plans, one at a time: reserve, execute, commit or abort
//!              └► StreamOrder ─► WaitTimer, ReadHolds     streams put behind what their new bytes were last used by
//!              └► UseEvents                           when other streams are done with what was freed
//!         ─► CompletionClock                         completion points, recorded and polled; Drain: every device of the process
//!         ─► Evictions, Refills ─► ExtentRecords     extents that leave and come back; FixedBlocks stay; Protection
//!         ─► PeerAccess ─► Reach, PeerBlocks         other GPUs
//!         ─► LiveBytes ─► LiveRanges                  which bytes of blocks count
//!         ─► Domains, FreeMemory, Checkpoints, Exports, Report
//! ```
//!
//! A part owns its state, and holds or borrows the parts that it stands on, never the pool. `Core` is the one that all share.
//!
//! Locks are taken in this order, each by the part that owns it:
//!
//! | lock | of | the driver is called under it |
//! |---|---|---|
//! | growth | `Growth` | yes: to make, map, open, unmap and release memory |
//! | clock | `CompletionClock` | yes: to record completion points and to ask for them |
//! | fixed | `FixedBlocks` | no |
//! | records | `ExtentRecords` | no |
//! | layout | `Core` | yes: for a plan's calls, and for a piece of an extent that is copied and stays |
//! | allocator | `Core` | no: it is held for pure work only |
//! | owed edges, lives, live ranges, holds | `Core`, under the allocator's | no |
//!
//! Leaves, under which no other is taken: the locks of `Reach`, `Lease` and `UseEvents`; that of the clock's sleepers; those of
//! `WaitTimer` and of the event in `StreamOrder`, under which the driver is called for events.

mod block_range;
mod blocks;
mod budget;
mod checkpoint;
mod clock;
mod core;
mod domain;
mod drain;
mod error;
mod evict;
mod execute;
mod export;
mod fixed;
#[cfg(test)]
mod fixture;
mod free_memory;
mod growth;
mod holds;
mod lag;
mod lease;
mod live_bytes;
mod live_ranges;
mod lives;
mod made;
mod miss;
mod observer;
mod options;
mod order;
mod owed;
mod peer;
mod peer_blocks;
mod point;
mod protect;
mod reach;
mod reads;
mod records;
mod refill;
mod report;
mod retry;
mod stream;
mod uses;
mod waits;

use std::ops::Range;
use std::sync::Arc;

use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_device::{Address, DeviceId, Driver, ExtentProperties, Place};
use glake_stitch::{Allocator, Broken, Counters, DomainId, DomainOptions, Settings, Stats};
use glake_units::Bytes;

pub(crate) use block_range::BlockRange;
pub use blocks::Block;
use blocks::Blocks;
use checkpoint::Checkpoints;
pub use checkpoint::{Checkpoint, Restored};
pub use clock::CompletionClock;
pub(crate) use core::Core;
use domain::Domains;
use drain::Drain;
pub use drain::PendingWork;
pub use error::PoolError;
use evict::Evictions;
pub use export::Exported;
use export::Exports;
use fixed::FixedBlocks;
use free_memory::FreeMemory;
use growth::Growth;
pub use holds::{BlockId, ReadHolds};
pub use lag::CompletionLag;
pub use lease::{Credits, Lease, LeaseEvent, LeaseObserver, LeaseOptions, LeaseShort, LeaseView};
pub use live_bytes::{LiveAnswer, LiveBytes};
pub use live_ranges::ByteRange;
pub use lives::BlockLife;
pub use observer::MappingObserver;
pub use options::PoolOptions;
use order::StreamOrder;
use peer::PeerAccess;
use peer_blocks::PeerBlocks;
pub(crate) use point::CompletionPoint;
use protect::Protection;
use reach::Reach;
pub(crate) use reads::ResidentReads;
pub(crate) use records::Eviction;
use records::ExtentRecords;
use refill::Refills;
pub use report::{LiveBlock, Report};
pub use stream::PoolStream;
pub use waits::GpuWaits;
use waits::WaitTimer;

type Result<T> = std::result::Result<T, PoolError>;

/// The memory of one GPU.
#[derive(Debug)]
pub struct GpuPool {
    blocks: Blocks,
    core: Arc<Core>,
    clock: Arc<CompletionClock>,
    reach: Arc<Reach>,
    waits: Arc<WaitTimer>,
    records: Arc<ExtentRecords>,
    fixed: FixedBlocks,
    /// All that the driver shows.
    devices: DeviceSet,
    /// Whether the driver exports memory of the device at all.
    exports: bool,
    growth: Arc<Growth>,
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
        let properties =
            ExtentProperties { place: Place::Gpu(device), exportable, gpu_direct: info.gpu_direct };
        let granularity = driver.granularity(properties)?;
        let mut settings = options.settings.unwrap_or_else(|| Settings::for_memory(info.memory));
        settings.granularity = granularity;
        let completion_events =
            options.completion_events.unwrap_or_else(|| CompletionEvents::new(driver.clone()));
        if !Arc::ptr_eq(completion_events.driver(), &driver) {
            return Err(PoolError::OtherDriver { device });
        }
        let core = Arc::new(Core::new(&completion_events, device, settings)?);
        let reach = Arc::new(Reach::of(device));
        let waits = Arc::new(WaitTimer::new(driver, device));
        let clock =
            Arc::new(CompletionClock::new(core.clone(), reach.clone(), completion_events, waits.clone()));
        let records = Arc::new(ExtentRecords::new(core.clone()));
        let lease = options.lease.unwrap_or_else(|| Lease::new(device, LeaseOptions::default()));
        let growth = Growth::new(
            core.clone(),
            clock.clone(),
            records.clone(),
            reach.clone(),
            options.observer,
            lease,
            properties,
        );
        let growth = Arc::new(growth);
        let order = StreamOrder::new(core.clone(), clock.clone(), growth.clone(), waits.clone())?;
        let blocks = Blocks::new(core.clone(), clock.clone(), records.clone(), order, growth.clone());
        let fixed = FixedBlocks::new(core.clone());
        let exports = info.exportable;
        let devices = devices.iter().map(|info| info.id).collect();
        let pool = GpuPool { blocks, core, clock, reach, waits, records, fixed, devices, exports, growth };
        options.peers.into_iter().try_for_each(|peer| pool.enable_peer(peer))?;
        Ok(pool)
    }

    /// Whose memory it is.
    pub fn device(&self) -> DeviceId {
        self.core.device()
    }

    /// Hands out a block of the default domain, for work on `stream`.
    ///
    /// # Errors
    /// [`PoolError::Refused`], [`PoolError::Leased`] or [`PoolError::DeviceFull`] when there is not enough memory, after everything
    /// that may be taken back was and every pending free was waited for; [`PoolError::CaptureOpen`] where that could not be;
    /// [`PoolError::Driver`]; [`PoolError::Poisoned`].
    pub fn malloc(&self, size: Bytes, stream: PoolStream) -> Result<Block> {
        self.blocks.malloc(Allocator::default_domain(), size, stream)
    }

    /// Hands out a block of a domain.
    ///
    /// # Errors
    /// As [`GpuPool::malloc`].
    pub fn malloc_in(&self, domain: DomainId, size: Bytes, stream: PoolStream) -> Result<Block> {
        self.blocks.malloc(domain, size, stream)
    }

    /// Takes a block back; returns its size. Its stream may have its bytes at once, or when other streams that were recorded are done,
    /// others when its completion point has passed.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; nothing changes then.
    pub fn free(&self, address: Address) -> Result<Bytes> {
        self.blocks.free(address)
    }

    /// Says that work of another stream uses a block, up to its free; returns whether a block of this pool begins there. The block's own
    /// stream has its bytes again when the streams that were recorded have done what was enqueued on them before the free.
    pub fn record_stream(&self, address: Address, stream: PoolStream) -> bool {
        self.blocks.record_stream(address, stream)
    }

    /// Releases free memory until at most `keep` is reserved, or nothing is left to release; what is freed but may still
    /// be in use stays, and so does what a private pool keeps until it is released. Returns how much went.
    ///
    /// # Errors
    /// [`PoolError::Driver`]: the pool is as it was; [`PoolError::Poisoned`].
    pub fn trim(&self, keep: Bytes) -> Result<Bytes> {
        self.free_memory().trim(keep)
    }

    /// Releases all free memory of one domain, also of a private pool that keeps its own from [`GpuPool::trim`]: nothing may
    /// count on it any more, such as a captured graph that writes to it when it is replayed. Returns how much went.
    ///
    /// # Errors
    /// As [`GpuPool::trim`].
    pub fn trim_domain(&self, domain: DomainId) -> Result<Bytes> {
        self.free_memory().trim_domain(domain)
    }

    /// What bounds how much memory is made, beside the limit.
    pub fn lease(&self) -> &Arc<Lease> {
        self.growth.lease()
    }

    /// Lowers the lease by what is not made, and by free memory that goes back to the driver for it, `most` at most; what is freed but
    /// may still be in use stays. Returns by how much.
    ///
    /// # Errors
    /// As [`GpuPool::trim`], where nothing was taken.
    pub fn take_lease(&self, most: Bytes) -> Result<Bytes> {
        self.free_memory().take_lease(most)
    }

    /// Changes the most that may be reserved, as a part of the device's memory.
    pub fn set_memory_fraction(&self, fraction: f64) {
        let memory = self.core.lock().settings().memory;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let limit = (memory.get() as f64 * fraction.clamp(0.0, 1.0)) as u64;
        self.blocks.budget().set_limit(Bytes::new(limit));
    }

    /// The most that may be reserved, as a part of the device's memory.
    #[allow(clippy::cast_precision_loss)]
    pub fn memory_fraction(&self) -> f64 {
        let memory = self.core.lock().settings().memory;
        self.blocks.budget().limit().get() as f64 / memory.get() as f64
    }

    /// What is to be reserved at most, if requests can be served within it, with waits of streams where that helps; `None`: as much as
    /// the limit allows. A request that cannot is served all the same, and counted.
    pub fn set_budget(&self, budget: Option<Bytes>) {
        self.blocks.budget().set(budget);
    }

    /// What is to be reserved at most, and how many requests could not be served within it.
    pub fn budget(&self) -> (Option<Bytes>, u64) {
        self.blocks.budget().told()
    }

    /// Bytes of live blocks and of those that other streams still use.
    pub fn active(&self) -> Bytes {
        self.core.lock().active_bytes()
    }

    /// Bytes of live blocks and of those that other streams still use, and the most that they were since this was asked last.
    pub fn take_most(&self) -> (Bytes, Bytes) {
        self.core.lock().take_most()
    }

    /// The clock of the driver's completions.
    pub fn completion_events(&self) -> &Arc<CompletionEvents> {
        self.clock.completion_events()
    }

    /// As [`CompletionClock::tick`].
    ///
    /// # Errors
    /// What the driver answers; nothing is lost.
    pub fn tick(&self) -> Result<()> {
        self.clock.tick()
    }

    /// As [`CompletionClock::settle`].
    ///
    /// # Errors
    /// What the driver answers; [`glake_device::DriverError::Capturing`] while a capture is open and frees wait for its end.
    pub fn settle(&self) -> Result<()> {
        self.clock.settle()
    }

    /// A new owner of extents, with properties of its own; `None`: those of the default domain.
    pub fn add_domain(&self, options: DomainOptions, properties: Option<ExtentProperties>) -> DomainId {
        self.domains().add(options, properties)
    }

    /// A CUDA graph is captured in a domain: its memory keeps its addresses from now on, nothing of it is stitched or lent.
    pub fn keep_addresses(&self, domain: DomainId) {
        self.domains().keep_addresses(domain);
    }

    /// Gives a domain up: its memory goes back once its blocks are freed and all work enqueued before is done.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where there is no such domain.
    pub fn release_domain(&self, domain: DomainId) -> Result<()> {
        self.domains().release(domain)
    }

    /// Whether there is anything of a domain: a released one goes with the last of its memory.
    pub fn has_domain(&self, domain: DomainId) -> bool {
        self.domains().has(domain)
    }

    /// The live blocks of a domain, for [`GpuPool::restore`].
    ///
    /// # Errors
    /// [`PoolError::Refused`] where a block is stitched; in private pools none is.
    pub fn checkpoint(&self, domain: DomainId) -> Result<Checkpoint> {
        self.checkpoints().take(domain)
    }

    /// Makes exactly the blocks of a checkpoint live in a domain, at their addresses: what is live now is freed, what was
    /// live then is claimed. No stream is made to wait and no byte is written: the program knows what is in them.
    ///
    /// # Errors
    /// [`PoolError::Refused`] where the domain was released and a block would be new in it, or where memory has gone since to the driver
    /// ([`GpuPool::trim_domain`]); [`PoolError::UnknownAddress`] for the checkpoint of another pool. The same blocks as
    /// before are live then.
    pub fn restore(&self, domain: DomainId, checkpoint: &Checkpoint) -> Result<Restored> {
        self.checkpoints().restore(domain, checkpoint)
    }

    /// The physical memory of the live block that an address lies in, for another process, with descriptors of a part of its extents. It
    /// stays on its GPU from then on.
    ///
    /// The caller keeps the block until the other process is done with it; descriptors keep the memory, but not the bytes.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; [`PoolError::NotExportable`] where the domain was not made for it
    /// ([`PoolOptions::exportable`]); [`PoolError::NoDescriptors`]; [`PoolError::Evicted`] while some of it is elsewhere; what
    /// the driver answers.
    pub fn export(&self, address: Address, part: Range<usize>) -> Result<Exported> {
        Exports { core: &self.core, growth: &self.growth, supported: self.exports }.export(address, part)
    }

    /// Lets work of the program on `peer` touch this pool's memory: what is mapped now, at all its addresses, and what will be. Plain
    /// memory of this device is opened to the peer as well, which the program sees. From then on memory is lent, unmapped and
    /// released only after the peer's work, too, is done, so the peer's context is made if there is none. Twice is no error, and a
    /// device need not be let to its own memory.
    ///
    /// # Errors
    /// [`PoolError::NoSuchDevice`], or what the driver answers, above all where the two devices cannot reach each other;
    /// the peer may touch no more of the pool than before, then; plain memory may be open to it.
    pub fn enable_peer(&self, peer: DeviceId) -> Result<()> {
        self.peer_access().enable(peer)
    }

    /// Work of the program on `peer` uses this pool's memory: from now on memory is lent, unmapped and released only after that
    /// device's work, too, is done. The device is given no access that it has not.
    ///
    /// # Errors
    /// [`PoolError::Poisoned`].
    pub fn watch(&self, peer: DeviceId) -> Result<()> {
        self.peer_access().watch(peer)
    }

    /// Opens this pool's memory to work of ours on another device: what is mapped now, at all its addresses, and what will be. Whoever
    /// enqueues such work joins it into this device's context, or tells the clock of it
    /// ([`glake_device::owned::CompletionEvents::outside`]): no completion point waits for anything else there, and nothing that the program could see
    /// changes. Twice is no error.
    ///
    /// # Errors
    /// As [`GpuPool::enable_peer`].
    pub fn lend_to(&self, relay: DeviceId) -> Result<()> {
        self.peer_access().lend_to(relay)
    }

    /// Closes a domain that has no memory yet to whom the pool is lent: relays' parts of its copies go through memory of their own. What comes
    /// and goes often is opened and unmapped the faster, the fewer GPUs may touch it. Who is let in by [`GpuPool::enable_peer`] may touch it.
    pub fn close_domain(&self, domain: DomainId) {
        self.peer_access().close_domain(domain);
    }

    /// Opens a domain again that was closed: what is mapped of it, and what will be. Of another one it does nothing.
    ///
    /// # Errors
    /// What the driver answers: it is closed as before.
    pub fn open_domain(&self, domain: DomainId) -> Result<()> {
        self.peer_access().open_domain(domain)
    }

    /// The domain of the block that an address lies in, where it is closed to others to whom the pool is lent.
    pub fn closed_at(&self, address: Address) -> Option<DomainId> {
        let domain = self.reach.is_any_closed().then(|| self.find(address)).flatten()?.domain;
        (self.reach.of_domain(domain) != self.reach.given()).then_some(domain)
    }

    /// The devices, besides its own, whose work may touch memory of the pool that is not closed.
    pub fn peers(&self) -> DeviceSet {
        self.reach.given()
    }

    /// The devices, besides its own, whose work may touch memory of a domain.
    pub fn peers_of(&self, domain: DomainId) -> DeviceSet {
        self.reach.of_domain(domain)
    }

    /// The devices whose work may touch a range of the pool, and a range around it of which the same is so. Asks no driver.
    pub fn reach_of(&self, start: Address, size: Bytes) -> (DeviceSet, (Address, Bytes)) {
        let own = DeviceSet::of(self.device());
        if !self.reach.is_any_closed() {
            return (own.union(self.reach.given()), self.range());
        }
        let Some(block) = self.find(start) else { return (own.union(self.reach.let_in()), (start, size)) };
        let holds = start.0.saturating_add(size.get()) <= block.address.0.saturating_add(block.size.get());
        match holds {
            true => (own.union(self.reach.of_domain(block.domain)), (block.address, block.size)),
            // Neighbours may be of other domains.
            false => (own.union(self.reach.let_in()), (start, size)),
        }
    }

    /// The address of offset 0.
    pub fn base(&self) -> Address {
        self.core.reservation().start()
    }

    /// The pool's addresses, at home and in aliases, mapped or not: where they begin, and how many they are.
    #[inline]
    pub fn range(&self) -> (Address, Bytes) {
        (self.core.reservation().start(), self.core.reservation().size())
    }

    /// The block that begins at an address: its size and what was asked for.
    pub fn block(&self, address: Address) -> Option<(Bytes, Bytes)> {
        self.core.lock().blocks().at(self.core.offset(address).ok()?)
    }

    /// The live block that an address lies in, at its start or anywhere else: large ones, small ones and stitched ones.
    /// Slower than [`GpuPool::block`], which knows starts alone.
    pub fn find(&self, address: Address) -> Option<LiveBlock> {
        let offset = self.core.offset(address).ok()?;
        let found = self.core.lock().blocks().find(offset);
        found.map(|block| LiveBlock::of(&self.core, block))
    }

    /// Whether any of these bytes of live blocks was decommitted ([`crate::Region::decommit`]), or is about to be.
    pub fn is_decommitted(&self, address: Address, size: Bytes) -> bool {
        let (mut at, end) = (address, Address(address.0.saturating_add(size.get())));
        while at < end && self.records.are_any_decommitted() {
            let Some(block) = self.find(at) else { return false };
            let next = Address(block.address.0.saturating_add(block.size.get())).min(end);
            let Ok(range) = BlockRange::of(self, at, Bytes::new(next.0 - at.0)) else { return false };
            if range.extents(self, false).into_iter().any(|extent| self.records.is_decommitted(extent)) {
                return true;
            }
            at = next;
        }
        false
    }

    /// The live blocks of a domain, in the order of their addresses.
    pub fn blocks_of(&self, domain: DomainId) -> Vec<LiveBlock> {
        let blocks = self.core.lock().blocks().of(domain);
        blocks.into_iter().map(|block| LiveBlock::of(&self.core, block)).collect()
    }

    /// Copies bytes of a block to the host and returns when they are there. The caller orders it after the work that
    /// wrote them.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] outside the pool; the driver's answer where nothing is mapped.
    pub fn read(&self, from: Address, into: &mut [u8]) -> Result<()> {
        self.core.usable()?;
        let read = self.core.reservation().read(self.core.offset(from)?, into);
        read.map_err(|error| self.core.failed(error))
    }

    /// Copies bytes of the host into a block and returns when they are there.
    ///
    /// # Errors
    /// As [`GpuPool::read`].
    pub fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.core.usable()?;
        let written = self.core.reservation().write(self.core.offset(to)?, bytes);
        written.map_err(|error| self.core.failed(error))
    }

    /// Everything that is counted; walks the free pieces.
    pub fn stats(&self) -> Stats {
        self.core.lock().report().stats()
    }

    /// What was done, without walking anything.
    pub fn counters(&self) -> Counters {
        self.core.lock().counters()
    }

    /// Physical memory held.
    pub fn reserved(&self) -> Bytes {
        self.core.lock().reserved_bytes()
    }

    /// Checks the core's invariants: slow, for tests and suspicion.
    ///
    /// # Errors
    /// The first that is broken.
    pub fn check(&self) -> std::result::Result<(), Broken> {
        let _quiet = self.growth.quiet();
        self.core.lock().check()
    }

    /// When what was freed is free on the device too.
    pub fn clock(&self) -> &CompletionClock {
        &self.clock
    }

    /// Which bytes of single blocks count when they leave, as a program says.
    pub fn live_bytes(&self) -> LiveBytes<'_> {
        LiveBytes { core: &self.core, records: &self.records }
    }

    /// Events on live blocks, up to which something beside their streams reads them.
    pub fn read_holds(&self) -> ReadHolds<'_> {
        ReadHolds { core: &self.core }
    }

    /// What else the pool tells about itself.
    pub fn report(&self) -> Report<'_> {
        Report { core: &self.core, clock: &self.clock, waits: &self.waits, lease: self.growth.lease() }
    }

    /// Its addresses.
    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// The owners of its extents.
    pub(crate) fn domains(&self) -> Domains<'_> {
        Domains { core: &self.core, clock: &self.clock, growth: &self.growth, records: &self.records }
    }

    /// What can go back to the driver.
    pub(crate) fn free_memory(&self) -> FreeMemory<'_> {
        FreeMemory { core: &self.core, clock: &self.clock, growth: &self.growth }
    }

    /// Where the bytes of its extents are.
    pub(crate) fn records(&self) -> &ExtentRecords {
        &self.records
    }

    /// Extents on their way out.
    pub(crate) fn evictions(&self) -> Evictions<'_> {
        let GpuPool { core, growth, fixed, records, .. } = self;
        Evictions { core, growth, fixed, records }
    }

    /// Extents on their way in.
    pub(crate) fn refills(&self) -> Refills<'_> {
        Refills { core: &self.core, growth: &self.growth, records: &self.records }
    }

    /// What stays.
    pub(crate) fn fixed(&self) -> &FixedBlocks {
        &self.fixed
    }

    /// Memory for other GPUs' copies.
    pub(crate) fn peer_blocks(&self) -> PeerBlocks<'_> {
        let GpuPool { core, growth, blocks, .. } = self;
        let (domains, access, free_memory) = (self.domains(), self.peer_access(), self.free_memory());
        PeerBlocks { core, growth, blocks, domains, access, free_memory }
    }

    /// What may be written to.
    pub(crate) fn protection(&self) -> Protection<'_> {
        Protection { core: &self.core, growth: &self.growth, reach: &self.reach, drain: self.drain() }
    }

    /// Every device of the process.
    pub(crate) fn drain(&self) -> Drain<'_> {
        Drain { clock: &self.clock, reach: &self.reach, devices: self.devices }
    }

    /// All work that was enqueued before on any device of the process.
    ///
    /// # Errors
    /// What the driver answers; [`glake_device::DriverError::Capturing`] while a capture is open.
    pub fn pending_work(&self) -> Result<PendingWork> {
        self.drain().begin()
    }

    fn peer_access(&self) -> PeerAccess<'_> {
        let GpuPool { core, clock, growth, reach, .. } = self;
        PeerAccess { core, clock, growth, reach }
    }

    fn checkpoints(&self) -> Checkpoints<'_> {
        Checkpoints { core: &self.core, clock: &self.clock, growth: &self.growth }
    }
}
