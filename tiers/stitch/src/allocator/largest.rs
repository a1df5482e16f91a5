//! The largest request that can be served.
//!
//! A request is refused only after everything free was waited for, stitched, or released and made anew. So what counts is
//! the free memory itself and the room to grow, not who may take it at the moment.

use glake_units::Bytes;

use super::{Allocator, SMALL_LIMIT};
use crate::domain::Domain;
use crate::error::StitchError;
use crate::free_list::{Class, Owner};
use crate::ids::{DomainId, FreeListId, PieceId};
use crate::piece::State;
use crate::run::{self, Run};
use crate::settings::Borrow;

impl Allocator {
    /// The largest request of a domain that can be served now, where the driver has `device_free` left: a free run, or
    /// what stitching and growing make, with pending memory waited for and other owners' free extents given back, on
    /// the stream for which that is most. Walks the free pieces, changes nothing.
    ///
    /// No larger request is served. One of this size is, but where the last extents are in use in part, where the number
    /// of mappings is at its limit, or where the driver takes memory for itself.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`].
    pub fn largest(&self, id: DomainId, device_free: Bytes) -> Result<Bytes, StitchError> {
        let domain = self.domain(id)?;
        let owners = self.owners(domain).into_iter();
        let best = owners.map(|lists| self.largest_from(id, &lists, device_free)).max().unwrap_or(0);
        let best = best.min(self.settings.memory.get());
        Ok(Bytes::new(if best > SMALL_LIMIT.get() { best } else { self.largest_small(domain) }))
    }

    /// The longest free range of slabs, where there is no memory for a large block.
    fn largest_small(&self, domain: &Domain) -> u64 {
        let lists = domain
            .lists()
            .map(|list| &self.lists[list.index()])
            .filter(|list| list.class != Class::Large && list.owner != Owner::Evicted);
        let pieces = lists.flat_map(|list| list.bins.iter()).map(|id| &self.pieces[id]);
        let slab = self.settings.slab.get();
        let usable = pieces.filter(|piece| piece.slab != PieceId::NONE || piece.size >= slab);
        usable.map(|piece| piece.size).max().unwrap_or(0).min(SMALL_LIMIT.get())
    }

    /// The free lists of large pieces that each stream may take from once all has passed.
    fn owners(&self, domain: &Domain) -> Vec<Vec<FreeListId>> {
        let shared = [domain.passed_large, domain.limbo_large];
        let own = domain.streams.iter().map(|lists| lists.large);
        if domain.options.lend && self.settings.borrow != Borrow::Off {
            return vec![own.chain(shared).collect()];
        }
        let each = own.map(|large| [large].into_iter().chain(shared).collect());
        each.chain([shared.to_vec()]).collect()
    }

    fn largest_from(&self, id: DomainId, lists: &[FreeListId], device_free: Bytes) -> u64 {
        let mut runs = self.runs_at_home(lists.iter().copied());
        let returnable: u64 = self.domains.iter().map(|(id, _)| self.returnable(id)).sum();
        // What is used as it is cannot be given back as well.
        let growth = |used: u64| self.growth_with(returnable.saturating_sub(used), device_free);
        let options = self.domains[id].options;
        let given = |run: &Run| if options.keep { 0 } else { self.whole(run) };
        let extended = runs.iter().map(|run| run.size() + growth(given(run))).max().unwrap_or(0);
        let plain = extended.max(growth(0));
        if !(self.settings.alias && options.alias) {
            return plain;
        }
        runs.extend(self.free_slabs(id));
        plain.max(self.longest_alias(&runs) + growth(runs.iter().map(given).sum()))
    }

    /// As long as an alias of free memory can be: whole extents, a suffix of one in front and a prefix of one behind.
    fn longest_alias(&self, runs: &[Run]) -> u64 {
        let (mut whole, mut head, mut tail) = (0, 0, 0);
        for run in runs {
            let (first, last) = self.extents.boundaries(run.start, run.end);
            if first <= last {
                whole += last - first;
                head = head.max(first - run.start);
                tail = tail.max(run.end - last);
            }
        }
        whole + head + tail
    }

    /// How much a domain would give back to the driver.
    fn returnable(&self, id: DomainId) -> u64 {
        let domain = &self.domains[id];
        if domain.options.keep && !domain.is_released() {
            return 0;
        }
        let runs = self.runs_at_home(domain.home_lists().chain([domain.limbo_large]));
        runs.iter().chain(&self.free_slabs(id)).map(|run| self.whole(run)).sum()
    }

    /// So much of a run is whole extents.
    fn whole(&self, run: &Run) -> u64 {
        let (first, last) = self.extents.boundaries(run.start, run.end);
        last.saturating_sub(first)
    }

    /// Free runs of large pieces.
    fn runs_at_home(&self, lists: impl Iterator<Item = FreeListId>) -> Vec<Run> {
        let pieces = lists.flat_map(|list| self.lists[list.index()].bins.iter());
        let large = pieces.map(|id| (id, &self.pieces[id])).filter(|(_, piece)| piece.start < self.slab_zone);
        run::join(large.map(|(first, piece)| Run { start: piece.start, end: piece.end(), first }).collect())
    }

    /// Runs of slabs of a domain in which nothing is live.
    fn free_slabs(&self, id: DomainId) -> Vec<Run> {
        let begins = self.segments.begins().filter(|&edge| self.pieces[edge].start >= self.slab_zone);
        let of_domain = |edge: &PieceId| self.extents[self.extents.at(self.pieces[*edge].start)].domain == id;
        let free = begins.filter(of_domain).flat_map(|edge| self.from(edge)).filter(|&id| {
            match self.pieces[id].state {
                State::Slab => {
                    self.from(self.pieces[id].inside).all(|id| self.pieces[id].state == State::Free)
                }
                state => state == State::Free,
            }
        });
        let pieces = free.map(|first| (first, &self.pieces[first]));
        run::join(pieces.map(|(first, piece)| Run { start: piece.start, end: piece.end(), first }).collect())
    }

    /// The pieces behind an edge, up to the next.
    fn from(&self, edge: PieceId) -> impl Iterator<Item = PieceId> + '_ {
        let pieces = std::iter::successors(Some(self.pieces[edge].next), |&id| Some(self.pieces[id].next));
        pieces.take_while(|&id| self.pieces[id].state != State::Edge)
    }

    /// How much new memory there can be, where so much is given back first.
    fn growth_with(&self, returned: u64, device_free: Bytes) -> u64 {
        let limit = (self.settings.limit.get() + returned).saturating_sub(self.reserved());
        let room = limit.min(device_free.get().saturating_add(returned));
        room - room % self.settings.granularity.get()
    }
}
