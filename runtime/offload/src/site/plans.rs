//! The plans of a site, one a shape class.

use std::collections::VecDeque;
use std::sync::Arc;

use glake_units::Bytes;

use crate::{Pack, Plan, PlanError, Request, ShapeClass, Tape};

/// Plans of so many shape classes are kept, those that were used last.
const MOST: usize = 32;
/// By what part of the budget memory must have become free to be planned with.
const FREED: u64 = 32;

/// The plans, the last used first.
#[derive(Clone, Debug, Default)]
pub(super) struct Plans {
    known: VecDeque<Known>,
    unplanned: Option<PlanError>,
}

/// A plan, and what it was made for.
#[derive(Clone, Debug)]
struct Known {
    class: ShapeClass,
    plan: Arc<Plan>,
    request: Request,
    /// What memory had when the pass began.
    base: Bytes,
}

impl Plans {
    /// Why the last pass that was looked at has no plan.
    pub(super) fn unplanned(&self) -> Option<&PlanError> {
        self.unplanned.as_ref()
    }

    /// The plan that was used last.
    pub(super) fn last(&self) -> Option<&Arc<Plan>> {
        self.known.front().map(|known| &known.plan)
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Plan>> {
        self.known.iter().map(|known| &known.plan)
    }

    /// The plan of the last pass that began with such a pack, as `request` asks and for what memory has now.
    pub(super) fn begin(&mut self, first: &Pack, request: &Request, base: Bytes) -> Option<Arc<Plan>> {
        let begins = |known: &Known| known.plan.tape().items().first().is_some_and(|item| item.admits(first));
        let at = self.known.iter().position(begins)?;
        let known = &self.known[at];
        let (more, less) = (base.saturating_sub(known.base), known.base.saturating_sub(base));
        let is_old = known.request != *request
            || known.plan.peak().saturating_add(more) > request.budget.max(known.plan.peak())
            || less > Bytes::new(request.budget.get() / FREED);
        if is_old {
            let mut tape = Tape::clone(known.plan.tape());
            tape.shift(known.base, base);
            self.known.remove(at);
            self.make(tape, request, base);
            return self.known.front().filter(|known| begins(known)).map(|known| known.plan.clone());
        }
        Some(known.plan.clone())
    }

    /// A pass was as its plan: whether the plan holds, with what memory had beside items.
    pub(super) fn was_followed(&mut self, plan: &Arc<Plan>, tape: &Tape, request: &Request, base: Bytes) {
        let Some(at) = self.known.iter().position(|known| Arc::ptr_eq(&known.plan, plan)) else { return };
        if plan.peak_with(tape) > request.budget.max(plan.peak()) {
            let mut wider = Tape::clone(plan.tape());
            self.known.remove(at);
            wider.widen(tape);
            self.make(wider, request, base);
        } else if let Some(known) = self.known.remove(at) {
            self.known.push_front(known);
        }
    }

    /// A pass had no plan, or was not as it.
    pub(super) fn was_new(&mut self, mut tape: Tape, request: &Request, base: Bytes) {
        // Of one class the largest counts: a plan for it holds for all.
        if let Some(known) = self.take(tape.class()) {
            tape.widen(known.plan.tape());
        }
        self.make(tape, request, base);
    }

    /// The times of a pass are known, and what memory had beside items while it was as ever.
    pub(super) fn was_timed(&mut self, tape: Tape, request: &Request, base: Bytes) {
        let tape = match self.take(tape.class()) {
            Some(known) => {
                let mut wider = Tape::clone(known.plan.tape());
                wider.forget_rest();
                wider.widen(&tape);
                wider
            }
            None => tape,
        };
        self.make(tape, request, base);
    }

    fn take(&mut self, class: ShapeClass) -> Option<Known> {
        let at = self.known.iter().position(|known| known.class == class)?;
        self.known.remove(at)
    }

    fn make(&mut self, tape: Tape, request: &Request, base: Bytes) {
        let class = tape.class();
        match Plan::new(&Arc::new(tape), request) {
            Ok(plan) => {
                self.known.push_front(Known { class, plan: Arc::new(plan), request: *request, base });
                self.known.truncate(MOST);
                self.unplanned = None;
            }
            Err(error) => self.unplanned = Some(error),
        }
    }
}
