//! Detection of bytes that changed between offload and free, by in-place kernels that no version counter records.
//!
//! ```text
//! program:  pack ──────────── a kernel writes in place, maybe ──────────── free
//! out:       └─► digest ─► copy                                             └─► digest ─► copy to the same host memory ─► event: a hold
//! later:                    both digests are read: compared ─► the save is unchanged or changed
//! ```
//!
//! Without offloading, a backward pass would read the block's contents at the time its last holder frees it. A checked save is therefore
//! copied twice to the same place, the second time after the work on the block's stream at its free, so that a reload is correct in any
//! case. This costs link bandwidth, but no host memory and no wait. The digests, computed at the rate of GPU memory, serve later passes:
//! they tell which saves need no second copy and which must stay on their GPU. Saves of one range that share a copy are correct together,
//! because they would have shared the block.
//!
//! A save is identified by its site, its number in the program and its size. Its first [`OFTEN`] copies are checked, and one more after
//! each new plan.
//!
//! Invariants: a save counts as unchanged only after [`OFTEN`] equal digests; a changed save stays changed. A missed comparison counts for
//! nothing, so that the save is checked again. Nothing waits on the host for a digest.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use glake_device::owned::{Digesting, OwnedEvent};
use glake_device::{Address, Stream};
use glake_tiers::BlockId;
use glake_transfer::UserStream;
use glake_transfer::paths::Direction;
use glake_units::Bytes;
use rustc_hash::FxHashMap;

use super::entries::Away;
use super::queue::Queue;
use super::{Offload, Place, ProcessError, Result};
use crate::sync::Mutex;

/// Number of copies of a save that are checked.
pub(super) const OFTEN: u8 = 2;
/// Maximum number of digests in flight, each with a slot of at least 128 KiB. Further copies are made twice but not compared.
const MOST: usize = 512;
/// Maximum number of saves remembered for a site; others are always checked.
const MOST_SAVES: usize = 1 << 18;

/// Identity of a save: the place in a program that saves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SaveId {
    /// Site that saves the bytes.
    pub site: u64,
    /// Number of the save within the site, equal in each pass.
    pub save: u64,
}

/// Result of the checks of a save so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckState {
    /// Needs a further check.
    Due,
    /// Unchanged in all its checks.
    Fine,
    /// Changed in a check: the bytes must stay on their GPU.
    Changed,
}

/// Number of comparisons by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Compared {
    pub(super) same: u64,
    pub(super) changed: u64,
    /// Number of comparisons that could not be made.
    pub(super) missed: u64,
}

/// A save whose block is digested and copied again when it is freed.
#[derive(Debug)]
pub(super) struct Watch {
    /// Number of the offloaded entry.
    pub(super) entry: u64,
    pub(super) save: SaveId,
    pub(super) block: BlockId,
    pub(super) address: Address,
    /// Stream on which the save was packed.
    pub(super) stream: Stream,
    pub(super) digest: Option<Digesting>,
}

#[derive(Debug)]
struct Pending {
    save: SaveId,
    first: Digesting,
    second: Digesting,
}

#[derive(Clone, Copy, Debug, Default)]
struct Known {
    same: u8,
    is_changed: bool,
}

/// Checks of a process and their results.
#[derive(Debug, Default)]
pub(super) struct Checks {
    /// Watched saves by the start address of their blocks.
    watched: Mutex<FxHashMap<Address, Vec<Watch>>>,
    /// Number of watched saves, read by every free.
    count: AtomicUsize,
    /// Digests in flight, in the order in which they are computed.
    pending: Mutex<VecDeque<Pending>>,
    /// Results by site and save.
    known: Mutex<FxHashMap<u64, FxHashMap<u64, Known>>>,
    same: AtomicU64,
    changed: AtomicU64,
    missed: AtomicU64,
}

impl Checks {
    /// Returns the result of a save's checks so far.
    pub(super) fn state(&self, save: SaveId) -> CheckState {
        self.poll();
        let known = self.known.lock();
        match known.get(&save.site).and_then(|saves| saves.get(&save.save)) {
            Some(Known { is_changed: true, .. }) => CheckState::Changed,
            Some(Known { same: OFTEN.., .. }) => CheckState::Fine,
            _ => CheckState::Due,
        }
    }

    /// Makes all saves of a site due for a full check, except changed ones.
    pub(super) fn again(&self, site: u64) {
        if let Some(saves) = self.known.lock().get_mut(&site) {
            saves.retain(|_, known| known.is_changed);
        }
    }

    /// Makes all saves of a site due for one further check.
    pub(super) fn once_more(&self, site: u64) {
        for known in self.known.lock().get_mut(&site).into_iter().flat_map(FxHashMap::values_mut) {
            known.same = known.same.min(OFTEN - 1);
        }
    }

    /// Forgets a removed site.
    pub(super) fn forget_site(&self, site: u64) {
        self.known.lock().remove(&site);
    }

    /// Returns whether another digest may be started.
    pub(super) fn have_room(&self) -> bool {
        self.count.load(Ordering::Relaxed) + 2 * self.pending.lock().len() < MOST
    }

    /// Returns whether any save is watched, so that a free must look.
    #[inline]
    pub(super) fn are_any_watched(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// Watches a save until its block is freed. Its site is known from now on until it is removed.
    pub(super) fn watch(&self, watch: Watch) {
        self.known.lock().entry(watch.save.site).or_default();
        let mut watched = self.watched.lock();
        watched.entry(watch.block.address).or_default().push(watch);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes the watched saves of the block that begins at an address.
    pub(super) fn take(&self, block: Address) -> Vec<Watch> {
        let taken = self.watched.lock().remove(&block).unwrap_or_default();
        self.count.fetch_sub(taken.len(), Ordering::Relaxed);
        taken
    }

    /// Stops watching an entry that was released before its block was freed.
    pub(super) fn forget(&self, block: Address, entry: u64) {
        let mut watched = self.watched.lock();
        let Some(watches) = watched.get_mut(&block) else { return };
        let before = watches.len();
        watches.retain(|watch| watch.entry != entry);
        self.count.fetch_sub(before - watches.len(), Ordering::Relaxed);
        if watches.is_empty() {
            watched.remove(&block);
        }
    }

    /// Stores the two digests of a save for comparison.
    pub(super) fn compare(&self, save: SaveId, first: Digesting, second: Digesting) {
        self.pending.lock().push_back(Pending { save, first, second });
    }

    /// Counts a comparison that could not be made.
    pub(super) fn miss(&self) {
        self.missed.fetch_add(1, Ordering::Relaxed);
    }

    /// Compares the digests that are finished.
    pub(super) fn poll(&self) {
        let mut pending = self.pending.lock();
        while let Some(Pending { save, first, second }) =
            pending.pop_front_if(|pending| !matches!(pending.second.is_done(), Ok(false)))
        {
            // Both are on one stream: this does not wait.
            match first.wait().and_then(|first| Ok(first == second.wait()?)) {
                Ok(is_same) => self.note(save, is_same),
                Err(_) => self.miss(),
            }
        }
    }

    /// Returns the number of sites with results.
    #[cfg(all(test, not(schedules)))]
    pub(super) fn sites(&self) -> usize {
        self.known.lock().len()
    }

    /// Returns the number of equal, changed and missed comparisons.
    pub(super) fn compared(&self) -> Compared {
        let [same, changed, missed] =
            [&self.same, &self.changed, &self.missed].map(|count| count.load(Ordering::Relaxed));
        Compared { same, changed, missed }
    }

    fn note(&self, SaveId { site, save }: SaveId, is_same: bool) {
        let count = if is_same { &self.same } else { &self.changed };
        count.fetch_add(1, Ordering::Relaxed);
        let mut known = self.known.lock();
        // A site removed meanwhile has no saves.
        let Some(saves) = known.get_mut(&site) else { return };
        if saves.len() < MOST_SAVES || saves.contains_key(&save) {
            let known = saves.entry(save).or_default();
            known.same = known.same.saturating_add(u8::from(is_same));
            known.is_changed |= !is_same;
        }
    }
}

/// Alignment of digested memory in bytes.
const WORD: u64 = 16;

impl Offload {
    /// Offloads like [`Offload::offload`], for a save that must be checked: the bytes are copied again when the block is freed, so that a
    /// reload returns the block's last contents, and both versions are compared.
    ///
    /// # Errors
    /// As [`Offload::offload`].
    pub fn offload_checked(&self, raw: Stream, address: Address, size: Bytes, save: SaveId) -> Result<u64> {
        if let Ok(site) = self.sites.of(save.site) {
            let mut site = site.lock();
            site.checked = site.checked.saturating_add(size);
        }
        self.copy_out(raw, address, size, Some(save))
    }

    /// Returns the result of a save's checks so far.
    pub fn check_state(&self, save: SaveId) -> CheckState {
        if self.registry.is_stopped() { CheckState::Due } else { self.checks.state(save) }
    }

    /// Handles the free of the block that begins at `address`. Failures are reported when the bytes are reloaded.
    #[inline]
    pub(in super::super) fn before_free(&self, address: Address) {
        if self.checks.are_any_watched() {
            self.copy_watched(address);
        }
    }

    /// Enqueues the digest of bytes that are about to be copied, if one is possible.
    pub(super) fn digest(
        &self,
        out: &mut Queue,
        on: UserStream,
        place: &Place<'_>,
        address: Address,
    ) -> Option<Digesting> {
        if !self.checks.have_room() {
            return None;
        }
        let digests = self.regions.stores.digests(true, place.started.pool.device()).ok()??;
        // Includes a few earlier bytes for alignment, which lie in the same block.
        let before = address.0 % WORD;
        let size = place.span.size().saturating_add(Bytes::new(before));
        let span = place.started.pool.read_holds().span(Address(address.0 - before), size).ok()?;
        out.digest(on, &digests, &span).ok()
    }

    #[cold]
    fn copy_watched(&self, address: Address) {
        if self.registry.is_stopped() {
            return;
        }
        self.checks.poll();
        for watch in self.checks.take(address) {
            let Ok(entry) = self.entries.of(watch.entry) else { continue };
            let mut entry = entry.lock();
            let last = entry.load.as_ref().map(|load| load.event.clone());
            let Some((away, _)) = entry.away.as_mut() else { continue };
            away.watched = None;
            let mut copied = self.copy_again(&watch, away, last.as_deref());
            if copied.is_err() {
                copied = self.copy_again(&watch, away, last.as_deref());
                // The progress of the first copy is unknown.
                away.is_torn = !matches!(copied, Ok(Again::Copied(_)));
            }
            match (copied, watch.digest) {
                (Ok(Again::Copied(Some(second))), Some(first)) => {
                    self.checks.compare(watch.save, first, second);
                }
                _ => self.checks.miss(),
            }
        }
    }

    /// Copies the current contents of a block over its first copy.
    fn copy_again(&self, watch: &Watch, away: &mut Away, last: Option<&OwnedEvent>) -> Result<Again> {
        let Watch { block, address, stream, ref digest, .. } = *watch;
        let device = away.device;
        self.streams.with_default_of(Some(device), || {
            // Evicted memory, or a block freed in an unobserved way, as by a restored checkpoint.
            let Ok(place) = self.place(address, away.size) else { return Ok(Again::Left) };
            if place.block != block {
                return Ok(Again::Left);
            }
            let own = self.streams.handle(block.stream).filter(|own| *own != stream);
            let mut streams = Vec::new();
            for raw in own.into_iter().chain([stream]) {
                match self.stream(raw) {
                    Err(ProcessError::OffloadCaptured { .. } | ProcessError::ForeignContext) => {
                        return Ok(Again::Left);
                    }
                    // The program has destroyed the stream.
                    Err(ProcessError::Driver(error)) if error.is_gone() => return Ok(Again::Left),
                    found => streams.push(found?),
                }
            }
            let out = self.queues.of(device, Direction::FromGpu)?;
            let mut out = out.lock();
            for &behind in &streams {
                out.follow(behind)?;
            }
            if let Some(last) = last {
                out.wait_for(last)?;
            }
            let Some(&packed) = streams.last() else { return Ok(Again::Left) };
            let second = digest.as_ref().and_then(|_| self.digest(&mut out, packed, &place, address));
            let held = out.copy_out(packed, &away.taken, &place.span).and_then(|(event, handles)| {
                (away.out, away.copied) = (event, handles);
                Ok(place.started.pool.read_holds().hold(block, &away.out, out.id())?)
            });
            if let Err(error) = held {
                // The block is freed next.
                out.finish();
                return Err(error);
            }
            Ok(Again::Copied(second))
        })?
    }
}

/// Result of a second copy.
#[derive(Debug)]
enum Again {
    /// The copy is enqueued, perhaps with a digest.
    Copied(Option<Digesting>),
    /// No second copy was possible; the first one counts.
    Left,
}
