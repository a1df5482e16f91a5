//! Bytes that are copied to the host while nobody uses them, and stay on their GPU: what a shrink finds copied already.
//!
//! ```text
//! idle      per extent:  copy out ─► digest of the copy                     the extent is clean
//! use                    [`Region::void_clean`]: its copies count no more, their bytes are kept to be compared
//! idle      per extent:  digest of the extent: the same ─► clean again      else it is copied anew
//! shrink    per extent:  digest of the extent: the same ─► released         else it is copied, as if there had been no copy
//! ```
//!
//! Invariant: a copy becomes the one that counts only in a shrink, once the extent's digest and its live ranges are the copy's. So
//! nothing depends on who told of a write: kernels that no use covers are found by the digest. Until then a copy is host memory that
//! can be given up at any time, and is, where that is short.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::owned::{Digest, Digests, Span};
use glake_stitch::{ExtentId, ExtentView, HomeRange};
use glake_units::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::{FxHashMap, FxHashSet};

use super::{Mover, Policy, Region, Result, Shrunk};
use crate::gpu::ResidentReads;
use crate::host::Reclaim;
use crate::store::{ResidentCopy, StoredCopy, copy_resident, packed_home};
use crate::{HostPool, Place, PoolError, Residency, Store};

/// How a region is cleaned.
#[derive(Clone, Copy, Debug)]
pub struct Clean<'a> {
    /// Where copies go.
    pub host: &'a Arc<HostPool>,
    /// By what: one that gives way to other copies.
    pub mover: &'a dyn Mover,
    /// Of the region's GPU.
    pub digests: &'a Arc<Digests>,
    /// By which use it was used last, in any numbering: copies are good until [`Region::void_clean`] is told of another.
    pub after_use: u64,
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
    /// Copies what has no copy to the host, extent by extent, while `keep_going` says so and nobody moves the region's extents. What is
    /// copied stays on its GPU; programs may use it, write to it, and free it meanwhile. Does nothing for what is given up when it leaves,
    /// or is sealed strictly, and stops where the host has no memory to spare.
    ///
    /// # Errors
    /// What the copies meet; what is clean by then stays so.
    pub fn clean(&self, clean: Clean<'_>, keep_going: &dyn Fn() -> bool) -> Result<Cleaned> {
        let mut cleaned = Cleaned { whole: true, ..Cleaned::default() };
        if self.options.policy == Policy::Discard || self.strict.load(Ordering::Acquire) {
            return Ok(cleaned);
        }
        self.clean.serve(clean);
        let standing = self.pool.records().standing(self.domain)?;
        let new: Vec<ExtentView> = standing
            .into_iter()
            .filter(|(_, residency)| *residency == Residency::NEW)
            .map(|(view, _)| view)
            .collect();
        self.clean.keep_only(&new.iter().map(|view| view.extent).collect());
        for view in new {
            let Some(turn) = self.turn.try_lock().filter(|_| keep_going()) else {
                return Ok(Cleaned { whole: false, ..cleaned });
            };
            let done = self.clean_extent(view.extent, clean, keep_going, &mut cleaned);
            // A shrink that waits goes first.
            MutexGuard::unlock_fair(turn);
            if !done? {
                return Ok(Cleaned { whole: false, ..cleaned });
            }
        }
        Ok(cleaned)
    }

    /// False: cleaning stops here.
    fn clean_extent(
        &self,
        extent: ExtentId,
        clean: Clean<'_>,
        keep_going: &dyn Fn() -> bool,
        cleaned: &mut Cleaned,
    ) -> Result<bool> {
        let reads = ResidentReads::of(&self.pool);
        let ranges = reads.ranges(extent)?;
        match self.clean.copy_of(extent, &ranges) {
            Found::Clean => return Ok(true),
            Found::Void(copy) => {
                let digest = |home: Vec<Span>| digest_of(clean.digests, &home);
                let found = reads.with(extent, &ranges, &ranges, digest)?.transpose()?;
                if found.is_some() && found == copy.digest() {
                    cleaned.unchanged = cleaned.unchanged.saturating_add(copy.size());
                    self.clean.put(extent, copy, clean.after_use);
                    return Ok(true);
                }
            }
            Found::Nothing => {}
        }
        if ranges.is_empty() {
            return Ok(true);
        }
        let what = (extent, ranges);
        match copy_resident(&self.pool, &self.options.tag, what, clean.host, clean.mover, keep_going)? {
            ResidentCopy::Whole(copy) => {
                cleaned.copied = cleaned.copied.saturating_add(copy.size());
                add(&self.clean.counts.copied, copy.size());
                self.clean.put(extent, copy, clean.after_use);
                Ok(true)
            }
            ResidentCopy::GivenUp => Ok(keep_going()),
            ResidentCopy::NoMemory => Ok(false),
        }
    }

    /// Says after which use the region is now: copies from before it count no more.
    pub fn void_clean(&self, after_use: u64) {
        self.clean.void(after_use);
    }

    /// What is clean, and what has become of what was.
    pub fn clean_counts(&self) -> CleanCounts {
        self.clean.counts()
    }

    /// Whether an extent that begins to leave needs no copy because it is clean: its copy is the one that counts then.
    pub(super) fn leave_unchanged(
        &self,
        extent: ExtentId,
        ranges: &[HomeRange],
        to: &Store,
        report: &mut Shrunk,
    ) -> bool {
        let Some(mut copy) = self.clean.take(extent, ranges) else { return false };
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

    fn serve(self: &Arc<Self>, clean: Clean<'_>) {
        self.digests.lock().get_or_insert_with(|| clean.digests.clone());
        let mut hosts = self.hosts.lock();
        if !hosts.iter().any(|known| Arc::ptr_eq(known, clean.host)) {
            clean.host.add_reclaimer(self);
            hosts.push(clean.host.clone());
        }
    }

    fn put(&self, extent: ExtentId, mut copy: StoredCopy, after_use: u64) {
        copy.set_retained();
        let clean = CleanCopy { copy, after_use: Some(after_use) };
        let gone = self.copies.lock().insert(extent, clean);
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

    fn void(&self, after_use: u64) {
        for clean in self.copies.lock().values_mut() {
            if clean.after_use.is_some_and(|of| of != after_use) {
                self.count_void(clean);
                clean.after_use = None;
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
