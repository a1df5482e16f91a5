//! The memory of single extents, given up and made again at the addresses that they keep.
//!
//! ```text
//! region ─► begin_evict ─► (its bytes are copied) ─► finish_copy ─► unmap ─► release             memory is free
//!        ─► begin_refill: made, mapped, access ─► (copied back) ─► finish_refill                as before
//! ```
//!
//! Invariants: how it stands with an extent is its [`Residency`] in `kept`, where there is no entry it is new; each step changes it
//! before another can begin. Where the core has an extent as moving, its memory is in `held.extents` and what is mapped of it is
//! asked of the reservation, so that a step which failed halfway is taken up where it stopped. One thread at a time moves the
//! extents of a domain; the growth lock is held for the driver's calls of one extent, never while bytes are copied.

use glake_device::Address;
use glake_device::owned::{Epoch, Extent, Mapping, Passed, Sequence, Span};
use glake_stitch::{DomainId, ExtentId, ExtentView, HomeRange, StitchError, StreamKey};
use glake_units::Bytes;

use super::execute::retry;
use super::{GpuPool, PlanState, PoolError, Result};
use crate::place::{NotNow, Place, Residency, Step};
use crate::store::{Return, StoredCopy};

/// Where an extent's bytes are, and their copy where there is one.
#[derive(Debug)]
pub(crate) struct ExtentRecord {
    pub(crate) residency: Residency,
    /// None: there is nothing in it that counts.
    pub(crate) copy: Option<StoredCopy>,
}

/// A moment, and the completion that tells that all work from before it is done.
#[derive(Debug)]
pub(crate) struct CompletionPoint {
    mark: Sequence,
    epoch: Epoch,
}

impl CompletionPoint {
    /// Whether that work is done. Never waits.
    pub(crate) fn has_passed(&mut self) -> glake_device::Result<bool> {
        Ok(self.epoch.poll()?.is_some())
    }
}

/// A moment from before which all work is done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Done {
    mark: Sequence,
    passed: Passed,
}

/// What has to be done to evict an extent.
#[derive(Debug)]
pub(crate) enum Eviction {
    /// These bytes are to be copied first.
    Copy(Vec<HomeRange>),
    /// A whole copy is there already, or nothing has to be kept.
    Release,
    /// It stays: other processes have it.
    Exported,
    /// It stays: a block in it is pinned.
    Fixed,
    /// It stays: blocks in it were freed that other streams may still use.
    Withheld,
}

impl GpuPool {
    /// The extents of a domain with how it stands with each.
    pub(crate) fn standing(&self, domain: DomainId) -> Result<Vec<(ExtentView, Residency)>> {
        let kept = self.kept.lock();
        let views = self.core.lock().extents().of(domain).map_err(|source| self.refused(source))?;
        let residency =
            |view: &ExtentView| kept.get(&view.extent).map_or(Residency::NEW, |kept| kept.residency);
        Ok(views.into_iter().map(|view| (view, residency(&view))).collect())
    }

    /// Whether it stands so with any extent of a domain: asked of those only that were moved.
    pub(crate) fn has_any(&self, domain: DomainId, so: impl Fn(Residency) -> bool) -> bool {
        let kept = self.kept.lock();
        let core = self.core.lock();
        let mut moved =
            kept.iter().filter(|(extent, _)| core.extents().size_and_domain(**extent).1 == domain);
        moved.any(|(_, kept)| so(kept.residency))
    }

    /// Whether all bytes of a domain count, those of free memory too.
    pub(crate) fn keeps_all(&self, domain: DomainId) -> bool {
        self.core.lock().extents().keeps_all(domain)
    }

    /// Whether all memory of a domain stays though nothing is live in it: it has an owner, whose graph knows its addresses.
    pub(crate) fn is_held(&self, domain: DomainId) -> bool {
        self.core.lock().extents().is_held(domain)
    }

    /// The address of an offset.
    pub(crate) fn address_at(&self, offset: Bytes) -> Address {
        self.address(offset)
    }

    pub(crate) fn unknown_offset(&self, offset: Bytes) -> PoolError {
        PoolError::UnknownAddress { device: self.device, address: self.address(offset) }
    }

    /// Marks now: nothing uses what was copied by now.
    pub(crate) fn completion_point(&self) -> Result<CompletionPoint> {
        self.usable()?;
        let mark = self.epochs.mark();
        let epoch = retry(|| self.epochs.record(self.reach.watched())).map_err(|error| self.failed(error))?;
        Ok(CompletionPoint { mark, epoch })
    }

    /// Waits until all work from before a mark is done.
    pub(crate) fn passed(&self, point: CompletionPoint) -> Result<Done> {
        let CompletionPoint { mark, mut epoch } = point;
        let passed = retry(|| epoch.wait()).map_err(|error| self.failed(error))?;
        Ok(Done { mark, passed })
    }

    /// Begins to evict an extent to `to`, or for where its copy is; with `discard` its bytes are given up.
    pub(crate) fn begin_evict(&self, extent: ExtentId, to: Place, discard: bool) -> Result<Eviction> {
        let held = self.growth()?;
        let residency = self.kept.lock().get(&extent).map_or(Residency::NEW, |kept| kept.residency);
        let next = self.after(residency, Step::Evict(residency.copy().unwrap_or(to)))?;
        let is_resident = matches!(residency, Residency::Resident { .. });
        if is_resident && held.extents.get(&extent).is_some_and(Extent::is_exported) {
            return Ok(Eviction::Exported);
        }
        if !discard && matches!(next, Residency::Evicting { .. }) {
            self.open_home(&held, extent)?;
        }
        let pins = self.pins.lock();
        let mut kept = self.kept.lock();
        if is_resident {
            let domain = self.core.lock().extents().size_and_domain(extent).1;
            if !pins.is_empty() && self.extents_of_pins(&pins, domain).contains(&extent) {
                return Ok(Eviction::Fixed);
            }
            match self.core.lock().evictions().begin(extent) {
                Ok(()) => {}
                Err(StitchError::Withheld { .. }) => return Ok(Eviction::Withheld),
                Err(source) => return Err(self.refused(source)),
            }
        }
        let entry = kept.entry(extent).or_insert(ExtentRecord { residency, copy: None });
        entry.residency = next;
        if let Some(copy) = &mut entry.copy {
            copy.set_needed();
        }
        if !matches!(next, Residency::Evicting { .. }) {
            return Ok(Eviction::Release);
        }
        let ranges = if discard { Vec::new() } else { self.core.lock().extents().kept_ranges(extent) };
        if !ranges.is_empty() {
            return Ok(Eviction::Copy(ranges));
        }
        entry.residency = self.after(next, Step::Copied)?;
        Ok(Eviction::Release)
    }

    /// Memory of the pool for asynchronous work.
    pub(crate) fn span(&self, range: HomeRange) -> Result<Span> {
        self.reservation.span(range.offset, range.size).map_err(|error| self.failed(error))
    }

    /// All bytes of an extent are in its copy.
    pub(crate) fn finish_copy(&self, extent: ExtentId, copy: StoredCopy) -> Result<()> {
        let mut kept = self.kept.lock();
        let needed = !self.core.lock().extents().kept_ranges(extent).is_empty();
        if let Some(entry) = kept.get_mut(&extent) {
            entry.residency = self.after(entry.residency, Step::Copied)?;
            if needed {
                entry.copy = Some(copy);
            }
        }
        Ok(())
    }

    /// The copy out failed: the extent stays, as it was.
    pub(crate) fn cancel_evict(&self, extent: ExtentId) -> Result<()> {
        let mut kept = self.kept.lock();
        if let Some(entry) = kept.get(&extent) {
            self.after(entry.residency, Step::Failed)?;
            kept.remove(&extent);
        }
        self.core.lock().evictions().finish_refill(extent).map_err(|source| self.refused(source))
    }

    /// Unmaps extents at all their addresses: what used them was done when it was marked. What lies side by side goes in one call:
    /// beside copies the driver takes as long for one mapping as for several. Returns those whose memory can be released.
    ///
    /// # Errors
    /// What the driver answered first; those that are not returned are interrupted then.
    pub(crate) fn unmap(&self, extents: &[ExtentId], done: &Done) -> (Vec<ExtentId>, Result<()>) {
        let mut unmapped = Vec::with_capacity(extents.len());
        let mut outcome = self.growth().and_then(|held| {
            let outcome = self.unmap_everywhere(&held, extents, done);
            let is_mapped = |extent: ExtentId| {
                let mut mappings = self.mappings_of(&held, extent).into_iter();
                mappings.any(|mapping| self.reservation.is_mapped(mapping))
            };
            unmapped.extend(extents.iter().copied().filter(|extent| !is_mapped(*extent)));
            outcome
        });
        for extent in extents.iter().filter(|extent| !unmapped.contains(extent)) {
            outcome = outcome.and(self.interrupted(*extent));
        }
        (unmapped, outcome)
    }

    /// Releases the memory of an extent that is unmapped.
    ///
    /// # Errors
    /// What the driver answered; it is interrupted then.
    pub(crate) fn release(&self, extent: ExtentId) -> Result<()> {
        let released = self.growth().and_then(|mut held| self.release_memory(&mut held, extent));
        let step = if released.is_ok() { Step::Released } else { Step::Failed };
        released.and(self.advance(extent, step))
    }

    fn unmap_everywhere(&self, held: &PlanState, extents: &[ExtentId], done: &Done) -> Result<()> {
        let moving = |extent: &&ExtentId| {
            self.core.lock().extents().residency(**extent) == Some(glake_stitch::Residency::Moving)
        };
        let mappings = extents.iter().filter(moving).flat_map(|extent| self.mappings_of(held, *extent));
        let mut mapped: Vec<Mapping> =
            mappings.filter(|mapping| self.reservation.is_mapped(*mapping)).collect();
        if mapped.is_empty() {
            return Ok(());
        }
        self.reservation.retire(&mapped, done.mark).map_err(|error| self.failed(error))?;
        mapped.iter().for_each(|mapping| self.tell_unmapping(mapping.offset, mapping.size));
        let unmapped = retry(|| {
            mapped.retain(|mapping| self.reservation.is_mapped(*mapping));
            self.reservation.unmap(&mapped, &done.passed)
        });
        let Err(error) = unmapped else { return Ok(()) };
        mapped.retain(|mapping| self.reservation.is_mapped(*mapping));
        self.reservation.revive(&mapped).map_err(|error| self.failed(error))?;
        mapped.iter().for_each(|mapping| self.tell_mapped(mapping.offset, mapping.size));
        Err(self.failed(error))
    }

    /// Does nothing where it is gone.
    fn release_memory(&self, held: &mut PlanState, extent: ExtentId) -> Result<()> {
        if self.core.lock().extents().residency(extent) != Some(glake_stitch::Residency::Moving) {
            return Ok(());
        }
        if let Some(memory) = held.extents.remove(&extent) {
            memory.release().map_err(|(memory, error)| {
                held.extents.insert(extent, memory);
                self.failed(error)
            })?;
        }
        self.core.lock().evictions().finish(extent).map_err(|source| self.refused(source))
    }

    pub(super) fn mappings_of(&self, held: &PlanState, extent: ExtentId) -> Vec<Mapping> {
        let Some(size) = held.extents.get(&extent).map(Extent::size) else { return Vec::new() };
        let addresses = self.core.lock().extents().addresses_of(extent);
        addresses.into_iter().map(|offset| Mapping { offset, size }).collect()
    }

    /// Makes an extent's memory again and maps it at all its addresses; returns what brings its bytes back; `None`: nothing
    /// has to be copied into it.
    ///
    /// # Errors
    /// [`PoolError::Refused`] or [`PoolError::DeviceFull`] where there is no memory for it, after what is free in other domains
    /// was given back; what the driver answers. The extent is interrupted then.
    pub(crate) fn begin_refill(&self, extent: ExtentId) -> Result<Option<Return>> {
        let mut held = self.growth()?;
        {
            let mut kept = self.kept.lock();
            let Some(entry) = kept.get_mut(&extent) else { return Ok(None) };
            entry.residency = self.after(entry.residency, Step::Refill)?;
        }
        let entered = self.make_and_map(&mut held, extent).and_then(|()| {
            let kept = self.kept.lock();
            let copy = kept.get(&extent).and_then(|entry| entry.copy.as_ref());
            copy.map(|copy| copy.back(self)).transpose()
        });
        if entered.is_err() {
            self.interrupted(extent)?;
        }
        entered
    }

    fn make_and_map(&self, held: &mut PlanState, extent: ExtentId) -> Result<()> {
        let residency = self.core.lock().extents().residency(extent);
        if residency == Some(glake_stitch::Residency::Evicted) {
            self.make(held, extent)?;
        }
        let domain = self.core.lock().extents().size_and_domain(extent).1;
        for mapping in self.mappings_of(held, extent) {
            if !self.reservation.is_mapped(mapping) {
                self.map(held, extent, mapping.offset).map_err(|error| self.failed(error))?;
            }
            let given = self.give_access(held, domain, mapping.offset, mapping.size);
            given.map_err(|error| self.failed(error))?;
        }
        Ok(())
    }

    /// New memory for an extent; where there is none, what is free elsewhere goes first.
    fn make(&self, held: &mut PlanState, extent: ExtentId) -> Result<()> {
        match self.try_make(held, extent) {
            Err(error) if error.is_out_of_memory() => {
                let plan = self.core.lock().plan_trim(Bytes::ZERO);
                let Some(plan) = plan else { return Err(error) };
                self.carry_out(held, &plan, StreamKey::default())?;
                self.try_make(held, extent)
            }
            made => made,
        }
    }

    fn try_make(&self, held: &mut PlanState, extent: ExtentId) -> Result<()> {
        let (size, domain) = {
            let mut core = self.core.lock();
            core.evictions().begin_refill(extent).map_err(|source| self.refused(source))?;
            core.extents().size_and_domain(extent)
        };
        let properties = held.properties.get(&domain).copied().unwrap_or(self.properties);
        let made = retry(|| Extent::new(&self.driver, size, properties));
        self.core.lock().evictions().refill_made(extent, made.is_ok());
        held.extents.insert(extent, made.map_err(|error| self.failed(error))?);
        Ok(())
    }

    /// All bytes of an extent are on its GPU again; `retain` keeps the copy, because nobody writes to them.
    pub(crate) fn finish_refill(&self, extent: ExtentId, retain: bool) -> Result<()> {
        let _gone;
        let mut kept = self.kept.lock();
        let Some(entry) = kept.get_mut(&extent) else { return Ok(()) };
        entry.residency = self.after(entry.residency, Step::Arrived)?;
        match &mut entry.copy {
            Some(copy) if retain => copy.set_retained(),
            _ => {
                self.after(entry.residency, Step::DropCopy)?;
                _gone = kept.remove(&extent);
            }
        }
        self.core.lock().evictions().finish_refill(extent).map_err(|source| self.refused(source))
    }

    /// What was begun with an extent that has a whole copy failed.
    pub(crate) fn interrupted(&self, extent: ExtentId) -> Result<()> {
        self.advance(extent, Step::Failed)
    }

    fn advance(&self, extent: ExtentId, step: Step) -> Result<()> {
        let mut kept = self.kept.lock();
        if let Some(entry) = kept.get_mut(&extent) {
            entry.residency = self.after(entry.residency, step)?;
        }
        Ok(())
    }

    /// Forgets the extents of a domain that are evicted and hold nothing live.
    pub(crate) fn forget_emptied(&self, domain: DomainId) -> Result<()> {
        self.tick()?;
        let mut held = self.growth()?;
        let plan = self.core.lock().plan_forget(domain).map_err(|source| self.refused(source))?;
        plan.map_or(Ok(()), |plan| self.carry_out(&mut held, &plan, StreamKey::default()).map(|_| ()))
    }

    /// Says whether the bytes of a domain stay as they are. Unsealed, its copies are dropped.
    pub(crate) fn seal_domain(&self, domain: DomainId, sealed: bool) -> Result<()> {
        let mut gone = Vec::new();
        let mut kept = self.kept.lock();
        let mut core = self.core.lock();
        core.seal_domain(domain, sealed).map_err(|source| self.refused(source))?;
        if !sealed {
            let own = core.extents().of(domain).map_err(|source| self.refused(source))?;
            for view in own.iter().filter(|view| view.residency == glake_stitch::Residency::Resident) {
                gone.push(kept.remove(&view.extent));
            }
        }
        Ok(())
    }

    /// The last live block was freed in these extents while they were elsewhere: what was kept of them goes.
    #[cold]
    pub(super) fn drop_emptied(&self, emptied: &[ExtentId]) {
        // Dropped behind the locks: a copy may be a file, or a block of another pool.
        let mut gone = Vec::new();
        let mut kept = self.kept.lock();
        let core = self.core.lock();
        for extent in emptied {
            if core.extents().kept_ranges(*extent).is_empty()
                && let Some(entry) = kept.get_mut(extent)
            {
                gone.push(entry.copy.take());
            }
        }
    }

    fn after(&self, residency: Residency, step: Step) -> Result<Residency> {
        let wrong = |source: NotNow| PoolError::NotNow { device: self.device, source };
        residency.after(step).map_err(wrong)
    }
}
