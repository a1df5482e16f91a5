//! Work for the driver: what a miss or a release asks of it, set aside until it ends.
//!
//! ```text
//! Miss ─────► Draft ──add──► Plan ──► the driver ──► commit: a block, or memory gone
//! Trim ─────►                                   └─► abort: all as before
//! ```
//!
//! Invariant: a pending plan names its domain, which lives until the plan is over; everything that it needs is in no free list.

mod grown;
mod miss;
mod pending;
mod release;
mod selection;
mod trim;

use slab::Slab;

use crate::aliases::Aliases;
use crate::heap::Heap;
use crate::ids::{DomainId, FreeListId, PlanId};
use crate::plan::{Grant, Plan, Step, Stitch};
use pending::Pending;

pub(crate) use miss::{Answer, Miss};
pub(crate) use trim::Trim;

/// A plan that has no name yet.
#[derive(Debug)]
pub(crate) struct Draft {
    pending: Pending,
    steps: Vec<Step>,
    stitch: Option<Stitch>,
}

/// The plans that are neither committed nor aborted.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    table: Slab<Pending>,
}

impl Plans {
    /// Names a plan, which holds its domain.
    pub(crate) fn add(&mut self, draft: Draft, heap: &mut Heap) -> Plan {
        let Draft { pending, steps, stitch } = draft;
        if let Some(domain) = pending.domain() {
            heap.home.domains[domain].plans += 1;
        }
        Plan { id: PlanId::at(self.table.insert(pending)), steps, stitch }
    }

    /// The driver has done a plan's steps. A plan for a block returns it.
    pub(crate) fn commit(&mut self, plan: PlanId, heap: &mut Heap, aliases: &mut Aliases) -> Option<Grant> {
        let pending = self.table.try_remove(plan.index())?;
        let domain = pending.domain();
        let grant = pending.commit(heap, aliases);
        end(domain, heap);
        heap.home.make_room();
        grant
    }

    /// The driver could not do a plan's steps.
    pub(crate) fn abort(&mut self, plan: PlanId, heap: &mut Heap, aliases: &mut Aliases) {
        let Some(pending) = self.table.try_remove(plan.index()) else { return };
        let domain = pending.domain();
        pending.abort(heap, aliases);
        end(domain, heap);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// The free lists that pieces of plans come from or go to.
    pub(crate) fn lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        self.table.iter().flat_map(|(_, pending)| pending.lists())
    }
}

/// A plan for a block of a domain is over: nothing more of it comes.
fn end(domain: Option<DomainId>, heap: &mut Heap) {
    if let Some(domain) = domain {
        heap.home.domains[domain].plans -= 1;
        heap.home.drop_if_done(domain);
    }
}
