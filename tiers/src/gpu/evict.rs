//! Eviction and refill of single extents, and state that depends on their memory: reads, fixed blocks, write protection, live bytes.
//!
//! ```text
//! eviction   Evictions::begin ─► (bytes copied out) ─► records.finish_copy ─► unmap ─► release                   memory is free
//! refill     Refills::begin: made, mapped, access ─► (bytes copied back) ─► records.finish_refill               as before
//! reads      ├ piece enqueued ┤ wait ├ piece enqueued ┤ wait      layout lock held while a piece is enqueued    memory stays in use
//! ```
//!
//! - `Evictions` and `Refills` move one extent at a time, which keeps its addresses.
//! - `ResidentReads` reads resident extents that stay in use. Between two pieces, plans may map and unmap memory. Programs may write
//!   meanwhile: the bytes read are used only after their digest has been compared.
//! - `FixedBlocks` are blocks whose physical memory must not move, because another component knows it by more than its address. Fixing
//!   applies to an address: it ends with its block, or applies to the next block there.
//! - `Protection` revokes and restores write access to sealed memory.
//! - `LiveBytes` takes the program's declarations of live byte ranges into `LiveRanges`, under the allocator's lock. Copies that hold less
//!   than the live bytes are dropped. An answer that arrives later counts only if its block still lives.
//!
//! Invariants:
//! - While the allocator marks an extent as moving, its memory is held. Evictions, refills and protection query existing memory, mappings
//!   and access from the allocator and the reservation, so that a failed step is resumed where it stopped.
//! - One thread at a time moves the extents of a domain. The growth lock is held for the driver calls of one extent, never during copies.
//! - Memory stays mapped while it is read: a plan that unmaps it waits for all work, and evictions take the region's turn, which the reader
//!   holds. No plan is refused because of a read, and plans for other memory do not wait.
//! - An extent of a fixed live block is not evicted. The lock of `FixedBlocks` is taken after the growth lock and before those of the
//!   extent records and the allocator.

use std::collections::BTreeMap;
use std::sync::Arc;

use glake_device::owned::{DeviceSet, Extent, Mapping, Span};
use glake_device::{Access, Address, Protection as Rights};
use glake_stitch::{Allocator, DomainId, ExtentId, ExtentState, HomeRange, StreamKey};
use glake_units::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::FxHashSet;

use super::block_range::BlockRange;
use super::clock::{Drain, PointProof};
use super::core::Core;
use super::error::retry;
use super::growth::{Growth, GrowthGuard};
use super::live_ranges::{self, ByteRange, DeclarationId};
use super::reach::Reach;
use super::records::{Eviction, ExtentRecords};
use super::{GpuPool, PoolError, Result};
use crate::place::{Place, Residency, Step};
use crate::store::{Return, packed_home};

/// Eviction operations of a pool.
#[derive(Debug)]
pub(crate) struct Evictions<'a> {
    pub(super) core: &'a Core,
    pub(super) growth: &'a Growth,
    pub(super) fixed: &'a FixedBlocks,
    pub(super) records: &'a ExtentRecords,
}

impl Evictions<'_> {
    /// Begins to evict an extent to `to`, or to the place of its existing copy. With `discard` its bytes are given up.
    pub(crate) fn begin(&self, extent: ExtentId, to: Place, discard: bool) -> Result<Eviction> {
        let growing = self.growth.lock()?;
        let residency = self.records.residency(extent);
        let next = self.records.after(residency, Step::Evict(residency.copy().unwrap_or(to)))?;
        let is_resident = matches!(residency, Residency::Resident { .. });
        if is_resident && growing.extent(extent).is_some_and(Extent::is_exported) {
            return Ok(Eviction::Exported);
        }
        if !discard && matches!(next, Residency::Evicting { .. }) {
            growing.open_home(extent)?;
        }
        let fixed = self.fixed.lock();
        if is_resident && fixed.holds(extent) {
            return Ok(Eviction::Fixed);
        }
        self.records.begin_evict(extent, residency, next, discard)
    }

    /// Returns those of the given extents that were exported and therefore stay.
    pub(crate) fn exported(&self, extents: impl Iterator<Item = ExtentId>) -> Vec<ExtentId> {
        let growing = self.growth.quiet();
        extents.filter(|extent| growing.extent(*extent).is_some_and(Extent::is_exported)).collect()
    }

    /// Begins to give up the memory of an extent and its bytes, wherever they are. The extent must lie entirely in the range of a block.
    pub(crate) fn begin_decommit(&self, extent: ExtentId, range: &BlockRange) -> Result<Eviction> {
        let (begun, _copy) = {
            let growing = self.growth.lock()?;
            if growing.extent(extent).is_some_and(Extent::is_exported) {
                return Ok(Eviction::Exported);
            }
            let fixed = self.fixed.lock();
            if fixed.holds(extent) {
                return Ok(Eviction::Fixed);
            }
            self.records.begin_decommit(extent, range)?
        };
        Ok(begun)
    }

    /// Unmaps extents at all their addresses; `done` proves that nothing uses them. Adjacent extents share one driver call, because beside
    /// copies the driver takes as long for one mapping as for several. Returns the extents whose memory can be released.
    ///
    /// # Errors
    /// The driver's first error; the extents that are not returned are interrupted.
    pub(crate) fn unmap(&self, extents: &[ExtentId], done: &PointProof) -> (Vec<ExtentId>, Result<()>) {
        let mut unmapped = Vec::with_capacity(extents.len());
        let mut outcome = self.growth.lock().and_then(|growing| {
            let outcome = self.unmap_everywhere(&growing, extents, done);
            let is_mapped = |extent: ExtentId| {
                let mut mappings = growing.mappings_of(extent).into_iter();
                mappings.any(|mapping| self.core.reservation().is_mapped(mapping))
            };
            unmapped.extend(extents.iter().copied().filter(|extent| !is_mapped(*extent)));
            outcome
        });
        for extent in extents.iter().filter(|extent| !unmapped.contains(extent)) {
            outcome = outcome.and(self.records.interrupted(*extent));
        }
        (unmapped, outcome)
    }

    /// Releases the memory of an unmapped extent.
    ///
    /// # Errors
    /// The driver's error; the extent is interrupted.
    pub(crate) fn release(&self, extent: ExtentId) -> Result<()> {
        let mut growing = self.growth.quiet();
        let released = self.core.usable().and_then(|()| self.release_memory(&mut growing, extent));
        let step = if released.is_ok() { Step::Released } else { Step::Failed };
        // Before another thread can see the extent as evicted, and forget it.
        let advanced = self.records.advance(extent, step);
        drop(growing);
        self.growth.lease().tell_returned(false);
        released.and(advanced)
    }

    fn unmap_everywhere(
        &self,
        growing: &GrowthGuard<'_>,
        extents: &[ExtentId],
        done: &PointProof,
    ) -> Result<()> {
        let reservation = self.core.reservation();
        let moving = |extent: &&ExtentId| {
            self.core.lock().extents().state(**extent) == Some(glake_stitch::ExtentState::Moving)
        };
        let mappings = extents.iter().filter(moving).flat_map(|extent| growing.mappings_of(*extent));
        let mut mapped: Vec<Mapping> = mappings.filter(|mapping| reservation.is_mapped(*mapping)).collect();
        if mapped.is_empty() {
            return Ok(());
        }
        reservation.retire(&mapped, done.mark).map_err(|error| self.core.failed(error))?;
        mapped.iter().for_each(|mapping| growing.tell_unmapping(mapping.offset, mapping.size));
        let unmapped = retry(|| {
            mapped.retain(|mapping| reservation.is_mapped(*mapping));
            reservation.unmap(&mapped, &done.passed)
        });
        let Err(error) = unmapped else { return Ok(()) };
        mapped.retain(|mapping| reservation.is_mapped(*mapping));
        reservation.revive(&mapped).map_err(|error| self.core.failed(error))?;
        mapped.iter().for_each(|mapping| growing.tell_mapped(mapping.offset, mapping.size));
        Err(self.core.failed(error))
    }

    /// Releases the memory of an extent, if it has any.
    fn release_memory(&self, growing: &mut GrowthGuard<'_>, extent: ExtentId) -> Result<()> {
        if self.core.lock().extents().state(extent) != Some(glake_stitch::ExtentState::Moving) {
            return Ok(());
        }
        // A program may commit the memory again: the lease keeps its size.
        let leased = self.records.residency(extent).authority() == Place::Nowhere;
        if let Some(made) = growing.remove(extent) {
            made.release(leased).map_err(|(made, error)| {
                growing.insert(extent, made);
                self.core.failed(error)
            })?;
        }
        self.core.lock().evictions().finish(extent).map_err(|source| self.core.refused(source))
    }
}

/// Operations that refill extents.
#[derive(Debug)]
pub(crate) struct Refills<'a> {
    pub(super) core: &'a Core,
    pub(super) growth: &'a Growth,
    pub(super) records: &'a ExtentRecords,
}

impl Refills<'_> {
    /// Makes an extent's memory again and maps it at all its addresses. Returns the source of its bytes; `None`: there is nothing to copy.
    ///
    /// # Errors
    /// [`super::PoolError::Refused`], [`super::PoolError::Leased`] or [`super::PoolError::DeviceFull`] if there is no memory after
    /// releasing free memory of other domains: the extent stays evicted. The driver's error: the extent is interrupted if its memory was
    /// made.
    pub(crate) fn begin(&self, extent: ExtentId) -> Result<Option<Return>> {
        let mut growing = self.growth.lock()?;
        if !self.records.begin_refill(extent)? {
            return Ok(None);
        }
        let entered = self.make_and_map(&mut growing, extent).and_then(|()| self.records.back(extent));
        if entered.is_err() {
            let residency = self.core.lock().extents().state(extent);
            let is_made = residency != Some(glake_stitch::ExtentState::Evicted);
            self.records.advance(extent, if is_made { Step::Failed } else { Step::NotMade })?;
        }
        entered
    }

    fn make_and_map(&self, growing: &mut GrowthGuard<'_>, extent: ExtentId) -> Result<()> {
        let state = self.core.lock().extents().state(extent);
        if state == Some(glake_stitch::ExtentState::Evicted) {
            self.make(growing, extent)?;
        }
        let domain = self.core.lock().extents().size_and_domain(extent).1;
        for mapping in growing.mappings_of(extent) {
            if !self.core.reservation().is_mapped(mapping) {
                growing.map(extent, mapping.offset).map_err(|error| self.core.failed(error))?;
            }
            let given = growing.give_access(domain, mapping.offset, mapping.size);
            given.map_err(|error| self.core.failed(error))?;
        }
        Ok(())
    }

    /// Makes new memory for an extent; if there is none, releases free memory elsewhere first.
    fn make(&self, growing: &mut GrowthGuard<'_>, extent: ExtentId) -> Result<()> {
        match self.try_make(growing, extent) {
            Err(error) if error.is_out_of_memory() => {
                let plan = self.core.lock().plan_trim(Bytes::ZERO);
                let Some(plan) = plan else { return Err(error) };
                growing.carry_out(&plan, StreamKey::default())?;
                self.try_make(growing, extent)
            }
            made => made,
        }
    }

    fn try_make(&self, growing: &mut GrowthGuard<'_>, extent: ExtentId) -> Result<()> {
        let (size, domain) = {
            let mut core = self.core.lock();
            core.evictions().begin_refill(extent).map_err(|source| self.core.refused(source))?;
            core.extents().size_and_domain(extent)
        };
        let made = growing.count(size).and_then(|mut counted| {
            growing.make(size, domain, &mut counted).map_err(|error| self.core.failed(error))
        });
        self.core.lock().evictions().refill_made(extent, made.is_ok());
        growing.insert(extent, made?);
        Ok(())
    }
}

/// Operations that read resident extents.
#[derive(Debug)]
pub(crate) struct ResidentReads<'a> {
    pool: &'a GpuPool,
    core: &'a Core,
    growth: &'a Growth,
    fixed: &'a FixedBlocks,
}

impl<'a> ResidentReads<'a> {
    pub(crate) fn of(pool: &'a GpuPool) -> Self {
        ResidentReads { pool, core: &pool.core, growth: &pool.growth, fixed: &pool.fixed }
    }

    /// Returns the bytes of an extent that an eviction would copy now; none if the extent cannot leave, has moved, or has a copy already.
    ///
    /// # Errors
    /// [`super::PoolError::Poisoned`].
    pub(crate) fn ranges(&self, extent: ExtentId) -> Result<Vec<HomeRange>> {
        let is_exported = self.growth.lock()?.extent(extent).is_some_and(Extent::is_exported);
        if is_exported
            || self.fixed.lock().holds(extent)
            || self.pool.records.residency(extent) != Residency::NEW
        {
            return Ok(Vec::new());
        }
        Ok(self.kept_here(extent))
    }

    /// Calls `enqueue` to enqueue reads of a part of the ranges, at home; returns `None` if the extent has changed since the ranges were
    /// queried. The result of `enqueue` must hold no span.
    pub(crate) fn with<R>(
        &self,
        extent: ExtentId,
        ranges: &[HomeRange],
        part: &[HomeRange],
        enqueue: impl FnOnce(Vec<Span>) -> R,
    ) -> Result<Option<R>> {
        let layout = self.core.lock_layout();
        if self.kept_here(extent) != ranges {
            return Ok(None);
        }
        let done = packed_home(self.core, part).map(enqueue);
        // Lets a waiting thread take the lock first.
        MutexGuard::unlock_fair(layout);
        done.map(Some)
    }

    /// Returns the extents of the live block of a domain at an address; empty if there is no such block.
    pub(crate) fn extents_of(&self, domain: DomainId, address: Address) -> Vec<ExtentId> {
        block_of(self.core, domain, address).map_or_else(|_| Vec::new(), |(_, extents)| extents)
    }

    /// Returns the bytes of a resident extent that must be preserved.
    pub(crate) fn kept_here(&self, extent: ExtentId) -> Vec<HomeRange> {
        let core = self.core.lock();
        match core.extents().state(extent) {
            Some(glake_stitch::ExtentState::Resident) => self.core.kept(&core, extent).ranges,
            _ => Vec::new(),
        }
    }
}

/// Fixed memory of a pool.
#[derive(Debug, Default)]
struct Pins {
    /// Addresses of fixed blocks, with the number of times each was fixed.
    blocks: BTreeMap<Address, usize>,
    /// Domains whose memory is fixed as a whole.
    domains: FxHashSet<DomainId>,
}

/// Fixed blocks and domains of a pool.
#[derive(Debug)]
pub(crate) struct FixedBlocks {
    core: Arc<Core>,
    pins: Mutex<Pins>,
}

/// Guard under which the set of fixed blocks does not change.
#[derive(Debug)]
pub(super) struct FixedGuard<'a> {
    core: &'a Core,
    pins: MutexGuard<'a, Pins>,
}

impl FixedBlocks {
    /// Creates an empty set.
    pub(super) fn new(core: Arc<Core>) -> Self {
        FixedBlocks { core, pins: Mutex::default() }
    }

    /// Keeps the extents of the block at `address` on their GPU, until the block is unfixed as many times.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; [`PoolError::Evicted`] if part of the block is not resident.
    pub(crate) fn fix(&self, domain: DomainId, address: Address) -> Result<()> {
        let mut pins = self.pins.lock();
        let (base, extents) = block_of(&self.core, domain, address)?;
        let core = self.core.lock();
        if extents.iter().any(|&extent| core.extents().state(extent) != Some(ExtentState::Resident)) {
            return Err(PoolError::Evicted { device: self.core.device(), address });
        }
        *pins.blocks.entry(base).or_default() += 1;
        Ok(())
    }

    /// Reverts one [`FixedBlocks::fix`].
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`] if no block is fixed at the address.
    pub(crate) fn unfix(&self, domain: DomainId, address: Address) -> Result<()> {
        let mut pins = self.pins.lock();
        let base = block_of(&self.core, domain, address).map_or(address, |(base, _)| base);
        let Some(count) = pins.blocks.get_mut(&base) else {
            return Err(PoolError::UnknownAddress { device: self.core.device(), address });
        };
        *count -= 1;
        if *count == 0 {
            pins.blocks.remove(&base);
        }
        Ok(())
    }

    /// Keeps all current and later memory of a domain on its GPU, free memory too, or ends that.
    ///
    /// # Errors
    /// [`PoolError::Evicted`] if part of the memory is not resident; nothing is fixed then.
    pub(crate) fn fix_domain(&self, domain: DomainId, fixed: bool) -> Result<()> {
        let mut pins = self.pins.lock();
        if !fixed {
            pins.domains.remove(&domain);
            return Ok(());
        }
        let views = self.core.lock().extents().of(domain);
        if let Some(evicted) = views.iter().find(|view| view.state != ExtentState::Resident) {
            let address = self.core.address(evicted.offset);
            return Err(PoolError::Evicted { device: self.core.device(), address });
        }
        pins.domains.insert(domain);
        Ok(())
    }

    /// Returns whether all memory of a domain is fixed.
    pub(crate) fn is_whole(&self, domain: DomainId) -> bool {
        self.pins.lock().domains.contains(&domain)
    }

    /// Returns the extents of a domain that hold fixed blocks.
    pub(crate) fn extents(&self, domain: DomainId) -> FxHashSet<ExtentId> {
        self.lock().extents(domain)
    }

    /// Locks the set: no block is fixed or unfixed while the guard is held.
    pub(super) fn lock(&self) -> FixedGuard<'_> {
        FixedGuard { core: &self.core, pins: self.pins.lock() }
    }
}

impl FixedGuard<'_> {
    /// Returns whether an extent holds a fixed block.
    pub(super) fn holds(&self, extent: ExtentId) -> bool {
        if self.pins.blocks.is_empty() && self.pins.domains.is_empty() {
            return false;
        }
        let domain = self.core.lock().extents().size_and_domain(extent).1;
        self.extents(domain).contains(&extent)
    }

    fn extents(&self, domain: DomainId) -> FxHashSet<ExtentId> {
        if self.pins.domains.contains(&domain) {
            return self.core.lock().extents().of(domain).into_iter().map(|view| view.extent).collect();
        }
        let blocks = self.pins.blocks.keys().filter_map(|&address| block_of(self.core, domain, address).ok());
        // A fixed address inside another block does not fix that block.
        let whole = blocks.filter(|(base, _)| self.pins.blocks.contains_key(base));
        whole.flat_map(|(_, extents)| extents).collect()
    }
}

/// Finds the live block of a domain at an address. Returns its start and its extents.
pub(super) fn block_of(core: &Core, domain: DomainId, address: Address) -> Result<(Address, Vec<ExtentId>)> {
    let unknown = || PoolError::UnknownAddress { device: core.device(), address };
    let offset = core.offset(address)?;
    let allocator = core.lock();
    let block = allocator.blocks().find(offset).filter(|block| block.domain == domain).ok_or_else(unknown)?;
    let backing = allocator.blocks().backing(block.offset).ok_or_else(unknown)?;
    Ok((core.address(block.offset), backing.extents))
}

/// Operations that revoke and restore write access.
#[derive(Debug)]
pub(crate) struct Protection<'a> {
    pub(super) core: &'a Core,
    pub(super) growth: &'a Growth,
    pub(super) reach: &'a Reach,
    pub(super) drain: Drain<'a>,
}

impl Protection<'_> {
    /// Revokes write access of all devices to a domain's resident memory, at all its addresses; waits for their work.
    ///
    /// # Errors
    /// The driver's error; part of the memory may be protected.
    pub(crate) fn protect(&self, domain: DomainId) -> Result<()> {
        let is_open = |writers: DeviceSet| !writers.is_empty();
        if self.runs_of(&self.growth.lock()?, domain, is_open)?.is_empty() {
            return Ok(());
        }
        // The work waited for may need memory that another thread has to allocate first.
        self.drain.wait()?;
        let growing = self.growth.lock()?;
        for (run, writers) in self.runs_of(&growing, domain, is_open)? {
            let access: Vec<Access> =
                writers.iter().map(|device| Access { device, protection: Rights::Read }).collect();
            retry(|| self.core.reservation().protect(run.offset, run.size, &access))
                .map_err(|error| self.core.failed(error))?;
        }
        Ok(())
    }

    /// Restores write access to a domain's memory.
    ///
    /// # Errors
    /// The driver's error; part of the access may be restored.
    pub(crate) fn open(&self, domain: DomainId) -> Result<()> {
        let growing = self.growth.lock()?;
        for (run, _) in
            self.runs_of(&growing, domain, |writers| !self.reach.may_all_write(domain, writers))?
        {
            let given = growing.give_access(domain, run.offset, run.size);
            given.map_err(|error| self.core.failed(error))?;
        }
        Ok(())
    }

    /// Returns the mappings of a domain's resident extents whose writers satisfy `so`; adjacent mappings with the same writers are joined.
    fn runs_of(
        &self,
        growing: &GrowthGuard<'_>,
        domain: DomainId,
        so: impl Fn(DeviceSet) -> bool,
    ) -> Result<Vec<(Mapping, DeviceSet)>> {
        let views = self.core.lock().extents().of(domain);
        let here = views.iter().filter(|view| view.state == ExtentState::Resident);
        let mappings = here.flat_map(|view| growing.mappings_of(view.extent));
        let mut found: Vec<(Mapping, DeviceSet)> =
            mappings.map(|mapping| (mapping, self.core.reservation().writers(mapping))).collect();
        found.retain(|(_, writers)| so(*writers));
        found.sort_unstable_by_key(|(mapping, _)| mapping.offset);
        Ok(joined(&found))
    }
}

/// Joins adjacent mappings with the same writers, in offset order.
fn joined(found: &[(Mapping, DeviceSet)]) -> Vec<(Mapping, DeviceSet)> {
    let end = |mapping: &Mapping| mapping.offset.saturating_add(mapping.size);
    let runs = found.chunk_by(|(one, by), (next, also)| end(one) == next.offset && by == also);
    let joined = runs.filter_map(|run| {
        let (first, writers) = *run.first()?;
        let size: Bytes = run.iter().map(|(mapping, _)| mapping.size).sum();
        Some((Mapping { offset: first.offset, size }, writers))
    });
    joined.collect()
}

/// Interface for declaring live bytes of a pool's blocks.
#[derive(Debug)]
pub struct LiveBytes<'a> {
    pub(super) core: &'a Core,
    pub(super) records: &'a ExtentRecords,
}

/// Block whose live ranges will be declared later. Until then, all its bytes are live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveAnswer {
    block: Bytes,
    number: DeclarationId,
}

impl LiveBytes<'_> {
    /// Declares the live bytes of the block that begins at an address: only these are preserved when its memory leaves, rounded out to 512
    /// bytes; the others become undefined. The declaration holds until the next one or the free. For memory that is already evicted, it
    /// takes effect at the next eviction.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]; [`PoolError::OutsideBlock`]: the previous declaration holds.
    pub fn set(&self, address: Address, ranges: &[ByteRange]) -> Result<()> {
        let block = {
            let allocator = self.core.lock();
            let (block, size) = self.block(&allocator, address)?;
            let live = self.rounded(block, size, ranges)?;
            self.core.live_ranges().say(block, Some(live));
            block
        };
        self.records.drop_outgrown(block)
    }

    /// Declares all bytes of the block that begins at an address live again.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`].
    pub fn clear(&self, address: Address) -> Result<()> {
        let block = {
            let allocator = self.core.lock();
            let (block, _) = self.block(&allocator, address)?;
            self.core.live_ranges().end(block);
            block
        };
        self.records.drop_outgrown(block)
    }

    /// Announces that the live ranges of the block at an address will be declared later.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`].
    pub fn ask(&self, address: Address) -> Result<LiveAnswer> {
        let answer = {
            let allocator = self.core.lock();
            let (block, _) = self.block(&allocator, address)?;
            LiveAnswer { block, number: self.core.live_ranges().say(block, None) }
        };
        self.records.drop_outgrown(answer.block)?;
        Ok(answer)
    }

    /// Answers a [`LiveBytes::ask`], any number of times; `None` makes all bytes live. Ignored if the block was freed or declared otherwise
    /// meanwhile.
    ///
    /// # Errors
    /// [`PoolError::OutsideBlock`]: all bytes of the block are live then.
    pub fn answer(&self, answer: LiveAnswer, ranges: Option<&[ByteRange]>) -> Result<()> {
        let said = {
            let allocator = self.core.lock();
            let Some((size, _)) = allocator.blocks().at(answer.block) else { return Ok(()) };
            let live = ranges.map(|ranges| self.rounded(answer.block, size, ranges)).transpose();
            let (live, wrong) = match live {
                Ok(live) => (live, None),
                Err(error) => (None, Some(error)),
            };
            let said = self.core.live_ranges().change(answer.block, answer.number, live);
            wrong.map_or(Ok(said), Err)
        };
        self.records.drop_outgrown(answer.block)?;
        said.map(|_| ())
    }

    /// Returns the domain of the block of a [`LiveBytes::ask`]; `None` once the block was freed or declared otherwise.
    pub fn asked(&self, answer: LiveAnswer) -> Option<DomainId> {
        let allocator = self.core.lock();
        let still = self.core.live_ranges().is(answer.block, answer.number);
        still.then(|| allocator.blocks().find(answer.block).map(|block| block.domain)).flatten()
    }

    fn block(&self, allocator: &Allocator, address: Address) -> Result<(Bytes, Bytes)> {
        let offset = self.core.offset(address)?;
        let found = allocator.blocks().at(offset);
        found.map(|(size, _)| (offset, size)).ok_or_else(|| self.core.unknown_offset(offset))
    }

    fn rounded(&self, block: Bytes, size: Bytes, ranges: &[ByteRange]) -> Result<Vec<ByteRange>> {
        live_ranges::rounded(ranges, size).map_err(|wrong| PoolError::OutsideBlock {
            device: self.core.device(),
            address: self.core.address(block),
            size: size.get(),
            start: wrong.start.get(),
            end: wrong.end.get(),
        })
    }
}

#[cfg(test)]
mod fixed_tests {
    use glake_stitch::Allocator;
    use glake_units::Bytes;

    use super::super::fixture::Parts;
    use super::*;

    #[test]
    fn a_block_is_fixed_as_often_as_it_was_said() {
        let parts = Parts::new();
        let (fixed, domain) = (FixedBlocks::new(parts.core.clone()), Allocator::default_domain());
        let block = parts.core.address(parts.grow(Bytes::mib(4)));
        let inside = Address(block.0 + 4096);
        fixed.fix(domain, block).unwrap();
        fixed.fix(domain, inside).unwrap();
        let extents = fixed.extents(domain);
        assert_eq!(extents.len(), 1);
        fixed.unfix(domain, inside).unwrap();
        assert!(extents.iter().all(|extent| fixed.lock().holds(*extent)));
        fixed.unfix(domain, block).unwrap();
        assert!(fixed.extents(domain).is_empty());
        fixed.unfix(domain, block).unwrap_err();
    }

    #[test]
    fn what_is_freed_is_fixed_no_more() {
        let parts = Parts::new();
        let (fixed, domain) = (FixedBlocks::new(parts.core.clone()), Allocator::default_domain());
        let offset = parts.grow(Bytes::mib(4));
        let address = parts.core.address(offset);
        fixed.fix(domain, address).unwrap();
        parts.core.free(offset).unwrap();
        assert!(fixed.extents(domain).is_empty());
        let unknown = fixed.fix(domain, address).unwrap_err();
        assert!(matches!(unknown, PoolError::UnknownAddress { .. }), "{unknown}");
    }

    #[test]
    fn what_is_evicted_cannot_be_fixed() {
        let parts = Parts::new();
        let (fixed, domain) = (FixedBlocks::new(parts.core.clone()), Allocator::default_domain());
        let offset = parts.grow(Bytes::mib(4));
        let extent = parts.core.lock().blocks().backing(offset).unwrap().extents[0];
        parts.core.lock().evictions().begin(extent).unwrap();
        let evicted = fixed.fix(domain, parts.core.address(offset)).unwrap_err();
        assert!(matches!(evicted, PoolError::Evicted { .. }), "{evicted}");
    }
}

#[cfg(test)]
mod protect_tests {
    use glake_device::DeviceId;

    use super::*;

    #[test]
    fn what_touches_and_has_the_same_writers_is_one() {
        let [one, two] = [0, 1].map(|device| DeviceSet::of(DeviceId(device)));
        let at = |offset, size, by| (Mapping { offset: Bytes::mib(offset), size: Bytes::mib(size) }, by);
        let found = [at(0, 2, one), at(2, 4, one), at(6, 2, two), at(10, 2, two), at(12, 2, two)];
        assert_eq!(joined(&found), [at(0, 6, one), at(6, 2, two), at(10, 4, two)]);
        assert!(joined(&[]).is_empty());
    }
}
