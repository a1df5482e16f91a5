//! Memory and mappings going back to the driver: whole free extents whose epoch has passed, and idle aliases.

use glake_units::Bytes;

use super::Allocator;
use super::outcome::{Carved, Pending};
use crate::alias::Alias;
use crate::error::StitchError;
use crate::extent::Presence;
use crate::free_list::{Class, Owner};
use crate::ids::{AliasId, DomainId, ExtentId, FreeListId, PieceId};
use crate::plan::{Plan, Step};
use crate::run::{self, Run};

/// More aliases than this are not kept: a miss looks at each, and a stitch costs about as much as looking at 256.
const MOST_ALIASES: usize = 256;

/// Home ranges and aliases on their way to the driver.
#[derive(Debug, Default)]
pub(super) struct Release {
    ranges: Vec<Carved>,
    aliases: Vec<Alias>,
    /// Extents that are evicted and hold nothing live.
    forgotten: Vec<ExtentId>,
}

impl Release {
    /// The free lists that its ranges were in.
    pub(super) fn lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        self.ranges.iter().flat_map(|range| range.former.iter().map(|former| former.list))
    }
}

/// Whole extents inside a free run.
#[derive(Clone, Copy, Debug)]
struct Free {
    run: Run,
    from: u64,
    to: u64,
}

impl Allocator {
    /// Driver work that releases free memory until at most `keep` is reserved, or nothing is left to release. Idle
    /// aliases of what goes are unmapped first; what is in use, or still pending, stays.
    pub fn plan_trim(&mut self, keep: Bytes) -> Option<Plan> {
        self.plan_release(Bytes::new(self.reserved().saturating_sub(keep.get())))
    }

    /// Driver work that releases all free memory of one domain, also where it keeps its own from [`Allocator::plan_trim`].
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`].
    pub fn plan_trim_domain(&mut self, domain: DomainId) -> Result<Option<Plan>, StitchError> {
        self.domain(domain)?;
        self.dissolve_idle_slabs(Some(domain));
        let free = self.releasable_of_domain(domain);
        Ok(self.plan_release_of(&[domain], free, Bytes::MAX))
    }

    /// Driver work that forgets the extents of a domain that are evicted and hold nothing live; none where a captured graph knows
    /// their addresses.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`].
    pub fn plan_forget(&mut self, domain: DomainId) -> Result<Option<Plan>, StitchError> {
        if self.domains.get(domain).is_none() {
            return Err(StitchError::UnknownDomain { domain });
        }
        if self.is_held(domain) {
            return Ok(None);
        }
        Ok(self.plan_release_of(&[domain], Vec::new(), Bytes::ZERO))
    }

    /// Driver work that unmaps idle aliases, the least recently used first, until at most `keep` of them is mapped.
    pub fn plan_collection(&mut self, keep: Bytes) -> Option<Plan> {
        let mut idle: Vec<(u64, AliasId, u64)> = self
            .aliases
            .iter()
            .filter(|(_, alias)| self.is_done(alias))
            .map(|(id, alias)| (alias.used, id, alias.size))
            .collect();
        idle.sort_unstable();
        let mut excess = self.stats.idle_alias_bytes.saturating_sub(keep).get();
        let mut release = Release::default();
        let mut steps = Vec::new();
        for (_, id, size) in idle {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub(size);
            release.aliases.push(self.withdraw(id, &mut steps));
        }
        self.plan_to(release, steps)
    }

    /// Driver work that is due: idle aliases above their limit go, and the older half of them where mappings near their
    /// cap, or where there are so many that looking through them costs more than making one. Nothing else is due.
    pub fn plan_due_collection(&mut self) -> Option<Plan> {
        let (limit, idle) = (self.settings.idle_aliases, self.stats.idle_alias_bytes);
        let near_cap = self.stats.mappings > self.settings.max_mappings / 8 * 7;
        let keep =
            if near_cap || self.aliases.len() > MOST_ALIASES { Bytes::new(idle.get() / 2) } else { idle };
        let keep = keep.min(limit);
        (idle > keep).then(|| self.plan_collection(keep)).flatten()
    }

    fn plan_to(&mut self, release: Release, steps: Vec<Step>) -> Option<Plan> {
        if steps.is_empty() {
            return None;
        }
        let id = self.pend(Pending::Released(release));
        Some(Plan { id, steps, stitch: None })
    }

    /// Releases at least `target` of free extents if there are so many: first what belongs to released domains, then
    /// slabs, then the rest, from the highest addresses down. What a domain keeps stays.
    pub(super) fn plan_release(&mut self, target: Bytes) -> Option<Plan> {
        self.dissolve_idle_slabs(None);
        let giving = self.domains.iter().filter(|(_, domain)| domain.is_released() || !domain.options.keep);
        let giving: Vec<DomainId> = giving.map(|(id, _)| id).collect();
        let mut order: Vec<(u8, Free)> =
            giving.iter().flat_map(|&id| self.releasable_of_domain(id)).collect();
        order.sort_by_key(|(rank, free)| (*rank, std::cmp::Reverse(free.from)));
        self.plan_release_of(&giving, order, target)
    }

    fn plan_release_of(
        &mut self,
        domains: &[DomainId],
        order: Vec<(u8, Free)>,
        target: Bytes,
    ) -> Option<Plan> {
        let mut release = Release::default();
        let mut steps = Vec::new();
        let mut releases = Vec::new();
        for extent in self.forgettable_of(domains) {
            self.withdraw_all(extent, &mut release, &mut steps);
            let (size, domain) = (Bytes::new(self.extents[extent].size), self.extents[extent].domain);
            releases.push(Step::Release { extent, size, domain });
            release.forgotten.push(extent);
        }
        let mut left = target.get();
        for (_, Free { run, from, to }) in order {
            let mut start = to;
            for extent in self.extents.touching(from, to).collect::<Vec<_>>().into_iter().rev() {
                if left == 0 {
                    break;
                }
                left = left.saturating_sub(self.extents[extent].size);
                start = self.extents[extent].start;
            }
            if start == to {
                break;
            }
            let extents: Vec<ExtentId> = self.extents.touching(start, to).collect();
            for &extent in &extents {
                self.withdraw_all(extent, &mut release, &mut steps);
                let (size, domain) = (Bytes::new(self.extents[extent].size), self.extents[extent].domain);
                releases.push(Step::Release { extent, size, domain });
            }
            release.ranges.push(self.carve(&run, start, to));
            steps.push(Step::Unmap { offset: Bytes::new(start), size: Bytes::new(to - start), extents });
        }
        steps.append(&mut releases);
        self.plan_to(release, steps)
    }

    /// Whole free extents of a domain that nothing can touch any more, whichever free lists they are in, with their rank in the
    /// order in which they should go. Ranges of one run come with the highest first, so that carving one leaves the run of
    /// the others as it is.
    fn releasable_of_domain(&self, id: DomainId) -> Vec<(u8, Free)> {
        let domain = &self.domains[id];
        let mut order = Vec::new();
        for class in [Class::Slabs, Class::Large] {
            let lists = domain.home_lists().filter(|list| self.lists[list.index()].class == class);
            let pieces = lists.flat_map(|list| self.lists[list.index()].bins.iter());
            let passed = pieces.filter(|&id| self.pieces[id].epoch <= self.passed).map(|id| {
                let piece = &self.pieces[id];
                Run { start: piece.start, end: piece.end(), first: id }
            });
            let rank = if domain.is_released() { 0 } else { 1 + u8::from(class == Class::Large) };
            for run in run::join(passed.collect()) {
                order.extend(self.releasable_of(run).into_iter().map(|free| (rank, free)));
            }
        }
        order.sort_by_key(|(rank, free)| (*rank, std::cmp::Reverse(free.from)));
        order
    }

    /// The ranges of whole extents of a run whose aliases are all done with.
    fn releasable_of(&self, run: Run) -> Vec<Free> {
        let (first, last) = self.extents.boundaries(run.start, run.end);
        let mut ranges: Vec<Free> = Vec::new();
        if first >= last {
            return ranges;
        }
        for extent in self.extents.touching(first, last).filter(|&extent| self.aliases_are_done(extent)) {
            let (from, to) = (self.extents[extent].start, self.extents[extent].end());
            match ranges.last_mut().filter(|free| free.to == from) {
                Some(free) => free.to = to,
                None => ranges.push(Free { run, from, to }),
            }
        }
        ranges
    }

    pub(super) fn aliases_are_done(&self, extent: ExtentId) -> bool {
        let aliases = self.extents[extent].aliases.iter().map(|&alias| &self.aliases[alias]);
        aliases.into_iter().all(|alias| self.is_done(alias))
    }

    /// Whether an alias can be unmapped: nothing can use it, and none of its extents is on its way out or back.
    fn is_done(&self, alias: &Alias) -> bool {
        let is_moving = |&extent: &ExtentId| self.extents[extent].presence == Presence::Moving;
        alias.is_idle() && alias.epoch <= self.passed && !alias.extents.iter().any(is_moving)
    }

    /// How many extents are mapped in an alias: those that are evicted are not.
    pub(super) fn mapped_in(&self, alias: &Alias) -> u64 {
        let mapped = alias.extents.iter().filter(|&&id| self.extents[id].presence != Presence::Evicted);
        mapped.count() as u64
    }

    /// The steps that unmap an alias: one for each run of extents that are mapped.
    fn unmap_alias(&self, alias: &Alias, steps: &mut Vec<Step>) {
        let mut at = alias.start;
        let is_evicted = |id: ExtentId| self.extents[id].presence == Presence::Evicted;
        for run in alias.extents.chunk_by(|&one, &next| is_evicted(one) == is_evicted(next)) {
            let size = run.iter().map(|&id| self.extents[id].size).sum();
            if run.first().is_some_and(|&id| !is_evicted(id)) {
                let (offset, size) = (Bytes::new(at), Bytes::new(size));
                steps.push(Step::Unmap { offset, size, extents: run.to_vec() });
            }
            at += size;
        }
    }

    /// Gives slabs back that were kept open for their stream though all of them is free: of one domain, or of all.
    pub(super) fn dissolve_idle_slabs(&mut self, of: Option<DomainId>) {
        let small = self.lists.iter().map(|(_, list)| list).filter(|list| list.class == Class::Small);
        let small = small.filter(|list| of.is_none_or(|domain| list.domain == domain));
        let free = small.flat_map(|list| list.bins.iter());
        let idle: Vec<PieceId> = free.filter(|&id| self.is_idle_slab(id)).collect();
        self.dissolve_slabs(&idle);
    }

    /// Whether a free piece is all of a slab, and somebody may take it.
    pub(super) fn is_idle_slab(&self, id: PieceId) -> bool {
        let piece = &self.pieces[id];
        let takes = !matches!(self.lists[piece.list.index()].owner, Owner::Nobody | Owner::Evicted);
        takes && piece.slab != PieceId::NONE && piece.size == self.pieces[piece.slab].size
    }

    /// Gives slabs back whose one piece is free, and in a free list.
    pub(super) fn dissolve_slabs(&mut self, idle: &[PieceId]) {
        for &id in idle {
            let list = self.pieces[id].list;
            self.lists[list.index()].remove(&mut self.pieces, id);
            self.dissolve_slab(id);
        }
    }

    /// Extents of domains that are evicted, with nothing live in them.
    fn forgettable_of(&self, domains: &[DomainId]) -> Vec<ExtentId> {
        if self.not_resident == 0 {
            return Vec::new();
        }
        let own = self.extents.iter().filter(|(_, extent)| domains.contains(&extent.domain));
        own.map(|(id, _)| id).filter(|&id| self.is_forgettable(id)).collect()
    }

    /// Takes all aliases of an extent out of use.
    fn withdraw_all(&mut self, extent: ExtentId, release: &mut Release, steps: &mut Vec<Step>) {
        while let Some(&alias) = self.extents[extent].aliases.first() {
            release.aliases.push(self.withdraw(alias, steps));
        }
    }

    /// Takes an idle alias out of use; its addresses stay taken until the driver has unmapped them.
    fn withdraw(&mut self, id: AliasId, steps: &mut Vec<Step>) -> Alias {
        let alias = self.aliases.remove(id);
        for extent in &alias.extents {
            self.extents[*extent].aliases.retain(|other| *other != id);
        }
        self.domains[alias.domain].aliases.retain(|other| *other != id);
        let size = Bytes::new(alias.size);
        self.stats.alias_bytes = self.stats.alias_bytes.saturating_sub(size);
        self.stats.idle_alias_bytes = self.stats.idle_alias_bytes.saturating_sub(size);
        self.stats.mappings -= self.mapped_in(&alias);
        self.unmap_alias(&alias, steps);
        alias
    }

    pub(super) fn commit_release(&mut self, release: Release) {
        for alias in release.aliases {
            self.elsewhere.give_back(alias.start, alias.size);
            self.stats.counters.aliases_collected += 1;
        }
        release.forgotten.into_iter().for_each(|extent| self.forget_extent(extent));
        for range in release.ranges {
            let (start, end) = (self.pieces[range.piece].start, self.pieces[range.piece].end());
            self.remove_piece(range.piece);
            let extents: Vec<ExtentId> = self.extents.touching(start, end).collect();
            let count = extents.len() as u64;
            let Some(&first) = extents.first() else { continue };
            let (class, domain) = (self.extents[first].class, self.extents[first].domain);
            for extent in extents {
                self.extents.remove(extent);
            }
            self.zone(class).give_back(start, end - start);
            self.stats.mappings -= count;
            self.stats.counters.extents_released += count;
            for pool in self.stats.pools(class == Class::Slabs) {
                pool.reserved.sub(end - start);
                pool.extents.sub(count);
            }
            self.domains[domain].extents -= usize::try_from(count).unwrap_or(0);
            self.drop_if_done(domain);
        }
    }

    pub(super) fn abort_release(&mut self, release: Release) {
        release.ranges.into_iter().for_each(|range| self.put_back(range));
        for alias in release.aliases {
            self.add_alias(alias);
        }
    }

    /// Forgets a released domain that holds nothing any more.
    pub(super) fn drop_if_done(&mut self, id: DomainId) {
        let domain = &self.domains[id];
        if !domain.is_released() || domain.extents > 0 || domain.plans > 0 {
            return;
        }
        let lists = self.domains.remove(id).into_iter().flat_map(|domain| domain.lists().collect::<Vec<_>>());
        for list in lists {
            self.lists.remove(list.index());
        }
    }
}
