//! Public interface of regions. [`Regions::decommit`] and [`Regions::commit`] serve caches that grow and shrink within one block.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use glake_device::{Address, DeviceId, Stream};
use glake_tiers::{
    ByteRange, CleanCounts, CopyPolicy, GpuPool, LiveBlock, Policy, Region, RegionError, RegionOptions,
};
use glake_units::Bytes;

use super::super::device::DeviceMemory;
use super::super::device_registry::DeviceRegistry;
use super::super::gate::{Admission, DEFAULT, Gate, Tags, UseId, WhenClosed};
use super::super::{ProcessError, Result};
use super::table::{Kind, Tagged};
use super::touch::Entered;
use super::{
    Background, Cleaner, Hook, LiveCallback, MemoryUsage, Refill, RefillReport, RegionSet, RegionView,
    Shrink, ShrinkReport, touch,
};
use crate::config;
use crate::process::sharing::Imports;

/// Regions of a process, as programs define, move and query them.
#[derive(Debug)]
pub struct Regions {
    /// Background refills; before `set`, so that they end before it is dropped.
    pub(super) background: Background,
    /// Cleaner of idle regions; before `set` for the same reason.
    pub(super) cleaner: Cleaner,
    pub(super) set: Arc<RegionSet>,
}

impl Regions {
    pub(in super::super) fn new(
        registry: &Arc<DeviceRegistry>,
        config: config::Tiers,
        imports: &Arc<Imports>,
    ) -> Regions {
        Regions {
            background: Background::default(),
            cleaner: Cleaner::default(),
            set: Arc::new(RegionSet::new(registry, config, imports)),
        }
    }

    /// Returns the part of the regions that the rest of the process uses.
    pub(in super::super) fn set(&self) -> &Arc<RegionSet> {
        &self.set
    }

    /// Stops all background work for good.
    pub(in super::super) fn stop_background(&self) {
        self.cleaner.stop();
        self.background.stop();
    }

    /// Defines a region. Repeating a definition with the same options is no error. The extents have the size `tiers.extent`.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the region has other options or its name is reserved;
    /// [`ProcessError::NoThread`] if there is no thread to clean it.
    pub fn define(&self, options: RegionOptions) -> Result<()> {
        let extent = self.set.config.extent;
        let (clean, prepare) = (options.clean, options.host_copy == CopyPolicy::Prepare);
        let kept = options.policy != Policy::Discard;
        self.set.table.define(RegionOptions { extent, closed: true, ..options })?;
        self.set.table.give_back();
        if clean && kept {
            self.set.flags.set_cleaned();
        }
        if (clean || prepare) && kept {
            self.cleaner.start(&self.set)?;
        }
        self.prepare_once()
    }

    /// Takes back one [`Regions::define`] of a tag. A region without definitions and without live blocks is forgotten once there are many:
    /// its tag is unknown then, and its memory is released.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the region does not exist, or was released as often as defined.
    pub fn release(&self, tag: &str) -> Result<()> {
        self.set.table.release(tag)
    }

    /// Routes the calling thread's allocations to this region until it leaves; private pools take precedence.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the region does not exist.
    pub fn enter(&self, tag: &str) -> Result<()> {
        let tagged = self.set.table.get(tag)?;
        touch::push(&self.set.flags, Entered::Region(tagged));
        Ok(())
    }

    /// Sends the calling thread's allocations to plain memory ([`GpuPool::malloc_plain`]) until [`Regions::leave_plain`]: it never leaves
    /// its GPU. Applies to private pools too; a region that is entered later takes precedence.
    pub fn enter_plain(&self) {
        touch::push(&self.set.flags, Entered::Plain);
    }

    /// Reverts the last [`Regions::enter_plain`] of the calling thread.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if there was none.
    pub fn leave_plain(&self) -> Result<()> {
        if touch::pop(&self.set.flags, |entered| matches!(entered, Entered::Plain)) {
            Ok(())
        } else {
            Err(ProcessError::invalid(
                "this thread allocates no plain memory: it left as often as it entered",
            ))
        }
    }

    /// Leaves the region that the calling thread entered last.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the thread is in no region.
    pub fn leave(&self) -> Result<()> {
        if touch::pop(&self.set.flags, |entered| matches!(entered, Entered::Region(_))) {
            Ok(())
        } else {
            Err(ProcessError::invalid("this thread is in no region: it left as often as it entered"))
        }
    }

    /// Seals a region: the program promises not to write to its bytes, on any device, until it is unsealed. With `strict` they are mapped
    /// read-only once no use of the region runs.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the region does not exist; [`ProcessError::Region`] if its policy is not `sealed`;
    /// [`ProcessError::StillUsed`].
    pub fn seal(&self, tag: &str, strict: bool) -> Result<()> {
        let tagged = self.set.table.get(tag)?;
        let timeout = Duration::from_millis(self.set.config.drain_timeout_ms);
        let tags = Tags::of(&[tag]);
        let closing = strict.then(|| self.set.gate.close(&tags, Some(timeout))).transpose()?;
        // A use that could still continue would write to memory that is being remapped.
        if closing.as_ref().is_some_and(|closing| !closing.is_agreed()) {
            return Err(ProcessError::not_agreed(&tags));
        }
        tagged.seal(strict)?;
        self.set.registry.observers.agent().start_is_over();
        Ok(())
    }

    /// Unseals a region: its bytes may change again.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the region does not exist; errors of the pool.
    pub fn unseal(&self, tag: &str) -> Result<()> {
        Ok(self.set.table.get(tag)?.unseal()?)
    }

    /// Pins host memory for a region ahead of time if its options ask for it.
    ///
    /// # Errors
    /// [`ProcessError::Region`].
    pub fn prepare(&self, tag: &str) -> Result<()> {
        for region in self.set.table.get(tag)?.regions() {
            region.prepare(&self.set.stores.host(region.pool().device())?)?;
        }
        Ok(())
    }

    /// Keeps the block that contains an address on its GPU if `fixed` is true; otherwise reverts one earlier call. Calls are counted.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Region`] if some of it is evicted, or was not fixed.
    pub fn fix(&self, address: Address, fixed: bool) -> Result<()> {
        if self.is_plain(address) {
            // It never leaves.
            return Ok(());
        }
        let (_, region) = self.region_at(address)?;
        Ok(if fixed { region.fix(address) } else { region.unfix(address) }?)
    }

    /// Declares the live bytes of the block that begins at an address; `None` means all bytes. Only live bytes are copied at an eviction;
    /// the others are undefined afterwards. The declaration ends with the block.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Pool`] if no block begins there, or a range exceeds it.
    pub fn set_live(&self, address: Address, ranges: Option<&[ByteRange]>) -> Result<()> {
        let pool = self.pool_of(address)?;
        self.set.live_callbacks.declare(&pool, address, ranges)
    }

    /// Sets a callback that reports the live bytes of a block, called by each shrink that takes the block: on its own thread, without
    /// locks, after the uses of the memory have ended or are parked and all GPU work has ended. If a callback fails, or all together exceed
    /// the hooks' timeout (without hooks `tiers.drain_timeout_ms`), all bytes count as live.
    ///
    /// # Errors
    /// As [`Regions::set_live`].
    pub fn ask_live(&self, address: Address, call: LiveCallback) -> Result<()> {
        self.set.live_callbacks.ask(self.pool_of(address)?, address, call)
    }

    /// Evicts GPU memory, with the gate closed for it until it is refilled. Regions of a device move one after the other, devices in
    /// parallel. Without the gate, the caller promises to enqueue no work on the memory until the refill is over.
    ///
    /// # Errors
    /// [`ProcessError::StillUsed`], [`ProcessError::Refused`] if a hook refuses or times out: nothing was
    /// moved and the gate is open. [`ProcessError::Region`]: no bytes are lost, and the same call continues.
    pub fn shrink(&self, ask: &Shrink) -> Result<ShrinkReport> {
        self.set.shrink_while(ask, &|| true)
    }

    /// Refills evicted memory at its old addresses. If `wait` is false, the refill runs in the background and logs its errors; the next
    /// user of the memory meets them again. The same happens after the timeout. Memory that is evicted by a later shrink stays evicted.
    ///
    /// # Errors
    /// [`ProcessError::StillComing`]. [`ProcessError::NoRoom`]: other users took the memory. [`ProcessError::Region`]. No bytes are lost,
    /// and the same call continues.
    pub fn refill(&self, ask: &Refill) -> Result<RefillReport> {
        if ask.wait {
            return match ask.timeout {
                Some(timeout) => self.refill_within(ask, timeout),
                None => self.set.refill(ask),
            };
        }
        let request = self.request(ask, None)?;
        let (regions, ask) = (self.set.clone(), ask.clone());
        self.background.spawn(move || {
            if let Err(error) = regions.refill_requested(&ask, Some(&request)) {
                tracing::warn!(target: "glake::regions", %error, "a refill in the background failed");
            }
        })?;
        Ok(RefillReport::default())
    }

    /// Makes later work of a stream wait until a region is on its device: it waits for a running refill; without one, the region is
    /// refilled before this returns.
    ///
    /// # Errors
    /// As [`Regions::refill`].
    pub fn wait_for(&self, tag: &str, device: i64, stream: Stream) -> Result<()> {
        let device = self.set.registry.device(device)?.id();
        let tagged = self.set.table.get(tag)?;
        for region in tagged.regions().iter().filter(|region| region.pool().device() == device) {
            match region.wait(device, stream) {
                Err(RegionError::Evicted { .. }) => self.set.bring_back(&tagged, region)?,
                waited => waited?,
            }
        }
        Ok(())
    }

    /// Sets the order of refills; tags that are not named follow in the order of their first allocations.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the region does not exist: the order is unchanged.
    pub fn set_order(&self, tags: &[String]) -> Result<()> {
        self.set.table.set_order(tags)
    }

    /// Returns every region on every device, including memory outside regions and graph pools.
    ///
    /// # Errors
    /// Errors of the pools.
    pub fn views(&self) -> Result<Vec<RegionView>> {
        self.set.views()
    }

    /// Returns the region of a block; `None` for a block outside regions, and for no block.
    pub fn tag_of(&self, address: Address) -> Option<String> {
        self.set.registry.devices.iter().find_map(|memory| {
            let started = memory.started()?;
            let LiveBlock { domain, .. } = started.pool.find(address)?;
            if started.pool.is_plain(address) {
                return None;
            }
            let (tagged, _) = self.set.table.of_domain(memory.id(), domain)?;
            (tagged.tag() != DEFAULT).then(|| tagged.tag().to_owned())
        })
    }

    /// Returns the memory in use on each GPU by holder.
    ///
    /// # Errors
    /// The driver's error when it is asked for its free memory.
    pub fn memory_usage(&self) -> Result<Vec<MemoryUsage>> {
        self.set.memory_usage()
    }

    /// Returns the gate of the regions.
    pub fn gate(&self) -> &Gate {
        &self.set.gate
    }

    /// Begins a use of memory: of these regions and memory outside regions, or of everything. None of it is evicted during the use. Uses do
    /// not nest: an inner use that begins while a shrink waits for the outer one waits for that shrink. If the timeout expires during a
    /// refill, the refill continues in the background.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the region does not exist; [`ProcessError::Closed`] with [`WhenClosed::Refuse`];
    /// [`ProcessError::HeldTooLong`]; errors of the refill.
    pub fn begin_use(&self, tags: &Tags, when: WhenClosed, timeout: Option<Duration>) -> Result<UseId> {
        let id = self.pass_gate(tags, timeout, |gate, left| gate.admit(tags, when, left))?;
        self.set.registry.observers.agent().has_loaded();
        self.set.relays.resume();
        Ok(id)
    }

    /// Waits until a use could begin, as [`Regions::begin_use`] does, but begins none: no shrink waits for the caller. If a shrink follows,
    /// the use that begins then waits again.
    ///
    /// # Errors
    /// As [`Regions::begin_use`].
    pub fn wait_for_gate(&self, tags: &Tags, when: WhenClosed, timeout: Option<Duration>) -> Result<()> {
        self.pass_gate(tags, timeout, |gate, left| gate.wait(tags, when, left))
    }

    fn pass_gate<T>(
        &self,
        tags: &Tags,
        timeout: Option<Duration>,
        attempt: impl Fn(&Gate, Option<Duration>) -> Result<Admission<T>>,
    ) -> Result<T> {
        self.check(tags)?;
        let begin = std::time::Instant::now();
        loop {
            let left = timeout.map(|timeout| timeout.saturating_sub(begin.elapsed()));
            match attempt(&self.set.gate, left)? {
                Admission::Admitted(passed) => return Ok(passed),
                Admission::Evicted(evicted) => self.refill_for_use(tags, evicted, begin, timeout)?,
            }
        }
    }

    /// Sets the hooks called before and after memory leaves or returns, replacing the previous ones. A hook gets the event as JSON on its
    /// own thread and returns 0. If the one before returns another value, or takes longer than `timeout`, the operation is cancelled. For
    /// memory that returns because it is touched, hooks are called ("touched") but not waited for.
    pub fn set_hooks(&self, before: Option<Hook>, after: Option<Hook>, timeout: Option<Duration>) {
        self.set.hooks.set(before, after, timeout);
    }

    /// Refills the memory that a copy is about to touch at an address; one load if nothing is evicted.
    ///
    /// # Errors
    /// As [`Regions::refill`].
    #[inline]
    pub fn bring_back(&self, address: Address) -> Result<()> {
        self.set.touched(address)
    }

    /// Checks that the tags exist. Memory outside regions always does; new graph pools are looked up.
    fn check(&self, tags: &Tags) -> Result<()> {
        let Tags::These(tags) = tags else { return Ok(()) };
        tags.iter().try_for_each(|tag| {
            self.set.table.find(tag).or_else(|_| {
                self.set.table.cover(&self.set.registry.devices);
                self.set.table.find(tag)
            })?;
            Ok(())
        })
    }

    /// Returns whether a live block of plain memory contains an address.
    fn is_plain(&self, address: Address) -> bool {
        let pools = self.set.registry.devices.iter().filter_map(DeviceMemory::started);
        { pools }.any(|started| started.pool.is_plain(address) && started.pool.find(address).is_some())
    }

    fn pool_of(&self, address: Address) -> Result<Arc<GpuPool>> {
        let found = self.set.started_at(address).map(|started| started.pool.clone());
        found.ok_or_else(|| self.set.not_movable(address))
    }

    /// Pins the configured host memory, with the first region.
    fn prepare_once(&self) -> Result<()> {
        let wanted = self.set.config.host_prepare;
        if wanted.is_zero() || self.set.prepared.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let regions = self.set.clone();
        self.background.spawn(move || {
            let device = regions.registry.devices.iter().find(|memory| memory.started().is_some());
            let device = device.map_or(DeviceId(0), DeviceMemory::id);
            let prepared = regions.stores.host(device).and_then(|host| Ok(host.prepare(wanted)?));
            if let Err(error) = prepared {
                tracing::warn!(target: "glake::regions", %error, "host memory was not pinned ahead");
            }
        })
    }
}

impl RegionSet {
    pub(in super::super) fn views(&self) -> Result<Vec<RegionView>> {
        self.table.cover(&self.registry.devices);
        let mut tags = self.table.named(None)?;
        self.table.sort(&mut tags);
        Ok(tags.iter().flat_map(|tagged| self.views_of(tagged)).collect())
    }

    fn views_of(&self, tagged: &Arc<Tagged>) -> Vec<RegionView> {
        let regions = tagged.regions();
        let none = RegionView {
            tag: tagged.tag().to_owned(),
            policy: tagged.options.policy,
            host_copy: tagged.options.host_copy,
            sealed: tagged.is_sealed(),
            clean: tagged.options.clean.then(CleanCounts::default),
            device: None,
            resident: Bytes::ZERO,
            evicted: Bytes::ZERO,
            decommitted: Bytes::ZERO,
            live: Bytes::ZERO,
            places: Vec::new(),
            predicted_refill: Duration::ZERO,
        };
        if regions.is_empty() {
            // A released private pool has nothing to show.
            return if tagged.kind == Kind::Graph { Vec::new() } else { vec![none] };
        }
        let of = |region: &Arc<glake_tiers::Region>| {
            let (resident, evicted) = region.sizes();
            RegionView {
                sealed: region.is_sealed(),
                clean: none.clean.map(|_| region.clean_counts(self.gate.last_use_of(tagged.tag()))),
                device: Some(region.pool().device()),
                resident,
                evicted,
                decommitted: region.decommitted(),
                live: region.pool().blocks_of(region.domain()).iter().map(|block| block.size).sum(),
                places: region.places(),
                predicted_refill: self.prediction.refill(region),
                ..none.clone()
            }
        };
        regions.iter().map(of).collect()
    }
}

impl Regions {
    /// Releases the physical memory of all extents that lie entirely in this range of a live block; returns the bytes. The block keeps its
    /// addresses; the bytes are lost and must not be accessed until they are committed. Waits for all GPU work. Memory that is fixed or
    /// shared with other processes stays.
    ///
    /// The caller promises to enqueue no work on this range until it is committed.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Region`] if the range exceeds the block, its region is sealed, or a capture is open:
    /// nothing has changed then.
    pub fn decommit(&self, address: Address, size: Bytes) -> Result<Bytes> {
        let (tagged, region) = self.region_at(address)?;
        self.set.flags.set_decommitted();
        let decommitted = region.decommit(address, size);
        // After a partial failure the uses of the region wait for the rest.
        tagged.settle(&self.set.flags, &self.set.gate);
        Ok(decommitted?.freed)
    }

    /// Creates physical memory for the decommitted parts of this range of a live block, at the same addresses; returns the bytes. The
    /// contents are undefined. Refills other evicted memory of its region first.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Region`] if the range exceeds the block, or there is no memory: the same call
    /// continues.
    pub fn commit(&self, address: Address, size: Bytes) -> Result<Bytes> {
        self.set.touched(address)?;
        let (tagged, region) = self.region_at(address)?;
        self.set.commit(&tagged, &region, address, size)
    }

    /// Reads evicted bytes of a live block from their copy in host memory: neither the GPU nor the gate is involved. Bytes that were
    /// declared dead ([`Regions::set_live`]) are left as they are in `into`.
    ///
    /// # Errors
    /// [`ProcessError::InNoBlock`]; [`ProcessError::Region`] if the range exceeds the block; [`ProcessError::NotInHostMemory`] if some of
    /// it is elsewhere.
    pub fn read_evicted(&self, address: Address, into: &mut [u8]) -> Result<()> {
        let (tagged, region) = self.region_at(address)?;
        match region.read_evicted(address, into)? {
            true => Ok(()),
            false => Err(ProcessError::NotInHostMemory { address, tag: tagged.tag().to_owned() }),
        }
    }

    /// Returns the region of the block that contains an address.
    pub(super) fn region_at(&self, address: Address) -> Result<(Arc<Tagged>, Arc<Region>)> {
        self.set.table.cover(&self.set.registry.devices);
        let found = self.set.started_at(address).and_then(|started| {
            let LiveBlock { domain, .. } = started.pool.find(address)?;
            self.set.table.of_domain(started.pool.device(), domain)
        });
        found.ok_or_else(|| self.set.not_movable(address))
    }
}
