//! Views of live blocks and single extents, and the claims that make blocks live again at their earlier addresses.
//!
//! A private pool's checkpoint is restored by claims:
//!
//! ```text
//! checkpoint:  [ a ][ b ]      [ c ]          live then
//! now:         [ a ]     [    d    ]          live now
//! restore:     a stays, d is freed, b and c are claimed
//! ```

use glake_units::Bytes;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::alias::Aliases;
use crate::domain::Domain;
use crate::error::{Obstacle, StitchError};
use crate::extent::ExtentState;
use crate::heap::Heap;
use crate::ids::{DomainId, ExtentId, PieceId, StreamKey};
use crate::piece::{Live, State};

/// Block that was handed out and not freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Start, from the start of the reservation.
    pub offset: Bytes,
    /// Size of the block in bytes.
    pub size: Bytes,
    /// Size of the request.
    pub requested: Bytes,
    /// Domain that owns the memory.
    pub domain: DomainId,
    /// Stream that the block returns to when freed.
    pub stream: StreamKey,
}

impl LiveBlock {
    fn contains(&self, offset: u64) -> bool {
        (self.offset.get()..self.offset.get() + self.size.get()).contains(&offset)
    }
}

/// The extents behind a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// Address of the first extent as mapped for this block, from the start of the reservation; at or before the block.
    pub start: Bytes,
    /// Extents in the order of the block's addresses, side by side from `start` on.
    pub extents: Vec<ExtentId>,
}

/// A view of the live blocks.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    pub(crate) heap: &'a Heap,
    pub(crate) aliases: &'a Aliases,
}

impl Blocks<'_> {
    /// Returns the number of live blocks.
    pub fn count(&self) -> usize {
        self.heap.home.live.len()
    }

    /// Returns the size and the requested size of the block that begins at an offset.
    pub fn at(&self, offset: Bytes) -> Option<(Bytes, Bytes)> {
        let (size, requested) = match self.live_at(offset)? {
            Live::Piece(id) => (self.heap.home.pieces[id].size, self.heap.home.pieces[id].requested),
            Live::Stitched(index) => {
                let block = &self.aliases.blocks[index as usize];
                (block.size, block.requested)
            }
        };
        Some((Bytes::new(size), Bytes::new(requested)))
    }

    /// Returns the live block that contains an offset. Slower than [`Blocks::at`]: it walks the slab, or back over earlier pieces.
    pub fn find(&self, offset: Bytes) -> Option<LiveBlock> {
        let at = offset.get();
        let live = if at < self.heap.home.slab_zone {
            Live::Piece(self.heap.home.live.last_at_home(at, &self.heap.home.pieces)?)
        } else if let Some((id, _)) = self.aliases.iter().find(|(_, alias)| alias.contains(at)) {
            let blocks = self.aliases.blocks.iter().filter(|(_, block)| block.alias == id);
            let (index, _) =
                blocks.filter(|(_, block)| block.start <= at).max_by_key(|(_, block)| block.start)?;
            #[allow(clippy::cast_possible_truncation)] // as when it was handed out
            Live::Stitched(index as u32)
        } else {
            Live::Piece(
                self.heap.home.piece_at(at).filter(|&id| self.heap.home.pieces[id].state == State::Live)?,
            )
        };
        Some(self.live_block(live)).filter(|block| block.contains(at))
    }

    /// Returns the live blocks of a domain, in the order of their offsets.
    pub fn of(&self, domain: DomainId) -> Vec<LiveBlock> {
        let all = self.heap.home.live.iter(&self.heap.home.pieces).map(|(_, live)| self.live_block(live));
        let mut blocks: Vec<LiveBlock> = all.filter(|block| block.domain == domain).collect();
        blocks.sort_unstable_by_key(|block| block.offset);
        blocks
    }

    /// Returns the domains with live blocks.
    pub fn domains(&self) -> FxHashSet<DomainId> {
        let live = self.heap.home.live.iter(&self.heap.home.pieces);
        live.map(|(_, live)| self.live_block(live).domain).collect()
    }

    /// Returns the extents behind the block that begins at an offset.
    pub fn backing(&self, offset: Bytes) -> Option<Backing> {
        let at = offset.get();
        match self.live_at(offset)? {
            Live::Piece(id) => {
                let piece = &self.heap.home.pieces[id];
                let extents: Vec<ExtentId> =
                    self.heap.home.extents.touching(piece.start, piece.end()).collect();
                let start = self.heap.home.extents[*extents.first()?].start;
                Some(Backing { start: Bytes::new(start), extents })
            }
            Live::Stitched(index) => {
                let block = &self.aliases.blocks[index as usize];
                let alias = &self.aliases[block.alias];
                let mut end = alias.start;
                let mut start = None;
                let mut extents = Vec::new();
                for &extent in &alias.extents {
                    let from = end;
                    end += self.heap.home.extents[extent].size;
                    if end > at && from < at + block.size {
                        start.get_or_insert(from);
                        extents.push(extent);
                    }
                }
                Some(Backing { start: Bytes::new(start?), extents })
            }
        }
    }

    /// Returns the home ranges of the block that begins at an offset, in the order of the block's bytes.
    pub fn home_of(&self, offset: Bytes) -> Option<Vec<HomeRange>> {
        let range = |&id: &PieceId| {
            let piece = &self.heap.home.pieces[id];
            HomeRange { offset: Bytes::new(piece.start), size: Bytes::new(piece.size) }
        };
        Some(match self.live_at(offset)? {
            Live::Piece(id) => vec![range(&id)],
            Live::Stitched(index) => self.aliases.blocks[index as usize].parts.iter().map(range).collect(),
        })
    }

    /// Returns the [`Claim`] by which a checkpoint's restore makes this block live again at the same address.
    ///
    /// # Errors
    /// [`StitchError::NotClaimable`] if the block is stitched: its address cannot be restored.
    pub(crate) fn claim_of(&self, block: &LiveBlock) -> Result<Claim, StitchError> {
        let LiveBlock { offset, size, requested, stream, .. } = *block;
        let Some(Live::Piece(id)) = self.live_at(offset) else {
            return Err(StitchError::NotClaimable { offset, wanted: size, obstacle: Obstacle::Stitched });
        };
        let slab = self.heap.home.pieces[id].slab;
        let slab = (slab != PieceId::NONE).then(|| Bytes::new(self.heap.home.pieces[slab].start));
        Ok(Claim { offset, size, requested, stream, slab })
    }

    fn live_at(&self, offset: Bytes) -> Option<Live> {
        self.heap.home.live.get(offset.get(), &self.heap.home.pieces)
    }

    fn live_block(&self, live: Live) -> LiveBlock {
        let (offset, size, requested, list) = match live {
            Live::Piece(id) => {
                let piece = &self.heap.home.pieces[id];
                (piece.start, piece.size, piece.requested, piece.list)
            }
            Live::Stitched(index) => {
                let block = &self.aliases.blocks[index as usize];
                (block.start, block.size, block.requested, block.list)
            }
        };
        // The free list of a live block always belongs to a stream.
        let list = &self.heap.home.lists[list];
        let (domain, stream) = (list.domain, list.stream().unwrap_or_default());
        LiveBlock {
            offset: Bytes::new(offset),
            size: Bytes::new(size),
            requested: Bytes::new(requested),
            domain,
            stream,
        }
    }
}

/// State of one extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentView {
    /// Extent that is described.
    pub extent: ExtentId,
    /// Start at home, from the start of the reservation.
    pub offset: Bytes,
    /// Size of the extent in bytes.
    pub size: Bytes,
    /// Bytes of the extent in live blocks.
    pub live: Bytes,
    /// Residency of the extent.
    pub state: ExtentState,
}

/// Consecutive bytes of home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomeRange {
    /// Start, from the start of the reservation.
    pub offset: Bytes,
    /// Size of the range in bytes.
    pub size: Bytes,
}

/// A view of the extents of an allocator.
#[derive(Clone, Copy, Debug)]
pub struct ExtentViews<'a> {
    pub(crate) heap: &'a Heap,
    pub(crate) aliases: &'a Aliases,
}

impl ExtentViews<'_> {
    /// Returns the extents of a domain, or the remaining ones of a released domain, in the order of their home addresses. Walks their
    /// pieces.
    pub fn of(&self, domain: DomainId) -> Vec<ExtentView> {
        let own = self.heap.home.extents.iter().filter(|(_, extent)| extent.domain == domain);
        let mut views: Vec<ExtentView> = own
            .map(|(id, extent)| ExtentView {
                extent: id,
                offset: Bytes::new(extent.start),
                size: Bytes::new(extent.size),
                live: Bytes::new(self.heap.home.live_in(id)),
                state: extent.state,
            })
            .collect();
        views.sort_unstable_by_key(|view| view.offset);
        views
    }

    /// Returns the residency of an extent; `None`: no such extent.
    pub fn state(&self, extent: ExtentId) -> Option<ExtentState> {
        self.heap.home.extents.state(extent)
    }

    /// Returns whether all memory of a domain counts and stays, live or not: a captured graph knows its addresses, and the domain was not
    /// released.
    pub fn is_held(&self, domain: DomainId) -> bool {
        self.heap.home.domains.get(domain).is_some_and(Domain::is_held)
    }

    /// Returns an extent's size and domain; for an unknown extent, 0 and the default domain.
    pub fn size_and_domain(&self, extent: ExtentId) -> (Bytes, DomainId) {
        let found = self.heap.home.extents.get(extent);
        found.map_or((Bytes::ZERO, DomainId::DEFAULT), |found| (Bytes::new(found.size), found.domain))
    }

    /// Returns the extents that a range of home touches, in address order, each with the part of the range that it holds.
    pub fn touching(&self, range: HomeRange) -> Vec<(ExtentId, HomeRange)> {
        let (start, end) = (range.offset.get(), range.offset.get() + range.size.get());
        let home = |id: ExtentId| {
            let (offset, size) = self.heap.home.extents.bounds(id);
            (id, HomeRange { offset, size })
        };
        self.heap.home.extents.touching(start, end).map(home).collect()
    }

    /// Returns the addresses of an extent when resident: at home, then in each alias.
    pub fn addresses_of(&self, extent: ExtentId) -> Vec<Bytes> {
        let Some(found) = self.heap.home.extents.get(extent) else { return Vec::new() };
        let aliases = found
            .aliases
            .iter()
            .map(|&alias| self.aliases[alias].address_of(extent, &self.heap.home.extents));
        [found.start].into_iter().chain(aliases).map(Bytes::new).collect()
    }

    /// Returns the bytes of an extent that an eviction has to keep: those in live blocks, joined where they touch. All bytes count if a
    /// captured graph knows the addresses, until its pool is released.
    pub fn kept_ranges(&self, extent: ExtentId) -> Vec<HomeRange> {
        let Some(found) = self.heap.home.extents.get(extent) else { return Vec::new() };
        let (start, end) = (found.start, found.end());
        let domain = &self.heap.home.domains[found.domain];
        if domain.is_held() {
            return vec![HomeRange { offset: Bytes::new(start), size: Bytes::new(end - start) }];
        }
        let range = |(from, to)| HomeRange { offset: Bytes::new(from), size: Bytes::new(to - from) };
        self.heap.home.live_ranges(start, end).into_iter().map(range).collect()
    }
}

/// Request to make a block live at one fixed place of home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Start of the block, from the start of the reservation.
    pub offset: Bytes,
    /// Size of the block: a multiple of 512 bytes.
    pub size: Bytes,
    /// Requested size; at most `size`.
    pub requested: Bytes,
    /// Stream that the block returns to when freed.
    pub stream: StreamKey,
    /// Start of the slab to open for a small block, if known.
    pub slab: Option<Bytes>,
}

/// Result of a restore. A block that is live both before and after is in both lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Blocks that were live before the restore.
    pub freed: Vec<LiveBlock>,
    /// Blocks that are live after the restore.
    pub claimed: Vec<LiveBlock>,
}

impl Claim {
    /// Returns the blocks to free (live now, not in the checkpoint) and the blocks to claim (in the checkpoint, not live now).
    pub(crate) fn differences(now: &[Claim], then: &[Claim]) -> (Vec<Claim>, Vec<Claim>) {
        let without = |these: &[Claim], those: &[Claim]| {
            let those: FxHashMap<Bytes, &Claim> = those.iter().map(|claim| (claim.offset, claim)).collect();
            these.iter().filter(|claim| those.get(&claim.offset) != Some(claim)).copied().collect()
        };
        (without(now, then), without(then, now))
    }
}

#[cfg(test)]
mod claim_tests {
    use super::*;

    #[test]
    fn a_restore_changes_only_the_differences() {
        let claim = |at: u64, stream| Claim {
            offset: Bytes::new(at),
            size: Bytes::kib(1),
            requested: Bytes::kib(1),
            stream: StreamKey(stream),
            slab: None,
        };
        let (now, then) = ([claim(0, 0), claim(4096, 0), claim(8192, 0)], [claim(0, 0), claim(4096, 1)]);
        let (goes, comes) = Claim::differences(&now, &then);
        assert_eq!((goes, comes), (vec![now[1], now[2]], vec![then[1]]));
    }
}
