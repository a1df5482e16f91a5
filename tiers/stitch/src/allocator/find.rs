//! Which live block an offset lies in, and which blocks are a domain's.

use glake_units::Bytes;

use super::Allocator;
use crate::ids::{DomainId, FreeListId, PieceId, StreamKey};
use crate::live::Live;
use crate::piece::State;

/// A block that was handed out and not freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// Where it begins, from the start of the reservation.
    pub offset: Bytes,
    /// How long it is.
    pub size: Bytes,
    /// What was asked for.
    pub requested: Bytes,
    /// Whose memory it is.
    pub domain: DomainId,
    /// The stream that it goes back to.
    pub stream: StreamKey,
}

impl LiveBlock {
    fn contains(&self, offset: u64) -> bool {
        (self.offset.get()..self.offset.get() + self.size.get()).contains(&offset)
    }
}

impl Allocator {
    /// The live block that an offset lies in: its first byte, or any other. Slower than [`Allocator::block`]: it walks the
    /// slabs, or back over what lies before.
    pub fn find(&self, offset: Bytes) -> Option<LiveBlock> {
        let at = offset.get();
        let live = if at < self.slab_zone {
            Live::Piece(self.live.last_at_home(at, &self.pieces)?)
        } else if let Some((id, _)) =
            self.aliases.iter().find(|(_, alias)| (alias.start..alias.start + alias.size).contains(&at))
        {
            let blocks = self.stitched.iter().filter(|(_, block)| block.alias == id);
            let (index, _) =
                blocks.filter(|(_, block)| block.start <= at).max_by_key(|(_, block)| block.start)?;
            #[allow(clippy::cast_possible_truncation)] // as when it was handed out
            Live::Stitched(index as u32)
        } else {
            Live::Piece(self.piece_at(at).filter(|&id| self.pieces[id].state == State::Live)?)
        };
        Some(self.live_block(live)).filter(|block| block.contains(at))
    }

    /// The live blocks of a domain, in the order of their offsets.
    pub fn blocks_of(&self, domain: DomainId) -> Vec<LiveBlock> {
        let all = self.live.iter(&self.pieces).map(|(_, live)| self.live_block(live));
        let mut blocks: Vec<LiveBlock> = all.filter(|block| block.domain == domain).collect();
        blocks.sort_unstable_by_key(|block| block.offset);
        blocks
    }

    /// The piece of home that an offset lies in; inside a slab, the slab's piece.
    pub(super) fn piece_at(&self, offset: u64) -> Option<PieceId> {
        let id = self.piece_from(self.segments.last_at(offset)?, offset)?;
        if self.pieces[id].state == State::Slab {
            return self.piece_from(self.pieces[id].inside, offset);
        }
        Some(id)
    }

    /// Of the pieces from an edge to the next one.
    pub(super) fn piece_from(&self, edge: PieceId, offset: u64) -> Option<PieceId> {
        let mut id = self.pieces[edge].next;
        while self.pieces[id].state != State::Edge {
            if offset < self.pieces[id].end() {
                return Some(id);
            }
            id = self.pieces[id].next;
        }
        None
    }

    fn live_block(&self, live: Live) -> LiveBlock {
        let (offset, size, requested, list) = match live {
            Live::Piece(id) => {
                let piece = &self.pieces[id];
                (piece.start, piece.size, piece.requested, piece.list)
            }
            Live::Stitched(index) => {
                let block = &self.stitched[index as usize];
                (block.start, block.size, block.requested, block.list)
            }
        };
        let (domain, stream) = self.owner_of_list(list);
        LiveBlock {
            offset: Bytes::new(offset),
            size: Bytes::new(size),
            requested: Bytes::new(requested),
            domain,
            stream,
        }
    }

    /// Whose a live block's free list is; it is always a stream's.
    fn owner_of_list(&self, list: FreeListId) -> (DomainId, StreamKey) {
        let list = &self.lists[list.index()];
        (list.domain, list.stream().unwrap_or_default())
    }
}
