//! Memory and mappings going back to the driver: whole free extents whose epoch has passed, and idle aliases.

use glake_units::Bytes;

use super::Allocator;
use super::outcome::{Carved, Pending};
use crate::alias::Alias;
use crate::ids::{AliasId, DomainId, ExtentId, LaneId, PieceId};
use crate::lane::{Class, Taker};
use crate::plan::{Plan, Step};
use crate::run::Run;

/// Home ranges and aliases on their way to the driver.
#[derive(Debug, Default)]
pub(super) struct Release {
    ranges: Vec<Carved>,
    aliases: Vec<Alias>,
}

impl Allocator {
    /// Driver work that releases free memory until at most `keep` is reserved, or nothing is left to release. Idle
    /// aliases of what goes are unmapped first; what is in use, or still pending, stays.
    pub fn plan_trim(&mut self, keep: Bytes) -> Option<Plan> {
        self.plan_release(Bytes::new(self.reserved().saturating_sub(keep.get())))
    }

    /// Driver work that unmaps idle aliases, the least recently used first, until at most `keep` of them is mapped.
    pub fn plan_collection(&mut self, keep: Bytes) -> Option<Plan> {
        let mut idle: Vec<(u64, AliasId, u64)> = self
            .aliases
            .iter()
            .filter(|(_, alias)| alias.is_idle() && alias.epoch <= self.passed)
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

    /// What an idle-alias limit asks for: nothing while it is kept.
    pub fn plan_due_collection(&mut self) -> Option<Plan> {
        let limit = self.settings.idle_aliases;
        (self.stats.idle_alias_bytes > limit).then(|| self.plan_collection(limit)).flatten()
    }

    fn plan_to(&mut self, release: Release, steps: Vec<Step>) -> Option<Plan> {
        if steps.is_empty() {
            return None;
        }
        let id = self.pend(Pending::Released(release));
        Some(Plan { id, steps, stitch: None })
    }

    /// Releases at least `target` of free extents if there are so many: first what belongs to released domains, then
    /// slabs, then the rest, from the highest addresses down.
    pub(super) fn plan_release(&mut self, target: Bytes) -> Option<Plan> {
        self.dissolve_idle_slabs();
        let mut release = Release::default();
        let mut steps = Vec::new();
        let mut releases = Vec::new();
        let mut left = target.get();
        for run in self.releasable() {
            if left == 0 {
                break;
            }
            let mut from = run.end;
            for extent in self.extents.touching(run.start, run.end).collect::<Vec<_>>().into_iter().rev() {
                if left == 0 {
                    break;
                }
                left = left.saturating_sub(self.extents[extent].size);
                from = self.extents[extent].start;
            }
            let extents: Vec<ExtentId> = self.extents.touching(from, run.end).collect();
            for &extent in &extents {
                while let Some(&alias) = self.extents[extent].aliases.first() {
                    release.aliases.push(self.withdraw(alias, &mut steps));
                }
                let (size, domain) = (Bytes::new(self.extents[extent].size), self.extents[extent].domain);
                releases.push(Step::Release { extent, size, domain });
            }
            let whole = Run { start: self.pieces[run.first].start, end: self.pieces[run.first].end(), first: run.first };
            release.ranges.push(self.carve(&whole, from, run.end));
            steps.push(Step::Unmap { offset: Bytes::new(from), size: Bytes::new(run.end - from), extents });
        }
        steps.append(&mut releases);
        self.plan_to(release, steps)
    }

    /// Runs of whole free extents that nothing can touch any more, at most one for each piece, in the order in which they
    /// should go.
    fn releasable(&self) -> Vec<Run> {
        let lanes = self.domains.iter().flat_map(|(_, domain)| {
            domain.home_lanes().map(|lane| {
                let slabs = self.lanes[lane.index()].class == Class::Slabs;
                (if domain.released { 0 } else if slabs { 1 } else { 2 }, lane)
            })
        });
        let mut runs: Vec<(u8, Run)> =
            lanes.flat_map(|(order, lane)| self.releasable_in(lane).map(move |run| (order, run))).collect();
        runs.sort_unstable_by_key(|(order, run)| (*order, std::cmp::Reverse(run.start)));
        runs.into_iter().map(|(_, run)| run).collect()
    }

    fn releasable_in(&self, lane: LaneId) -> impl Iterator<Item = Run> + '_ {
        self.lanes[lane.index()].bins.iter().filter_map(|id| {
            let piece = &self.pieces[id];
            let (first, last) = self.extents.boundaries(piece.start, piece.end());
            if piece.epoch > self.passed || first >= last {
                return None;
            }
            let mut extents: Vec<ExtentId> = self.extents.touching(first, last).collect();
            while extents.pop_if(|extent| !self.aliases_are_done(*extent)).is_some() {}
            let kept = extents.iter().rposition(|extent| !self.aliases_are_done(*extent)).map_or(0, |at| at + 1);
            let (from, to) = (extents.get(kept)?, extents.last()?);
            Some(Run { start: self.extents[*from].start, end: self.extents[*to].end(), first: id })
        })
    }

    fn aliases_are_done(&self, extent: ExtentId) -> bool {
        let aliases = self.extents[extent].aliases.iter().map(|&alias| &self.aliases[alias]);
        aliases.into_iter().all(|alias| alias.is_idle() && alias.epoch <= self.passed)
    }

    /// Gives slabs back that were kept open for their stream though all of them is free.
    fn dissolve_idle_slabs(&mut self) {
        let small = self.lanes.iter().map(|(_, lane)| lane);
        let small = small.filter(|lane| lane.class == Class::Small && lane.taker != Taker::Nobody);
        let is_whole = |id: &PieceId| self.pieces[*id].size == self.pieces[self.pieces[*id].slab].size;
        let whole: Vec<PieceId> = small.flat_map(|lane| lane.bins.iter()).filter(is_whole).collect();
        for id in whole {
            let lane = self.pieces[id].lane;
            self.lanes[lane.index()].remove(&mut self.pieces, id);
            self.dissolve_slab(id);
        }
    }

    /// Takes an idle alias out of use; its addresses stay taken until the driver has unmapped them.
    fn withdraw(&mut self, id: AliasId, steps: &mut Vec<Step>) -> Alias {
        let alias = self.aliases.remove(id);
        for extent in &alias.extents {
            self.extents[*extent].aliases.retain(|other| *other != id);
        }
        self.domains[alias.domain.index()].aliases.retain(|other| *other != id);
        let size = Bytes::new(alias.size);
        self.stats.alias_bytes = self.stats.alias_bytes.saturating_sub(size);
        self.stats.idle_alias_bytes = self.stats.idle_alias_bytes.saturating_sub(size);
        self.stats.mappings -= alias.extents.len() as u64;
        steps.push(Step::Unmap { offset: Bytes::new(alias.start), size, extents: alias.extents.clone() });
        alias
    }

    pub(super) fn commit_release(&mut self, release: Release) {
        for alias in release.aliases {
            self.elsewhere.give_back(alias.start, alias.size);
            self.stats.counters.aliases_collected += 1;
        }
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
            for pool in self.stats.pools(class == Class::Slabs) {
                pool.reserved_bytes.sub(end - start);
                pool.extents.sub(count);
            }
            self.domains[domain.index()].extents -= usize::try_from(count).unwrap_or(0);
            self.drop_if_done(domain);
        }
    }

    pub(super) fn abort_release(&mut self, release: Release) {
        release.ranges.into_iter().for_each(|range| self.restore(range));
        for alias in release.aliases {
            self.add_alias(alias);
        }
    }

    /// Forgets a released domain that holds nothing any more.
    pub(super) fn drop_if_done(&mut self, id: DomainId) {
        let domain = &self.domains[id.index()];
        if !domain.released || domain.extents > 0 {
            return;
        }
        for lane in self.domains.remove(id.index()).lanes() {
            self.lanes.remove(lane.index());
        }
    }
}
