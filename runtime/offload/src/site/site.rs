//! Site: history of passes, and decisions for the next one.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use glake_units::Bytes;

use super::held::Held;
use super::leaves::Leaves;
use super::measured::Measured;
use super::plans::Plans;
use crate::{
    Clock, ItemId, LeafPart, Pack, Plan, PlanError, Position, Preset, Recompute, Recorder, Request, ScopeId,
    TapeError, Verdict,
};

/// Maximum number of completed passes whose times are still missing.
const MOST_OVER: usize = 4;
/// Maximum number of searches for another plan in one pass.
const MOST_TRIES: u32 = 4;

/// A site of a program that offloads, pass after pass: a module, or a block of code.
///
/// A pass that it knows nothing of is offloaded whole and reloaded on demand, and recorded. From then on passes that
/// begin like it follow its plan. A pass that turns out to be another one is on demand for the rest, and recorded too.
///
/// ```
/// use glake_offload::{ItemId, Links, Pack, Site, Preset, Request, Verdict};
/// use glake_units::{Bandwidth, Bytes};
///
/// let links = Links::new(Bandwidth(50.0), Bandwidth(50.0));
/// let mut site = Site::new(Request::new(Bytes::MAX, links).preset(Preset::Memory));
/// for pass in 0..2 {
///     let items: Vec<_> = (0..4).map(|_| site.packed(Pack::new(Bytes::mib(8)))).collect();
///     for &(item, verdict, _) in items.iter().rev() {
///         // The second pass has what comes next on its way before it is asked for, and keeps what came last.
///         let begins = site.unpacked(item)?;
///         assert_eq!(begins.contains(&item), pass == 0);
///         assert_eq!(verdict == Verdict::Keep, pass == 1 && item == ItemId::new(3));
///         site.dropped(item)?;
///     }
///     assert_eq!(site.passes(), pass + 1);
/// }
/// # Ok::<(), glake_offload::TapeError>(())
/// ```
#[derive(Debug)]
pub struct Site {
    request: Request,
    plans: Plans,
    recorder: Recorder,
    held: Held,
    /// Memory of the process at the begin of the pass, and now.
    memory: (Bytes, Bytes),
    over: VecDeque<Over>,
    /// Steps of the pass so far.
    steps: Vec<Did>,
    /// State of its items, whichever plan decided it.
    stored: Vec<Stored>,
    leaves: Leaves,
    follows: Follows,
    tries: u32,
    passes: u64,
    diverged: u64,
    /// Number of further passes among which one without times may occur.
    wanting: usize,
    /// Whether the last pass followed its plan.
    followed: bool,
}

/// Record of a completed pass.
#[derive(Debug)]
struct Over {
    pass: u64,
    recorder: Recorder,
    leaves: Leaves,
    base: Bytes,
}

/// Step of a pass.
#[derive(Clone, Copy, Debug)]
enum Did {
    Pack(Pack),
    Unpack(ItemId),
}

/// State of an item of a pass.
#[derive(Clone, Copy, Debug)]
struct Stored {
    is_offloaded: bool,
    /// Whether the item is offloaded and no reload was ordered since.
    is_away: bool,
}

/// Guidance of the current pass.
#[derive(Debug)]
enum Follows {
    /// No pass has begun.
    Nothing,
    /// On demand, without a plan: items are reloaded when they are unpacked.
    Demand,
    Plan(Box<Clock>),
}

impl Site {
    /// Creates a site without history.
    pub fn new(request: Request) -> Self {
        Site {
            request,
            plans: Plans::default(),
            recorder: Recorder::new(),
            held: Held::default(),
            memory: (Bytes::ZERO, Bytes::ZERO),
            over: VecDeque::new(),
            steps: Vec::new(),
            stored: Vec::new(),
            leaves: Leaves::default(),
            follows: Follows::Nothing,
            tries: 0,
            passes: 0,
            diverged: 0,
            wanting: MOST_OVER,
            followed: false,
        }
    }

    /// Records the pack of a new item. Returns its ID, its verdict, and the reloads to begin before, in this order. A leaf output to
    /// recompute has no handle: its scope holds it.
    pub fn packed(&mut self, pack: Pack) -> (ItemId, Verdict, Vec<ItemId>) {
        // A leaf that no scope computes again is none.
        let pack = Pack { leaf: pack.leaf.filter(|_| pack.scope.is_some()), ..pack };
        self.end_if_over();
        let item = self.recorder.packed(pack);
        self.held.step();
        if matches!(self.follows, Follows::Nothing) {
            self.follows = match self.plans.begin(&pack, &self.request, self.memory.0) {
                Some(plan) => Follows::Plan(Box::new(Clock::new(plan))),
                None => Follows::Demand,
            };
        }
        self.steps.push(Did::Pack(pack));
        let demanded = self.demands(&pack);
        let (verdict, reloads) = match &mut self.follows {
            Follows::Plan(clock) => {
                let orders = clock.packed(&pack).1;
                let (verdict, reloads) = (orders.verdict, orders.reload.to_vec());
                (verdict, self.or_of_another_plan(reloads))
            }
            Follows::Demand | Follows::Nothing => (demanded, Vec::new()),
        };
        // Nothing is recomputed then that a leaf can give, in a pass that turns out to be another one neither.
        let verdict = match verdict {
            Verdict::Recompute if self.request.preset == Preset::Memory => Verdict::Offload,
            verdict => verdict,
        };
        let verdict = match (pack.leaf, self.leaves.is_last_stored()) {
            (Some(LeafPart::Beside), false) => Verdict::Recompute,
            (Some(LeafPart::Beside), true) if verdict == Verdict::Recompute => Verdict::Offload,
            _ => verdict,
        };
        let is_offloaded = verdict == Verdict::Offload;
        self.stored.push(Stored { is_offloaded, is_away: is_offloaded });
        let reloads = self.told(reloads);
        self.held.packed(item, &pack, verdict);
        self.held.reloaded(&reloads);
        if let Some(scope) = pack.scope.filter(|_| pack.leaf.is_some()) {
            self.leaves.packed(item, scope, verdict);
        }
        (item, verdict, reloads)
    }

    /// Ends the previous pass if only scopes hold anything of it, for branches that were never read. Called when another pass begins.
    pub fn end_if_over(&mut self) {
        if self.handles() == 0 && self.leaves.is_behind_replays() {
            self.end_pass();
        }
    }

    /// Records the begin of a scope's replay. Returns the reloads to begin before, in this order.
    pub fn replays(&mut self, scope: ScopeId) -> Vec<ItemId> {
        let mut begins = Vec::new();
        for item in self.leaves.replays(scope) {
            // One whose graph is gone is not read any more.
            begins.extend(self.read(item).unwrap_or_default());
            // What comes to be in a replay is of the rest, whether it was stored or is made again.
            self.held.freed(item);
        }
        begins
    }

    /// Records the end of a scope's replay.
    pub fn replayed(&mut self, scope: ScopeId) {
        for item in self.leaves.replayed(scope) {
            let dropped = self.recorder.dropped(item);
            debug_assert!(dropped.is_ok(), "a scope holds a handle");
        }
        if self.recorder.is_over() {
            self.end_pass();
        }
    }

    /// Records another pack of the same bytes: another handle.
    ///
    /// # Errors
    /// [`TapeError::UnknownItem`].
    pub fn shared(&mut self, item: ItemId) -> Result<(), TapeError> {
        self.recorder.shared(item)
    }

    /// Records an unpack. Returns the reloads to begin before it, in order.
    ///
    /// # Errors
    /// [`TapeError::UnknownItem`].
    pub fn unpacked(&mut self, item: ItemId) -> Result<Vec<ItemId>, TapeError> {
        if self.leaves.is_replaying(item) {
            // It was unpacked where the replay began.
            self.recorder.holds(item)?;
            let reloads = self.told(vec![item]);
            self.held.reloaded(&reloads);
            return Ok(reloads);
        }
        self.read(item)
    }

    fn read(&mut self, item: ItemId) -> Result<Vec<ItemId>, TapeError> {
        self.recorder.unpacked(item)?;
        self.held.step();
        self.steps.push(Did::Unpack(item));
        let mut reloads = match &mut self.follows {
            Follows::Plan(clock) => {
                let reloads = clock.unpacked(item)?.reload.to_vec();
                self.or_of_another_plan(reloads)
            }
            Follows::Demand | Follows::Nothing => Vec::new(),
        };
        // Whatever a plan says: it is read now.
        reloads.push(item);
        let reloads = self.told(reloads);
        self.held.reloaded(&reloads);
        Ok(reloads)
    }

    /// Keeps the items that are away, and marks them as reloading.
    fn told(&mut self, mut reloads: Vec<ItemId>) -> Vec<ItemId> {
        let is_away = |item: &ItemId| {
            self.stored.get_mut(item.index()).is_some_and(|stored| std::mem::take(&mut stored.is_away))
        };
        reloads.retain(is_away);
        reloads
    }

    /// Records that the reloaded copy of an item was freed while a handle is alive. It is reloaded when it is unpacked again.
    pub fn freed(&mut self, item: ItemId) {
        self.held.freed(item);
        if let Follows::Plan(clock) = &mut self.follows {
            clock.freed(item);
        }
        if let Some(stored) = self.stored.get_mut(item.index()) {
            stored.is_away = stored.is_offloaded;
        }
    }

    /// Records the end of a handle. The last one ends the pass, which is then planned for if necessary. Recomputed outputs have no handle.
    ///
    /// # Errors
    /// [`TapeError::UnknownItem`], [`TapeError::NoHandle`].
    pub fn dropped(&mut self, item: ItemId) -> Result<(), TapeError> {
        if self.leaves.was_not_stored(item) {
            return Ok(());
        }
        self.recorder.dropped(item)?;
        self.held.dropped(item);
        if self.recorder.is_over() {
            self.end_pass();
        }
        Ok(())
    }

    /// Returns the number of completed passes.
    pub fn passes(&self) -> u64 {
        self.passes
    }

    /// Returns whether the last pass followed its plan.
    pub fn has_followed(&self) -> bool {
        self.followed
    }

    /// Returns the number of passes that diverged from their plans.
    pub fn diverged(&self) -> u64 {
        self.diverged
    }

    /// Returns the reason why the most recent pass has no plan.
    pub fn unplanned(&self) -> Option<&PlanError> {
        self.plans.unplanned()
    }

    /// Returns the plan that was followed or made most recently.
    pub fn plan(&self) -> Option<&Arc<Plan>> {
        self.plans.last()
    }

    /// Returns the number of plans made.
    pub fn plans_made(&self) -> u64 {
        self.plans.made()
    }

    /// Returns the current request.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Changes the request from the next pass on.
    pub fn ask(&mut self, request: Request) {
        self.request = request;
    }

    /// Returns the size of an item of the pass.
    pub fn size(&self, item: ItemId) -> Bytes {
        self.recorder.size(item)
    }

    /// Returns the memory that the last pass added, if it followed a plan that keeps everything.
    pub fn kept_all(&self) -> Option<Bytes> {
        let plan = self.plan().filter(|plan| self.followed && plan.keeps_all())?;
        Some(plan.peak().saturating_sub(self.memory.0))
    }

    /// Returns the number of steps of the current pass; 0 if none is in progress.
    pub fn position(&self) -> Position {
        self.recorder.position()
    }

    /// Returns whether times of a new pass would be useful: it has no plan, or may follow one made without times, as one of the last passes
    /// did.
    pub fn may_want_times(&self) -> bool {
        let untimed = || self.plans.want_times(MOST_OVER);
        self.wants_times() || self.wanting > 0 && untimed() && self.request.preset != Preset::Memory
    }

    /// Returns whether times of the current pass are useful: it has no plan, or one based on few passes.
    fn wants_times(&self) -> bool {
        let untimed = match &self.follows {
            Follows::Plan(clock) => self.plans.wants_times(clock.plan()),
            Follows::Demand => true,
            Follows::Nothing => false,
        };
        // What offloads everything does so in the order of steps alone.
        untimed && self.request.preset != Preset::Memory
    }

    /// Records the GPU memory of the process before the next step, and its maximum since the last call. All of it except items counts as
    /// the rest.
    pub fn sampled(&mut self, now: Bytes, most: Bytes) {
        if self.recorder.position() == Position(0) {
            self.memory.0 = now;
        } else {
            self.recorder.sampled(most.saturating_sub(self.held.bytes()));
        }
        self.memory.1 = now;
    }

    /// Records the measurements of pass number `pass`, counted from 1. Ignored if the pass is no longer known.
    pub fn measured(&mut self, pass: u64, measured: &Measured) {
        let Some(at) = self.over.iter().position(|over| over.pass == pass) else { return };
        let Some(Over { mut recorder, leaves, base, .. }) = self.over.remove(at) else { return };
        let mut times = HashMap::new();
        for &(item, time) in &measured.leaves {
            times.insert(item, time);
            let told = recorder.recomputable(item, Recompute::Leaf(time));
            debug_assert!(told.is_ok(), "a leaf of another pass");
        }
        measured.marks.iter().for_each(|(at, time)| recorder.mark_at(*at, *time));
        measured.waits.iter().for_each(|(at, wait)| recorder.waited_at(*at, *wait));
        for &(at, scope, time) in &measured.replays {
            // The rest of a replay is work of every pass.
            let again = leaves.not_stored(scope).filter_map(|item| times.get(&item)).sum::<Duration>();
            recorder.waited_at(at, again.min(time));
        }
        self.plans.was_timed(recorder.finish(), &self.request, base);
    }

    /// Returns the verdict of an item without a plan. Under a budget, half of the memory that was free at the begin of the pass is filled
    /// first.
    fn demands(&self, pack: &Pack) -> Verdict {
        let (base, now) = self.memory;
        let budget = self.request.budget;
        let is_tight = self.plans.unplanned().is_some() || self.request.preset == Preset::Memory;
        let keeps = budget != Bytes::MAX && !is_tight;
        let half = base.saturating_add(Bytes::new(budget.saturating_sub(base).get() / 2));
        match Verdict::unplanned(pack) {
            Verdict::Offload if keeps && now <= half => Verdict::Keep,
            verdict => verdict,
        }
    }

    /// Switches a pass that has just diverged to another known plan that it matches so far, and orders the reloads that should have begun
    /// by now. Reloads ordered by the first plan remain in effect.
    fn or_of_another_plan(&mut self, reloads: Vec<ItemId>) -> Vec<ItemId> {
        let Follows::Plan(clock) = &self.follows else { return reloads };
        // At its first step beside it, and a few times at most.
        if clock.diverged().is_none_or(|at| at.0 + 1 != self.steps.len()) || self.tries >= MOST_TRIES {
            return reloads;
        }
        self.tries += 1;
        let own = clock.plan().clone();
        let is_like = |plan: &&Arc<Plan>| !Arc::ptr_eq(plan, &own) && follow(plan, &self.steps).is_some();
        let like = self.plans.all().find(is_like).cloned();
        // What was asked may be another thing than when that plan was made.
        let like = like.and_then(|plan| self.plans.renewed(&plan, &self.request, self.memory.0));
        let found = like.and_then(|plan| follow(&plan, &self.steps));
        let Some((clock, mut begun)) = found else { return reloads };
        self.follows = Follows::Plan(Box::new(clock));
        begun.extend(reloads);
        begun
    }

    /// Returns the number of handles that the program holds.
    fn handles(&self) -> usize {
        self.recorder.live() - self.leaves.held()
    }

    fn end_pass(&mut self) {
        self.passes += 1;
        self.steps.clear();
        self.stored.clear();
        self.tries = 0;
        self.held = Held::default();
        let (leaves, base) = (std::mem::take(&mut self.leaves), self.memory.0);
        let mut recorder = std::mem::take(&mut self.recorder);
        let wanted = self.wants_times();
        self.wanting = if wanted { MOST_OVER } else { self.wanting.saturating_sub(1) };
        let tape = if wanted { recorder.clone().finish() } else { std::mem::take(&mut recorder).finish() };
        if wanted {
            self.over.push_back(Over { pass: self.passes, recorder, leaves, base });
            if self.over.len() > MOST_OVER {
                self.over.pop_front();
            }
        }
        self.followed = false;
        match std::mem::replace(&mut self.follows, Follows::Nothing) {
            Follows::Plan(clock) if clock.is_complete() => {
                self.followed = true;
                return self.plans.was_followed(clock.plan(), &tape, &self.request, base);
            }
            Follows::Plan(_) => self.diverged += 1,
            Follows::Demand | Follows::Nothing => {}
        }
        self.plans.was_new(tape, &self.request, base);
    }
}

/// Returns a clock of a plan that matches the steps, with all reloads it has ordered.
fn follow(plan: &Arc<Plan>, steps: &[Did]) -> Option<(Clock, Vec<ItemId>)> {
    let (mut clock, mut begun) = (Clock::new(plan.clone()), Vec::new());
    for step in steps {
        let orders = match step {
            Did::Pack(pack) => clock.packed(pack).1,
            Did::Unpack(item) => clock.unpacked(*item).ok()?,
        };
        begun.extend_from_slice(orders.reload);
        if clock.diverged().is_some() {
            return None;
        }
    }
    Some((clock, begun))
}
