//! What the allocator tells about itself: statistics, the kinds of waste, and a picture of its segments.

use glake_units::Bytes;
use serde::Serialize;

use super::Allocator;
use crate::extent::Presence;
use crate::free_list::{Class, FreeList, Owner};
use crate::ids::{AliasId, DomainId, ExtentId, PieceId, StreamKey};
use crate::live::Live;
use crate::piece::{Piece, State};
use crate::stats::{Counters, Inactive, Stats, Waste};

/// What a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SegmentKind {
    /// A mapped run at home, for large blocks.
    Home,
    /// A mapped run at home, for slabs.
    Slabs,
    /// An alias: it reserves nothing of its own.
    Stitched,
}

/// A mapped address range.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// From the start of the reservation.
    pub offset: Bytes,
    /// How long.
    pub size: Bytes,
    /// Of it, addresses that have no memory because it is elsewhere.
    pub evicted: Bytes,
    /// What it is.
    pub kind: SegmentKind,
    /// Whose.
    #[serde(skip)]
    pub domain: DomainId,
    /// What lies in it, in order, without gaps; of an alias only what was handed out through it.
    pub blocks: Vec<BlockInfo>,
}

/// A run of bytes of a segment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockInfo {
    /// From the start of the reservation.
    pub offset: Bytes,
    /// How long.
    pub size: Bytes,
    /// As asked for; zero where free.
    pub requested: Bytes,
    /// Handed out.
    pub live: bool,
    /// Part of a block that was handed out through an alias.
    pub lent: bool,
    /// Free, and what used it may still run: its own stream may have it, others not yet.
    pub pending: bool,
    /// Free, but nobody's yet, its own stream's neither: other streams were recorded on it.
    pub withheld: bool,
    /// The stream that it belongs to, where it belongs to one.
    #[serde(skip)]
    pub stream: Option<StreamKey>,
}

impl Allocator {
    /// Everything that is counted.
    pub fn stats(&self) -> Stats {
        self.stats.stats(self.waste(), [self.inactive(true), self.inactive(false)])
    }

    /// Physical memory held: cheaper than [`Allocator::stats`], which walks the free pieces.
    pub fn reserved_bytes(&self) -> Bytes {
        Bytes::new(self.stats.reserved())
    }

    /// The counters alone: cheaper than [`Allocator::stats`].
    pub fn counters(&self) -> Counters {
        self.stats.counters
    }

    /// Starts the peaks from what is now.
    pub fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
    }

    /// Starts the totals from zero.
    pub fn reset_totals(&mut self) {
        self.stats.reset_totals();
    }

    /// The block that begins at an offset: its size and what was asked for.
    pub fn block(&self, offset: Bytes) -> Option<(Bytes, Bytes)> {
        let (size, requested) = match self.live.get(offset.get(), &self.pieces)? {
            Live::Piece(id) => (self.pieces[id].size, self.pieces[id].requested),
            Live::Stitched(index) => {
                let block = &self.stitched[index as usize];
                (block.size, block.requested)
            }
        };
        Some((Bytes::new(size), Bytes::new(requested)))
    }

    /// How many blocks are live.
    pub fn live_blocks(&self) -> usize {
        self.live.len()
    }

    /// How many free ranges there are, over all free lists.
    pub fn free_ranges(&self) -> usize {
        self.lists.iter().map(|(_, list)| list.bins.len()).sum()
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.stats.reserved() + self.live_evicted() - self.stats.active_bytes()
    }

    pub(super) fn stitchable_bytes(&self) -> u64 {
        self.free_at_home().map(|id| self.whole_extents(id)).sum()
    }

    fn free_at_home(&self) -> impl Iterator<Item = PieceId> + '_ {
        let is_free = |list: &FreeList| {
            list.class != Class::Small && !matches!(list.owner, Owner::Nobody | Owner::Evicted)
        };
        let lists = self.lists.iter().filter(move |(_, list)| is_free(list));
        lists.flat_map(|(_, list)| list.bins.iter())
    }

    fn whole_extents(&self, id: PieceId) -> u64 {
        let piece = &self.pieces[id];
        let (first, last) = self.extents.boundaries(piece.start, piece.end());
        last.saturating_sub(first)
    }

    /// What is reserved and not in use: pending on a stream while others are there to use it, in whole extents, or not.
    fn waste(&self) -> Waste {
        let (mut stream, mut soft) = (0, 0);
        for id in self.free_at_home() {
            let piece = &self.pieces[id];
            let list = &self.lists[piece.list.index()];
            let shared = self.domains[list.domain].streams.len() > 1;
            if piece.epoch > self.passed && shared {
                stream += piece.size;
            } else {
                soft += self.whole_extents(id);
            }
        }
        let hard = self.free_bytes().saturating_sub(soft + stream);
        Waste { hard: Bytes::new(hard), soft: Bytes::new(soft), stream: Bytes::new(stream) }
    }

    /// What is free of one pool and lies in extents that are not free as a whole.
    fn inactive(&self, small: bool) -> Inactive {
        let of_pool = |list: &FreeList| (list.class != Class::Large) == small && list.owner != Owner::Evicted;
        let free = self.lists.iter().filter(|(_, list)| of_pool(list)).flat_map(|(_, list)| list.bins.iter());
        let mut inactive = Inactive::default();
        for id in free {
            let piece = &self.pieces[id];
            let whole = if piece.slab == PieceId::NONE { self.whole_extents(id) } else { 0 };
            if whole < piece.size {
                inactive.ranges += 1;
                inactive.bytes = inactive.bytes.saturating_add(Bytes::new(piece.size - whole));
            }
        }
        inactive
    }

    /// Every mapped range and what lies in it.
    pub fn segments(&self) -> Vec<Segment> {
        let home = self.segments.begins().map(|edge| {
            let first = self.pieces[edge].next;
            let (offset, extent) =
                (self.pieces[first].start, &self.extents[self.extents.at(self.pieces[first].start)]);
            let blocks = self.blocks_from(first);
            let size: Bytes = blocks.iter().map(|block| block.size).sum();
            let kind = if extent.class == Class::Slabs { SegmentKind::Slabs } else { SegmentKind::Home };
            let evicted = self.evicted_in(self.extents.touching(offset, offset + size.get()));
            Segment { offset: Bytes::new(offset), size, evicted, kind, domain: extent.domain, blocks }
        });
        let mut segments: Vec<Segment> = home.collect();
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
        let evicted =
            extents.map(|id| &self.extents[id]).filter(|extent| extent.presence == Presence::Evicted);
        Bytes::new(evicted.map(|extent| extent.size).sum())
    }

    fn blocks_from(&self, first: PieceId) -> Vec<BlockInfo> {
        let mut blocks = Vec::new();
        let mut id = first;
        while self.pieces[id].state != State::Edge {
            let piece = &self.pieces[id];
            if piece.state == State::Slab {
                blocks.extend(self.blocks_from(self.pieces[piece.inside].next));
            } else {
                blocks.push(self.describe(piece));
            }
            id = piece.next;
        }
        blocks
    }

    fn describe(&self, piece: &Piece) -> BlockInfo {
        let (live, free) = (piece.state == State::Live, piece.state == State::Free);
        let list = self.lists.get(piece.list.index());
        let withheld = free && list.is_some_and(|list| list.owner == Owner::Nobody);
        let apart = free && list.is_some_and(|list| list.owner == Owner::Evicted);
        let list = if withheld || apart { self.lists.get(piece.returns_to.index()) } else { list };
        BlockInfo {
            offset: Bytes::new(piece.start),
            size: Bytes::new(piece.size),
            requested: Bytes::new(if live { piece.requested } else { 0 }),
            live,
            lent: piece.state == State::Part,
            pending: free && piece.epoch > self.passed,
            withheld,
            stream: list.and_then(FreeList::stream),
        }
    }

    fn blocks_in_alias(&self, id: AliasId) -> Vec<BlockInfo> {
        let inside = self.stitched.iter().filter(|(_, block)| block.alias == id);
        let mut blocks: Vec<BlockInfo> = inside
            .map(|(_, block)| BlockInfo {
                offset: Bytes::new(block.start),
                size: Bytes::new(block.size),
                requested: Bytes::new(block.requested),
                live: true,
                lent: false,
                pending: false,
                withheld: false,
                stream: self.lists[block.list.index()].stream(),
            })
            .collect();
        blocks.sort_unstable_by_key(|block| block.offset);
        blocks
    }
}
