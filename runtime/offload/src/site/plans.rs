//! The plans of a site, one a shape class.

use std::collections::VecDeque;
use std::sync::Arc;

use glake_units::Bytes;

use crate::{Pack, Plan, PlanError, Preset, Request, ShapeClass, Tape, Verdict};

/// Plans of so many shape classes are kept, those that were used last.
const MOST: usize = 32;
/// By what part of the budget memory must have become free to be planned with.
const FREED: u64 = 32;
/// What part of the budget a plan leaves, if there is one that does: memory that has as much more when a pass begins is no reason for
/// another plan, which would offload, and check, other items.
const SLACK: u64 = 128;
/// A plan's times come from so many passes.
const SAMPLES: u32 = 3;
/// Other times make another plan where a pass takes less by more than such a part.
const FASTER: u32 = 64;

/// The plans, the last used first.
#[derive(Clone, Debug, Default)]
pub(super) struct Plans {
    known: VecDeque<Known>,
    unplanned: Option<Unplanned>,
    /// How many were made.
    made: u64,
}

/// A pass that has no plan.
#[derive(Clone, Debug)]
struct Unplanned {
    error: PlanError,
    tape: Tape,
    request: Request,
    base: Bytes,
    samples: u32,
}

/// A plan, and what it was made for.
#[derive(Clone, Debug)]
struct Known {
    class: ShapeClass,
    plan: Arc<Plan>,
    request: Request,
    /// What memory had when the pass began.
    base: Bytes,
    /// Of its items.
    bytes: Bytes,
    /// How many passes its times come from.
    samples: u32,
}

impl Known {
    /// Whether it was made for something else than what is asked now, or for other memory.
    fn is_old(&self, request: &Request, base: Bytes) -> bool {
        let (more, less) = (base.saturating_sub(self.base), self.base.saturating_sub(base));
        let less = less.saturating_add(request.budget.saturating_sub(self.request.budget));
        Request { budget: request.budget, ..self.request } != *request
            || self.plan.peak().saturating_add(more) > request.budget
            || less > Bytes::new(request.budget.get() / FREED)
    }
}

impl Plans {
    /// Why the last pass that was looked at has no plan.
    pub(super) fn unplanned(&self) -> Option<&PlanError> {
        self.unplanned.as_ref().map(|unplanned| &unplanned.error)
    }

    /// The plan that was used last.
    pub(super) fn last(&self) -> Option<&Arc<Plan>> {
        self.known.front().map(|known| &known.plan)
    }

    /// How many were made by now.
    pub(super) fn made(&self) -> u64 {
        self.made
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Plan>> {
        self.known.iter().map(|known| &known.plan)
    }

    /// The plan of a pass that began with such a pack, as `request` asks and for what memory has now. Of several it is the last one's; under
    /// a budget that of the largest, which holds for what the others have until they part.
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

    /// A plan that holds for what is asked now, of passes like this one.
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

    /// A pass was as its plan: whether the plan holds, with what memory had beside items.
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

    /// A pass had no plan, or was not as it.
    pub(super) fn was_new(&mut self, mut tape: Tape, request: &Request, base: Bytes) {
        // Of one class the largest counts: a plan for it holds for all.
        let mut samples = 0;
        if let Some(known) = self.take(tape.class()) {
            tape.widen(known.plan.tape());
            samples = known.samples;
        }
        self.make(tape, request, base, samples);
    }

    /// The times of a pass are known, and what memory had beside items while it was as ever.
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

    /// Whether times of another pass are of use to a plan.
    pub(super) fn wants_times(&self, plan: &Arc<Plan>) -> bool {
        self.known.iter().any(|known| Arc::ptr_eq(&known.plan, plan) && known.samples < SAMPLES)
    }

    /// Whether they are to one of the plans that were used last.
    pub(super) fn want_times(&self, count: usize) -> bool {
        self.known.iter().take(count).any(|known| known.samples < SAMPLES)
    }

    fn take(&mut self, class: ShapeClass) -> Option<Known> {
        let at = self.known.iter().position(|known| known.class == class)?;
        self.known.remove(at)
    }

    /// As `make`, where memory had something else when the pass began.
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

    /// Whether there is a plan, which is the first one then.
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

/// A plan that leaves a little of the budget; one that leaves nothing if there is no other, or if it keeps everything.
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
