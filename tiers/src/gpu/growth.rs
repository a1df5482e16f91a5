//! The physical memory of a pool, and the lock under which it is made, mapped and released.
//!
//! Invariants: one plan a device at a time, since the driver serialises these calls anyhow; hits and frees of other threads go on
//! meanwhile. Between two plans every resident extent of the allocator is a key of `extents`, mapped where the allocator says; one
//! that is evicted is none, and mapped nowhere. What is made is counted by the lease first, all of a plan at once.

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

/// What grows and shrinks.
#[derive(Debug)]
pub(super) struct Growth {
    // Before the extents: what is dropped first unmaps them.
    core: Arc<Core>,
    clock: Arc<CompletionClock>,
    records: Arc<ExtentRecords>,
    reach: Arc<Reach>,
    observer: Option<Arc<dyn MappingObserver>>,
    lease: Arc<Lease>,
    /// What extents are like where their domain does not say.
    properties: ExtentProperties,
    held: Mutex<Held>,
}

/// What only plans touch.
#[derive(Debug, Default)]
struct Held {
    extents: FxHashMap<ExtentId, Made>,
    properties: FxHashMap<DomainId, ExtentProperties>,
    streams: FxHashMap<StreamKey, Stream>,
    /// The domains of owners' peer blocks, made when they are needed: the driver takes longer the more GPUs memory is opened to.
    owners: FxHashMap<DeviceId, DomainId>,
}

/// The growth lock, and what may be done under it.
#[derive(Debug)]
pub(super) struct Growing<'a> {
    growth: &'a Growth,
    held: MutexGuard<'a, Held>,
}

impl Growth {
    /// No memory yet.
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

    /// What bounds what is made.
    pub(super) fn lease(&self) -> &Arc<Lease> {
        &self.lease
    }

    /// The growth lock, if the pool is still of use.
    pub(super) fn lock(&self) -> Result<Growing<'_>> {
        let growing = self.quiet();
        self.core.usable().map(|()| growing)
    }

    /// The growth lock, whatever became of the pool.
    pub(super) fn quiet(&self) -> Growing<'_> {
        Growing { growth: self, held: self.held.lock() }
    }

    /// What extents are like where their domain does not say.
    pub(super) fn properties(&self) -> ExtentProperties {
        self.properties
    }

    /// The driver's handle of a stream that asked for memory.
    pub(super) fn streams(&self, keys: &[StreamKey]) -> Vec<Stream> {
        let held = self.held.lock();
        keys.iter().filter_map(|key| held.streams.get(key).copied()).collect()
    }
}

impl Growing<'_> {
    /// Executes a plan and commits it, or undoes and aborts it.
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

    /// Counts memory that is about to be made.
    pub(super) fn count(&self, size: Bytes) -> Result<Counted> {
        let device = self.growth.core.device();
        self.growth.lease.count(size).map_err(|short| PoolError::Leased { device, short, in_capture: false })
    }

    /// Makes memory like that of a domain, of what is counted already.
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

    /// Maps an extent; does nothing where it has no memory.
    pub(super) fn map(
        &self,
        extent: ExtentId,
        offset: Bytes,
    ) -> std::result::Result<Option<Mapping>, DriverError> {
        let map = |extent| retry(|| self.growth.core.reservation().map(offset, extent));
        self.extent(extent).map(map).transpose()
    }

    /// Gives access to a range of one domain.
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

    /// Where an extent that has memory belongs: at home first.
    pub(super) fn mappings_of(&self, extent: ExtentId) -> Vec<Mapping> {
        let Some(size) = self.extent(extent).map(Extent::size) else { return Vec::new() };
        let addresses = self.growth.core.lock().extents().addresses_of(extent);
        addresses.into_iter().map(|offset| Mapping { offset, size }).collect()
    }

    /// What is mapped of a domain.
    pub(super) fn mappings_in(&self, domain: DomainId) -> Vec<Mapping> {
        let core = &self.growth.core;
        let views = core.lock().extents().of(domain);
        let mappings = views.iter().flat_map(|view| self.mappings_of(view.extent));
        mappings.filter(|mapping| core.reservation().is_mapped(*mapping)).collect()
    }

    /// The mappings of extents that lie side by side from `offset` on.
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

    /// Opens an extent at home before it is copied: a copy goes over devices that may load and store.
    pub(super) fn open_home(&self, extent: ExtentId) -> Result<()> {
        let core = &self.growth.core;
        let Some(home) = self.mappings_of(extent).first().copied() else { return Ok(()) };
        let domain = core.lock().extents().size_and_domain(extent).1;
        if self.growth.reach.may_all_write(domain, core.reservation().writers(home)) {
            return Ok(());
        }
        self.give_access(domain, home.offset, home.size).map_err(|error| core.failed(error))
    }

    /// What the extents of a domain are like.
    pub(super) fn set_properties(&mut self, domain: DomainId, properties: ExtentProperties) {
        if properties != self.growth.properties {
            self.held.properties.insert(domain, properties);
        }
    }

    /// Which handle a stream has that asks for memory.
    pub(super) fn know(&mut self, key: StreamKey, stream: Stream) {
        self.held.streams.insert(key, stream);
    }

    /// The domains of peer blocks, by their owners.
    pub(super) fn owners(&mut self) -> &mut FxHashMap<DeviceId, DomainId> {
        &mut self.held.owners
    }

    /// Whose peer blocks lie in a domain.
    fn owner_of(&self, domain: DomainId) -> Option<DeviceId> {
        self.held.owners.iter().find(|(_, known)| **known == domain).map(|(owner, _)| *owner)
    }
}
