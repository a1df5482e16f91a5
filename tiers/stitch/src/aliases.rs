//! The aliases of a device, their addresses, and the blocks that were handed out through them.
//!
//! Invariant: an alias maps only extents of its own domain, and each of these extents knows it.

use glake_units::Bytes;
use slab::Slab;

use crate::alias::Alias;
use crate::extent::Extent;
use crate::heap::Heap;
use crate::home::Carved;
use crate::ids::{AliasId, DomainId, FreeListId, HoldId, PointNumber};
use crate::live::Live;
use crate::plan::{Grant, Step};
use crate::run::Run;
use crate::stitched::Stitched;
use crate::want::Want;
use crate::zone::Zone;

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
