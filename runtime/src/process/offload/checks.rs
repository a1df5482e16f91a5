//! Whether bytes changed between when they were offloaded and when their block was freed, by work that no version counter knows.
//!
//! ```text
//! program:  pack ──────────── a kernel writes in place, maybe ──────────── free
//! out:       └─► digest ─► copy                                             └─► digest ─► copy to the same host memory ─► event: a hold
//! later:                    both digests are taken: compared ─► the save is fine, or changes
//! ```
//!
//! What a backward pass would have read without offloading is what the block has when its last holder frees it: until then the graph
//! would have held it. So a save that is checked is copied twice, to one place, the second time behind the work that was on the block's
//! stream when it was freed; whatever wrote meanwhile, what is reloaded is right. That costs the link once more, and neither host
//! memory nor a wait. The digests, which the GPU takes at the rate of its memory, are for the passes that follow: they tell which saves
//! need no second copy, and which must stay on their GPU. Saves of one range that share a copy are right together, for they would have
//! shared the block.
//!
//! A save is known by its site and a number that says where in the program it is, and how large. Its first [`OFTEN`] copies are checked, and
//! one more after plans were made anew.
//!
//! Invariants: a save is fine only after so many of its digests were equal; one that changed once stays so. What could not be compared
//! counts for nothing, so that it is checked again. Nothing waits on the host for a digest.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use glake_device::owned::Digesting;
use glake_device::{Address, Stream};
use glake_tiers::BlockId;
use rustc_hash::FxHashMap;

use crate::sync::Mutex;

/// So many copies of a save are checked.
pub(super) const OFTEN: u8 = 2;
/// So many digests are under way at a time, each with a slot of 128 KiB or more; copies beyond are made twice, and not compared.
const MOST: usize = 512;
/// So many saves of a site are remembered; others are always checked.
const MOST_SAVES: usize = 1 << 18;

/// Where in a program bytes are saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SaveId {
    /// The site that saves them.
    pub site: u64,
    /// Which of its saves it is: the same number in each pass.
    pub save: u64,
}

/// What is known of a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckState {
    /// It is to be checked.
    Due,
    /// Its bytes did not change when it was checked.
    Fine,
    /// Its bytes changed: they belong on their GPU.
    Changed,
}

/// What was compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Compared {
    pub(super) same: u64,
    pub(super) changed: u64,
    /// What was to be compared and was not.
    pub(super) missed: u64,
}

/// What is looked at once more when its block is freed.
#[derive(Debug)]
pub(super) struct Watch {
    /// Under which number it is offloaded.
    pub(super) entry: u64,
    pub(super) save: SaveId,
    pub(super) block: BlockId,
    pub(super) address: Address,
    /// On which stream it was packed.
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

/// The checks of a process.
#[derive(Debug, Default)]
pub(super) struct Checks {
    /// By where their blocks begin.
    watched: Mutex<FxHashMap<Address, Vec<Watch>>>,
    /// How many these are: every free asks.
    count: AtomicUsize,
    /// In the order in which their digests are taken.
    pending: Mutex<VecDeque<Pending>>,
    /// By site.
    known: Mutex<FxHashMap<u64, FxHashMap<u64, Known>>>,
    same: AtomicU64,
    changed: AtomicU64,
    missed: AtomicU64,
}

impl Checks {
    /// What is known of a save by now.
    pub(super) fn state(&self, save: SaveId) -> CheckState {
        self.poll();
        let known = self.known.lock();
        match known.get(&save.site).and_then(|saves| saves.get(&save.save)) {
            Some(Known { is_changed: true, .. }) => CheckState::Changed,
            Some(Known { same: OFTEN.., .. }) => CheckState::Fine,
            _ => CheckState::Due,
        }
    }

    /// Saves of a site are to be checked anew, but for those that changed.
    pub(super) fn again(&self, site: u64) {
        if let Some(saves) = self.known.lock().get_mut(&site) {
            saves.retain(|_, known| known.is_changed);
        }
    }

    /// Saves of a site are to be checked once more.
    pub(super) fn once_more(&self, site: u64) {
        for known in self.known.lock().get_mut(&site).into_iter().flat_map(FxHashMap::values_mut) {
            known.same = known.same.min(OFTEN - 1);
        }
    }

    /// A site is gone.
    pub(super) fn forget_site(&self, site: u64) {
        self.known.lock().remove(&site);
    }

    /// Whether one more digest may be taken.
    pub(super) fn have_room(&self) -> bool {
        self.count.load(Ordering::Relaxed) + 2 * self.pending.lock().len() < MOST
    }

    /// Whether a free may be of anything that is watched.
    #[inline]
    pub(super) fn are_any_watched(&self) -> bool {
        self.count.load(Ordering::Relaxed) > 0
    }

    /// To be looked at when its block is freed. Its site is known from here on, until it goes.
    pub(super) fn watch(&self, watch: Watch) {
        self.known.lock().entry(watch.save.site).or_default();
        let mut watched = self.watched.lock();
        watched.entry(watch.block.address).or_default().push(watch);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    /// What is watched of the block that begins there, once.
    pub(super) fn take(&self, block: Address) -> Vec<Watch> {
        let taken = self.watched.lock().remove(&block).unwrap_or_default();
        self.count.fetch_sub(taken.len(), Ordering::Relaxed);
        taken
    }

    /// What is offloaded under a number is gone before its block was freed.
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

    /// Both digests of a save are on their way.
    pub(super) fn compare(&self, save: SaveId, first: Digesting, second: Digesting) {
        self.pending.lock().push_back(Pending { save, first, second });
    }

    /// A save was not compared.
    pub(super) fn miss(&self) {
        self.missed.fetch_add(1, Ordering::Relaxed);
    }

    /// Compares what has been taken.
    pub(super) fn poll(&self) {
        let mut pending = self.pending.lock();
        while let Some(Pending { save, first, second }) =
            pending.pop_front_if(|pending| !matches!(pending.second.is_done(), Ok(false)))
        {
            // Both are of one stream: nothing is waited for.
            match first.wait().and_then(|first| Ok(first == second.wait()?)) {
                Ok(is_same) => self.note(save, is_same),
                Err(_) => self.miss(),
            }
        }
    }

    /// Of how many sites anything is known.
    #[cfg(all(test, not(schedules)))]
    pub(super) fn sites(&self) -> usize {
        self.known.lock().len()
    }

    /// How often bytes were the same, and how often not.
    pub(super) fn compared(&self) -> Compared {
        let [same, changed, missed] =
            [&self.same, &self.changed, &self.missed].map(|count| count.load(Ordering::Relaxed));
        Compared { same, changed, missed }
    }

    fn note(&self, SaveId { site, save }: SaveId, is_same: bool) {
        let count = if is_same { &self.same } else { &self.changed };
        count.fetch_add(1, Ordering::Relaxed);
        let mut known = self.known.lock();
        // A site that went meanwhile has no saves any more.
        let Some(saves) = known.get_mut(&site) else { return };
        if saves.len() < MOST_SAVES || saves.contains_key(&save) {
            let known = saves.entry(save).or_default();
            known.same = known.same.saturating_add(u8::from(is_same));
            known.is_changed |= !is_same;
        }
    }
}
