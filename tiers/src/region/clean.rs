//! Copies of resident bytes, made on the host while the region is idle, so that a shrink need not copy them.
//!
//! ```text
//! idle      per extent:  copy out ─► digest of the copy                     the extent is clean
//! use                    [`Region::void_clean`]: voids its copies, which are kept for comparison
//! allocation, copy       [`Region::void_block`]: voids the copies of the block's extents
//! idle      per extent:  digest of the extent: the same ─► clean again      else it is copied again
//! shrink    per extent:  digest of the extent: the same ─► released         else it is copied, as if there were no copy
//! ```
//!
//! Invariant: a copy becomes the valid one only in a shrink, after its digest and its live ranges were compared with the extent's.
//! Correctness therefore does not depend on reports of writes: the digest detects kernels that no use covers. Until then a copy is host
//! memory that can be reclaimed at any time, and is when host memory is short.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::Address;
use glake_device::owned::{Digest, Digesting, Digests, Span};
use glake_stitch::{ExtentId, ExtentView, HomeRange};
use glake_units::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::{FxHashMap, FxHashSet, FxHasher};

use super::{Mover, Policy, Region, Result, Shrunk};
use crate::gpu::ResidentReads;
use crate::host::Reclaim;
use crate::store::{ResidentCopies, ResidentCopy, StoredCopy, packed_home};
use crate::{HostPool, Place, PoolError, Residency, Store};

/// Parameters for cleaning a region.
#[derive(Clone, Copy)]
pub struct Clean<'a> {
    /// Pool for the copies.
    pub host: &'a Arc<HostPool>,
    /// Mover for the copies. Pieces of 16 MiB are enqueued, one at a time.
    pub mover: &'a dyn Mover,
    /// Digests of the region's GPU.
    pub digests: &'a Arc<Digests>,
    /// Number of the last use of the region, in any numbering: copies are valid until [`Region::void_clean`] is called with another one.
    pub after_use: u64,
    /// Whether to continue; called before each piece. May block until links are free.
    pub keep_going: &'a dyn Fn() -> bool,
}

impl fmt::Debug for Clean<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clean")
            .field("mover", &self.mover)
            .field("after_use", &self.after_use)
            .finish_non_exhaustive()
    }
}

/// Result of cleaning a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Bytes copied to the host.
    pub copied: Bytes,
    /// Bytes whose older copy is still identical.
    pub unchanged: Bytes,
    /// Whether the whole region is clean.
    pub whole: bool,
}

/// Statistics of a region's clean copies since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CleanCounts {
    /// Bytes that are clean now.
    pub clean: Bytes,
    /// Bytes copied while the region was idle.
    pub copied: Bytes,
    /// Bytes of copies voided by a use, an allocation or a free.
    pub voided: Bytes,
    /// Bytes that a shrink released without copying them.
    pub released: Bytes,
    /// Bytes that had changed without a report: their digest differed.
    pub refused: Bytes,
    /// Bytes of copies reclaimed because host memory was short.
    pub reclaimed: Bytes,
}

/// Clean copies of one region.
#[derive(Debug, Default)]
pub(super) struct CleanCopies {
    copies: Mutex<FxHashMap<ExtentId, CleanCopy>>,
    /// Digests of the region's GPU, set by the first cleaning.
    digests: Mutex<Option<Arc<Digests>>>,
    /// Host pools that can reclaim the copies.
    hosts: Mutex<Vec<Arc<HostPool>>>,
    /// Number of times copies were voided: bytes read across a void are not clean.
    voids: AtomicU64,
    counts: Counts,
}

#[derive(Debug)]
struct CleanCopy {
    copy: StoredCopy,
    /// Last use covered by the copy; `None`: the copy is void.
    after_use: Option<u64>,
}

#[derive(Debug, Default)]
struct Counts {
    copied: AtomicU64,
    voided: AtomicU64,
    released: AtomicU64,
    refused: AtomicU64,
    reclaimed: AtomicU64,
}

impl Region {
    /// Copies resident extents without a copy to the host, one at a time, while `keep_going` returns true and no other thread moves the
    /// region's extents. The bytes stay on their GPU, and programs may use, write and free them meanwhile. Does nothing for regions that
    /// discard their bytes or are strictly sealed, and stops if the host has no memory to spare. A thread that moves extents waits for at
    /// most one piece, and not while this one waits for host memory.
    ///
    /// # Errors
    /// The error of a copy; extents cleaned before it stay clean.
    pub fn clean(&self, clean: Clean<'_>) -> Result<Cleaned> {
        let mut cleaned = Cleaned { whole: true, ..Cleaned::default() };
        if self.options.policy == Policy::Discard || self.strict.load(Ordering::Acquire) {
            return Ok(cleaned);
        }
        self.clean.serve(clean);
        let standing = self.pool.records().standing(self.domain);
        let new: Vec<ExtentView> = standing
            .into_iter()
            .filter(|(_, residency)| *residency == Residency::NEW)
            .map(|(view, _)| view)
            .collect();
        self.clean.keep_only(&new.iter().map(|view| view.extent).collect());
        for view in new {
            if !(clean.keep_going)() || !self.clean_extent(view.extent, clean, &mut cleaned)? {
                return Ok(Cleaned { whole: false, ..cleaned });
            }
        }
        Ok(cleaned)
    }

    /// Cleans one extent. Returns false if cleaning stops here.
    fn clean_extent(&self, extent: ExtentId, clean: Clean<'_>, cleaned: &mut Cleaned) -> Result<bool> {
        let voids = self.clean.voids.load(Ordering::Acquire);
        let ranges = ResidentReads::of(&self.pool).ranges(extent)?;
        match self.clean.copy_of(extent, &ranges) {
            CopyState::Clean => return Ok(true),
            CopyState::Void(copy) => match self.is_unchanged(extent, &copy, clean.digests)? {
                None => {
                    self.clean.put(extent, copy, None);
                    return Ok(false);
                }
                Some(true) => {
                    cleaned.unchanged = cleaned.unchanged.saturating_add(copy.size());
                    self.clean.put(extent, copy, Some((clean.after_use, voids)));
                    return Ok(true);
                }
                Some(false) => {}
            },
            CopyState::Nothing => {}
        }
        let size: Bytes = ranges.iter().map(|range| range.size).sum();
        if size.is_zero() {
            return Ok(true);
        }
        let Some(block) = clean.host.take_spare(size)? else { return Ok(false) };
        let Region { pool, options, turn, .. } = self;
        let (tag, mover, keep_going) = (&*options.tag, clean.mover, clean.keep_going);
        let copies = ResidentCopies { pool, tag, turn, mover, keep_going };
        match copies.copy(extent, ranges, block)? {
            ResidentCopy::Whole(copy) => {
                cleaned.copied = cleaned.copied.saturating_add(copy.size());
                add(&self.clean.counts.copied, copy.size());
                self.clean.put(extent, copy, Some((clean.after_use, voids)));
                Ok(true)
            }
            ResidentCopy::GivenUp => {
                cleaned.whole = false;
                Ok(keep_going())
            }
        }
    }

    /// Returns whether an extent still has the bytes of its copy; `None` if another thread is moving extents.
    fn is_unchanged(&self, extent: ExtentId, copy: &StoredCopy, digests: &Digests) -> Result<Option<bool>> {
        let Some(turn) = self.turn.try_lock() else { return Ok(None) };
        let reads = ResidentReads::of(&self.pool);
        let enqueued = reads.with(extent, copy.ranges(), copy.ranges(), |home| {
            digests.enqueue(digests.stream(), &home).map(Digesting::let_go)
        })?;
        let Some(enqueued) = enqueued else { return Ok(Some(false)) };
        let found = enqueued.and_then(Digesting::wait).map_err(PoolError::from)?;
        MutexGuard::unlock_fair(turn);
        Ok(Some(Some(found) == copy.digest()))
    }

    /// Sets the number of the region's last use: voids copies of earlier uses, and those of extents whose live bytes have changed.
    pub fn void_clean(&self, after_use: u64) {
        let reads = ResidentReads::of(&self.pool);
        self.clean.void(|extent, clean| {
            clean.after_use != Some(after_use) || reads.kept_here(extent) != clean.copy.ranges()
        });
    }

    /// Voids the copies of the extents of the block at an address, because it was allocated or is about to be written.
    pub fn void_block(&self, address: Address) {
        // Before the check for copies: a copy in progress must not become clean.
        self.clean.voids.fetch_add(1, Ordering::AcqRel);
        if self.clean.is_empty() {
            return;
        }
        let extents = ResidentReads::of(&self.pool).extents_of(self.domain, address);
        self.clean.void(|extent, _| extents.contains(&extent));
    }

    /// Returns the statistics, with copies of uses other than `after_use` voided first.
    pub fn clean_counts(&self, after_use: u64) -> CleanCounts {
        self.void_clean(after_use);
        self.clean.counts()
    }

    /// Returns a number that changes with the region's memory, live bytes, voided and reclaimed copies. An equal number does not prove that
    /// nothing changed.
    ///
    /// # Errors
    /// The error of the pool.
    pub fn state_number(&self) -> Result<u64> {
        let mut hasher = FxHasher::default();
        for (view, residency) in self.pool.records().standing(self.domain) {
            (view.offset, view.size, view.live, residency).hash(&mut hasher);
        }
        self.clean.voids.load(Ordering::Acquire).hash(&mut hasher);
        self.clean.counts.reclaimed.load(Ordering::Relaxed).hash(&mut hasher);
        Ok(hasher.finish())
    }

    /// Returns whether an extent being evicted is clean and needs no copying: its clean copy becomes the valid one.
    pub(super) fn leave_unchanged(
        &self,
        extent: ExtentId,
        ranges: &[HomeRange],
        to: &Store,
        report: &mut Shrunk,
    ) -> bool {
        let Some(copy) = self.clean.take(extent, ranges) else { return false };
        if to.place() != Place::Host {
            return false;
        }
        let size = copy.size();
        match self.digest_here(ranges) {
            Ok(found) if found.is_some() && found == copy.digest() => {}
            Ok(_) => {
                add(&self.clean.counts.refused, size);
                return false;
            }
            Err(error) => {
                tracing::debug!(target: "glake::regions", tag = self.options.tag, %error, "an extent was not compared: it is copied");
                return false;
            }
        }
        copy.set_needed();
        match self.pool.records().finish_copy(extent, copy) {
            Ok(()) => {
                add(&self.clean.counts.released, size);
                report.clean = report.clean.saturating_add(size);
                true
            }
            Err(error) => {
                tracing::debug!(target: "glake::regions", tag = self.options.tag, %error, "a clean extent is copied");
                false
            }
        }
    }

    fn digest_here(&self, ranges: &[HomeRange]) -> Result<Option<Digest>> {
        let Some(digests) = self.clean.digests.lock().clone() else { return Ok(None) };
        Ok(Some(digest_of(&digests, &packed_home(self.pool.core(), ranges)?)?))
    }
}

/// State of an extent's clean copy.
#[derive(Debug)]
enum CopyState {
    Clean,
    /// Void copy, removed from the table.
    Void(StoredCopy),
    Nothing,
}

impl CleanCopies {
    /// Returns whether an extent has a copy that is not void.
    pub(super) fn has(&self, extent: ExtentId) -> bool {
        self.copies.lock().get(&extent).is_some_and(|copy| copy.after_use.is_some())
    }

    /// Returns the host memory of all copies.
    pub(super) fn hosted(&self) -> Bytes {
        self.copies.lock().values().map(|clean| clean.copy.size()).sum()
    }

    fn serve(self: &Arc<Self>, clean: Clean<'_>) {
        self.digests.lock().get_or_insert_with(|| clean.digests.clone());
        let mut hosts = self.hosts.lock();
        if !hosts.iter().any(|known| Arc::ptr_eq(known, clean.host)) {
            clean.host.add_reclaimer(self);
            hosts.push(clean.host.clone());
        }
    }

    /// Returns whether there are no copies.
    fn is_empty(&self) -> bool {
        self.copies.lock().is_empty()
    }

    /// Stores a copy made after use `of.0` when the void counter was `of.1`; void if the counter has changed since, or if `of` is `None`.
    fn put(&self, extent: ExtentId, copy: StoredCopy, of: Option<(u64, u64)>) {
        copy.set_retained();
        let mut copies = self.copies.lock();
        let is_good = |(_, voids): &(u64, u64)| self.voids.load(Ordering::Acquire) == *voids;
        let after_use = of.filter(is_good).map(|(after_use, _)| after_use);
        let gone = copies.insert(extent, CleanCopy { copy, after_use });
        drop(copies);
        drop(gone);
    }

    fn copy_of(&self, extent: ExtentId, ranges: &[HomeRange]) -> CopyState {
        let mut copies = self.copies.lock();
        if copies.get(&extent).is_some_and(|clean| clean.after_use.is_some() && clean.copy.ranges() == ranges)
        {
            return CopyState::Clean;
        }
        let found = copies.remove(&extent);
        drop(copies);
        match found {
            Some(clean) if clean.copy.ranges() == ranges => CopyState::Void(clean.copy),
            Some(clean) => {
                self.count_void(&clean);
                CopyState::Nothing
            }
            None => CopyState::Nothing,
        }
    }

    /// Takes the copy of exactly these ranges; drops any other.
    fn take(&self, extent: ExtentId, ranges: &[HomeRange]) -> Option<StoredCopy> {
        let clean = self.copies.lock().remove(&extent)?;
        if clean.copy.ranges() == ranges && clean.after_use.is_some() {
            return Some(clean.copy);
        }
        self.count_void(&clean);
        None
    }

    /// Drops the copies of extents that are gone or evicted.
    fn keep_only(&self, extents: &FxHashSet<ExtentId>) {
        let gone: Vec<(ExtentId, CleanCopy)> =
            self.copies.lock().extract_if(|extent, _| !extents.contains(extent)).collect();
        gone.iter().for_each(|(_, clean)| self.count_void(clean));
    }

    /// Voids the copies for which `is_void` returns true.
    fn void(&self, is_void: impl Fn(ExtentId, &CleanCopy) -> bool) {
        let mut copies = self.copies.lock();
        for (extent, clean) in copies.iter_mut().filter(|(_, clean)| clean.after_use.is_some()) {
            if is_void(*extent, clean) {
                self.count_void(clean);
                clean.after_use = None;
                self.voids.fetch_add(1, Ordering::AcqRel);
            }
        }
    }

    fn count_void(&self, clean: &CleanCopy) {
        if clean.after_use.is_some() {
            add(&self.counts.voided, clean.copy.size());
        }
    }

    fn counts(&self) -> CleanCounts {
        let of = |count: &AtomicU64| Bytes::new(count.load(Ordering::Relaxed));
        let Counts { copied, voided, released, refused, reclaimed } = &self.counts;
        let good = |clean: &&CleanCopy| clean.after_use.is_some();
        CleanCounts {
            clean: self.copies.lock().values().filter(good).map(|clean| clean.copy.size()).sum(),
            copied: of(copied),
            voided: of(voided),
            released: of(released),
            refused: of(refused),
            reclaimed: of(reclaimed),
        }
    }
}

impl Reclaim for CleanCopies {
    /// Gives up void copies first.
    fn reclaim(&self, wanted: Bytes) -> Bytes {
        let mut copies = self.copies.lock();
        let mut order: Vec<(bool, ExtentId)> =
            copies.iter().map(|(extent, clean)| (clean.after_use.is_some(), *extent)).collect();
        order.sort_unstable();
        let (mut given, mut gone) = (Bytes::ZERO, Vec::new());
        for (_, extent) in order {
            if given >= wanted {
                break;
            }
            if let Some(clean) = copies.remove(&extent) {
                given = given.saturating_add(clean.copy.size());
                gone.push(clean);
            }
        }
        drop(copies);
        drop(gone);
        add(&self.counts.reclaimed, given);
        given
    }
}

fn digest_of(digests: &Digests, home: &[Span]) -> Result<Digest> {
    let digesting = digests.enqueue(digests.stream(), home).map_err(PoolError::from)?;
    Ok(digesting.wait().map_err(PoolError::from)?)
}

fn add(count: &AtomicU64, size: Bytes) {
    count.fetch_add(size.get(), Ordering::Relaxed);
}
