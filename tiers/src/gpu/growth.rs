//! Physical memory of a pool, and the lock under which it is created, mapped and released.
//!
//! Invariants: a device executes one plan at a time, because the driver serialises these calls anyway; hits and frees of other threads
//! proceed meanwhile. Between two plans, every resident extent of the allocator is a key of `extents` and is mapped at the addresses in the
//! allocator; an evicted extent is neither. Memory is counted by the lease before it is created, all of a plan at once.

use std::sync::Arc;

use glake_device::owned::{Extent, Mapping};
use glake_device::{DeviceId, DriverError, ExtentProperties, Stream};
use glake_stitch::{DomainId, ExtentId, Grant, Plan, StreamKey};
use glake_units::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;

use super::clock::CompletionClock;
use super::core::Core;
use super::execute::Execution;
use super::lease::{Counted, Lease};
use super::made::Made;
use super::observer::MappingObserver;
use super::reach::Reach;
use super::records::ExtentRecords;
use super::retry::retry;
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
    held: Mutex<Held>,
}

/// State that only plans touch.
#[derive(Debug, Default)]
struct Held {
    extents: FxHashMap<ExtentId, Made>,
    properties: FxHashMap<DomainId, ExtentProperties>,
    streams: FxHashMap<StreamKey, Stream>,
    /// Domains of peer blocks by owner, created on demand: the driver's access calls take longer the more GPUs they cover.
    owners: FxHashMap<DeviceId, DomainId>,
}

/// Guard of the growth lock, with the operations allowed under it.
#[derive(Debug)]
pub(super) struct Growing<'a> {
    growth: &'a Growth,
    held: MutexGuard<'a, Held>,
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
        Growth { core, clock, records, reach, observer, lease, properties, held: Mutex::default() }
    }

    /// Returns the lease that bounds the created memory.
    pub(super) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// Takes the growth lock; fails if the pool is poisoned.
    pub(super) fn lock(&self) -> Result<Growing<'_>> {
        let growing = self.quiet();
        self.core.usable().map(|()| growing)
    }

    /// Takes the growth lock, even if the pool is poisoned.
    pub(super) fn quiet(&self) -> Growing<'_> {
        Growing { growth: self, held: self.held.lock() }
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

impl Growing<'_> {
    /// Executes a plan and commits it; on failure rolls back and aborts it.
    pub(super) fn carry_out(&mut self, plan: &Plan, stream: StreamKey) -> Result<Option<Grant>> {
        let growth = self.growth;
        let (core, clock, records) = (&growth.core, &growth.clock, &growth.records);
        let _layout = core.lock_layout();
        let done = self.count(plan.created()).and_then(|mut counted| {
            Execution { core, clock, records, growing: self, counted: &mut counted }.run(plan)
        });
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
    pub(super) fn count(&self, size: Bytes) -> Result<Counted> {
        let device = self.growth.core.device();
        self.growth.lease.count(size).map_err(|short| PoolError::Leased { device, short, in_capture: false })
    }

    /// Creates memory with a domain's properties; its size is already counted.
    pub(super) fn make(
        &self,
        size: Bytes,
        domain: DomainId,
        counted: &mut Counted,
    ) -> std::result::Result<Made, DriverError> {
        let properties = self.held.properties.get(&domain).copied().unwrap_or(self.growth.properties);
        let memory = retry(|| Extent::new(self.growth.core.driver(), size, properties))?;
        Ok(Made::new(memory, counted.split(size)))
    }

    pub(super) fn insert(&mut self, extent: ExtentId, made: Made) {
        self.held.extents.insert(extent, made);
    }

    pub(super) fn remove(&mut self, extent: ExtentId) -> Option<Made> {
        self.held.extents.remove(&extent)
    }

    pub(super) fn extent(&self, extent: ExtentId) -> Option<&Extent> {
        self.held.extents.get(&extent).and_then(Made::memory)
    }

    /// Maps an extent; does nothing if the extent has no memory.
    pub(super) fn map(
        &self,
        extent: ExtentId,
        offset: Bytes,
    ) -> std::result::Result<Option<Mapping>, DriverError> {
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
        let access = self.growth.reach.access(domain, self.owner_of(domain));
        retry(|| self.growth.core.reservation().set_access(offset, size, &access))?;
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
