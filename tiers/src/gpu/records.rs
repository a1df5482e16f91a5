//! Where the bytes of single extents are: the pool's record, beside the allocator's of which extents have memory.
//!
//! ```text
//! begin_evict ─► (its bytes are copied) ─► finish_copy ─► Released                  memory is free
//! begin_refill ─► (made, mapped, copied back) ─► finish_refill                      as before
//! ```
//!
//! Invariants: how it stands with an extent is its [`Residency`] here, where there is no entry it is new; each step changes it
//! before another can begin. The lock is taken before the allocator's, and neither with the driver at work. Copies are dropped
//! behind the locks: one may be a file, or a block of another pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use glake_stitch::{DomainId, ExtentId, ExtentView, HomeRange, StitchError};
use glake_units::Bytes;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::block_range::BlockRange;
use super::core::Core;
use super::live_ranges::{Kept, size_of, without};
use super::{PoolError, Result};
use crate::place::{NotNow, Place, Residency, Step};
use crate::store::{Return, StoredCopy};
use crate::{HostBlock, HostPool, SealedFile};

/// Where an extent's bytes are, and their copy where there is one.
#[derive(Debug)]
struct ExtentRecord {
    residency: Residency,
    /// None: there is nothing in it that counts.
    copy: Option<StoredCopy>,
}

impl ExtentRecord {
    /// What lies in blocks of its extent and not in its copy.
    fn uncopied(&self, core: &Core, extent: ExtentId) -> Vec<HomeRange> {
        let all = core.lock().extents().kept_ranges(extent);
        without(&all, self.copy.as_ref().map_or(&[], StoredCopy::ranges))
    }
}

/// Whether a copy has all that counts.
fn covers(copy: &[HomeRange], kept: &[HomeRange]) -> bool {
    without(kept, copy).is_empty()
}

/// Of extents whose bytes are elsewhere, or somewhere else too.
#[derive(Debug)]
pub(crate) struct ExtentRecords {
    core: Arc<Core>,
    moved: Mutex<FxHashMap<ExtentId, ExtentRecord>>,
    /// How many of them have bytes that were given up: copies look at it first.
    decommitted: AtomicUsize,
}

/// What has to be done to evict an extent.
#[derive(Debug)]
pub(crate) enum Eviction {
    /// These bytes are to be copied first.
    Copy {
        /// At home, in the order of addresses.
        ranges: Vec<HomeRange>,
        /// Bytes in blocks that are not copied, because they do not count.
        undefined: Bytes,
    },
    /// A whole copy is there already, or nothing has to be kept.
    Release {
        /// Bytes in blocks of which there is no copy, because they do not count.
        undefined: Bytes,
    },
    /// It stays: other processes have it.
    Exported,
    /// It stays: a block in it is fixed.
    Fixed,
    /// It stays: blocks in it were freed that other streams may still use.
    Withheld,
    /// It is evicted already, and what there was of a copy is gone.
    Decommitted,
}

impl ExtentRecords {
    /// Nothing was moved yet.
    pub(super) fn new(core: Arc<Core>) -> Self {
        ExtentRecords { core, moved: Mutex::default(), decommitted: AtomicUsize::new(0) }
    }

    /// The extents of a domain with how it stands with each.
    pub(crate) fn standing(&self, domain: DomainId) -> Vec<(ExtentView, Residency)> {
        let moved = self.moved.lock();
        let views = self.core.lock().extents().of(domain);
        let residency =
            |view: &ExtentView| moved.get(&view.extent).map_or(Residency::NEW, |record| record.residency);
        views.into_iter().map(|view| (view, residency(&view))).collect()
    }

    /// Whether it stands so with any extent of a domain: asked of those only that were moved.
    pub(crate) fn has_any(&self, domain: DomainId, so: impl Fn(Residency) -> bool) -> bool {
        let moved = self.moved.lock();
        let core = self.core.lock();
        let mut own = moved.iter().filter(|(extent, _)| core.extents().size_and_domain(**extent).1 == domain);
        own.any(|(_, record)| so(record.residency))
    }

    /// Whether the bytes of any extent are given up, or about to be.
    pub(super) fn are_any_decommitted(&self) -> bool {
        self.decommitted.load(Ordering::Acquire) > 0
    }

    /// Whether an extent's bytes are given up, or about to be.
    pub(crate) fn is_decommitted(&self, extent: ExtentId) -> bool {
        self.residency(extent).authority() == Place::Nowhere
    }

    /// How it stands with an extent.
    pub(super) fn residency(&self, extent: ExtentId) -> Residency {
        self.moved.lock().get(&extent).map_or(Residency::NEW, |record| record.residency)
    }

    /// What a residency is after a step.
    ///
    /// # Errors
    /// [`PoolError::NotNow`].
    pub(super) fn after(&self, residency: Residency, step: Step) -> Result<Residency> {
        let wrong = |source: NotNow| PoolError::NotNow { device: self.core.device(), source };
        residency.after(step).map_err(wrong)
    }

    /// An extent stands as `next` from now on, after `residency`; with `discard` its bytes are given up.
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
        let Kept { ranges, undefined } = match discard {
            true => Kept::default(),
            false => self.core.kept(&self.core.lock(), extent),
        };
        if !ranges.is_empty() {
            return Ok(Eviction::Copy { ranges, undefined });
        }
        record.residency = self.after(next, Step::Copied)?;
        Ok(Eviction::Release { undefined })
    }

    /// The bytes of an extent are given up, and its memory is to go where it has any; refused where a range of a block does not hold all
    /// of it any more. Also returns what there was of a copy, to be dropped behind the locks.
    ///
    /// # Errors
    /// [`PoolError::UnknownAddress`]: the block was freed, and its addresses may be others'. Nothing has changed then.
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

    /// How many bytes of an extent would be copied if it left now.
    pub(crate) fn size_to_copy(&self, extent: ExtentId) -> Bytes {
        size_of(&self.core.kept(&self.core.lock(), extent).ranges)
    }

    /// Host memory that the copies of a domain's extents take.
    pub(crate) fn hosted(&self, domain: DomainId) -> Bytes {
        let moved = self.moved.lock();
        let core = self.core.lock();
        let own = moved.iter().filter(|(extent, _)| core.extents().size_and_domain(**extent).1 == domain);
        let copies = own.filter_map(|(_, record)| record.copy.as_ref());
        copies.filter(|copy| copy.host_block().is_some()).map(StoredCopy::size).sum()
    }

    /// The copy of an extent, where that is evicted and its copy takes memory of the host.
    pub(crate) fn evicted_to_host(&self, extent: ExtentId) -> Option<Arc<HostBlock>> {
        let moved = self.moved.lock();
        let record = moved.get(&extent)?;
        let is_evicted = record.residency == Residency::Evicted { at: Place::Host };
        record.copy.as_ref().filter(|_| is_evicted)?.host_block().cloned()
    }

    /// The copy of an extent is in a file, too, and counts there from now on. False: it is on its way back, or gone, and the file nobody's.
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

    /// The bytes in blocks of an extent that is being refilled which its copy does not have.
    pub(crate) fn undefined(&self, extent: ExtentId) -> Vec<HomeRange> {
        let moved = self.moved.lock();
        let refilling = |record: &&ExtentRecord| matches!(record.residency, Residency::Refilling { .. });
        let record = moved.get(&extent).filter(refilling);
        record.map(|record| record.uncopied(&self.core, extent)).unwrap_or_default()
    }

    /// What counts of a block has changed: copies of its extents that were retained and do not have all of it are dropped.
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

    /// All bytes of an extent are in its copy.
    pub(crate) fn finish_copy(&self, extent: ExtentId, copy: StoredCopy) -> Result<()> {
        let mut moved = self.moved.lock();
        let needed = !self.core.lock().extents().kept_ranges(extent).is_empty();
        if let Some(record) = moved.get_mut(&extent) {
            record.residency = self.after(record.residency, Step::Copied)?;
            if needed {
                record.copy = Some(copy);
            }
        }
        Ok(())
    }

    /// The copy out failed: the extent stays, as it was.
    pub(crate) fn cancel_evict(&self, extent: ExtentId) -> Result<()> {
        let mut moved = self.moved.lock();
        if let Some(record) = moved.get(&extent) {
            self.after(record.residency, Step::Failed)?;
            moved.remove(&extent);
        }
        self.core.lock().evictions().finish_refill(extent).map_err(|source| self.core.refused(source))
    }

    /// An extent's bytes are to come back; false where they were never elsewhere.
    pub(super) fn begin_refill(&self, extent: ExtentId) -> Result<bool> {
        let mut moved = self.moved.lock();
        let Some(record) = moved.get_mut(&extent) else { return Ok(false) };
        record.residency = self.after(record.residency, Step::Refill)?;
        Ok(true)
    }

    /// What brings the bytes of an extent back that is mapped; `None`: nothing has to be copied into it.
    pub(super) fn back(&self, extent: ExtentId) -> Result<Option<Return>> {
        let moved = self.moved.lock();
        let Some(ExtentRecord { residency, copy: Some(copy) }) = moved.get(&extent) else { return Ok(None) };
        copy.back(&self.core, residency.authority()).map(Some)
    }

    /// All bytes of an extent are on its GPU again; `retain` keeps the copy, because nobody writes to them.
    pub(crate) fn finish_refill(&self, extent: ExtentId, retain: bool) -> Result<()> {
        let _gone;
        let mut moved = self.moved.lock();
        let Some(record) = moved.get_mut(&extent) else { return Ok(()) };
        let arrived = self.after(record.residency, Step::Arrived)?;
        if record.residency.authority() == Place::Nowhere {
            self.decommitted.fetch_sub(1, Ordering::AcqRel);
        }
        record.residency = arrived;
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

    /// What was begun with an extent that has a whole copy failed.
    pub(crate) fn interrupted(&self, extent: ExtentId) -> Result<()> {
        self.advance(extent, Step::Failed)
    }

    /// A step of an extent that was moved.
    pub(super) fn advance(&self, extent: ExtentId, step: Step) -> Result<()> {
        let mut moved = self.moved.lock();
        if let Some(record) = moved.get_mut(&extent) {
            record.residency = self.after(record.residency, step)?;
        }
        Ok(())
    }

    /// Says whether the bytes of a domain stay as they are. Unsealed, its copies are dropped.
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

    /// The last live block was freed in these extents while they were elsewhere: what was kept of them goes.
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

    /// The extent is no more.
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

    /// Records, and an extent with a live block in it that nobody has made.
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
