//! Live blocks, found by an offset or by their domain, with the physical memory behind them.

use glake_units::Bytes;

use crate::aliases::Aliases;
use crate::claim::Claim;
use crate::error::{Obstacle, StitchError};
use crate::heap::Heap;
use crate::ids::{DomainId, ExtentId, PieceId, StreamKey};
use crate::live::Live;
use crate::piece::State;
use crate::view::extents::HomeRange;

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

    /// Returns the claim that restores a live block.
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
