//! Plans of a site, one per shape class.

use std::collections::VecDeque;
use std::sync::Arc;

use glake_units::Bytes;

use crate::{Pack, Plan, PlanError, Preset, Request, ShapeClass, Tape, Verdict};

/// Maximum number of shape classes; the least recently used plan is dropped.
const MOST: usize = 32;
/// Fraction of the budget (1/n) that must have become free to be used by a new plan.
const FREED: u64 = 32;
/// Fraction of the budget (1/n) that a plan leaves free if possible. Passes that begin with that much more memory in use then need no new
/// plan, which would offload, and check, other items.
const SLACK: u64 = 128;
/// Number of passes whose times a plan is based on.
const SAMPLES: u32 = 3;
/// Fraction (1/n) of the pass time that a new plan must save to replace one for other times.
const FASTER: u32 = 64;

/// Plans, the most recently used one first.
#[derive(Clone, Debug, Default)]
pub(super) struct Plans {
    known: VecDeque<Known>,
    unplanned: Option<Unplanned>,
    /// Number of plans made.
    made: u64,
}

/// Pass without a plan.
#[derive(Clone, Debug)]
struct Unplanned {
    error: PlanError,
    tape: Tape,
    request: Request,
    base: Bytes,
    samples: u32,
}

/// Plan and its inputs.
#[derive(Clone, Debug)]
struct Known {
    class: ShapeClass,
    plan: Arc<Plan>,
    request: Request,
    /// Memory in use when the pass began.
    base: Bytes,
    /// Total size of its items.
    bytes: Bytes,
    /// Number of passes whose times it is based on.
    samples: u32,
}

impl Known {
    /// Returns whether the plan was made for another request or other memory in use.
    fn is_old(&self, request: &Request, base: Bytes) -> bool {
        let (more, less) = (base.saturating_sub(self.base), self.base.saturating_sub(base));
        let less = less.saturating_add(request.budget.saturating_sub(self.request.budget));
        Request { budget: request.budget, ..self.request } != *request
            || self.plan.peak().saturating_add(more) > request.budget
            || less > Bytes::new(request.budget.get() / FREED)
    }
}

impl Plans {
    /// Returns the reason why the most recent pass has no plan.
    pub(super) fn unplanned(&self) -> Option<&PlanError> {
        self.unplanned.as_ref().map(|unplanned| &unplanned.error)
    }

    /// Returns the most recently used plan.
    pub(super) fn last(&self) -> Option<&Arc<Plan>> {
        self.known.front().map(|known| &known.plan)
    }

    /// Returns the number of plans made.
    pub(super) fn made(&self) -> u64 {
        self.made
    }

    /// Returns all known plans.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Plan>> {
        self.known.iter().map(|known| &known.plan)
    }

    /// Returns the plan for a pass that begins with a pack, valid for `request` and the memory in use. Among several it is the most recent
    /// one; under a budget, the one with the largest items, which also holds for the others until they diverge.
    pub(super) fn begin(&mut self, first: &Pack, request: &Request, base: Bytes) -> Option<Arc<Plan>> {
        let admits = |tape: &Tape| tape.items().first().is_some_and(|item| item.admits(first));
        let is_asked_again = |of: &mut Unplanned| of.request != *request && admits(&of.tape);
        if let Some(Unplanned { tape, base: before, samples, .. }) = self.unplanned.take_if(is_asked_again) {
            self.make_from(tape, request, before, base, samples);
        }
        let begins = |(_, known): &(usize, &Known)| admits(known.plan.tape());
        let mut like = self.known.iter().enumerate().filter(begins);
        let (at, known) = match request.budget {
            Bytes::MAX => like.next(),
            // The first of several that are as large.
            _ => like.reduce(|best, other| if other.1.bytes > best.1.bytes { other } else { best }),
        }?;
        if !known.is_old(request, base) {
            return Some(known.plan.clone());
        }
        self.renew(at, request, base)
    }

    /// Returns a plan for the same passes that is valid for the current request and memory.
    pub(super) fn renewed(&mut self, plan: &Arc<Plan>, request: &Request, base: Bytes) -> Option<Arc<Plan>> {
        let at = self.known.iter().position(|known| Arc::ptr_eq(&known.plan, plan))?;
        if self.known[at].is_old(request, base) { self.renew(at, request, base) } else { Some(plan.clone()) }
    }

    fn renew(&mut self, at: usize, request: &Request, base: Bytes) -> Option<Arc<Plan>> {
        let known = self.known.remove(at)?;
        self.make_from(Tape::clone(known.plan.tape()), request, known.base, base, known.samples)
            .then_some(())?;
        self.last().cloned()
    }

    /// Checks a plan after a pass followed it, given the memory used outside items.
    pub(super) fn was_followed(&mut self, plan: &Arc<Plan>, tape: &Tape, request: &Request, base: Bytes) {
        let Some(at) = self.known.iter().position(|known| Arc::ptr_eq(&known.plan, plan)) else { return };
        if plan.peak_with(tape) > request.budget.max(plan.peak()) {
            let mut wider = Tape::clone(plan.tape());
            let samples = self.known.remove(at).map_or(0, |known| known.samples);
            wider.widen(tape);
            self.make(wider, request, base, samples);
        } else if let Some(known) = self.known.remove(at) {
            self.known.push_front(known);
        }
    }

    /// Records a pass that had no plan or diverged from it.
    pub(super) fn was_new(&mut self, mut tape: Tape, request: &Request, base: Bytes) {
        // Of one class the largest counts: a plan for it holds for all.
        let mut samples = 0;
        if let Some(known) = self.take(tape.class()) {
            tape.widen(known.plan.tape());
            samples = known.samples;
        }
        self.make(tape, request, base, samples);
    }

    /// Records the times of a pass, given the memory used outside items during it.
    pub(super) fn was_timed(&mut self, tape: Tape, request: &Request, base: Bytes) {
        let Some(mut known) = self.take(tape.class()) else {
            self.make(tape, request, base, 1);
            return;
        };
        let before = known.plan.tape();
        let mut wider = Tape::clone(before);
        wider.forget_rest();
        wider.widen(&tape);
        known.samples += 1;
        let is_as_before = before.is_timed()
            && before.time().saturating_sub(wider.time()) <= before.time() / FASTER
            && !known.is_old(request, base);
        if is_as_before {
            self.known.push_front(known);
        } else {
            self.make(wider, request, base, known.samples);
        }
    }

    /// Returns whether times of another pass would improve a plan.
    pub(super) fn wants_times(&self, plan: &Arc<Plan>) -> bool {
        self.known.iter().any(|known| Arc::ptr_eq(&known.plan, plan) && known.samples < SAMPLES)
    }

    /// Returns whether they would improve one of the `count` most recently used plans.
    pub(super) fn want_times(&self, count: usize) -> bool {
        self.known.iter().take(count).any(|known| known.samples < SAMPLES)
    }

    fn take(&mut self, class: ShapeClass) -> Option<Known> {
        let at = self.known.iter().position(|known| known.class == class)?;
        self.known.remove(at)
    }

    /// Like `make`, for a pass that began with other memory in use.
    fn make_from(
        &mut self,
        mut tape: Tape,
        request: &Request,
        before: Bytes,
        base: Bytes,
        samples: u32,
    ) -> bool {
        tape.shift(before, base);
        self.make(tape, request, base, samples)
    }

    /// Makes a plan from a tape and adds it as the most recently used one. Returns false if no plan fits; `unplanned` keeps the reason.
    fn make(&mut self, tape: Tape, request: &Request, base: Bytes, samples: u32) -> bool {
        let (class, bytes) = (tape.class(), tape.items().iter().map(|item| item.pack().bytes).sum());
        let (tape, request) = (Arc::new(tape), *request);
        match planned(&tape, &request) {
            Ok(plan) => {
                self.known.push_front(Known { class, plan: Arc::new(plan), request, base, bytes, samples });
                self.known.truncate(MOST);
                self.made += 1;
                self.unplanned = None;
                true
            }
            Err(error) => {
                let tape = Arc::unwrap_or_clone(tape);
                self.unplanned = Some(Unplanned { error, tape, request, base, samples });
                false
            }
        }
    }
}

/// Makes a plan that leaves a part of the budget free, or one without if there is no other or if it keeps everything.
fn planned(tape: &Arc<Tape>, request: &Request) -> Result<Plan, PlanError> {
    if request.budget == Bytes::MAX {
        return Plan::new(tape, request);
    }
    let keeps = vec![Verdict::Keep; tape.items().len()];
    if matches!(request.preset, Preset::Fit | Preset::Hybrid)
        && let Ok(plan) = Plan::with_verdicts(tape, request, &keeps)
    {
        return Ok(plan);
    }
    let budget = Bytes::new(request.budget.get() - request.budget.get() / SLACK);
    Plan::new(tape, &Request { budget, ..*request }).or_else(|_| Plan::new(tape, request))
}
