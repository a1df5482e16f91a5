//! Release of memory and mappings: whole free extents whose completion point has passed, and idle aliases.
//!
//! Invariant: an extent is released only if no alias maps it; the aliases over it are unmapped first.

use glake_units::Bytes;

use super::{Draft, Pending, Release};
use crate::alias::Aliases;
use crate::free_list::Class;
use crate::heap::Heap;
use crate::ids::{AliasId, DomainId, ExtentId};
use crate::piece::{self, Run};
use crate::plan::Step;
use crate::settings::Settings;

/// Maximum number of aliases kept: a miss searches all, and searching 256 costs about as much as making one.
const MOST_ALIASES: usize = 256;

/// Whole extents inside a free run.
#[derive(Clone, Copy, Debug)]
struct Free {
    run: Run,
    from: u64,
    to: u64,
}

/// A release under construction.
#[derive(Debug)]
pub(crate) struct Trim<'a> {
    heap: &'a mut Heap,
    aliases: &'a mut Aliases,
    release: Release,
    steps: Vec<Step>,
}

impl<'a> Trim<'a> {
    pub(crate) fn new(heap: &'a mut Heap, aliases: &'a mut Aliases) -> Self {
        Trim { heap, aliases, release: Release::default(), steps: Vec::new() }
    }

    /// Releases at least `target` of free extents if there are as many. Released domains go first, then slabs, then the rest, from the
    /// highest addresses down. Domains that keep their memory are skipped, except for evicted extents without live bytes.
    pub(crate) fn of_all(self, target: Bytes) -> Option<Draft> {
        self.heap.home.dissolve_idle_slabs(None);
        let giving = self.heap.home.domains.iter().filter(|(_, domain)| domain.gives_back());
        let giving: Vec<DomainId> = giving.map(|(id, _)| id).collect();
        let mut order: Vec<(u8, Free)> =
            giving.iter().flat_map(|&id| self.releasable_of_domain(id)).collect();
        order.sort_by_key(|(rank, free)| (*rank, std::cmp::Reverse(free.from)));
        let forgetting = self.heap.home.domains.iter().filter(|(_, domain)| !domain.is_held());
        let forgetting: Vec<DomainId> = forgetting.map(|(id, _)| id).collect();
        self.of(&forgetting, order, target)
    }

    /// Releases all free memory of one domain, even if the domain keeps its memory.
    pub(crate) fn of_domain(self, domain: DomainId) -> Option<Draft> {
        self.heap.home.dissolve_idle_slabs(Some(domain));
        let free = self.releasable_of_domain(domain);
        self.of(&[domain], free, Bytes::MAX)
    }

    /// Forgets the evicted extents of a domain without live bytes.
    pub(crate) fn of_evicted(self, domain: DomainId) -> Option<Draft> {
        self.of(&[domain], Vec::new(), Bytes::ZERO)
    }

    /// Unmaps idle aliases, least recently used first, until at most `keep` bytes of them are mapped.
    pub(crate) fn of_aliases(mut self, keep: Bytes) -> Option<Draft> {
        let (all, passed) = (&self.heap.home.extents, self.heap.points.passed());
        let mut idle: Vec<(u64, AliasId, u64)> = self
            .aliases
            .iter()
            .filter(|(_, alias)| alias.is_done(all, passed))
            .map(|(id, alias)| (alias.used, id, alias.size))
            .collect();
        idle.sort_unstable();
        let mut excess = self.heap.tallies.idle_alias_bytes.saturating_sub(keep).get();
        for (_, id, size) in idle {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub(size);
            self.withdraw(id);
        }
        self.finish()
    }

    /// Collects the idle aliases above their limit. The older half of the idle aliases is also collected near the cap of mappings, or if
    /// searching them costs more than making a new one.
    pub(crate) fn of_due(self, settings: &Settings) -> Option<Draft> {
        let idle = self.heap.tallies.idle_alias_bytes;
        let near_cap = self.heap.tallies.mappings > settings.max_mappings / 8 * 7;
        let many = near_cap || self.aliases.len() > MOST_ALIASES;
        let keep = if many { Bytes::new(idle.get() / 2) } else { idle };
        let keep = keep.min(settings.idle_aliases);
        (idle > keep).then(|| self.of_aliases(keep)).flatten()
    }

    fn of(mut self, domains: &[DomainId], order: Vec<(u8, Free)>, target: Bytes) -> Option<Draft> {
        let mut releases = Vec::new();
        for extent in self.forgettable_of(domains) {
            releases.push(self.withdraw_all(extent));
            self.release.forgotten.push(extent);
        }
        let mut left = target.get();
        for (_, Free { run, from, to }) in order {
            let mut start = to;
            let all = &self.heap.home.extents;
            for extent in all.touching(from, to).collect::<Vec<_>>().into_iter().rev() {
                if left == 0 {
                    break;
                }
                left = left.saturating_sub(all[extent].size);
                start = all[extent].start;
            }
            if start == to {
                break;
            }
            let extents: Vec<ExtentId> = all.touching(start, to).collect();
            for &extent in &extents {
                releases.push(self.withdraw_all(extent));
            }
            self.release.ranges.push(self.heap.home.carve(&run, start, to));
            self.steps.push(Step::Unmap { offset: Bytes::new(start), size: Bytes::new(to - start), extents });
        }
        self.steps.append(&mut releases);
        self.finish()
    }

    fn finish(self) -> Option<Draft> {
        if self.steps.is_empty() {
            return None;
        }
        Some(Draft { pending: Pending::Released(self.release), steps: self.steps, stitch: None })
    }

    /// Takes all aliases of an extent out of use and returns the step that releases the extent.
    fn withdraw_all(&mut self, extent: ExtentId) -> Step {
        while let Some(&alias) = self.heap.home.extents[extent].aliases.first() {
            self.withdraw(alias);
        }
        let leaving = &self.heap.home.extents[extent];
        Step::Release { extent, size: Bytes::new(leaving.size), domain: leaving.domain }
    }

    fn withdraw(&mut self, alias: AliasId) {
        let alias = self.aliases.withdraw(alias, self.heap, &mut self.steps);
        self.release.aliases.push(alias);
    }

    /// Returns the evicted extents of `domains` without live bytes.
    fn forgettable_of(&self, domains: &[DomainId]) -> Vec<ExtentId> {
        let home = &self.heap.home;
        if home.extents.are_all_resident() {
            return Vec::new();
        }
        let own = home.extents.iter().filter(|(_, extent)| domains.contains(&extent.domain));
        let gone =
            own.filter(|(id, extent)| home.is_forgettable(*id) && self.aliases.are_done(extent, self.heap));
        gone.map(|(id, _)| id).collect()
    }

    /// Returns the whole free extents of a domain that no work can touch any more, across its free lists, with their rank in the order of
    /// release. Ranges of one run come highest first, so that carving one does not change the run of the others.
    fn releasable_of_domain(&self, id: DomainId) -> Vec<(u8, Free)> {
        let home = &self.heap.home;
        let domain = &home.domains[id];
        let mut order = Vec::new();
        for class in [Class::Slabs, Class::Large] {
            let lists = domain.home_lists().filter(|&list| home.lists[list].class == class);
            let pieces = lists.flat_map(|list| home.lists[list].bins.iter());
            let passed = pieces.filter(|&id| !self.heap.points.is_pending(home.pieces[id].point));
            let rank = if domain.is_released() { 0 } else { 1 + u8::from(class == Class::Large) };
            for run in piece::join_runs(passed.map(|id| home.run_of(id)).collect()) {
                order.extend(self.releasable_of(run).into_iter().map(|free| (rank, free)));
            }
        }
        order.sort_by_key(|(rank, free)| (*rank, std::cmp::Reverse(free.from)));
        order
    }

    /// Returns the ranges of whole extents of a run whose aliases can all be unmapped.
    fn releasable_of(&self, run: Run) -> Vec<Free> {
        let all = &self.heap.home.extents;
        let (first, last) = all.boundaries(run.start, run.end);
        let mut ranges: Vec<Free> = Vec::new();
        if first >= last {
            return ranges;
        }
        for extent in all.touching(first, last).map(|id| &all[id]) {
            if !self.aliases.are_done(extent, self.heap) {
                continue;
            }
            let (from, to) = (extent.start, extent.end());
            match ranges.last_mut().filter(|free| free.to == from) {
                Some(free) => free.to = to,
                None => ranges.push(Free { run, from, to }),
            }
        }
        ranges
    }
}
