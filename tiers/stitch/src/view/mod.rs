//! Read-only views of an allocator, which borrow the parts that they read: statistics, segments, and the largest request.
//!
//! A request is refused only after all free memory was waited for, stitched, or released and made anew. So the largest request depends on the
//! free memory and the room to grow, not on the streams that may take it now.

use glake_units::Bytes;
use serde::Serialize;

use crate::alias::Aliases;
use crate::domain::Domain;
use crate::error::StitchError;
use crate::extent::ExtentState;
use crate::free_list::{Class, FreeList, Owner};
use crate::heap::{Heap, SMALL_LIMIT};
use crate::ids::{AliasId, DomainId, ExtentId, FreeListId, PieceId, StreamKey};
use crate::piece::{self, Piece, Run, State};
use crate::settings::{Borrow, Settings};

pub(crate) use audit::Audit;
pub use audit::Broken;
pub use blocks::{Backing, Blocks, Claim, ExtentView, ExtentViews, HomeRange, LiveBlock, Restored};

mod audit;
mod blocks;

/// Kind of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SegmentKind {
    /// Mapped run at home, for large blocks.
    Home,
    /// Mapped run at home, for slabs.
    Slabs,
    /// Alias, which reserves no memory of its own.
    Stitched,
}

/// A mapped address range.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// Start, from the start of the reservation.
    pub offset: Bytes,
    /// Size of the segment in bytes.
    pub size: Bytes,
    /// Bytes of addresses without memory because it is evicted.
    pub evicted: Bytes,
    /// Kind of the segment.
    pub kind: SegmentKind,
    /// Domain that owns the memory.
    #[serde(skip)]
    pub domain: DomainId,
    /// Blocks and free ranges in order, without gaps; for an alias only the blocks handed out through it.
    pub blocks: Vec<BlockInfo>,
}

/// A run of bytes of a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockInfo {
    /// Start, from the start of the reservation.
    pub offset: Bytes,
    /// Size of the run in bytes.
    pub size: Bytes,
    /// Requested size; 0 if free.
    pub requested: Bytes,
    /// Whether the bytes belong to a live block.
    pub live: bool,
    /// Whether the bytes are part of a block handed out through an alias.
    pub lent: bool,
    /// Whether the bytes are free but earlier work may still use them: reusable by their own stream, not by others.
    pub pending: bool,
    /// Whether the bytes are free but withheld from every stream: other streams were recorded on them.
    pub withheld: bool,
    /// Stream that owns the bytes, if any.
    #[serde(skip)]
    pub stream: Option<StreamKey>,
}

/// A read-only view of the whole allocator.
#[derive(Clone, Copy, Debug)]
pub struct Report<'a> {
    pub(crate) heap: &'a Heap,
    pub(crate) aliases: &'a Aliases,
}

impl Report<'_> {
    /// Returns the number of free ranges over all free lists.
    pub fn free_ranges(&self) -> usize {
        self.heap.home.lists.iter().map(|(_, list)| list.bins.len()).sum()
    }

    /// Returns every mapped range with its blocks.
    pub fn segments(&self) -> Vec<Segment> {
        let home = &self.heap.home;
        let at_home = home.segments.begins().map(|edge| {
            let first = home.pieces[edge].next;
            let (offset, extent) =
                (home.pieces[first].start, &home.extents[home.extents.at(home.pieces[first].start)]);
            let blocks = self.blocks_from(edge);
            let size: Bytes = blocks.iter().map(|block| block.size).sum();
            let kind = if extent.class == Class::Slabs { SegmentKind::Slabs } else { SegmentKind::Home };
            let evicted = self.evicted_in(home.extents.touching(offset, offset + size.get()));
            Segment { offset: Bytes::new(offset), size, evicted, kind, domain: extent.domain, blocks }
        });
        let mut segments: Vec<Segment> = at_home.collect();
        segments.extend(self.aliases.iter().map(|(id, alias)| Segment {
            offset: Bytes::new(alias.start),
            size: Bytes::new(alias.size),
            evicted: self.evicted_in(alias.extents.iter().copied()),
            kind: SegmentKind::Stitched,
            domain: alias.domain,
            blocks: self.blocks_in_alias(id),
        }));
        segments
    }

    fn evicted_in(&self, extents: impl Iterator<Item = ExtentId>) -> Bytes {
        let evicted = extents
            .map(|id| &self.heap.home.extents[id])
            .filter(|extent| extent.state == ExtentState::Evicted);
        Bytes::new(evicted.map(|extent| extent.size).sum())
    }

    fn blocks_from(&self, edge: PieceId) -> Vec<BlockInfo> {
        let home = &self.heap.home;
        let mut blocks = Vec::new();
        for piece in home.behind(edge).map(|id| &home.pieces[id]) {
            if piece.state == State::Slab {
                blocks.extend(self.blocks_from(piece.inside));
            } else {
                blocks.push(self.describe(piece));
            }
        }
        blocks
    }

    fn describe(&self, piece: &Piece) -> BlockInfo {
        let lists = &self.heap.home.lists;
        let (live, free) = (piece.state == State::Live, piece.state == State::Free);
        let list = lists.get(piece.list);
        let withheld = free && list.is_some_and(|list| list.owner == Owner::Nobody);
        let apart = free && list.is_some_and(|list| list.owner == Owner::Evicted);
        let held = free && list.is_some_and(|list| matches!(list.owner, Owner::Held(_)));
        let list = if withheld || held || apart { lists.get(piece.returns_to) } else { list };
        BlockInfo {
            offset: Bytes::new(piece.start),
            size: Bytes::new(piece.size),
            requested: Bytes::new(if live { piece.requested } else { 0 }),
            live,
            lent: piece.state == State::Part,
            pending: free && self.heap.points.is_pending(piece.point),
            withheld,
            stream: list.and_then(FreeList::stream),
        }
    }

    fn blocks_in_alias(&self, id: AliasId) -> Vec<BlockInfo> {
        let inside = self.aliases.blocks.iter().filter(|(_, block)| block.alias == id);
        let mut blocks: Vec<BlockInfo> = inside
            .map(|(_, block)| BlockInfo {
                offset: Bytes::new(block.start),
                size: Bytes::new(block.size),
                requested: Bytes::new(block.requested),
                live: true,
                lent: false,
                pending: false,
                withheld: false,
                stream: self.heap.home.lists[block.list].stream(),
            })
            .collect();
        blocks.sort_unstable_by_key(|block| block.offset);
        blocks
    }
}

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
        piece::join_runs(large.map(|id| home.run_of(id)).collect())
    }

    /// Returns the most new memory there can be after `returned` bytes are returned to the driver.
    fn growth_with(&self, returned: u64) -> u64 {
        let limit = (self.settings.most().get() + returned).saturating_sub(self.heap.tallies.committed());
        let room = limit.min(self.device_free.get().saturating_add(returned));
        room - room % self.settings.granularity.get()
    }
}
