//! Physical memory of a pool, and the lock under which it is created, mapped and released.
//!
//! Invariants: a device executes one plan at a time, because the driver serialises these calls anyway; hits and frees of other threads
//! proceed meanwhile. Between two plans, every resident extent of the allocator is a key of `extents` and is mapped at the addresses in the
//! allocator; an evicted extent is neither. Memory is counted by the lease before it is created, all of a plan at once.
//!
//! `Execution`: a plan's steps on the driver, with rollback. `ExtentMemory`: physical memory of an extent, counted by the lease until the
//! driver has released it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glake_device::owned::{Extent, Mapping, PlainMemory, Sequence};
use glake_device::{Address, DeviceId, DriverError, ExtentProperties, Refusal, Stream};
use glake_stitch::{Allocator, DomainId, ExtentId, Grant, Plan, Step, StreamKey};
use glake_units::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;

use super::clock::CompletionClock;
use super::core::Core;
use super::error::retry;
use super::lease::{Lease, LeaseCharge};
use super::reach::Reach;
use super::records::ExtentRecords;
use super::{PoolError, Result};

/// Physical memory of a pool and its lock.
#[derive(Debug)]
pub(super) struct Growth {
    // Declared before the extents: the fields dropped first unmap them.
    core: Arc<Core>,
    clock: Arc<CompletionClock>,
    records: Arc<ExtentRecords>,
    reach: Arc<Reach>,
    observer: Option<Arc<dyn MappingObserver>>,
    lease: Arc<Lease>,
    /// Extent properties of domains without their own.
    properties: ExtentProperties,
    /// Whether plain memory waits for the end of a capture to be freed.
    has_unfreed: AtomicBool,
    held: Mutex<PlanState>,
}

/// State that only plans touch.
#[derive(Debug, Default)]
struct PlanState {
    extents: FxHashMap<ExtentId, ExtentMemory>,
    /// Plain memory that plans have released and the driver has not freed yet, because a capture was open.
    unfreed: Vec<ExtentMemory>,
    properties: FxHashMap<DomainId, ExtentProperties>,
    streams: FxHashMap<StreamKey, Stream>,
    /// Domains of peer blocks by owner, created on demand: the driver's access calls take longer the more GPUs they cover.
    owners: FxHashMap<DeviceId, DomainId>,
}

/// Guard of the growth lock, with the operations allowed under it.
#[derive(Debug)]
pub(super) struct GrowthGuard<'a> {
    growth: &'a Growth,
    held: MutexGuard<'a, PlanState>,
}

impl Growth {
    /// Creates the state of a pool without memory.
    pub(super) fn new(
        core: Arc<Core>,
        clock: Arc<CompletionClock>,
        records: Arc<ExtentRecords>,
        reach: Arc<Reach>,
        observer: Option<Arc<dyn MappingObserver>>,
        lease: Arc<Lease>,
        properties: ExtentProperties,
    ) -> Self {
        let (has_unfreed, held) = Default::default();
        Growth { core, clock, records, reach, observer, lease, properties, has_unfreed, held }
    }

    /// Returns the lease that bounds the created memory.
    pub(super) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// Takes the growth lock; fails if the pool is poisoned.
    pub(super) fn lock(&self) -> Result<GrowthGuard<'_>> {
        let growing = self.quiet();
        self.core.usable().map(|()| growing)
    }

    /// Takes the growth lock, even if the pool is poisoned.
    pub(super) fn quiet(&self) -> GrowthGuard<'_> {
        GrowthGuard { growth: self, held: self.held.lock() }
    }

    /// Frees plain memory that waited for the end of a capture, unless a plan is carried out, which frees it itself.
    #[inline]
    pub(super) fn free_late(&self) {
        if self.has_unfreed.load(Ordering::Relaxed)
            && let Some(held) = self.held.try_lock()
        {
            GrowthGuard { growth: self, held }.free_plain();
        }
    }

    /// Returns the extent properties of domains without their own.
    pub(super) fn properties(&self) -> ExtentProperties {
        self.properties
    }

    /// Returns the driver handles of streams that have allocated memory.
    pub(super) fn streams(&self, keys: &[StreamKey]) -> Vec<Stream> {
        let held = self.held.lock();
        keys.iter().filter_map(|key| held.streams.get(key).copied()).collect()
    }
}

impl GrowthGuard<'_> {
    /// Executes a plan and commits it; on failure rolls back and aborts it.
    pub(super) fn carry_out(&mut self, plan: &Plan, stream: StreamKey) -> Result<Option<Grant>> {
        let growth = self.growth;
        let (core, clock, records) = (&growth.core, &growth.clock, &growth.records);
        let layout = core.lock_layout();
        let done = self.count(plan.created()).and_then(|mut counted| {
            Execution { core, clock, records, growing: self, counted: &mut counted }.run(plan)
        });
        drop(layout);
        self.free_plain();
        match done {
            Ok(()) => {
                let grant = core.commit(plan, stream);
                if !plan.created().is_zero() {
                    growth.lease.tell_made();
                }
                Ok(grant)
            }
            Err(error) => {
                core.lock().abort(plan.id);
                Err(error)
            }
        }
    }

    /// Counts memory in the lease before it is created.
    pub(super) fn count(&self, size: Bytes) -> Result<LeaseCharge> {
        let device = self.growth.core.device();
        self.growth.lease.count(size).map_err(|short| PoolError::Leased { device, short, in_capture: false })
    }

    /// Creates memory with a domain's properties; its size is already counted.
    pub(super) fn make(
        &self,
        size: Bytes,
        domain: DomainId,
        counted: &mut LeaseCharge,
    ) -> std::result::Result<ExtentMemory, DriverError> {
        let core = &self.growth.core;
        let memory = if core.is_plain(domain) {
            Memory::Plain(retry(|| PlainMemory::new(core.driver(), core.device(), size))?)
        } else {
            let properties = self.held.properties.get(&domain).copied().unwrap_or(self.growth.properties);
            Memory::Mapped(retry(|| Extent::new(core.driver(), size, properties))?)
        };
        Ok(ExtentMemory::new(memory, counted.split(size)))
    }

    /// Frees plain memory that plans have released. During a capture, in which the driver may refuse to free, the memory waits.
    pub(super) fn free_plain(&mut self) {
        if self.held.unfreed.is_empty() {
            return;
        }
        let unfreed = &mut self.held.unfreed;
        let events = self.growth.clock.completion_events();
        // The driver waits for the device: the pool's work on this memory is done, other work may run.
        events.outside_captures(|| unfreed.clear());
        self.growth.has_unfreed.store(!self.held.unfreed.is_empty(), Ordering::Relaxed);
    }

    /// Removes an extent that a plan has released.
    fn release(&mut self, extent: ExtentId) {
        let released = self.held.extents.remove(&extent);
        self.held.unfreed.extend(released.filter(|memory| memory.plain().is_some()));
        self.growth.has_unfreed.store(!self.held.unfreed.is_empty(), Ordering::Relaxed);
    }

    fn plain(&self, extent: ExtentId) -> Option<&PlainMemory> {
        self.held.extents.get(&extent).and_then(ExtentMemory::plain)
    }

    /// Calls `access` with the plain memory at an offset and the position in it; `None` if it has been released.
    pub(super) fn with_plain<T>(
        &self,
        offset: Bytes,
        access: impl FnOnce(&PlainMemory, Bytes) -> T,
    ) -> Option<T> {
        let core = &self.growth.core;
        let address = core.address(offset);
        let memory = self.held.extents.values().filter_map(ExtentMemory::plain);
        let found = memory.filter_map(|memory| Some((memory, address.0.checked_sub(memory.start().0)?)));
        let found = found.into_iter().find(|(memory, at)| *at < memory.size().get());
        found.map(|(memory, at)| access(memory, Bytes::new(at)))
    }

    pub(super) fn insert(&mut self, extent: ExtentId, made: ExtentMemory) {
        self.held.extents.insert(extent, made);
    }

    pub(super) fn remove(&mut self, extent: ExtentId) -> Option<ExtentMemory> {
        self.held.extents.remove(&extent)
    }

    pub(super) fn extent(&self, extent: ExtentId) -> Option<&Extent> {
        self.held.extents.get(&extent).and_then(ExtentMemory::memory)
    }

    /// Maps an extent, or records the address of a plain one; does nothing if the extent has no memory.
    pub(super) fn map(
        &self,
        extent: ExtentId,
        offset: Bytes,
    ) -> std::result::Result<Option<Mapping>, DriverError> {
        if let Some(memory) = self.plain(extent) {
            let core = &self.growth.core;
            let home = Address(core.reservation().start().0 + offset.get());
            core.plain().add(offset, memory.size(), home, memory.start());
            return Ok(None);
        }
        let map = |extent| retry(|| self.growth.core.reservation().map(offset, extent));
        self.extent(extent).map(map).transpose()
    }

    /// Grants access to a range of one domain.
    pub(super) fn give_access(
        &self,
        domain: DomainId,
        offset: Bytes,
        size: Bytes,
    ) -> std::result::Result<(), DriverError> {
        if !self.growth.core.is_plain(domain) {
            let access = self.growth.reach.access(domain, self.owner_of(domain));
            retry(|| self.growth.core.reservation().set_access(offset, size, &access))?;
        }
        self.tell_mapped(offset, size);
        Ok(())
    }

    pub(super) fn tell_mapped(&self, offset: Bytes, size: Bytes) {
        let core = &self.growth.core;
        if let Some(observer) = &self.growth.observer {
            observer.mapped(core.device(), core.address(offset), size);
        }
    }

    pub(super) fn tell_unmapping(&self, offset: Bytes, size: Bytes) {
        let core = &self.growth.core;
        if let Some(observer) = &self.growth.observer {
            observer.unmapping(core.device(), core.address(offset), size);
        }
    }

    /// Returns the mappings of an extent with memory, the home address first.
    pub(super) fn mappings_of(&self, extent: ExtentId) -> Vec<Mapping> {
        let Some(size) = self.extent(extent).map(Extent::size) else { return Vec::new() };
        let addresses = self.growth.core.lock().extents().addresses_of(extent);
        addresses.into_iter().map(|offset| Mapping { offset, size }).collect()
    }

    /// Returns the current mappings of a domain.
    pub(super) fn mappings_in(&self, domain: DomainId) -> Vec<Mapping> {
        let core = &self.growth.core;
        let views = core.lock().extents().of(domain);
        let mappings = views.iter().flat_map(|view| self.mappings_of(view.extent));
        mappings.filter(|mapping| core.reservation().is_mapped(*mapping)).collect()
    }

    /// Returns the mappings of adjacent extents from `offset` on.
    pub(super) fn mappings_from(&self, offset: Bytes, extents: &[ExtentId]) -> Vec<Mapping> {
        let mut at = offset;
        let sizes = extents.iter().filter_map(|extent| self.extent(*extent)).map(Extent::size);
        sizes
            .map(|size| {
                let mapping = Mapping { offset: at, size };
                at = at.saturating_add(size);
                mapping
            })
            .collect()
    }

    /// Makes an extent readable and writable at its home address before a copy: copies need both accesses.
    pub(super) fn open_home(&self, extent: ExtentId) -> Result<()> {
        let core = &self.growth.core;
        let Some(home) = self.mappings_of(extent).first().copied() else { return Ok(()) };
        let domain = core.lock().extents().size_and_domain(extent).1;
        if self.growth.reach.may_all_write(domain, core.reservation().writers(home)) {
            return Ok(());
        }
        self.give_access(domain, home.offset, home.size).map_err(|error| core.failed(error))
    }

    /// Sets the extent properties of a domain.
    pub(super) fn set_properties(&mut self, domain: DomainId, properties: ExtentProperties) {
        if properties != self.growth.properties {
            self.held.properties.insert(domain, properties);
        }
    }

    /// Registers the driver handle of a stream that allocates memory.
    pub(super) fn know(&mut self, key: StreamKey, stream: Stream) {
        self.held.streams.insert(key, stream);
    }

    /// Returns the domains of peer blocks, by owner.
    pub(super) fn owners(&mut self) -> &mut FxHashMap<DeviceId, DomainId> {
        &mut self.held.owners
    }

    /// Returns the owner of the peer blocks in a domain.
    fn owner_of(&self, domain: DomainId) -> Option<DeviceId> {
        self.held.owners.iter().find(|(_, known)| **known == domain).map(|(owner, _)| *owner)
    }
}

/// Execution of one plan.
#[derive(Debug)]
pub(super) struct Execution<'a, 'g> {
    pub(super) core: &'a Core,
    pub(super) clock: &'a CompletionClock,
    pub(super) records: &'a ExtentRecords,
    pub(super) growing: &'a mut GrowthGuard<'g>,
    /// Lease account of the plan's new extents.
    pub(super) counted: &'a mut LeaseCharge,
}

impl Execution<'_, '_> {
    /// Executes all steps of a plan, or none: on failure the driver's state is restored, or the pool is poisoned.
    pub(super) fn run(&mut self, plan: &Plan) -> Result<()> {
        for (done, step) in plan.steps.iter().enumerate() {
            if let Err(error) = self.step(step) {
                return Err(self.undo(&plan.steps[..done], error));
            }
        }
        for step in &plan.steps {
            if let Step::Release { extent, .. } = step {
                self.growing.release(*extent);
                self.records.forget(*extent);
            }
        }
        Ok(())
    }

    fn step(&mut self, step: &Step) -> std::result::Result<(), DriverError> {
        match step {
            Step::Create { extent, size, domain } => {
                let made = self.growing.make(*size, *domain, self.counted)?;
                self.growing.insert(*extent, made);
                Ok(())
            }
            Step::Map { extent, offset, .. } => self.growing.map(*extent, *offset).map(|_| ()),
            Step::Access { offset, size, domain } => self.growing.give_access(*domain, *offset, *size),
            Step::Unmap { offset, size, .. } if self.core.plain().holds(*offset) => {
                self.growing.tell_unmapping(*offset, *size);
                self.core.plain().remove(*offset, *size);
                Ok(())
            }
            Step::Unmap { offset, size, extents } => {
                let proof = self.clock.proof();
                let mappings = self.growing.mappings_from(*offset, extents);
                let reservation = self.core.reservation();
                reservation.retire(&mappings, proof.sequence())?;
                self.growing.tell_unmapping(*offset, *size);
                let unmapped = match retry(|| reservation.unmap(&mappings, &proof)) {
                    Err(DriverError::Refused { reason: Refusal::InUse, .. }) => {
                        self.unmap_what_was_read(&mappings)
                    }
                    answer => answer,
                };
                if unmapped.is_err() {
                    reservation.revive(&mappings)?;
                    self.growing.tell_mapped(*offset, *size);
                }
                unmapped
            }
            // The last step, which cannot fail: see `run`.
            Step::Release { .. } => Ok(()),
        }
    }

    /// Unmaps memory that a resident read (`ResidentReads`) may have used since it became free; a later completion point covers the read.
    #[cold]
    fn unmap_what_was_read(&self, mappings: &[Mapping]) -> std::result::Result<(), DriverError> {
        let passed = self.clock.passed_now()?;
        self.core.reservation().retire(mappings, passed.sequence())?;
        retry(|| self.core.reservation().unmap(mappings, &passed))
    }

    /// Rolls back the executed steps, last first, and returns the error to report.
    fn undo(&mut self, done: &[Step], error: DriverError) -> PoolError {
        let undone = done.iter().rev().try_for_each(|step| self.undo_step(step));
        match undone {
            Ok(()) => self.core.failed(error),
            Err(second) => self.core.poisoned(format!("{error}; and undoing it: {second}")),
        }
    }

    fn undo_step(&mut self, step: &Step) -> std::result::Result<(), DriverError> {
        match step {
            Step::Create { extent, .. } => {
                self.growing.remove(*extent);
                Ok(())
            }
            // The address was never handed out, so that no work can use it and no wait is needed: a wait for the whole
            // context would break a capture.
            Step::Map { offset, size, .. } if self.core.plain().holds(*offset) => {
                self.core.plain().remove(*offset, *size);
                Ok(())
            }
            Step::Map { offset, size, .. } => {
                let mapping = [Mapping { offset: *offset, size: *size }];
                self.core.reservation().retire(&mapping, Sequence::START)?;
                retry(|| self.core.reservation().unmap(&mapping, &self.clock.completion_events().start()))
            }
            Step::Unmap { offset, size, extents } => {
                let domain_of = |extent: &ExtentId| self.core.lock().extents().size_and_domain(*extent).1;
                for mapping in self.growing.mappings_from(*offset, extents).iter().zip(extents) {
                    self.growing.map(*mapping.1, mapping.0.offset)?;
                }
                if let Some(plain) = extents.first().filter(|extent| self.growing.plain(**extent).is_some()) {
                    self.growing.map(*plain, *offset)?;
                }
                let domain = extents.first().map_or_else(Allocator::default_domain, domain_of);
                self.growing.give_access(domain, *offset, *size)
            }
            // Access ends with the mappings, which are undone next because they precede it.
            Step::Access { offset, size, .. } => {
                self.growing.tell_unmapping(*offset, *size);
                Ok(())
            }
            Step::Release { .. } => Ok(()),
        }
    }
}

/// Physical memory of an extent.
#[derive(Debug)]
pub(super) enum Memory {
    /// Created by handle and mapped at home.
    Mapped(Extent),
    /// At an address of the driver's own.
    Plain(PlainMemory),
}

impl Memory {
    fn release(self) -> std::result::Result<(), (Memory, DriverError)> {
        match self {
            Memory::Mapped(extent) => {
                extent.release().map_err(|(extent, error)| (Memory::Mapped(extent), error))
            }
            Memory::Plain(plain) => plain.release().map_err(|(plain, error)| (Memory::Plain(plain), error)),
        }
    }

    fn abandon(self) {
        match self {
            Memory::Mapped(extent) => extent.abandon(),
            Memory::Plain(plain) => plain.abandon(),
        }
    }
}

/// Extent with physical memory.
#[derive(Debug)]
pub(super) struct ExtentMemory(Option<(Memory, LeaseCharge)>);

impl ExtentMemory {
    pub(super) fn new(memory: Memory, counted: LeaseCharge) -> ExtentMemory {
        ExtentMemory(Some((memory, counted)))
    }

    /// Returns the memory that can be mapped.
    pub(super) fn memory(&self) -> Option<&Extent> {
        match &self.0 {
            Some((Memory::Mapped(memory), _)) => Some(memory),
            _ => None,
        }
    }

    fn plain(&self) -> Option<&PlainMemory> {
        match &self.0 {
            Some((Memory::Plain(memory), _)) => Some(memory),
            _ => None,
        }
    }

    /// Releases the memory. A shrink also lowers the lease; with `leased` the lease keeps its size.
    ///
    /// # Errors
    /// The driver's error, and the memory, which still exists.
    pub(super) fn release(mut self, leased: bool) -> std::result::Result<(), (ExtentMemory, DriverError)> {
        let Some((memory, counted)) = self.0.take() else { return Ok(()) };
        match memory.release() {
            Ok(()) => {
                if !leased {
                    counted.give_back();
                }
                Ok(())
            }
            Err((memory, error)) => Err((ExtentMemory::new(memory, counted), error)),
        }
    }
}

impl Drop for ExtentMemory {
    fn drop(&mut self) {
        // Memory that the driver does not release is unavailable to others too.
        if let Some((memory, counted)) = self.0.take()
            && let Err((memory, _)) = memory.release()
        {
            memory.abandon();
            counted.keep();
        }
    }
}

/// Observer of every address range that is mapped or unmapped, at home and in aliases: for registration with network cards and collective
/// libraries, and for traces.
///
/// An unmapped range may be a part of a mapped one, or several adjacent ones. A mapping that is rolled back because a later step failed is
/// reported as unmapped, and vice versa. Mappings that exist when a pool is dropped are not reported.
///
/// The methods are called with the pool's growth lock held and must not call the pool.
pub trait MappingObserver: fmt::Debug + Send + Sync {
    /// Reports that a range is mapped and usable.
    fn mapped(&self, device: DeviceId, address: Address, size: Bytes);
    /// Reports that a range is about to be unmapped; no enqueued work uses it any more.
    fn unmapping(&self, device: DeviceId, address: Address, size: Bytes);
}
