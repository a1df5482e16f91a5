//! Stitched address ranges: extents with free memory, mapped side by side a second time and kept mapped for later requests.
//!
//! ```text
//! home:   [ e0 |  e1  ]   [ e2 ]      [ e3 |   e4 ]
//!             ▀▀▀▀▀▀▀      ▀▀▀▀        ▀▀▀▀▀▀▀              free bytes
//! alias:  [ e0 |  e1  | e2 | e3 | e4 ]                      whole extents, one address range
//!             ^block                ^end                    begins in a free suffix, ends in a free prefix
//! ```
//!
//! An alias owns no bytes: home keeps the record of free memory. An alias is idle while no live block was handed out through it.
//!
//! A stitched block has its bytes in pieces of home, and its addresses in an alias.
//!
//! Invariant: an alias maps only extents of its own domain, and each of these extents knows it.

use glake_units::Bytes;
use slab::Slab;

use crate::extent::{Extent, ExtentState, Extents, Zone};
use crate::heap::{Heap, Want};
use crate::home::Carved;
use crate::ids::{AliasId, DomainId, ExtentId, FreeListId, HoldId, PieceId, PointNumber};
use crate::piece::{Live, Run};
use crate::plan::{Grant, Step};

/// Consecutive alias addresses that are consecutive at home too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Offset from the start of the alias.
    pub(crate) offset: u64,
    pub(crate) home: u64,
    pub(crate) size: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Alias {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) domain: DomainId,
    pub(crate) extents: Vec<ExtentId>,
    pub(crate) spans: Vec<Span>,
    /// Number of live blocks that were handed out through the alias.
    pub(crate) blocks: u32,
    /// Completion point that covers the last use of the alias.
    pub(crate) point: PointNumber,
    /// Sequence number of the last use; idle aliases are collected in this order.
    pub(crate) used: u64,
}

/// Contiguous free bytes of an alias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl Alias {
    /// Creates an idle alias at `start` over `extents` in this order.
    pub(crate) fn new(start: u64, domain: DomainId, extents: Vec<ExtentId>, all: &Extents) -> Self {
        let mut spans: Vec<Span> = Vec::new();
        let mut offset = 0;
        for &extent in &extents {
            let (home, size) = (all[extent].start, all[extent].size);
            match spans.last_mut().filter(|span| span.home + span.size == home) {
                Some(span) => span.size += size,
                None => spans.push(Span { offset, home, size }),
            }
            offset += size;
        }
        Alias { start, size: offset, domain, extents, spans, blocks: 0, point: PointNumber(0), used: 0 }
    }

    /// Appends the steps that map the alias.
    pub(crate) fn map(&self, all: &Extents, steps: &mut Vec<Step>) {
        let mut at = self.start;
        for &extent in &self.extents {
            let size = all[extent].size;
            steps.push(Step::Map { extent, offset: Bytes::new(at), size: Bytes::new(size) });
            at += size;
        }
        let (offset, size) = (Bytes::new(self.start), Bytes::new(self.size));
        steps.push(Step::Access { offset, size, domain: self.domain });
    }

    /// Appends the steps that unmap the alias: one step for each run of mapped extents.
    pub(crate) fn unmap(&self, all: &Extents, steps: &mut Vec<Step>) {
        let mut at = self.start;
        let is_evicted = |id: ExtentId| all[id].state == ExtentState::Evicted;
        for run in self.extents.chunk_by(|&one, &next| is_evicted(one) == is_evicted(next)) {
            let size = run.iter().map(|&id| all[id].size).sum();
            if run.first().is_some_and(|&id| !is_evicted(id)) {
                let (offset, size) = (Bytes::new(at), Bytes::new(size));
                steps.push(Step::Unmap { offset, size, extents: run.to_vec() });
            }
            at += size;
        }
    }

    /// Returns the number of extents mapped in the alias; evicted extents are not mapped.
    pub(crate) fn mapped(&self, all: &Extents) -> u64 {
        let mapped = self.extents.iter().filter(|&&id| all[id].state != ExtentState::Evicted);
        mapped.count() as u64
    }

    /// Returns the address at which the alias maps one of its extents.
    pub(crate) fn address_of(&self, extent: ExtentId, all: &Extents) -> u64 {
        let before = self.extents.iter().take_while(|&&other| other != extent);
        self.start + before.map(|&other| all[other].size).sum::<u64>()
    }

    /// Returns whether the alias can be unmapped: no work can use it, and none of its extents is being evicted or refilled.
    pub(crate) fn is_done(&self, all: &Extents, passed: PointNumber) -> bool {
        let is_moving = |&extent: &ExtentId| all[extent].state == ExtentState::Moving;
        self.is_idle() && self.point <= passed && !self.extents.iter().any(is_moving)
    }

    /// Returns whether an offset lies in the address range of the alias.
    pub(crate) fn contains(&self, offset: u64) -> bool {
        (self.start..self.start + self.size).contains(&offset)
    }

    /// Returns the smallest window of at least `size` free bytes. `runs` are the free runs at home, sorted and disjoint.
    pub(crate) fn best_window(&self, runs: &[Run], size: u64) -> Option<Window> {
        let mut best: Option<Window> = None;
        let mut open = Window { offset: 0, size: 0 };
        let mut close = |window: Window| {
            if window.size >= size && best.is_none_or(|best| window.size < best.size) {
                best = Some(window);
            }
        };
        for span in &self.spans {
            let (from, to) = (span.home, span.home + span.size);
            let first = runs.partition_point(|run| run.end <= from);
            for run in runs[first..].iter().take_while(|run| run.start < to) {
                let (start, end) = (run.start.max(from), run.end.min(to));
                let offset = span.offset + (start - from);
                if offset != open.offset + open.size {
                    close(open);
                    open = Window { offset, size: 0 };
                }
                open.size += end - start;
            }
        }
        close(open);
        best
    }

    /// Returns the home ranges behind a range of the alias, in alias order.
    pub(crate) fn home_of(&self, window: Window) -> impl Iterator<Item = (u64, u64)> + '_ {
        let (from, to) = (window.offset, window.offset + window.size);
        self.spans.iter().filter_map(move |span| {
            let (start, end) = (span.offset.max(from), (span.offset + span.size).min(to));
            (start < end).then(|| (span.home + (start - span.offset), end - start))
        })
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.blocks == 0
    }
}

/// The aliases of one device.
#[derive(Debug)]
pub(crate) struct Aliases {
    table: Slab<Alias>,
    /// Sequence number of the latest use of any alias.
    clock: u64,
    /// Address zone of the aliases.
    pub(crate) zone: Zone,
    /// Live blocks whose addresses belong to an alias.
    pub(crate) blocks: Slab<Stitched>,
}

impl std::ops::Index<AliasId> for Aliases {
    type Output = Alias;

    fn index(&self, id: AliasId) -> &Alias {
        &self.table[id.index()]
    }
}

impl Aliases {
    /// Creates an empty set of aliases whose addresses will come from `zone`.
    pub(crate) fn new(zone: Zone) -> Self {
        Aliases { table: Slab::new(), clock: 0, zone, blocks: Slab::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (AliasId, &Alias)> {
        self.table.iter().map(|(index, alias)| (AliasId::at(index), alias))
    }

    /// Registers a newly mapped alias, idle, with its domain and its extents.
    pub(crate) fn add(&mut self, alias: Alias, heap: &mut Heap) -> AliasId {
        let size = Bytes::new(alias.size);
        let id = AliasId::at(self.table.insert(alias));
        let (alias, home) = (&self[id], &mut heap.home);
        for extent in &alias.extents {
            home.extents[*extent].aliases.push(id);
        }
        home.domains[alias.domain].aliases.push(id);
        let tallies = &mut heap.tallies;
        tallies.alias_bytes = tallies.alias_bytes.saturating_add(size);
        tallies.set_idle(true, size);
        tallies.mappings += alias.mapped(&home.extents);
        id
    }

    /// Removes an idle alias from the index and appends the steps that unmap it. Its addresses stay reserved until the driver has unmapped
    /// them.
    pub(crate) fn withdraw(&mut self, id: AliasId, heap: &mut Heap, steps: &mut Vec<Step>) -> Alias {
        let alias = self.table.remove(id.index());
        let home = &mut heap.home;
        for extent in &alias.extents {
            home.extents[*extent].aliases.retain(|other| *other != id);
        }
        home.domains[alias.domain].aliases.retain(|other| *other != id);
        let (size, tallies) = (Bytes::new(alias.size), &mut heap.tallies);
        tallies.alias_bytes = tallies.alias_bytes.saturating_sub(size);
        tallies.set_idle(false, size);
        tallies.mappings -= alias.mapped(&home.extents);
        alias.unmap(&home.extents, steps);
        alias
    }

    /// Marks the aliases of a domain as used in a completion point.
    pub(crate) fn renew(&mut self, domain: DomainId, point: PointNumber) {
        let own = self.table.iter_mut().map(|(_, alias)| alias).filter(|alias| alias.domain == domain);
        own.for_each(|alias| alias.point = point);
    }

    /// Returns whether all aliases of an extent can be unmapped.
    pub(crate) fn are_done(&self, extent: &Extent, heap: &Heap) -> bool {
        let passed = heap.points.passed();
        extent.aliases.iter().all(|&alias| self[alias].is_done(&heap.home.extents, passed))
    }

    /// Serves a request from free bytes of an existing alias whose size is at most `longest`.
    pub(crate) fn reuse(
        &mut self,
        heap: &mut Heap,
        want: &Want,
        runs: &[Run],
        longest: u64,
    ) -> Option<Grant> {
        let aliases = &heap.home.domains[want.domain].aliases;
        let fitting = aliases
            .iter()
            .map(|&id| (id, &self[id]))
            .filter(|(_, alias)| (want.size..=longest).contains(&alias.size))
            .filter_map(|(id, alias)| alias.best_window(runs, want.size).map(|window| (id, window)));
        let (id, mut window) = fitting.min_by_key(|(_, window)| window.size)?;
        window.size = want.size;
        let ranges: Vec<_> = self[id].home_of(window).collect();
        let carved = heap.home.carve_all(runs, &ranges);
        heap.tallies.counters.alias_reuses += 1;
        Some(self.hand_out(heap, want, id, window.offset, carved))
    }

    /// Carves the home ranges behind `offset` of an alias and hands them out as one block.
    pub(crate) fn hand_out(
        &mut self,
        heap: &mut Heap,
        want: &Want,
        id: AliasId,
        offset: u64,
        carved: Vec<Carved>,
    ) -> Grant {
        let mut former = carved.iter().flat_map(|range| &range.former);
        let edge = former.any(|former| heap.points.is_pending(former.point));
        if edge {
            heap.home.lists[want.lists.large].edge = heap.moves;
        }
        let waits = heap.waits(want, &carved);
        let parts = carved.into_iter().map(|range| range.piece).collect();
        self.clock += 1;
        let alias = &mut self.table[id.index()];
        alias.used = self.clock;
        if alias.is_idle() {
            heap.tallies.set_idle(false, Bytes::new(alias.size));
        }
        alias.blocks += 1;
        let start = alias.start + offset;
        #[allow(clippy::cast_possible_truncation)]
        let index = self.blocks.insert(Stitched {
            alias: id,
            start,
            size: want.size,
            requested: want.requested,
            list: want.lists.large,
            slabs: want.lists.slabs,
            recorded: false,
            parts,
        }) as u32;
        heap.home.live.insert(start, Live::Stitched(index));
        heap.tallies.handed_out(false, want.size, want.requested);
        heap.tallies.counters.edges += u64::from(edge);
        Grant { offset: Bytes::new(start), size: Bytes::new(want.size), edge, waits }
    }

    /// Frees a block that was handed out through an alias and is held by `holds`. Returns the block's size.
    pub(crate) fn free(&mut self, index: u32, holds: &[HoldId], heap: &mut Heap) -> Bytes {
        let block = self.blocks.remove(index as usize);
        let alias = &mut self.table[block.alias.index()];
        alias.blocks -= 1;
        alias.point = heap.points.open();
        if alias.is_idle() {
            heap.tallies.set_idle(true, Bytes::new(alias.size));
        }
        heap.free_parts(block, holds)
    }

    /// Returns the free lists that live blocks return to.
    pub(crate) fn lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        self.blocks.iter().flat_map(|(_, block)| [block.list, block.slabs])
    }
}

/// A live block with addresses of an alias.
#[derive(Clone, Debug)]
pub(crate) struct Stitched {
    pub(crate) alias: AliasId,
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) list: FreeListId,
    /// Free list that its parts from slabs return to.
    pub(crate) slabs: FreeListId,
    /// Whether other streams use it.
    pub(crate) recorded: bool,
    /// Pieces at home behind the block, in alias order.
    pub(crate) parts: Vec<PieceId>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extent::Extent;
    use crate::free_list::Class;
    use crate::ids::PieceId;

    const SIZE: u64 = 8 << 20;

    /// Creates an alias at 1 GiB over the second, the third and the first of three extents.
    fn alias() -> (Extents, Vec<ExtentId>, Alias) {
        let mut all = Extents::new(2 << 20);
        let extent = |start| Extent {
            start,
            size: SIZE,
            domain: DomainId::DEFAULT,
            class: Class::Large,
            aliases: Default::default(),
            state: ExtentState::Resident,
            live: 0,
        };
        let ids: Vec<ExtentId> = (0..3).map(|n| all.insert(extent(n * SIZE))).collect();
        let alias = Alias::new(1 << 30, DomainId::DEFAULT, vec![ids[1], ids[2], ids[0]], &all);
        (all, ids, alias)
    }

    #[test]
    fn extents_side_by_side_at_home_are_one_span() {
        let (all, ids, alias) = alias();
        assert_eq!((alias.size, alias.spans.len()), (3 * SIZE, 2));
        assert_eq!(alias.address_of(ids[0], &all), (1 << 30) + 2 * SIZE);
        let window = Window { offset: SIZE, size: 2 * SIZE };
        assert_eq!(alias.home_of(window).collect::<Vec<_>>(), [(2 * SIZE, SIZE), (0, SIZE)]);
        let free = [Run { start: 0, end: SIZE, first: PieceId::NONE }];
        assert_eq!(alias.best_window(&free, SIZE / 2), Some(Window { offset: 2 * SIZE, size: SIZE }));
        assert_eq!(alias.best_window(&free, 2 * SIZE), None);
    }

    #[test]
    fn only_mapped_extents_are_unmapped() {
        let (mut all, ids, alias) = alias();
        let mut steps = Vec::new();
        alias.map(&all, &mut steps);
        assert_eq!(steps.len(), 4, "three extents, and access once");
        all.set_state(ids[2], ExtentState::Moving);
        assert!(!alias.is_done(&all, PointNumber(0)), "one is on its way");
        all.set_state(ids[2], ExtentState::Evicted);
        assert!(alias.is_done(&all, PointNumber(0)));
        assert_eq!(alias.mapped(&all), 2);
        let mut steps = Vec::new();
        alias.unmap(&all, &mut steps);
        let offset = |n: u64| Bytes::new((1 << 30) + n * SIZE);
        let unmap =
            |n, extent| Step::Unmap { offset: offset(n), size: Bytes::new(SIZE), extents: vec![extent] };
        assert_eq!(steps, [unmap(0, ids[1]), unmap(2, ids[0])]);
    }
}
