//! Location of extents' bytes: the pool's record, in addition to the allocator's record of which extents have memory.
//!
//! ```text
//! begin_evict ─► (its bytes are copied) ─► finish_copy ─► Released                  memory is free
//! begin_refill ─► (made, mapped, copied back) ─► finish_refill                      as before
//! ```
//!
//! Invariants: the state of an extent is its [`Residency`] here; an extent without an entry is new. Each step changes the state before
//! another can begin. The lock is taken before the allocator's, and the driver is called under neither. Copies are dropped after the locks
//! are released: a copy may be a file, or a block of another pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use glake_stitch::{DomainId, ExtentId, ExtentView, HomeRange, StitchError};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::block_range::BlockRange;
use super::core::Core;
use super::live_ranges::{BytesToKeep, size_of, without};
use super::{PoolError, Result};
use crate::place::{NotNow, Place, Residency, Step};
use crate::store::{HostPart, Return, StoredCopy};
use crate::{HostBlock, HostPool, SealedFile};

/// Residency of an extent, and its copy if there is one.
#[derive(Debug)]
struct ExtentRecord {
    residency: Residency,
    /// Copy of the bytes; `None`: the extent holds no live bytes.
    copy: Option<StoredCopy>,
}

impl ExtentRecord {
    /// Returns the bytes in the extent's blocks that its copy lacks.
    fn uncopied(&self, core: &Core, extent: ExtentId) -> Vec<HomeRange> {
        let all = core.lock().extents().kept_ranges(extent);
        without(&all, self.copy.as_ref().map_or(&[], StoredCopy::ranges))
    }
}

/// Returns whether a copy holds all bytes to be preserved.
fn covers(copy: &[HomeRange], kept: &[HomeRange]) -> bool {
    without(kept, copy).is_empty()
}

/// Records of extents whose bytes are, or also are, somewhere else.
#[derive(Debug)]
pub(crate) struct ExtentRecords {
    core: Arc<Core>,
    moved: Mutex<FxHashMap<ExtentId, ExtentRecord>>,
    /// Number of extents whose bytes were given up: lets copies skip the lookup.
    decommitted: AtomicUsize,
    /// Bytes copied off the GPU, and back.
    copied_out: AtomicU64,
    copied_back: AtomicU64,
}

/// Bytes of a pool's evicted extents by the place of their contents, and bytes copied so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvictedBytes {
    /// Extents whose contents are in host memory.
    pub host: Bytes,
    /// Extents whose contents are in memory of other GPUs.
    pub peers: Bytes,
    /// Extents whose contents are in files.
    pub files: Bytes,
    /// Extents without contents: they return without a copy, or not at all.
    pub discarded: Bytes,
    /// Bytes that evictions have copied off the GPU.
    pub copied_out: Bytes,
    /// Bytes that refills have copied to the GPU.
    pub copied_back: Bytes,
}

/// Work required to evict an extent.
#[derive(Debug)]
pub(crate) enum Eviction {
    /// Bytes must be copied first.
    Copy {
        /// Home ranges in address order.
        ranges: Vec<HomeRange>,
        /// Bytes in blocks that are not copied, because they were declared dead.
        undefined: Bytes,
    },
    /// No copy is required: a complete one exists, or no bytes must be preserved.
    Release {
        /// Bytes in blocks without a copy, because they were declared dead.
        undefined: Bytes,
    },
    /// Not possible: other processes use the extent.
    Exported,
    /// Not possible: the extent holds a fixed block.
    Fixed,
    /// Not possible now: other streams may still use freed blocks in it.
    Withheld,
    /// Complete already: the extent was evicted, and its copy is dropped.
    Decommitted,
}

impl ExtentRecords {
    /// Creates records in which no extent has moved.
    pub(super) fn new(core: Arc<Core>) -> Self {
        let (moved, decommitted, copied_out, copied_back) = Default::default();
        ExtentRecords { core, moved, decommitted, copied_out, copied_back }
    }

    /// Returns the extents of a domain with their residency.
    pub(crate) fn standing(&self, domain: DomainId) -> Vec<(ExtentView, Residency)> {
        let moved = self.moved.lock();
        let views = self.core.lock().extents().of(domain);
        let residency =
            |view: &ExtentView| moved.get(&view.extent).map_or(Residency::NEW, |record| record.residency);
        views.into_iter().map(|view| (view, residency(&view))).collect()
    }

    /// Returns whether any moved extent of a domain satisfies `so`.
    pub(crate) fn has_any(&self, domain: DomainId, so: impl Fn(Residency) -> bool) -> bool {
        let moved = self.moved.lock();
        let core = self.core.lock();
        let mut own = moved.iter().filter(|(extent, _)| core.extents().size_and_domain(**extent).1 == domain);
        own.any(|(_, record)| so(record.residency))
    }

    /// Returns whether the bytes of any extent are given up, or about to be.
    pub(super) fn are_any_decommitted(&self) -> bool {
        self.decommitted.load(Ordering::Acquire) > 0
    }

    /// Returns whether an extent's bytes are given up, or about to be.
    pub(crate) fn is_decommitted(&self, extent: ExtentId) -> bool {
        self.residency(extent).authority() == Place::Nowhere
    }

    /// Returns the residency of an extent.
    pub(super) fn residency(&self, extent: ExtentId) -> Residency {
        self.moved.lock().get(&extent).map_or(Residency::NEW, |record| record.residency)
    }

    /// Returns the residency after a step.
    ///
    /// # Errors
    /// [`PoolError::NotNow`].
    pub(super) fn after(&self, residency: Residency, step: Step) -> Result<Residency> {
        let wrong = |source: NotNow| PoolError::NotNow { device: self.core.device(), source };
        residency.after(step).map_err(wrong)
    }

    /// Changes an extent's state from `residency` to `next`; with `discard` its bytes are given up.
    pub(super) fn begin_evict(
        &self,
        extent: ExtentId,
        residency: Residency,
        next: Residency,
        discard: bool,
    ) -> Result<Eviction> {
        let mut moved = self.moved.lock();
        if matches!(residency, Residency::Resident { .. }) {
            match self.core.lock().evictions().begin(extent) {
                Ok(()) => {}
                Err(StitchError::Withheld { .. }) => return Ok(Eviction::Withheld),
                Err(source) => return Err(self.core.refused(source)),
            }
        }
        let record = moved.entry(extent).or_insert(ExtentRecord { residency, copy: None });
        record.residency = next;
        if let Some(copy) = &record.copy {
            copy.set_needed();
        }
        if !matches!(next, Residency::Evicting { .. }) {
            let undefined = if discard { Bytes::ZERO } else { size_of(&record.uncopied(&self.core, extent)) };
            return Ok(Eviction::Release { undefined });
        }
        let BytesToKeep { ranges, undefined } = match discard {
            true => BytesToKeep::default(),
            false => self.core.kept(&self.core.lock(), extent),
        };
        if !ranges.is_empty() {
            return Ok(Eviction::Copy { ranges, undefined });
        }
        record.residency = self.after(next, Step::Copied)?;
        Ok(Eviction::Release { undefined })
    }

    /// Begins to give up an extent's bytes and its memory, if any; refused unless the block range still holds all of the extent. Also
    /// returns the previous copy, to be dropped after the locks are released.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]: the block was freed, and its addresses may be reused. Nothing has changed.
    pub(super) fn begin_decommit(
        &self,
        extent: ExtentId,
        range: &BlockRange,
    ) -> Result<(Eviction, Option<StoredCopy>)> {
        let mut moved = self.moved.lock();
        let residency = moved.get(&extent).map_or(Residency::NEW, |record| record.residency);
        let next = self.after(residency, Step::Evict(Place::Nowhere))?;
        let mut core = self.core.lock();
        if !range.covers(&core, extent) {
            return Err(range.unknown(&self.core));
        }
        if matches!(residency, Residency::Resident { .. }) {
            match core.evictions().begin(extent) {
                Ok(()) => {}
                Err(StitchError::Withheld { .. }) => return Ok((Eviction::Withheld, None)),
                Err(source) => return Err(self.core.refused(source)),
            }
        }
        if residency.authority() != Place::Nowhere {
            self.decommitted.fetch_add(1, Ordering::AcqRel);
        }
        let known = moved.insert(extent, ExtentRecord { residency: next, copy: None });
        let begun = match next {
            Residency::Evicted { .. } => Eviction::Decommitted,
            _ => Eviction::Release { undefined: Bytes::ZERO },
        };
        Ok((begun, known.and_then(|record| record.copy)))
    }

    /// Returns the number of bytes that an eviction of the extent would copy now.
    pub(crate) fn size_to_copy(&self, extent: ExtentId) -> Bytes {
        size_of(&self.core.kept(&self.core.lock(), extent).ranges)
    }

    /// Returns the host memory of the copies of a domain's extents.
    pub(crate) fn hosted(&self, domain: DomainId) -> Bytes {
        let moved = self.moved.lock();
        let core = self.core.lock();
        let own = moved.iter().filter(|(extent, _)| core.extents().size_and_domain(**extent).1 == domain);
        let copies = own.filter_map(|(_, record)| record.copy.as_ref());
        copies.filter(|copy| copy.host_block().is_some()).map(StoredCopy::size).sum()
    }

    /// Returns the evicted bytes by place. Visits all moved extents.
    pub(super) fn evicted(&self) -> EvictedBytes {
        let moved = self.moved.lock();
        let core = self.core.lock();
        let mut sums = EvictedBytes {
            copied_out: Bytes::new(self.copied_out.load(Ordering::Relaxed)),
            copied_back: Bytes::new(self.copied_back.load(Ordering::Relaxed)),
            ..EvictedBytes::default()
        };
        for (extent, record) in moved.iter() {
            let sum = match record.residency.authority() {
                Place::Gpu => continue,
                Place::Host if record.copy.is_some() => &mut sums.host,
                Place::Peer(_) if record.copy.is_some() => &mut sums.peers,
                Place::File if record.copy.is_some() => &mut sums.files,
                _ => &mut sums.discarded,
            };
            *sum = sum.saturating_add(core.extents().size_and_domain(*extent).0);
        }
        sums
    }

    /// Returns the copy of an evicted extent if it is in host memory.
    pub(crate) fn evicted_to_host(&self, extent: ExtentId) -> Option<Arc<HostBlock>> {
        let moved = self.moved.lock();
        let record = moved.get(&extent)?;
        let is_evicted = record.residency == Residency::Evicted { at: Place::Host };
        record.copy.as_ref().filter(|_| is_evicted)?.host_block().cloned()
    }

    /// Makes a file the valid copy of an extent, in place of host memory. Returns false if the extent is being refilled or gone; the file
    /// is dropped then.
    pub(crate) fn demote(
        &self,
        extent: ExtentId,
        copied: &Arc<HostBlock>,
        file: SealedFile,
        host: &Arc<HostPool>,
    ) -> Result<bool> {
        let _gone;
        let mut moved = self.moved.lock();
        let Some(ExtentRecord { residency, copy: Some(copy) }) = moved.get_mut(&extent) else {
            return Ok(false);
        };
        let is_same = copy.host_block().is_some_and(|block| Arc::ptr_eq(block, copied));
        if !is_same || *residency != (Residency::Evicted { at: Place::Host }) {
            return Ok(false);
        }
        *residency = self.after(*residency, Step::Demote(Place::File))?;
        _gone = copy.demote(file, host);
        Ok(true)
    }

    /// Returns the parts of copies in host memory that hold the bytes of a block's range, without bytes that were declared dead. `None` if
    /// some of the range is not evicted to host memory.
    pub(crate) fn host_parts(&self, range: &BlockRange) -> Option<Vec<HostPart>> {
        let moved = self.moved.lock();
        let core = self.core.lock();
        let (mut parts, mut at) = (Vec::new(), Bytes::ZERO);
        for piece in range.pieces(&core) {
            for (extent, home) in core.extents().touching(piece) {
                let start = piece.offset.max(home.offset);
                let end = piece.offset.saturating_add(piece.size).min(home.offset.saturating_add(home.size));
                let wanted = HomeRange { offset: start, size: end.saturating_sub(start) };
                let record =
                    moved.get(&extent).filter(|record| record.residency.authority() == Place::Host)?;
                record.copy.as_ref()?.host_parts(wanted, at, &mut parts)?;
                at = at.saturating_add(wanted.size);
            }
        }
        Some(parts)
    }

    /// Returns the bytes in blocks of an extent being refilled that its copy lacks.
    pub(crate) fn undefined(&self, extent: ExtentId) -> Vec<HomeRange> {
        let moved = self.moved.lock();
        let refilling = |record: &&ExtentRecord| matches!(record.residency, Residency::Refilling { .. });
        let record = moved.get(&extent).filter(refilling);
        record.map(|record| record.uncopied(&self.core, extent)).unwrap_or_default()
    }

    /// Drops retained copies of a block's extents that lack bytes which are live now.
    pub(super) fn drop_outgrown(&self, block: Bytes) -> Result<()> {
        let mut gone = Vec::new();
        let mut moved = self.moved.lock();
        if moved.is_empty() {
            return Ok(());
        }
        let core = self.core.lock();
        let Some(backing) = core.blocks().backing(block) else { return Ok(()) };
        for extent in backing.extents {
            let Some(ExtentRecord { residency: residency @ Residency::Resident { .. }, copy: Some(copy) }) =
                moved.get(&extent)
            else {
                continue;
            };
            if !covers(copy.ranges(), &self.core.kept(&core, extent).ranges) {
                self.after(*residency, Step::DropCopy)?;
                gone.push(moved.remove(&extent));
            }
        }
        Ok(())
    }

    /// Records that a copy with all bytes of an extent is complete.
    pub(crate) fn finish_copy(&self, extent: ExtentId, copy: StoredCopy) -> Result<()> {
        let mut moved = self.moved.lock();
        let needed = !self.core.lock().extents().kept_ranges(extent).is_empty();
        if let Some(record) = moved.get_mut(&extent) {
            record.residency = self.after(record.residency, Step::Copied)?;
            self.copied_out.fetch_add(copy.size().get(), Ordering::Relaxed);
            if needed {
                record.copy = Some(copy);
            }
        }
        Ok(())
    }

    /// Records that the copy out failed: the extent stays resident.
    pub(crate) fn cancel_evict(&self, extent: ExtentId) -> Result<()> {
        let mut moved = self.moved.lock();
        if let Some(record) = moved.get(&extent) {
            self.after(record.residency, Step::Failed)?;
            moved.remove(&extent);
        }
        self.core.lock().evictions().finish_refill(extent).map_err(|source| self.core.refused(source))
    }

    /// Begins to refill an extent. Returns false if its bytes were never elsewhere.
    pub(super) fn begin_refill(&self, extent: ExtentId) -> Result<bool> {
        let mut moved = self.moved.lock();
        let Some(record) = moved.get_mut(&extent) else { return Ok(false) };
        record.residency = self.after(record.residency, Step::Refill)?;
        Ok(true)
    }

    /// Returns the source of the bytes of a mapped extent; `None`: there is nothing to copy into it.
    pub(super) fn back(&self, extent: ExtentId) -> Result<Option<Return>> {
        let moved = self.moved.lock();
        let Some(ExtentRecord { residency, copy: Some(copy) }) = moved.get(&extent) else { return Ok(None) };
        copy.back(&self.core, residency.authority()).map(Some)
    }

    /// Records that all bytes of an extent are on its GPU again; `retain` keeps the copy, because the bytes will not be written.
    pub(crate) fn finish_refill(&self, extent: ExtentId, retain: bool) -> Result<()> {
        let _gone;
        let mut moved = self.moved.lock();
        let Some(record) = moved.get_mut(&extent) else { return Ok(()) };
        let arrived = self.after(record.residency, Step::Arrived)?;
        if record.residency.authority() == Place::Nowhere {
            self.decommitted.fetch_sub(1, Ordering::AcqRel);
        }
        record.residency = arrived;
        let copied = record.copy.as_ref().map_or(Bytes::ZERO, StoredCopy::size);
        self.copied_back.fetch_add(copied.get(), Ordering::Relaxed);
        match &record.copy {
            Some(copy)
                if retain && covers(copy.ranges(), &self.core.kept(&self.core.lock(), extent).ranges) =>
            {
                copy.set_retained();
            }
            _ => {
                self.after(record.residency, Step::DropCopy)?;
                _gone = moved.remove(&extent);
            }
        }
        self.core.lock().evictions().finish_refill(extent).map_err(|source| self.core.refused(source))
    }

    /// Records that a step of an extent with a complete copy failed.
    pub(crate) fn interrupted(&self, extent: ExtentId) -> Result<()> {
        self.advance(extent, Step::Failed)
    }

    /// Applies a step to a moved extent.
    pub(super) fn advance(&self, extent: ExtentId, step: Step) -> Result<()> {
        let mut moved = self.moved.lock();
        if let Some(record) = moved.get_mut(&extent) {
            record.residency = self.after(record.residency, step)?;
        }
        Ok(())
    }

    /// Seals or unseals a domain. Unsealing drops its retained copies.
    pub(crate) fn seal(&self, domain: DomainId, sealed: bool) {
        let mut gone = Vec::new();
        let mut moved = self.moved.lock();
        let mut core = self.core.lock();
        core.seal_domain(domain, sealed);
        if !sealed {
            let own = core.extents().of(domain);
            for view in own.iter().filter(|view| view.state == glake_stitch::ExtentState::Resident) {
                gone.push(moved.remove(&view.extent));
            }
        }
    }

    /// Drops the copies of evicted extents whose last live block was freed.
    #[cold]
    pub(super) fn drop_emptied(&self, emptied: &[ExtentId]) {
        let mut gone = Vec::new();
        let mut moved = self.moved.lock();
        let core = self.core.lock();
        for extent in emptied {
            if core.extents().kept_ranges(*extent).is_empty()
                && let Some(record) = moved.get_mut(extent)
            {
                gone.push(record.copy.take());
            }
        }
    }

    /// Removes the record of an extent that no longer exists.
    pub(super) fn forget(&self, extent: ExtentId) {
        let gone = self.moved.lock().remove(&extent);
        if gone.as_ref().is_some_and(|record| record.residency.authority() == Place::Nowhere) {
            self.decommitted.fetch_sub(1, Ordering::AcqRel);
        }
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use glake_stitch::Allocator;
    use glake_units::Bytes;

    use super::super::fixture::Parts;
    use super::*;
    use crate::Place;

    const OUT: Residency = Residency::Evicting { to: Place::Host };

    /// Creates records and an extent with a live block, without device memory.
    fn records() -> (Parts, ExtentRecords, ExtentId) {
        let parts = Parts::new();
        let block = parts.grow(Bytes::mib(4));
        let extent = parts.core.lock().blocks().backing(block).unwrap().extents[0];
        let records = ExtentRecords::new(parts.core.clone());
        (parts, records, extent)
    }

    fn standing(records: &ExtentRecords) -> Vec<(glake_stitch::ExtentState, Residency)> {
        let all = records.standing(Allocator::default_domain());
        all.into_iter().map(|(view, residency)| (view.state, residency)).collect()
    }

    #[test]
    fn an_eviction_that_is_given_up_leaves_no_record() {
        let (_parts, records, extent) = records();
        match records.begin_evict(extent, Residency::NEW, OUT, false).unwrap() {
            Eviction::Copy { ranges, undefined } => {
                assert_eq!((ranges.len(), undefined), (1, Bytes::ZERO));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(standing(&records), [(glake_stitch::ExtentState::Moving, OUT)]);
        records.cancel_evict(extent).unwrap();
        assert_eq!(standing(&records), [(glake_stitch::ExtentState::Resident, Residency::NEW)]);
        assert!(!records.has_any(Allocator::default_domain(), |_| true));
    }

    #[test]
    fn what_is_discarded_goes_and_comes_without_a_copy() {
        let (parts, records, extent) = records();
        let begun = records.begin_evict(extent, Residency::NEW, OUT, true).unwrap();
        assert!(matches!(begun, Eviction::Release { .. }), "{begun:?}");
        parts.core.lock().evictions().finish(extent).unwrap();
        records.advance(extent, Step::Released).unwrap();
        assert_eq!(
            standing(&records),
            [(glake_stitch::ExtentState::Evicted, Residency::Evicted { at: Place::Host })]
        );
        assert!(records.begin_refill(extent).unwrap());
        parts.core.lock().evictions().begin_refill(extent).unwrap();
        parts.core.lock().evictions().refill_made(extent, true);
        assert!(records.back(extent).unwrap().is_none());
        records.finish_refill(extent, true).unwrap();
        assert_eq!(standing(&records), [(glake_stitch::ExtentState::Resident, Residency::NEW)]);
    }

    #[test]
    fn a_step_out_of_order_changes_nothing() {
        let (_parts, records, extent) = records();
        assert!(!records.begin_refill(extent).unwrap(), "it was never elsewhere");
        records.begin_evict(extent, Residency::NEW, OUT, false).unwrap();
        let early = records.advance(extent, Step::Released).unwrap_err();
        assert!(matches!(early, PoolError::NotNow { .. }), "{early}");
        assert_eq!(records.residency(extent), OUT);
    }

    #[test]
    fn what_is_forgotten_is_new() {
        let (_parts, records, extent) = records();
        records.begin_evict(extent, Residency::NEW, OUT, true).unwrap();
        records.interrupted(extent).unwrap();
        assert_eq!(records.residency(extent), Residency::Interrupted { at: Place::Host });
        records.forget(extent);
        assert_eq!(records.residency(extent), Residency::NEW);
    }
}
