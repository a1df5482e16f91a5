//! The physical memory behind a live block.

use glake_units::Bytes;

use super::Allocator;
use crate::ids::ExtentId;
use crate::live::Live;

/// The extents that a block lies in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// Where the first one is mapped for this block, from the start of the reservation: at or before the block.
    pub start: Bytes,
    /// In the order of the block's addresses, side by side from `start` on.
    pub extents: Vec<ExtentId>,
}

impl Allocator {
    /// The extents behind the block that begins at an offset.
    pub fn backing(&self, offset: Bytes) -> Option<Backing> {
        let at = offset.get();
        match self.live.get(at, &self.pieces)? {
            Live::Piece(id) => {
                let piece = &self.pieces[id];
                let extents: Vec<ExtentId> = self.extents.touching(piece.start, piece.end()).collect();
                let start = self.extents[*extents.first()?].start;
                Some(Backing { start: Bytes::new(start), extents })
            }
            Live::Stitched(index) => {
                let block = &self.stitched[index as usize];
                let alias = &self.aliases[block.alias];
                let mut end = alias.start;
                let mut start = None;
                let mut extents = Vec::new();
                for &extent in &alias.extents {
                    let from = end;
                    end += self.extents[extent].size;
                    if end > at && from < at + block.size {
                        start.get_or_insert(from);
                        extents.push(extent);
                    }
                }
                Some(Backing { start: Bytes::new(start?), extents })
            }
        }
    }
}
