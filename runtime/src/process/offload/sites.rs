//! Sites of a program that offload, by number: their plans, and what is measured for them.
//!
//! A site has no memory of its own: what becomes of bytes is said here, and done by whoever asks ([`Offload`]).
//!
//! [`Offload`]: super::Offload

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use glake_device::DeviceId;
use glake_offload::{ItemId, Links, PlanError, Preset, Request, Site, Verdict};
use glake_units::Bytes;
use rustc_hash::FxHashMap;

use super::super::{ProcessError, Result};
use super::measures::LINK;
use super::timer::PassTimer;
use crate::sync::Mutex;

/// All sites of a process. A number is above 0 and never given twice.
#[derive(Debug, Default)]
pub struct Sites {
    known: Mutex<FxHashMap<u64, Arc<Mutex<Planned>>>>,
    given: AtomicU64,
}

/// What of a budget plans leave alone: a pool rounds blocks up, and leaves gaps that nothing fits in. How much is seen only as passes that
/// were as planned go above their budget, or wait for memory that copies still read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Spare(u64);

/// What a program asks of a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    /// Whose memory it is.
    pub(super) device: DeviceId,
    /// What the GPU may show of the process; `None`: anything.
    pub(super) budget: Option<Bytes>,
    /// What its plans are for.
    pub(super) preset: Preset,
}

/// A pass that is over, and whose times are not read yet.
#[derive(Debug)]
pub(super) struct Timed {
    /// Its number.
    pub(super) pass: u64,
    pub(super) timer: Arc<Mutex<PassTimer>>,
    /// What its plan left alone, if it was as planned.
    pub(super) spare: Option<Spare>,
}

/// A site, and what is known of its passes.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) site: Site,
    /// Reloads that are to begin and were not asked for yet.
    pub(super) reloads: VecDeque<ItemId>,
    pub(super) asked: Option<Asked>,
    /// What the GPU showed beside the pool when that was looked at last.
    pub(super) beside: Bytes,
    /// Links with those of other GPUs.
    pub(super) all_links: Links,
    pub(super) timer: Option<Arc<Mutex<PassTimer>>>,
    /// Of passes that are over: to be read once their work is done.
    pub(super) timed: VecDeque<Timed>,
    /// Bytes that the pass under way, or the last one, packed; and those of them that are copied twice, to be checked.
    pub(super) packed: Bytes,
    pub(super) checked: Bytes,
    pub(super) shapes: Shapes,
    /// When saves are checked once more.
    pub(super) looks: Looks,
    /// How long the last pass took that was timed, and for how much of it copies were waited for.
    pub(super) real: Option<(Duration, Duration)>,
    /// Requests that the pool's budget had not served when the pass began.
    pub(super) passed: u64,
    /// What of the budget plans leave alone, and the most that they may: what was seen to leave a plan to every pass.
    pub(super) spare: Spare,
    pub(super) most_spare: Spare,
    /// What the pool had for a budget when the pass began: of all sites of its GPU the least.
    pub(super) least: Bytes,
    /// Looked at when so many passes are over.
    pub(super) due: u64,
}

/// When a site's saves are checked once more: in the pass that follows a plan that was made anew, where the last such pass is long over, for
/// all that a pass offloads is copied twice then.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// How many plans were made by the last one.
    made: u64,
    /// After so many passes there may be another.
    due: u64,
    /// Whether the pass under way, or the last one, is such a pass.
    is_now: bool,
}

impl Looks {
    /// So many passes lie between two at least.
    pub(super) const APART: u64 = 64;

    /// A pass begins, after so many, with so many plans made by now: whether its saves are checked once more.
    pub(super) fn begins(&mut self, passes: u64, made: u64) -> bool {
        self.is_now = made > self.made && passes >= self.due;
        if self.is_now {
            (self.made, self.due) = (made, passes + Looks::APART);
        }
        self.is_now
    }
}

/// Kinds of passes, as the program tells them apart before they begin.
#[derive(Debug, Default)]
pub(super) struct Shapes {
    /// Of the forward that has begun and saved nothing yet.
    pub(super) begun: Option<u64>,
    /// Of the pass that is under way.
    pub(super) current: BTreeSet<u64>,
    /// Those whose plans keep everything, with how much memory they add to what there was.
    pub(super) kept: FxHashMap<u64, Bytes>,
    /// Those of passes that need more than the budget, and had it: of several forwards in one pass each may be small enough.
    failed: FxHashMap<BTreeSet<u64>, PlanError>,
}

/// A pass that has forwards of more shapes may fail, and is tried again each time.
const MOST_FORWARDS: usize = 1 << 9;
/// Of so many shapes at most it is known what their plans keep: a program whose every input is of another size has more.
const MOST_SHAPES: usize = 1 << 12;

impl Shapes {
    /// What a plan says of a pass that had forwards of these shapes: how much memory it adds where it keeps everything, or why it needs more
    /// than the budget.
    pub(super) fn learn(&mut self, shapes: BTreeSet<u64>, adds: Option<Bytes>, failed: Option<PlanError>) {
        let has_room = |known: usize| known < MOST_SHAPES;
        for &shape in &shapes {
            match adds {
                // What is forgotten is planned again.
                Some(adds) => {
                    if !has_room(self.kept.len()) {
                        self.kept.clear();
                    }
                    self.kept.insert(shape, adds);
                }
                None => drop(self.kept.remove(&shape)),
            }
        }
        if let Some(error) = failed.filter(|_| shapes.len() <= MOST_FORWARDS) {
            if !has_room(self.failed.len()) {
                self.failed.clear();
            }
            self.failed.insert(shapes, error);
        }
    }

    /// Why a pass needs more than the budget whose next forward is of a shape.
    pub(super) fn failure_with(&self, shape: u64) -> Option<PlanError> {
        let is_known = !self.failed.is_empty() && self.current.len() < MOST_FORWARDS;
        if is_known { self.failed.get(&self.with(shape)).copied() } else { None }
    }

    /// Such a pass may be tried again.
    pub(super) fn forget_failure_with(&mut self, shape: u64) {
        self.failed.remove(&self.with(shape));
    }

    fn with(&self, shape: u64) -> BTreeSet<u64> {
        self.current.iter().copied().chain([shape]).collect()
    }
}

/// What becomes of bytes that were packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedItem {
    /// By which number the pass knows them.
    pub item: ItemId,
    /// Whether they stay, are to be offloaded, or are not to be stored.
    pub verdict: Verdict,
}

/// What is copied twice is much where it is more than such a part of what was packed.
const CHECKED: u64 = 32;
/// After so many passes whatever they do is what passes do.
pub(super) const LEARNED: u64 = 16;

impl Spare {
    /// It is counted in such parts of a budget, and is at most so many of them.
    const PARTS: u64 = 128;
    pub(super) const MOST: Spare = Spare(32);

    /// More than it was.
    pub(super) fn grown(self) -> Spare {
        Spare(self.0 * 2).min(Spare::MOST)
    }

    /// As much as is left where a pass as planned waited for memory: twice what is left at first. More would not help where something else
    /// keeps copies waiting.
    pub(super) fn for_waits(self) -> Spare {
        Spare(self.0.max(Spare::default().grown().0))
    }

    /// The largest one below it that leaves a plan to passes that need so much, if there is any.
    pub(super) fn less_for(self, minimum: Bytes, budget: Bytes) -> Option<Spare> {
        let less = std::iter::successors(Some(Spare(self.0 / 2)), |spare| Some(Spare(spare.0 / 2)));
        less.take_while(|spare| *spare >= Spare::default()).find(|spare| minimum <= spare.planned_of(budget))
    }

    /// How much of a budget that is.
    pub(super) fn of(self, budget: Bytes) -> Bytes {
        Bytes::new(budget.get() / Spare::PARTS * self.0)
    }

    /// What plans have of a budget.
    pub(super) fn planned_of(self, budget: Bytes) -> Bytes {
        budget.saturating_sub(self.of(budget))
    }

    /// The least budget of which plans have so much.
    pub(super) fn budget_of(self, planned: Bytes) -> Bytes {
        let left = Spare::PARTS - self.0;
        Bytes::new(planned.get().saturating_add(planned.get() / left * self.0).saturating_add(Spare::PARTS))
    }
}

impl Default for Spare {
    /// A thirty-second: what pools lose on most programs.
    fn default() -> Self {
        Spare(4)
    }
}

impl Sites {
    /// A new site, which has seen no pass.
    pub fn create(&self) -> u64 {
        let id = self.given.fetch_add(1, Ordering::Relaxed) + 1;
        self.known.lock().insert(id, Arc::new(Mutex::new(Planned::new())));
        id
    }

    /// Forgets a site and its plans.
    ///
    /// # Errors
    /// [`ProcessError::UnknownSite`].
    pub fn release(&self, id: u64) -> Result<()> {
        self.known.lock().remove(&id).map(drop).ok_or(ProcessError::UnknownSite { id })
    }

    /// # Errors
    /// [`ProcessError::UnknownSite`].
    pub(super) fn of(&self, id: u64) -> Result<Arc<Mutex<Planned>>> {
        self.known.lock().get(&id).cloned().ok_or(ProcessError::UnknownSite { id })
    }
}

impl Planned {
    /// Everything is offloaded until something else is asked for.
    fn new() -> Planned {
        let links = Links::new(LINK, LINK);
        Planned {
            site: Site::new(Request::new(Bytes::MAX, links).preset(Preset::Memory)),
            reloads: VecDeque::new(),
            asked: None,
            beside: Bytes::ZERO,
            all_links: links,
            timer: None,
            timed: VecDeque::new(),
            packed: Bytes::ZERO,
            checked: Bytes::ZERO,
            shapes: Shapes::default(),
            looks: Looks::default(),
            real: None,
            passed: 0,
            spare: Spare::default(),
            most_spare: Spare::MOST,
            least: Bytes::ZERO,
            due: 0,
        }
    }

    /// Whether what memory holds, and how long steps take, is of use.
    pub(super) fn is_measured(&self) -> Option<Asked> {
        self.asked.filter(|asked| asked.preset != Preset::Memory || asked.budget.is_some())
    }

    /// Whether so much of the last pass was copied twice that neither its times nor the links' rates in it are those of later ones. Where
    /// that is so in every pass, it is what passes are.
    pub(super) fn was_checked(&self) -> bool {
        let is_much = self.checked.get().saturating_mul(CHECKED) > self.packed.get();
        is_much && (self.site.passes() < LEARNED || self.looks.is_now)
    }

    /// Fills `begin` with reloads that are to begin, as far as there is room, and says how many these are.
    pub(super) fn fill(&mut self, reloads: Vec<ItemId>, begin: &mut [u64]) -> usize {
        self.reloads.extend(reloads);
        let count = begin.len().min(self.reloads.len());
        for (begin, item) in begin.iter_mut().zip(self.reloads.drain(..count)) {
            *begin = item.index() as u64;
        }
        count
    }
}
