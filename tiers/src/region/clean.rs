//! Bytes that are copied to the host while nobody uses them, and stay on their GPU: what a shrink finds copied already.
//!
//! ```text
//! idle      per extent:  copy out ─► digest of the copy                     the extent is clean
//! use                    [`Region::void_clean`]: its copies count no more, their bytes are kept to be compared
//! allocation, copy       [`Region::void_block`]: those of the block's extents
//! idle      per extent:  digest of the extent: the same ─► clean again      else it is copied anew
//! shrink    per extent:  digest of the extent: the same ─► released         else it is copied, as if there had been no copy
//! ```
//!
//! Invariant: a copy becomes the one that counts only in a shrink, once the extent's digest and its live ranges are the copy's. So
//! nothing depends on who told of a write: kernels that no use covers are found by the digest. Until then a copy is host memory that
//! can be given up at any time, and is, where that is short.

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

/// How a region is cleaned.
#[derive(Clone, Copy)]
pub struct Clean<'a> {
    /// Where copies go.
    pub host: &'a Arc<HostPool>,
    /// By what. Pieces of 16 MiB are enqueued, one at a time.
    pub mover: &'a dyn Mover,
    /// Of the region's GPU.
    pub digests: &'a Arc<Digests>,
    /// By which use it was used last, in any numbering: copies are good until [`Region::void_clean`] is told of another.
    pub after_use: u64,
    /// Whether it goes on: asked before each piece. May wait until links are free.
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

/// What cleaning has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Bytes that were copied.
    pub copied: Bytes,
    /// Bytes of which an older copy is the same.
    pub unchanged: Bytes,
    /// Whether nothing is left to do.
    pub whole: bool,
}

/// What has become of a region's clean copies since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CleanCounts {
    /// Bytes that are clean now.
    pub clean: Bytes,
    /// Bytes that were copied while nobody used them.
    pub copied: Bytes,
    /// Bytes of copies that a use, an allocation or a free made void.
    pub voided: Bytes,
    /// Bytes that a shrink released without a copy of its own.
    pub released: Bytes,
    /// Bytes that had changed though nobody told: their digest was another one.
    pub refused: Bytes,
    /// Bytes of copies that were given up because host memory was short.
    pub reclaimed: Bytes,
}

/// The copies of one region.
#[derive(Debug, Default)]
pub(super) struct CleanCopies {
    copies: Mutex<FxHashMap<ExtentId, CleanCopy>>,
    /// Made by who cleans first.
    digests: Mutex<Option<Arc<Digests>>>,
    /// The pools that know it.
    hosts: Mutex<Vec<Arc<HostPool>>>,
    /// How often something was voided: what is read meanwhile is no clean copy.
    voids: AtomicU64,
    counts: Counts,
}

#[derive(Debug)]
struct CleanCopy {
    copy: StoredCopy,
    /// `None`: the region was used since.
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
    /// Copies what has no copy to the host, extent by extent, while it is to go on and nobody moves the region's extents. What is
    /// copied stays on its GPU; programs may use it, write to it, and free it meanwhile. Does nothing for what is given up when it leaves,
    /// or is sealed strictly, and stops where the host has no memory to spare. Who moves extents waits for one piece at most, and nobody
    /// waits while it waits for host memory.
    ///
    /// # Errors
    /// What the copies meet; what is clean by then stays so.
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

    /// False: cleaning stops here.
    fn clean_extent(&self, extent: ExtentId, clean: Clean<'_>, cleaned: &mut Cleaned) -> Result<bool> {
        let voids = self.clean.voids.load(Ordering::Acquire);
        let ranges = ResidentReads::of(&self.pool).ranges(extent)?;
        match self.clean.copy_of(extent, &ranges) {
            Found::Clean => return Ok(true),
            Found::Void(copy) => match self.is_unchanged(extent, &copy, clean.digests)? {
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
            Found::Nothing => {}
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

    /// Whether an extent has the bytes of a copy of it; `None`: somebody moves extents.
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

    /// Says after which use the region is now: copies from before it count no more, nor those of extents that have other live bytes now.
    pub fn void_clean(&self, after_use: u64) {
        let reads = ResidentReads::of(&self.pool);
        self.clean.void(|extent, clean| {
            clean.after_use != Some(after_use) || reads.kept_here(extent) != clean.copy.ranges()
        });
    }

    /// Something was handed out, or is about to be written to: copies of the extents of the block that an address lies in count no more.
    pub fn void_block(&self, address: Address) {
        // Before it is looked whether there are any: a copy that is on its way is none.
        self.clean.voids.fetch_add(1, Ordering::AcqRel);
        if self.clean.is_empty() {
            return;
        }
        let extents = ResidentReads::of(&self.pool).extents_of(self.domain, address);
        self.clean.void(|extent, _| extents.contains(&extent));
    }

    /// What is clean if it was used last by that use, and what has become of what was.
    pub fn clean_counts(&self, after_use: u64) -> CleanCounts {
        self.void_clean(after_use);
        self.clean.counts()
    }

    /// Says in a number which memory it has, which of it is live, and what was made void or given up: another one tells that something
    /// changed. The same is no promise that nothing did.
    ///
    /// # Errors
    /// What the pool answers.
    pub fn state_number(&self) -> Result<u64> {
        let mut hasher = FxHasher::default();
        for (view, residency) in self.pool.records().standing(self.domain) {
            (view.offset, view.size, view.live, residency).hash(&mut hasher);
        }
        self.clean.voids.load(Ordering::Acquire).hash(&mut hasher);
        self.clean.counts.reclaimed.load(Ordering::Relaxed).hash(&mut hasher);
        Ok(hasher.finish())
    }

    /// Whether an extent that begins to leave needs no copy because it is clean: its copy is the one that counts then.
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

/// What is there of the copy of an extent.
#[derive(Debug)]
enum Found {
    Clean,
    /// It is taken out.
    Void(StoredCopy),
    Nothing,
}

impl CleanCopies {
    /// Whether an extent has one that may be good.
    pub(super) fn has(&self, extent: ExtentId) -> bool {
        self.copies.lock().get(&extent).is_some_and(|copy| copy.after_use.is_some())
    }

    /// Host memory that they take.
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

    /// Whether there is no copy at all.
    fn is_empty(&self) -> bool {
        self.copies.lock().is_empty()
    }

    /// A copy of what an extent had after a use, since so many voids: void if there were more. `None`: void.
    fn put(&self, extent: ExtentId, copy: StoredCopy, of: Option<(u64, u64)>) {
        copy.set_retained();
        let mut copies = self.copies.lock();
        let is_good = |(_, voids): &(u64, u64)| self.voids.load(Ordering::Acquire) == *voids;
        let after_use = of.filter(is_good).map(|(after_use, _)| after_use);
        let gone = copies.insert(extent, CleanCopy { copy, after_use });
        drop(copies);
        drop(gone);
    }

    fn copy_of(&self, extent: ExtentId, ranges: &[HomeRange]) -> Found {
        let mut copies = self.copies.lock();
        if copies.get(&extent).is_some_and(|clean| clean.after_use.is_some() && clean.copy.ranges() == ranges)
        {
            return Found::Clean;
        }
        let found = copies.remove(&extent);
        drop(copies);
        match found {
            Some(clean) if clean.copy.ranges() == ranges => Found::Void(clean.copy),
            Some(clean) => {
                self.count_void(&clean);
                Found::Nothing
            }
            None => Found::Nothing,
        }
    }

    /// Takes the copy of these ranges out; no other is left.
    fn take(&self, extent: ExtentId, ranges: &[HomeRange]) -> Option<StoredCopy> {
        let clean = self.copies.lock().remove(&extent)?;
        if clean.copy.ranges() == ranges && clean.after_use.is_some() {
            return Some(clean.copy);
        }
        self.count_void(&clean);
        None
    }

    /// Drops the copies of what is gone, or has left.
    fn keep_only(&self, extents: &FxHashSet<ExtentId>) {
        let gone: Vec<(ExtentId, CleanCopy)> =
            self.copies.lock().extract_if(|extent, _| !extents.contains(extent)).collect();
        gone.iter().for_each(|(_, clean)| self.count_void(clean));
    }

    /// Those of which `is_void` says so count no more.
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
    /// What is void goes first.
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
