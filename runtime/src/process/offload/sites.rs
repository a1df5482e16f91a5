//! Sites of a program that offload, by number: their plans and measurements.
//!
//! A site has no memory of its own: it decides about bytes, and the caller carries the decision out ([`Offload`]).
//!
//! [`Offload`]: super::Offload

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use glake_device::DeviceId;
use glake_offload::{ItemId, Links, Plan, PlanError, Preset, Request, Site, Uses, Verdict};
use glake_units::Bytes;
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::super::{ProcessError, Result};
use super::passes::Sum;
use super::timer::{LINK, PassTimer};
use super::{Offload, Position};
use crate::metrics::{ItemStats, PlanStats, SiteStats, micros};
use crate::sync::Mutex;

/// Table of all sites of a process. A number is above 0 and never reused.
#[derive(Debug, Default)]
pub struct Sites {
    known: Mutex<FxHashMap<u64, Arc<Mutex<Planned>>>>,
    given: AtomicU64,
}

/// Part of a budget that plans do not use, because a pool rounds blocks up and leaves gaps. The amount is learned from passes that followed
/// their plan and exceeded the budget, or waited for memory that copies still read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Spare(u64);

/// Goal of a site as the program set it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    /// Device of the memory.
    pub(super) device: DeviceId,
    /// Maximum memory of the process on the GPU; `None` for no limit.
    pub(super) budget: Option<Bytes>,
    /// Preset that the plans optimize for.
    pub(super) preset: Preset,
}

/// A finished pass whose times have not been read.
#[derive(Debug)]
pub(super) struct Timed {
    /// Number of the pass.
    pub(super) pass: u64,
    pub(super) timer: Arc<Mutex<PassTimer>>,
    /// Unused part of the budget, if the pass followed its plan.
    pub(super) spare: Option<Spare>,
}

/// A site and the state of its passes.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) site: Site,
    /// Reloads that are due and not yet returned to the caller.
    pub(super) reloads: VecDeque<ItemId>,
    pub(super) asked: Option<Asked>,
    /// Most recent measurement of the GPU memory outside the pool.
    pub(super) beside: Bytes,
    /// Rates of the links together with those of other GPUs.
    pub(super) all_links: Links,
    pub(super) timer: Option<Arc<Mutex<PassTimer>>>,
    /// Finished passes, read once their GPU work is done.
    pub(super) timed: VecDeque<Timed>,
    /// Bytes packed by the current or last pass, and the part of them that is copied twice to be checked.
    pub(super) packed: Bytes,
    pub(super) checked: Bytes,
    pub(super) shapes: Shapes,
    /// Schedule of further checks of the saves.
    pub(super) looks: Looks,
    /// Duration of the last timed pass, and the part of it spent waiting for copies.
    pub(super) real: Option<(Duration, Duration)>,
    /// Requests that the pool's budget had refused when the pass began.
    pub(super) passed: u64,
    /// Part of the budget that plans do not use, and its upper limit: the largest that was seen to leave every pass a plan.
    pub(super) spare: Spare,
    pub(super) most_spare: Spare,
    /// Budget of the pool when the pass began: the smallest of all sites on the GPU.
    pub(super) least: Bytes,
    /// Number of passes after which the measurements are looked at again.
    pub(super) due: u64,
    /// Streamed weights of the program; the bytes of their copies until the last pass ended, and in that pass.
    pub(super) uses: Uses,
    pub(super) begun: Bytes,
    pub(super) streamed: Bytes,
}

/// Schedule of a site's further checks: in the pass after a new plan, unless the last check was recent, because everything that such a pass
/// offloads is copied twice.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// Number of plans made at the last check.
    made: u64,
    /// Number of passes after which another check is allowed.
    due: u64,
    /// Whether the current or last pass is a checking pass.
    is_now: bool,
}

impl Looks {
    /// Minimum number of passes between two checks.
    pub(super) const APART: u64 = 64;

    /// Begins a pass, given the numbers of passes and plans so far. Returns whether its saves are checked once more.
    pub(super) fn begins(&mut self, passes: u64, made: u64) -> bool {
        self.is_now = made > self.made && passes >= self.due;
        if self.is_now {
            (self.made, self.due) = (made, passes + Looks::APART);
        }
        self.is_now
    }
}

/// Kinds of passes as the program numbers them before they begin.
#[derive(Debug, Default)]
pub(super) struct Shapes {
    /// Shape of the forward pass that has begun and saved nothing yet.
    pub(super) begun: Option<u64>,
    /// Shapes of the current pass.
    pub(super) current: BTreeSet<u64>,
    /// Shapes whose plans keep everything, with the memory that they add.
    pub(super) kept: FxHashMap<u64, Bytes>,
    /// Sets of shapes that exceed the budget together: each forward pass of one alone may fit.
    failed: FxHashMap<BTreeSet<u64>, PlanError>,
}

/// Maximum number of shapes in a remembered failure; larger passes are tried each time.
const MOST_FORWARDS: usize = 1 << 9;
/// Maximum number of remembered shapes: a program whose inputs all differ in size has more.
const MOST_SHAPES: usize = 1 << 12;

impl Shapes {
    /// Records the plan of a pass with forward passes of these shapes: the memory it adds if it keeps everything, or the error if it
    /// exceeds the budget.
    pub(super) fn learn(&mut self, shapes: BTreeSet<u64>, adds: Option<Bytes>, failed: Option<PlanError>) {
        let has_room = |known: usize| known < MOST_SHAPES;
        for &shape in &shapes {
            match adds {
                // A forgotten shape is planned again.
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

    /// Returns the error of a remembered failure that `shape` would complete.
    pub(super) fn failure_with(&self, shape: u64) -> Option<PlanError> {
        let is_known = !self.failed.is_empty() && self.current.len() < MOST_FORWARDS;
        if is_known { self.failed.get(&self.with(shape)).copied() } else { None }
    }

    /// Forgets the failures that `shape` would complete, so that the pass is tried again.
    pub(super) fn forget_failure_with(&mut self, shape: u64) {
        self.failed.remove(&self.with(shape));
    }

    fn with(&self, shape: u64) -> BTreeSet<u64> {
        self.current.iter().copied().chain([shape]).collect()
    }
}

/// Decision about packed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedItem {
    /// Number of the item within the pass.
    pub item: ItemId,
    /// Whether the bytes are kept, offloaded or not stored.
    pub verdict: Verdict,
}

/// Divisor of the packed bytes above which the bytes copied twice disturb a pass's times.
const CHECKED: u64 = 32;
/// Number of passes after which disturbed passes count as normal.
pub(super) const LEARNED: u64 = 16;

impl Spare {
    /// Number of parts in which a budget is counted; also the limit of the spare parts.
    const PARTS: u64 = 128;
    pub(super) const MOST: Spare = Spare(32);

    /// Returns the next larger spare part.
    pub(super) fn grown(self) -> Spare {
        Spare(self.0 * 2).min(Spare::MOST)
    }

    /// Returns the spare part after a pass that followed its plan waited for memory: at least twice the initial one. More would not help if
    /// something else delays the copies.
    pub(super) fn for_waits(self) -> Spare {
        Spare(self.0.max(Spare::default().grown().0))
    }

    /// Returns the largest smaller spare part with which passes that need `minimum` have a plan.
    pub(super) fn less_for(self, minimum: Bytes, budget: Bytes) -> Option<Spare> {
        let less = std::iter::successors(Some(Spare(self.0 / 2)), |spare| Some(Spare(spare.0 / 2)));
        less.take_while(|spare| *spare >= Spare::default()).find(|spare| minimum <= spare.planned_of(budget))
    }

    /// Returns the spare bytes of a budget.
    pub(super) fn of(self, budget: Bytes) -> Bytes {
        Bytes::new(budget.get() / Spare::PARTS * self.0)
    }

    /// Returns the bytes of a budget that plans may use.
    pub(super) fn planned_of(self, budget: Bytes) -> Bytes {
        budget.saturating_sub(self.of(budget))
    }

    /// Returns the smallest budget of which plans may use `planned` bytes.
    pub(super) fn budget_of(self, planned: Bytes) -> Bytes {
        let left = Spare::PARTS - self.0;
        Bytes::new(planned.get().saturating_add(planned.get() / left * self.0).saturating_add(Spare::PARTS))
    }
}

impl Default for Spare {
    /// Returns 1/32, the share that pools lose on most programs.
    fn default() -> Self {
        Spare(4)
    }
}

impl Sites {
    /// Creates a site without passes and returns its number.
    pub fn create(&self) -> u64 {
        let id = self.given.fetch_add(1, Ordering::Relaxed) + 1;
        self.known.lock().insert(id, Arc::new(Mutex::new(Planned::new())));
        id
    }

    /// Removes a site and its plans.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist.
    pub fn release(&self, id: u64) -> Result<()> {
        self.known.lock().remove(&id).map(drop).ok_or_else(|| ProcessError::unknown_site(id))
    }

    /// Returns the site with a number.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the site does not exist.
    pub(super) fn of(&self, id: u64) -> Result<Arc<Mutex<Planned>>> {
        self.known.lock().get(&id).cloned().ok_or_else(|| ProcessError::unknown_site(id))
    }
}

impl Planned {
    /// Creates a site that offloads everything until a goal is set.
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
            uses: Uses::new(Vec::new()),
            begun: Bytes::ZERO,
            streamed: Bytes::ZERO,
        }
    }

    /// Notes the bytes of streamed weights that came in the pass that ends.
    pub(super) fn note_streamed(&mut self) {
        let begun = self.uses.begun();
        self.streamed = begun.saturating_sub(std::mem::replace(&mut self.begun, begun));
    }

    /// Returns the links without the time in which copies of streamed weights take them, as in the last pass that was timed.
    pub(super) fn beside_weights(&self, links: Links) -> Links {
        let Some((total, _)) = self.real.filter(|(total, _)| !self.streamed.is_zero() && !total.is_zero())
        else {
            return links;
        };
        #[allow(clippy::cast_precision_loss)] // a share
        let busy = self.streamed.get() as f64 / (links.into.0 * 1e9);
        links.shared(busy / total.as_secs_f64())
    }

    /// Returns the goal if memory and times must be measured for it.
    pub(super) fn is_measured(&self) -> Option<Asked> {
        self.asked.filter(|asked| asked.preset != Preset::Memory || asked.budget.is_some())
    }

    /// Returns whether so much of the last pass was copied twice that neither its times nor its link rates represent later passes. If this
    /// is so in every pass, it counts as normal.
    pub(super) fn was_checked(&self) -> bool {
        let is_much = self.checked.get().saturating_mul(CHECKED) > self.packed.get();
        is_much && (self.site.passes() < LEARNED || self.looks.is_now)
    }

    /// Fills `begin` with due reloads, as far as there is room, and returns their number.
    pub(super) fn fill(&mut self, reloads: Vec<ItemId>, begin: &mut [u64]) -> usize {
        self.reloads.extend(reloads);
        let count = begin.len().min(self.reloads.len());
        for (begin, item) in begin.iter_mut().zip(self.reloads.drain(..count)) {
            *begin = item.index() as u64;
        }
        count
    }
}

impl Offload {
    /// Returns a site's goal, its last plan and its passes as JSON; with `course` also the planned pass step by step.
    ///
    /// # Errors
    /// [`super::ProcessError::Refused`] if the site does not exist.
    pub fn told(&self, site: u64, course: bool) -> Result<Value> {
        let planned = self.sites.of(site)?;
        let planned = planned.lock();
        let (site, request) = (&planned.site, planned.site.request());
        let asked = planned.asked;
        let pool = asked.and_then(|asked| self.measures.pool(asked.device));
        let are_all_used = self.registry.engine.is_on();
        let told = SiteStats {
            preset: name(asked.map_or(request.preset, |asked| asked.preset)),
            budget: asked.and_then(|asked| asked.budget).map(Bytes::get),
            device: asked.map(|asked| asked.device.0),
            beside_bytes: planned.beside.get(),
            reserved_bytes: pool.map(|pool| pool.reserved().get()),
            above_budget: pool.map(|pool| pool.budget().1),
            passes: site.passes(),
            diverged: site.diverged(),
            unplanned: site.unplanned().map(|error| self.below(&planned, *error).to_string()),
            out_gb_s: request.links.out.0,
            in_gb_s: request.links.into.0,
            host_room_bytes: request.host_room.get(),
            real_us: planned.real.map(|(total, _)| micros(total)),
            real_exposed_us: planned.real.map(|(_, waited)| micros(waited)),
            plan: site.plan().map(|plan| plan_of(plan, &planned, are_all_used)),
        };
        let mut told = told.json();
        if let Some(plan) = site.plan().filter(|_| course) {
            told["plan"]["course"] = steps(plan, &planned);
        }
        Ok(told)
    }
}

fn plan_of(plan: &Plan, planned: &Planned, are_all_used: bool) -> PlanStats {
    let sum = |verdict| {
        let Sum { items, bytes } = Sum::of(plan, verdict);
        ItemStats { items, bytes }
    };
    PlanStats {
        kept: sum(Verdict::Keep),
        offloaded: sum(Verdict::Offload),
        recomputed: sum(Verdict::Recompute),
        peak_bytes: plan.peak().saturating_add(planned.beside).get(),
        host_bytes: plan.host().get(),
        is_timed: plan.tape().is_timed(),
        expected_us: micros(plan.time()),
        expected_exposed_us: micros(plan.exposed()),
        recompute_us: micros(plan.recompute()),
        all_links_us: if are_all_used { None } else { over_all(plan, planned).map(micros) },
    }
}

fn over_all(plan: &Plan, planned: &Planned) -> Option<std::time::Duration> {
    let (request, all) = (planned.site.request(), planned.all_links);
    let is_more = all.out.0 > request.links.out.0 * 1.05 || all.into.0 > request.links.into.0 * 1.05;
    let other = is_more.then(|| Plan::new(plan.tape(), &Request { links: all, ..*request }).ok())??;
    (other.time() < plan.time()).then(|| other.time())
}

/// Returns the start of each step and the memory in use until the next; and for each item its bytes, the bytes over a link, its verdict,
/// and when it is packed, reloaded and needed.
fn steps(plan: &Plan, planned: &Planned) -> Value {
    let tape = plan.tape();
    let time = |at: Position| micros(tape.time_at(at));
    let positions = || (0..=tape.steps().len()).map(Position);
    let items = tape.items().iter().enumerate().map(|(index, item)| {
        let id = glake_offload::ItemId::new(index);
        let (pack, needed) = (item.pack(), item.unpacks().first().copied());
        json!([
            pack.bytes.get(),
            pack.link_bytes.get(),
            plan.verdict(id).map_or(0, number),
            item.packed().0,
            plan.reload_at(id).map(|at| at.0),
            needed.map(|at| at.0),
            item.dropped().0,
        ])
    });
    json!({
        "us": positions().map(time).collect::<Vec<_>>(),
        "rest_bytes": positions().map(|at| tape.rest_at(at).saturating_add(planned.beside).get()).collect::<Vec<_>>(),
        "held_bytes": plan.held().iter().map(|held| held.saturating_add(planned.beside).get()).collect::<Vec<_>>(),
        "items": items.collect::<Vec<_>>(),
    })
}

fn number(verdict: Verdict) -> u32 {
    match verdict {
        Verdict::Keep => 0,
        Verdict::Offload => 1,
        Verdict::Recompute => 2,
    }
}

fn name(preset: Preset) -> &'static str {
    match preset {
        Preset::Fit => "fit",
        Preset::Memory => "memory",
        Preset::Hybrid => "hybrid",
    }
}
