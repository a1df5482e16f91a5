//! Plans: driver work for a miss or a release, with everything set aside until it ends.
//!
//! ```text
//! Miss ─────► Draft ──add──► Plan ──► the driver ──► commit: a block, or memory released
//! Trim ─────►                                   └─► abort: state as before
//! ```
//!
//! Invariant: a pending plan names its domain, which lives until the plan ends; everything that the plan needs is in no free list.

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

/// A plan without an id.
#[derive(Debug)]
pub(crate) struct Draft {
    pending: Pending,
    steps: Vec<Step>,
    stitch: Option<Stitch>,
}

/// Plans that are neither committed nor aborted.
#[derive(Debug, Default)]
pub(crate) struct Plans {
    table: Slab<Pending>,
}

impl Plans {
    /// Registers a plan under a new id; its domain stays until it ends.
    pub(crate) fn add(&mut self, draft: Draft, heap: &mut Heap) -> Plan {
        let Draft { pending, steps, stitch } = draft;
        if let Some(domain) = pending.domain() {
            heap.home.domains[domain].plans += 1;
        }
        Plan { id: PlanId::at(self.table.insert(pending)), steps, stitch }
    }

    /// Applies a plan whose steps the driver has executed. Returns the block if the plan was for one.
    pub(crate) fn commit(&mut self, plan: PlanId, heap: &mut Heap, aliases: &mut Aliases) -> Option<Grant> {
        let pending = self.table.try_remove(plan.index())?;
        let domain = pending.domain();
        let grant = pending.commit(heap, aliases);
        end(domain, heap);
        heap.home.make_room();
        grant
    }

    /// Rolls back a plan that the driver could not execute.
    pub(crate) fn abort(&mut self, plan: PlanId, heap: &mut Heap, aliases: &mut Aliases) {
        let Some(pending) = self.table.try_remove(plan.index()) else { return };
        let domain = pending.domain();
        pending.abort(heap, aliases);
        end(domain, heap);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Iterates over the free lists that pieces of plans come from or go to.
    pub(crate) fn lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        self.table.iter().flat_map(|(_, pending)| pending.lists())
    }
}

/// Ends a plan's claim on its domain, which may go if it is released and empty.
fn end(domain: Option<DomainId>, heap: &mut Heap) {
    if let Some(domain) = domain {
        heap.home.domains[domain].plans -= 1;
        heap.home.drop_if_done(domain);
    }
}
