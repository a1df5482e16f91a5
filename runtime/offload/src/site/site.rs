//! What a site's passes were, and what follows for the next one.

use std::collections::VecDeque;
use std::sync::Arc;

use super::leaves::Leaves;
use crate::{
    Clock, ItemId, Pack, Plan, PlanError, Recorder, Request, ScopeId, ShapeClass, TapeError, Verdict,
};

/// Plans of so many shape classes are kept, those that were used last.
const MOST_PLANS: usize = 32;
/// How often another plan is looked for in one pass.
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
    /// The last used first.
    plans: VecDeque<(ShapeClass, Arc<Plan>)>,
    recorder: Recorder,
    /// What the pass did so far.
    steps: Vec<Did>,
    leaves: Leaves,
    follows: Follows,
    tries: u32,
    passes: u64,
    diverged: u64,
    unplanned: Option<PlanError>,
}

/// A step of a pass.
#[derive(Clone, Copy, Debug)]
enum Did {
    Pack(Pack),
    Unpack(ItemId),
}

/// What the pass that is under way follows.
#[derive(Debug)]
enum Follows {
    /// It has not begun.
    Nothing,
    /// No plan: which items are away.
    Demand(Vec<bool>),
    Plan(Box<Clock>),
}

impl Site {
    /// One that has seen no pass.
    pub fn new(request: Request) -> Self {
        Site {
            request,
            plans: VecDeque::new(),
            recorder: Recorder::new(),
            steps: Vec::new(),
            leaves: Leaves::default(),
            follows: Follows::Nothing,
            tries: 0,
            passes: 0,
            diverged: 0,
            unplanned: None,
        }
    }

    /// Bytes are packed that this pass has not: which item they are, what becomes of them, and which reloads are to begin
    /// before, in this order. A leaf's output that is to be recomputed has no handle: its scope holds it.
    pub fn packed(&mut self, pack: Pack) -> (ItemId, Verdict, Vec<ItemId>) {
        // A leaf that no scope computes again is none.
        let pack = Pack { is_leaf: pack.is_leaf && pack.scope.is_some(), ..pack };
        if self.handles() == 0 && self.leaves.is_behind_replays() {
            // Scopes that hold something still are those of branches that nothing read.
            self.end_pass();
        }
        let item = self.recorder.packed(pack);
        if matches!(self.follows, Follows::Nothing) {
            self.follows = match self.plan_of(&pack) {
                Some(plan) => Follows::Plan(Box::new(Clock::new(plan))),
                None => Follows::Demand(Vec::new()),
            };
        }
        self.steps.push(Did::Pack(pack));
        let (verdict, reloads) = match &mut self.follows {
            Follows::Plan(clock) => {
                let orders = clock.packed(&pack).1;
                let (verdict, reloads) = (orders.verdict, orders.reload.to_vec());
                (verdict, self.or_of_another_plan(reloads))
            }
            Follows::Demand(away) => {
                let verdict = Verdict::unplanned(&pack);
                away.push(verdict == Verdict::Offload);
                (verdict, Vec::new())
            }
            Follows::Nothing => (Verdict::unplanned(&pack), Vec::new()),
        };
        if let Some(scope) = pack.scope.filter(|_| pack.is_leaf) {
            self.leaves.packed(item, scope, verdict);
        }
        (item, verdict, reloads)
    }

    /// A scope is computed again from here on: which reloads are to begin before, in this order.
    pub fn replays(&mut self, scope: ScopeId) -> Vec<ItemId> {
        let mut begins = Vec::new();
        for item in self.leaves.replays(scope) {
            // One whose graph is gone is not read any more.
            begins.extend(self.read(item).unwrap_or_default());
        }
        begins
    }

    /// A scope was computed again.
    pub fn replayed(&mut self, scope: ScopeId) {
        for item in self.leaves.replayed(scope) {
            let dropped = self.recorder.dropped(item);
            debug_assert!(dropped.is_ok(), "a scope holds a handle");
        }
        if self.recorder.is_over() {
            self.end_pass();
        }
    }

    /// Bytes of the pass are packed once more: they have another handle.
    ///
    /// # Errors
    /// The pass has no such item.
    pub fn shared(&mut self, item: ItemId) -> Result<(), TapeError> {
        self.recorder.shared(item)
    }

    /// A handle is unpacked: which reloads are to begin before, in this order.
    ///
    /// # Errors
    /// The pass has no such item.
    pub fn unpacked(&mut self, item: ItemId) -> Result<Vec<ItemId>, TapeError> {
        if !self.leaves.is_replaying(item) {
            return self.read(item);
        }
        // It was unpacked where the replay began; where it was given up since, it comes back once more.
        self.recorder.holds(item)?;
        Ok(match &mut self.follows {
            Follows::Plan(clock) => clock.read(item).then_some(item).into_iter().collect(),
            Follows::Demand(away) => demanded(away, item),
            Follows::Nothing => Vec::new(),
        })
    }

    fn read(&mut self, item: ItemId) -> Result<Vec<ItemId>, TapeError> {
        self.recorder.unpacked(item)?;
        self.steps.push(Did::Unpack(item));
        match &mut self.follows {
            Follows::Plan(clock) => {
                let reloads = clock.unpacked(item)?.reload.to_vec();
                Ok(self.or_of_another_plan(reloads))
            }
            Follows::Demand(away) => Ok(demanded(away, item)),
            Follows::Nothing => Ok(Vec::new()),
        }
    }

    /// The GPU's copy of an item that was reloaded is gone, and a handle of it lives: it is reloaded when it is unpacked
    /// again.
    pub fn freed(&mut self, item: ItemId) {
        match &mut self.follows {
            Follows::Plan(clock) => clock.freed(item),
            Follows::Demand(away) => {
                if let Some(away) = away.get_mut(item.index()) {
                    *away = true;
                }
            }
            Follows::Nothing => {}
        }
    }

    /// A handle is gone. With the last one the pass is over, and what is not planned for yet is. Of an output that is recomputed nobody
    /// has one.
    ///
    /// # Errors
    /// The pass has no such item, or no handle of it.
    pub fn dropped(&mut self, item: ItemId) -> Result<(), TapeError> {
        if self.leaves.was_not_stored(item) {
            return Ok(());
        }
        self.recorder.dropped(item)?;
        if self.recorder.is_over() {
            self.end_pass();
        }
        Ok(())
    }

    /// How many passes are over.
    pub fn passes(&self) -> u64 {
        self.passes
    }

    /// How many of them were not as their plan.
    pub fn diverged(&self) -> u64 {
        self.diverged
    }

    /// Why the last pass that was looked at has no plan.
    pub fn unplanned(&self) -> Option<&PlanError> {
        self.unplanned.as_ref()
    }

    /// Another budget, or other links: from the next pass on.
    pub fn ask(&mut self, request: Request) {
        if self.request != request {
            self.request = request;
            self.plans.clear();
        }
    }

    /// The plan of the last pass that began with such a pack.
    fn plan_of(&mut self, first: &Pack) -> Option<Arc<Plan>> {
        let begins = |plan: &Plan| plan.tape().items().first().is_some_and(|item| item.admits(first));
        self.plans.iter().find(|(_, plan)| begins(plan)).map(|(_, plan)| plan.clone())
    }

    /// A pass that has just left its plan may be one that is known too: it follows that one's from here on, and has what should have
    /// begun by now begin. What the first plan has had begun is begun.
    fn or_of_another_plan(&mut self, reloads: Vec<ItemId>) -> Vec<ItemId> {
        let Follows::Plan(clock) = &self.follows else { return reloads };
        // At its first step beside it, and a few times at most.
        if clock.diverged().is_none_or(|at| at.0 + 1 != self.steps.len()) || self.tries >= MOST_TRIES {
            return reloads;
        }
        self.tries += 1;
        let own = clock.plan().clone();
        let others = self.plans.iter().map(|(_, plan)| plan).filter(|plan| !Arc::ptr_eq(plan, &own));
        let found = others.filter_map(|plan| follow(plan, &self.steps)).next();
        let Some((clock, begun)) = found else { return reloads };
        self.follows = Follows::Plan(Box::new(clock));
        begun
    }

    /// How many handles the program has.
    fn handles(&self) -> usize {
        self.recorder.live() - self.leaves.held()
    }

    fn end_pass(&mut self) {
        self.passes += 1;
        self.steps.clear();
        self.leaves = Leaves::default();
        self.tries = 0;
        let mut tape = std::mem::take(&mut self.recorder).finish();
        match std::mem::replace(&mut self.follows, Follows::Nothing) {
            Follows::Plan(clock) if clock.is_complete() => {
                let used = self.plans.iter().position(|(_, plan)| Arc::ptr_eq(plan, clock.plan()));
                if let Some(plan) = used.and_then(|used| self.plans.remove(used)) {
                    self.plans.push_front(plan);
                }
                return;
            }
            Follows::Plan(_) => self.diverged += 1,
            Follows::Demand(_) | Follows::Nothing => {}
        }
        let class = tape.class();
        // Of one class the largest counts: a plan for it holds for all.
        if let Some(at) = self.plans.iter().position(|(known, _)| *known == class)
            && let Some((_, plan)) = self.plans.remove(at)
        {
            tape.widen(plan.tape());
        }
        match Plan::new(&Arc::new(tape), &self.request) {
            Ok(plan) => {
                self.plans.push_front((class, Arc::new(plan)));
                self.plans.truncate(MOST_PLANS);
                self.unplanned = None;
            }
            Err(error) => self.unplanned = Some(error),
        }
    }
}

/// The item, if it is away; it is not any more.
fn demanded(away: &mut [bool], item: ItemId) -> Vec<ItemId> {
    let is_away = away.get_mut(item.index()).is_some_and(std::mem::take);
    if is_away { vec![item] } else { Vec::new() }
}

/// A clock of a plan that these steps are of, and all that it has had begun.
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
