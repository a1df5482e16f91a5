//! The largest request that can be served.
//!
//! A request is refused only after all free memory was waited for, stitched, or released and made anew. So the result depends on the free
//! memory and the room to grow, not on the streams that may take it now.

use glake_units::Bytes;

use crate::domain::Domain;
use crate::error::StitchError;
use crate::free_list::{Class, Owner};
use crate::heap::{Heap, SMALL_LIMIT};
use crate::ids::{DomainId, FreeListId, PieceId};
use crate::run::{self, Run};
use crate::settings::{Borrow, Settings};

/// Search for the largest request, with `device_free` bytes left on the driver's side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Largest<'a> {
    pub(crate) heap: &'a Heap,
    pub(crate) settings: &'a Settings,
    pub(crate) device_free: Bytes,
}

impl Largest<'_> {
    /// Returns the largest request for a domain.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`].
    pub(crate) fn of(&self, id: DomainId) -> Result<Bytes, StitchError> {
        let domain = self.heap.home.domains.active(id)?;
        let owners = self.owners(domain).into_iter();
        let best = owners.map(|lists| self.largest_from(id, &lists)).max().unwrap_or(0);
        let best = best.min(self.settings.memory.get());
        Ok(Bytes::new(if best > SMALL_LIMIT.get() { best } else { self.largest_small(domain) }))
    }

    /// Returns the longest free range of slabs; used if no large block can be served.
    fn largest_small(&self, domain: &Domain) -> u64 {
        let lists = domain
            .lists()
            .map(|list| &self.heap.home.lists[list])
            .filter(|list| list.class != Class::Large && list.owner != Owner::Evicted);
        let pieces = lists.flat_map(|list| list.bins.iter()).map(|id| &self.heap.home.pieces[id]);
        let slab = self.settings.slab.get();
        let usable = pieces.filter(|piece| piece.slab != PieceId::NONE || piece.size >= slab);
        usable.map(|piece| piece.size).max().unwrap_or(0).min(SMALL_LIMIT.get())
    }

    /// Returns the free lists of large pieces that each stream may take from once all completion points have passed.
    fn owners(&self, domain: &Domain) -> Vec<Vec<FreeListId>> {
        let shared = [domain.passed_large, domain.limbo_large];
        let own = domain.streams.iter().map(|lists| [lists.large, lists.held]);
        if domain.options.lend && self.settings.borrow != Borrow::Off {
            return vec![own.flatten().chain(shared).collect()];
        }
        let each = own.map(|own| own.into_iter().chain(shared).collect());
        each.chain([shared.to_vec()]).collect()
    }

    fn largest_from(&self, id: DomainId, lists: &[FreeListId]) -> u64 {
        let extents = &self.heap.home.extents;
        let whole = |run: &Run| extents.whole_in(run.start, run.end);
        let mut runs = self.runs_at_home(lists.iter().copied());
        let returnable: u64 = self.heap.home.domains.iter().map(|(id, _)| self.returnable(id)).sum();
        // Memory that serves the request in place cannot be returned to the driver as well.
        let growth = |used: u64| self.growth_with(returnable.saturating_sub(used));
        let options = self.heap.home.domains[id].options;
        let given = |run: &Run| if options.keep { 0 } else { whole(run) };
        let extended = runs.iter().map(|run| run.size() + growth(given(run))).max().unwrap_or(0);
        let plain = extended.max(growth(0));
        if !(self.settings.alias && options.alias) {
            return plain;
        }
        runs.extend(self.heap.home.free_slabs(id));
        plain.max(self.longest_alias(&runs) + growth(runs.iter().map(given).sum()))
    }

    /// Returns the size of the longest alias of free memory: whole extents, a suffix of one in front and a prefix of one behind.
    fn longest_alias(&self, runs: &[Run]) -> u64 {
        let (mut whole, mut head, mut tail) = (0, 0, 0);
        for run in runs {
            let (first, last) = self.heap.home.extents.boundaries(run.start, run.end);
            if first <= last {
                whole += last - first;
                head = head.max(first - run.start);
                tail = tail.max(run.end - last);
            }
        }
        whole + head + tail
    }

    /// Returns the bytes that a domain would return to the driver.
    fn returnable(&self, id: DomainId) -> u64 {
        let domain = &self.heap.home.domains[id];
        if !domain.gives_back() {
            return 0;
        }
        let extents = &self.heap.home.extents;
        let runs =
            self.runs_at_home(domain.home_lists().chain(domain.held_lists()).chain([domain.limbo_large]));
        runs.iter()
            .chain(&self.heap.home.free_slabs(id))
            .map(|run| extents.whole_in(run.start, run.end))
            .sum()
    }

    /// Returns the free runs of large pieces.
    fn runs_at_home(&self, lists: impl Iterator<Item = FreeListId>) -> Vec<Run> {
        let home = &self.heap.home;
        let pieces = lists.flat_map(|list| home.lists[list].bins.iter());
        let large = pieces.filter(|&id| home.pieces[id].start < home.slab_zone);
        run::join(large.map(|id| home.run_of(id)).collect())
    }

    /// Returns the most new memory there can be after `returned` bytes are returned to the driver.
    fn growth_with(&self, returned: u64) -> u64 {
        let limit = (self.settings.most().get() + returned).saturating_sub(self.heap.tallies.committed());
        let room = limit.min(self.device_free.get().saturating_add(returned));
        room - room % self.settings.granularity.get()
    }
}
