//! Memory of one GPU, allocated in blocks.
//!
//! ```text
//! GpuPool ─► Blocks ─► Core        hits and frees: one short lock
//!              ├► Miss ─► Growth ─► Execution        plans, one at a time: reserve, execute, commit or abort
//!              └► StreamOrder ─► WaitTimer, ReadHolds     make streams wait for the last use of their new bytes
//!              └► UseEvents                           completion of other streams' uses of freed blocks
//!         ─► CompletionClock                         completion points, recorded and polled; Drain: every device of the process
//!         ─► Evictions, Refills ─► ExtentRecords     extents that leave and come back; FixedBlocks stay; Protection
//!         ─► PeerAccess ─► Reach, PeerBlocks         other GPUs
//!         ─► LiveBytes ─► LiveRanges                 live bytes of blocks
//!         ─► Domains, FreeMemory, Checkpoints, Exports, Report
//! ```
//!
//! A part owns its state, and holds or borrows the parts that it depends on, never the pool. All parts share `Core`.
//!
//! Locks are taken in this order, each by the part that owns it:
//!
//! | lock | owner | driver calls under the lock |
//! |---|---|---|
//! | growth | `Growth` | yes: to make, map, open, unmap and release memory |
//! | clock | `CompletionClock` | yes: to record and query completion points |
//! | fixed | `FixedBlocks` | no |
//! | records | `ExtentRecords` | no |
//! | layout | `Core` | yes: for a plan's calls, and for a piece of a resident extent that is being copied |
//! | allocator | `Core` | no: held for pure work only |
//! | owed edges, lives, live ranges, holds | `Core`, under the allocator's | no |
//!
//! Leaf locks, under which no other lock is taken: those of `Reach`, `Lease`, `UseEvents` and the clock's sleepers; those of `WaitTimer`
//! and of the event in `StreamOrder`, under which the driver is called for events.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use blocks::{Blocks, StreamOrder};
use clock::{Drain, WaitTimer};
use domain::{Checkpoints, Domains, Exports, FreeMemory};
use evict::{Evictions, FixedBlocks, Protection, Refills};
use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_device::{Address, DeviceId, Driver, ExtentProperties, Place, Stream};
use glake_stitch::{
    Allocator, Broken, Counters, DomainId, DomainOptions, Segment, Settings, Stats, StreamKey,
};
use glake_units::Bytes;
use growth::Growth;
use peer::PeerBlocks;
use reach::Reach;
use records::ExtentRecords;
use rustc_hash::FxHashSet;

pub(crate) use block_range::BlockRange;
pub use blocks::Block;
pub(crate) use clock::CompletionPoint;
pub use clock::{CompletionClock, CompletionLag, GpuWaits, PendingWork};
pub(crate) use core::Core;
pub use core::{BlockId, BlockLife, ReadHolds};
pub use domain::{Checkpoint, Exported, Restored};
pub use error::{PoolError, PoolStream};
pub(crate) use evict::ResidentReads;
pub use evict::{LiveAnswer, LiveBytes};
pub use growth::MappingObserver;
pub use lease::{Credits, Lease, LeaseEvent, LeaseObserver, LeaseOptions, LeaseShort, LeaseView};
pub use live_ranges::ByteRange;
pub use peer::PeerAccess;
pub use records::EvictedBytes;
pub(crate) use records::Eviction;

mod block_range;
mod blocks;
mod clock;
mod core;
mod domain;
mod error;
mod evict;
#[cfg(test)]
mod fixture;
mod growth;
mod lease;
mod live_ranges;
mod peer;
mod plain;
mod reach;
mod records;
mod uses;

type Result<T> = std::result::Result<T, PoolError>;

/// Memory pool of one GPU.
#[derive(Debug)]
pub struct GpuPool {
    blocks: Blocks,
    core: Arc<Core>,
    clock: Arc<CompletionClock>,
    reach: Arc<Reach>,
    waits: Arc<WaitTimer>,
    records: Arc<ExtentRecords>,
    fixed: FixedBlocks,
    /// Devices visible to the driver.
    devices: DeviceSet,
    /// Whether the driver can export memory of this device.
    exports: bool,
    growth: Arc<Growth>,
}

impl GpuPool {
    /// Creates a pool that reserves addresses and owns no memory yet.
    ///
    /// # Errors
    /// [`PoolError::NoSuchDevice`], a setting out of range, or the driver's error.
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
        options.peers.into_iter().try_for_each(|peer| pool.peer_access().enable(peer))?;
        Ok(pool)
    }

    /// Returns the device of the pool.
    pub fn device(&self) -> DeviceId {
        self.core.device()
    }

    /// Allocates a block of the default domain for work on `stream`.
    ///
    /// # Errors
    /// [`PoolError::Refused`], [`PoolError::Leased`] or [`PoolError::DeviceFull`] if there is not enough memory after reclaiming unused
    /// memory and waiting for pending frees; [`PoolError::CaptureOpen`] if a capture prevents that wait; [`PoolError::Driver`];
    /// [`PoolError::Poisoned`].
    pub fn malloc(&self, size: Bytes, stream: PoolStream) -> Result<Block> {
        self.blocks.malloc(Allocator::default_domain(), size, stream)
    }

    /// Allocates a block of a domain.
    ///
    /// # Errors
    /// The same as [`GpuPool::malloc`].
    pub fn malloc_in(&self, domain: DomainId, size: Bytes, stream: PoolStream) -> Result<Block> {
        self.blocks.malloc(domain, size, stream)
    }

    /// Allocates a block of plain memory for a domain: at an address of the driver's own (`cuMemAlloc`), so that it has a legacy IPC handle
    /// and an address range of its own. It stays on its GPU, and is otherwise kept, lent and released like the domain's memory.
    ///
    /// # Errors
    /// The same as [`GpuPool::malloc`].
    pub fn malloc_plain(&self, domain: DomainId, size: Bytes, stream: PoolStream) -> Result<Block> {
        self.blocks.malloc(self.domains().plain(domain)?, size, stream)
    }

    /// Frees a block and returns its size. Its own stream may reuse the bytes at once, or after the recorded uses by other streams; other
    /// streams may once the free's completion point has passed.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; nothing changes.
    pub fn free(&self, address: Address) -> Result<Bytes> {
        self.blocks.free(address)
    }

    /// Records that work of another stream uses a block until its free. Returns whether a block of this pool begins at the address. After
    /// the free, the block's own stream may reuse the bytes once the recorded streams have finished the work enqueued before the free.
    pub fn record_stream(&self, address: Address, stream: PoolStream) -> bool {
        self.blocks.record_stream(address, stream)
    }

    /// Releases free memory until at most `keep` is reserved. Freed memory that may still be in use stays, and so does the memory that a
    /// private pool keeps until its release. Returns the number of bytes released.
    ///
    /// # Errors
    /// [`PoolError::Driver`]: the pool is unchanged; [`PoolError::Poisoned`].
    pub fn trim(&self, keep: Bytes) -> Result<Bytes> {
        self.free_memory().trim(keep)
    }

    /// Releases all free memory of one domain, including a private pool's, which [`GpuPool::trim`] skips. No captured graph that writes to
    /// this memory may be replayed afterwards. Returns the number of bytes released.
    ///
    /// # Errors
    /// The same as [`GpuPool::trim`].
    pub fn trim_domain(&self, domain: DomainId) -> Result<Bytes> {
        self.free_memory().trim_domain(domain)
    }

    /// Returns the lease, which bounds physical memory in addition to the limit.
    pub fn lease(&self) -> &Arc<Lease> {
        self.growth.lease()
    }

    /// Lowers the lease by its unused part and by free memory, which is released, at most `most` in total. Freed memory that may still be
    /// in use stays. Returns the number of bytes taken from the lease.
    ///
    /// # Errors
    /// The same as [`GpuPool::trim`], if nothing was taken.
    pub fn take_lease(&self, most: Bytes) -> Result<Bytes> {
        self.free_memory().take_lease(most)
    }

    /// Sets the limit of reserved memory as a fraction of the device's memory.
    pub fn set_memory_fraction(&self, fraction: f64) {
        let memory = self.core.lock().settings().memory;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let limit = (memory.get() as f64 * fraction.clamp(0.0, 1.0)) as u64;
        self.blocks.budget().set_limit(Bytes::new(limit));
    }

    /// Returns the limit of reserved memory as a fraction of the device's memory.
    #[allow(clippy::cast_precision_loss)]
    pub fn memory_fraction(&self) -> f64 {
        let memory = self.core.lock().settings().memory;
        self.blocks.budget().limit().get() as f64 / memory.get() as f64
    }

    /// Sets the budget: a soft limit of reserved memory, kept by making streams wait if that helps; `None`: the limit alone applies. A
    /// request that cannot be served within the budget exceeds it and is counted.
    pub fn set_budget(&self, budget: Option<Bytes>) {
        self.blocks.budget().set(budget);
    }

    /// Returns the budget and the number of requests that exceeded it.
    pub fn budget(&self) -> (Option<Bytes>, u64) {
        self.blocks.budget().told()
    }

    /// Returns the source of completion events.
    pub fn completion_events(&self) -> &Arc<CompletionEvents> {
        self.clock.completion_events()
    }

    /// Calls [`CompletionClock::tick`] of the pool's clock.
    ///
    /// # Errors
    /// The driver's error; no free is lost.
    pub fn tick(&self) -> Result<()> {
        self.clock.tick()?;
        self.growth.free_late();
        Ok(())
    }

    /// Calls [`CompletionClock::settle`] of the pool's clock.
    ///
    /// # Errors
    /// The driver's error; [`glake_device::DriverError::Capturing`] while a capture is open and frees wait for its end.
    pub fn settle(&self) -> Result<()> {
        self.clock.settle()
    }

    /// Adds a domain with its own extent properties; `None`: those of the default domain.
    pub fn add_domain(&self, options: DomainOptions, properties: Option<ExtentProperties>) -> DomainId {
        self.domains().add(options, properties)
    }

    /// Prepares a domain for the capture of a CUDA graph: from now on its memory keeps its addresses and is neither stitched nor lent.
    pub fn keep_addresses(&self, domain: DomainId) {
        self.domains().keep_addresses(domain);
    }

    /// Keeps all memory of a domain on its GPU until it is unfixed, memory that is made later and free memory too: libraries that it is
    /// registered with, or whose work a captured graph holds, know its physical memory.
    ///
    /// # Errors
    /// [`PoolError::Evicted`] if part of it is not on its GPU; nothing is fixed then.
    pub fn fix_domain(&self, domain: DomainId, fixed: bool) -> Result<()> {
        self.fixed.fix_domain(domain, fixed)
    }

    /// Releases a domain: its memory is freed once its blocks are freed and all work enqueued before has completed.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if there is no such domain.
    pub fn release_domain(&self, domain: DomainId) -> Result<()> {
        self.domains().release(domain)
    }

    /// Returns whether a domain exists: a released one disappears with the last of its memory.
    pub fn has_domain(&self, domain: DomainId) -> bool {
        self.domains().has(domain)
    }

    /// Records the live blocks of a domain for [`GpuPool::restore`].
    ///
    /// # Errors
    /// [`PoolError::Refused`] if a block is stitched, which never happens in private pools.
    pub fn checkpoint(&self, domain: DomainId) -> Result<Checkpoint> {
        self.checkpoints().take(domain)
    }

    /// Makes exactly the blocks of a checkpoint live in a domain, at their addresses: frees the current blocks and claims the recorded
    /// ones. No stream waits and no byte is written: the program knows the contents.
    ///
    /// # Errors
    /// [`PoolError::Refused`] if the domain was released and a block would be new in it, or if its memory has been released to the driver
    /// ([`GpuPool::trim_domain`]); [`PoolError::UnknownAddress`] for the checkpoint of another pool. The live blocks are unchanged then.
    pub fn restore(&self, domain: DomainId, checkpoint: &Checkpoint) -> Result<Restored> {
        self.checkpoints().restore(domain, checkpoint)
    }

    /// Exports the physical memory of the live block at an address to another process, with descriptors for a part of its extents. The
    /// memory stays on its GPU from then on.
    ///
    /// The caller keeps the block until the other process has finished with it; descriptors keep the memory, but not the bytes.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; [`PoolError::NotExportable`] if the domain was not created as exportable
    /// ([`PoolOptions::exportable`]); [`PoolError::NoDescriptors`]; [`PoolError::Evicted`] while part of the block is evicted; the driver's
    /// error.
    pub fn export(&self, address: Address, part: Range<usize>) -> Result<Exported> {
        Exports { core: &self.core, growth: &self.growth, supported: self.exports }.export(address, part)
    }

    /// Returns the operations on the access of other devices.
    pub fn peer_access(&self) -> PeerAccess<'_> {
        let GpuPool { core, clock, growth, reach, .. } = self;
        PeerAccess { core, clock, growth, reach }
    }

    /// Returns the devices whose work may access a range of the pool, and a range around it with the same devices. Makes no driver call.
    pub fn reach_of(&self, start: Address, size: Bytes) -> (DeviceSet, (Address, Bytes)) {
        let own = DeviceSet::of(self.device());
        if !self.reach.is_any_closed() {
            return (own.union(self.reach.given()), self.range());
        }
        let Some(block) = self.find(start) else { return (own.union(self.reach.let_in()), (start, size)) };
        let holds = start.0.saturating_add(size.get()) <= block.address.0.saturating_add(block.size.get());
        match holds {
            true => (own.union(self.reach.of_domain(block.domain)), (block.address, block.size)),
            // Adjacent extents may belong to other domains.
            false => (own.union(self.reach.let_in()), (start, size)),
        }
    }

    /// Returns the address of an offset of a segment or of a block in it.
    pub fn address_of(&self, offset: Bytes) -> Address {
        self.core.address(offset)
    }

    /// Returns whether an address lies in plain memory of the pool ([`GpuPool::malloc_plain`]).
    pub fn is_plain(&self, address: Address) -> bool {
        self.core.plain().offset(address).is_some()
    }

    /// Returns the address of offset 0.
    pub fn base(&self) -> Address {
        self.core.reservation().start()
    }

    /// Returns the pool's address range, home and aliases, mapped or not: its start and its size.
    #[inline]
    pub fn range(&self) -> (Address, Bytes) {
        (self.core.reservation().start(), self.core.reservation().size())
    }

    /// Returns the size and the requested size of the block that begins at an address.
    pub fn block(&self, address: Address) -> Option<(Bytes, Bytes)> {
        self.core.lock().blocks().at(self.core.offset(address).ok()?)
    }

    /// Finds the live block that contains an address, of any kind: large, small or stitched. Slower than [`GpuPool::block`], which only
    /// knows the starts of blocks.
    pub fn find(&self, address: Address) -> Option<LiveBlock> {
        let offset = self.core.offset(address).ok()?;
        let found = self.core.lock().blocks().find(offset);
        found.map(|block| LiveBlock::of(&self.core, block))
    }

    /// Returns whether any of these bytes of live blocks is decommitted ([`crate::Region::decommit`]), or about to be.
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

    /// Returns the live blocks of a domain in address order.
    pub fn blocks_of(&self, domain: DomainId) -> Vec<LiveBlock> {
        let twin = self.core.plain().twin(domain);
        let of = |domain| self.core.lock().blocks().of(domain);
        let blocks = [Some(domain), twin].into_iter().flatten().flat_map(of);
        let mut blocks: Vec<_> = blocks.map(|block| LiveBlock::of(&self.core, block)).collect();
        blocks.sort_unstable_by_key(|block| block.address);
        blocks
    }

    /// Returns the domains with live blocks. Walks all live blocks.
    pub fn live_domains(&self) -> FxHashSet<DomainId> {
        self.core.lock().blocks().domains()
    }

    /// Returns the live blocks with bytes in an extent, in address order.
    pub(crate) fn blocks_in(&self, extent: glake_stitch::ExtentId) -> Vec<LiveBlock> {
        let core = self.core.lock();
        let blocks = core.blocks();
        let (_, domain) = core.extents().size_and_domain(extent);
        let is_in = |block: &glake_stitch::LiveBlock| {
            let home = blocks.home_of(block.offset).unwrap_or_default();
            home.into_iter().any(|part| core.extents().touching(part).iter().any(|(of, _)| *of == extent))
        };
        let found = blocks.of(domain).into_iter().filter(is_in);
        found.map(|block| LiveBlock::of(&self.core, block)).collect()
    }

    /// Copies bytes of a block to the host and waits for completion. The caller orders the copy after the work that wrote the bytes.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] outside the pool; the driver's error if the bytes are not mapped.
    pub fn read(&self, from: Address, into: &mut [u8]) -> Result<()> {
        self.core.usable()?;
        let offset = self.core.offset(from)?;
        let read = match self.core.plain().holds(offset) {
            true => self.growth.quiet().with_plain(offset, |memory, at| memory.read(at, into)),
            false => Some(self.core.reservation().read(offset, into)),
        };
        let read = read.ok_or_else(|| self.core.unknown_offset(offset))?;
        read.map_err(|error| self.core.failed(error))
    }

    /// Copies bytes of the host into a block and waits for completion.
    ///
    /// # Errors
    /// The same as [`GpuPool::read`].
    pub fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.core.usable()?;
        let offset = self.core.offset(to)?;
        let written = match self.core.plain().holds(offset) {
            true => self.growth.quiet().with_plain(offset, |memory, at| memory.write(at, bytes)),
            false => Some(self.core.reservation().write(offset, bytes)),
        };
        let written = written.ok_or_else(|| self.core.unknown_offset(offset))?;
        written.map_err(|error| self.core.failed(error))
    }

    /// Returns all statistics ([`Allocator::stats`]).
    pub fn stats(&self) -> Stats {
        self.core.lock().stats()
    }

    /// Returns the counters alone.
    pub fn counters(&self) -> Counters {
        self.core.lock().counters()
    }

    /// Returns the physical memory of the pool.
    pub fn reserved(&self) -> Bytes {
        self.core.lock().reserved_bytes()
    }

    /// Checks the allocator's invariants. Slow: meant for tests and debugging.
    ///
    /// # Errors
    /// The first broken invariant.
    pub fn check(&self) -> std::result::Result<(), Broken> {
        let _quiet = self.growth.quiet();
        self.core.lock().check()
    }

    /// Returns the clock, which tracks when freed memory is no longer in use on the device.
    pub fn clock(&self) -> &CompletionClock {
        &self.clock
    }

    /// Returns the interface for declaring live bytes of blocks.
    pub fn live_bytes(&self) -> LiveBytes<'_> {
        LiveBytes { core: &self.core, records: &self.records }
    }

    /// Returns the interface for read holds: events until which other components read live blocks.
    pub fn read_holds(&self) -> ReadHolds<'_> {
        ReadHolds { core: &self.core }
    }

    /// Returns further statistics of the pool.
    pub fn report(&self) -> Report<'_> {
        let GpuPool { core, clock, waits, records, growth, .. } = self;
        Report { core, clock, waits, records, lease: growth.lease() }
    }

    /// Returns the core of the pool.
    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// Returns the operations on domains.
    pub(crate) fn domains(&self) -> Domains<'_> {
        Domains { core: &self.core, clock: &self.clock, growth: &self.growth, records: &self.records }
    }

    /// Returns the operations on free memory.
    pub(crate) fn free_memory(&self) -> FreeMemory<'_> {
        FreeMemory { core: &self.core, clock: &self.clock, growth: &self.growth }
    }

    /// Returns the records of where extents' bytes are.
    pub(crate) fn records(&self) -> &ExtentRecords {
        &self.records
    }

    /// Returns the operations that evict extents.
    pub(crate) fn evictions(&self) -> Evictions<'_> {
        let GpuPool { core, growth, fixed, records, .. } = self;
        Evictions { core, growth, fixed, records }
    }

    /// Returns the operations that refill extents.
    pub(crate) fn refills(&self) -> Refills<'_> {
        Refills { core: &self.core, growth: &self.growth, records: &self.records }
    }

    /// Returns the set of fixed blocks.
    pub(crate) fn fixed(&self) -> &FixedBlocks {
        &self.fixed
    }

    /// Returns the memory for other GPUs' copies.
    pub(crate) fn peer_blocks(&self) -> PeerBlocks<'_> {
        let GpuPool { core, growth, blocks, .. } = self;
        let (domains, access, free_memory) = (self.domains(), self.peer_access(), self.free_memory());
        PeerBlocks { core, growth, blocks, domains, access, free_memory }
    }

    /// Returns the operations on write access.
    pub(crate) fn protection(&self) -> Protection<'_> {
        Protection { core: &self.core, growth: &self.growth, reach: &self.reach, drain: self.drain() }
    }

    /// Returns the wait for all devices of the process.
    pub(crate) fn drain(&self) -> Drain<'_> {
        Drain { clock: &self.clock, reach: &self.reach, devices: self.devices }
    }

    /// Records all work enqueued so far on any device of the process.
    ///
    /// # Errors
    /// The driver's error; [`glake_device::DriverError::Capturing`] while a capture is open.
    pub fn pending_work(&self) -> Result<PendingWork> {
        self.drain().begin()
    }

    fn checkpoints(&self) -> Checkpoints<'_> {
        Checkpoints { core: &self.core, clock: &self.clock, growth: &self.growth }
    }
}

/// Options of a pool at its creation.
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// Settings of the allocator; `None`: the defaults for the device's memory.
    pub settings: Option<Settings>,
    /// Source of completion events; `None`: the pool creates its own. The pools of one process should share one: a pool that peers access
    /// records events in their contexts too, so that a `CaptureHold` must stop all pools.
    pub completion_events: Option<Arc<CompletionEvents>>,
    /// Devices whose work may access the pool's memory from the start: see [`PeerAccess::enable`].
    pub peers: Vec<DeviceId>,
    /// Whether memory of the default domain, and of domains without their own properties, can be exported to other processes: see
    /// [`GpuPool::export`]. Without effect if the driver cannot export memory of the device.
    pub exportable: bool,
    /// Observer of mappings; `None`: there is none.
    pub observer: Option<Arc<dyn MappingObserver>>,
    /// Lease that bounds physical memory; `None`: only the limit applies.
    pub lease: Option<Arc<Lease>>,
}

/// Block that was allocated and not freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Address of the first byte.
    pub address: Address,
    /// Size of the block: the request rounded up to 512 bytes.
    pub size: Bytes,
    /// Size that was requested.
    pub requested: Bytes,
    /// Domain of the block.
    pub domain: DomainId,
    /// Stream for which the block was allocated.
    pub stream: StreamKey,
}

impl LiveBlock {
    pub(super) fn of(core: &Core, block: glake_stitch::LiveBlock) -> Self {
        let glake_stitch::LiveBlock { offset, size, requested, domain, stream } = block;
        let domain = if core.plain().holds(offset) { core.plain().parent(domain) } else { domain };
        LiveBlock { address: core.address(offset), size, requested, domain, stream }
    }
}

/// Statistics of a pool beyond its blocks.
#[derive(Debug)]
pub struct Report<'a> {
    core: &'a Core,
    clock: &'a CompletionClock,
    waits: &'a WaitTimer,
    records: &'a ExtentRecords,
    lease: &'a Lease,
}

impl Report<'_> {
    /// Returns the largest request of the default domain that could be served now ([`Allocator::largest`]), given the pool's limit, the
    /// driver's free memory and the lease.
    ///
    /// # Errors
    /// The driver's error when queried for its free memory.
    pub fn largest(&self) -> Result<Bytes> {
        self.core.usable()?;
        let info = self.core.driver().memory_info(self.core.device());
        let free = info.map_err(|error| self.core.failed(error))?.free.min(self.lease.room());
        let largest = self.core.lock().largest(Allocator::default_domain(), free);
        largest.map_err(|source| self.core.refused(source))
    }

    /// Returns the GPU time that streams spent waiting for other streams without the program's request, under
    /// [`glake_stitch::Borrow::Wait`]. Unfinished waits are counted but not timed.
    pub fn gpu_waits(&self) -> GpuWaits {
        self.waits.told()
    }

    /// Resets the peaks to the current values.
    pub fn reset_peaks(&self) {
        self.core.lock().reset_peaks();
    }

    /// Returns the bytes of live blocks and of freed blocks that other streams still use.
    pub fn active(&self) -> Bytes {
        self.core.lock().active_bytes()
    }

    /// Returns [`Report::active`] and its maximum since the last call.
    pub fn take_most(&self) -> (Bytes, Bytes) {
        self.core.lock().take_most()
    }

    /// Returns the total number of such waits, which is the number of the next one.
    pub fn gpu_waits_made(&self) -> u64 {
        self.waits.made()
    }

    /// Returns how long a stream stood still in the finished waits with these numbers; only the last few thousand are known.
    pub fn gpu_wait_time(&self, stream: Stream, numbers: &Range<u64>) -> Duration {
        self.waits.time_of(stream, numbers)
    }

    /// Resets the totals, the counters, and the statistics of lags and waits.
    pub fn reset_totals(&self) {
        self.core.lock().reset_totals();
        self.clock.reset_lag();
        self.waits.reset();
        self.lease.reset();
    }

    /// Returns the number of free ranges.
    pub fn free_ranges(&self) -> usize {
        self.core.lock().report().free_ranges()
    }

    /// Returns every mapped range with its contents; offsets count from [`GpuPool::base`], except for plain memory
    /// ([`GpuPool::address_of`]).
    pub fn segments(&self) -> Vec<Segment> {
        let mut segments = self.core.lock().report().segments();
        for segment in segments.iter_mut().filter(|segment| self.core.plain().holds(segment.offset)) {
            segment.domain = self.core.plain().parent(segment.domain);
        }
        segments
    }

    /// Returns the evicted bytes by place, and the bytes copied by evictions and refills so far. Visits all evicted extents.
    pub fn evicted(&self) -> EvictedBytes {
        self.records.evicted()
    }

    /// Returns the bytes of plain memory, in use or free.
    pub fn plain_bytes(&self) -> Bytes {
        let twins = self.core.plain().all_twins();
        let core = self.core.lock();
        let views = twins.into_iter().flat_map(|twin| core.extents().of(twin));
        views.map(|view| view.size).sum()
    }
}
