//! Index of the live blocks by their start offset.
//!
//! ```text
//! home:  stretch of 1 MiB ─► a piece      a large block is longer than that, so at most one begins in a stretch
//! slabs, aliases ──────────► hash table
//! ```
//!
//! The table of stretches answers with one memory access and no hashing: most bytes, and most calls of a training run, are in large blocks.
//! It stores pieces and not their starts: the caller reads the piece next anyway, and a table half as large is twice as often in the cache.

use rustc_hash::FxHashMap;

use crate::SMALL_LIMIT;
use crate::ids::PieceId;
use crate::piece::Pieces;
use crate::room;

/// Kind of a live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Live {
    Piece(PieceId),
    /// Index of a stitched block.
    Stitched(u32),
}

/// Live blocks of a device.
#[derive(Debug)]
pub(crate) struct LiveBlocks {
    /// End of home; offsets below it are large blocks.
    home_end: u64,
    /// Piece of the block that begins in each stretch, or none.
    stretches: Vec<PieceId>,
    others: FxHashMap<u64, Live>,
    at_home: usize,
}

#[allow(clippy::cast_possible_truncation)] // home is at most 2^40 bytes
const fn stretch_of(offset: u64) -> usize {
    (offset / SMALL_LIMIT.get()) as usize
}

impl LiveBlocks {
    pub(crate) fn new(home_end: u64) -> Self {
        LiveBlocks { home_end, stretches: Vec::new(), others: FxHashMap::default(), at_home: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.at_home + self.others.len()
    }

    /// Makes room for blocks up to `end`, to which home is now mapped, so that no hit has to.
    pub(crate) fn reach(&mut self, end: u64) {
        let stretches = stretch_of(end.min(self.home_end)) + 1;
        if stretches > self.stretches.len() {
            self.stretches.resize(stretches, PieceId::NONE);
        }
    }

    /// Makes room for the small blocks that hits add until the next call.
    pub(crate) fn make_room(&mut self) {
        room::make(self.others.len(), self.others.capacity(), room::OF_DEVICE, |more| {
            self.others.reserve(more)
        });
    }

    /// Adds a live block.
    #[inline]
    pub(crate) fn insert(&mut self, offset: u64, live: Live) {
        match live {
            Live::Piece(piece) if offset < self.home_end => {
                let stretch = stretch_of(offset);
                if stretch >= self.stretches.len() {
                    self.reach(offset);
                }
                let slot = &mut self.stretches[stretch];
                debug_assert_eq!(*slot, PieceId::NONE, "a stretch with two large blocks");
                *slot = piece;
                self.at_home += 1;
            }
            _ => {
                self.others.insert(offset, live);
            }
        }
    }

    #[inline]
    pub(crate) fn remove(&mut self, offset: u64, pieces: &Pieces) -> Option<Live> {
        if offset >= self.home_end {
            return self.others.remove(&offset);
        }
        let slot = self.stretches.get_mut(stretch_of(offset))?;
        let piece = begins_at(*slot, offset, pieces)?;
        *slot = PieceId::NONE;
        self.at_home -= 1;
        Some(Live::Piece(piece))
    }

    pub(crate) fn get(&self, offset: u64, pieces: &Pieces) -> Option<Live> {
        if offset >= self.home_end {
            return self.others.get(&offset).copied();
        }
        let piece = *self.stretches.get(stretch_of(offset))?;
        begins_at(piece, offset, pieces).map(Live::Piece)
    }

    /// Returns the last large block that begins at or before an offset of home; walks back over stretches without one.
    pub(crate) fn last_at_home(&self, offset: u64, pieces: &Pieces) -> Option<PieceId> {
        let upto = self.stretches.len().min(stretch_of(offset) + 1);
        let blocks = self.stretches[..upto].iter().rev().copied().filter(|&piece| piece != PieceId::NONE);
        blocks.into_iter().find(|&piece| pieces[piece].start <= offset)
    }

    /// Iterates over all live blocks in no particular order.
    pub(crate) fn iter<'a>(&'a self, pieces: &'a Pieces) -> impl Iterator<Item = (u64, Live)> + 'a {
        let home = self.stretches.iter().copied().filter(|&piece| piece != PieceId::NONE);
        let home = home.map(|piece| (pieces[piece].start, Live::Piece(piece)));
        home.chain(self.others.iter().map(|(&offset, &live)| (offset, live)))
    }
}

#[inline]
fn begins_at(piece: PieceId, offset: u64, pieces: &Pieces) -> Option<PieceId> {
    (piece != PieceId::NONE && pieces[piece].start == offset).then_some(piece)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bins::QUANTUM;
    use crate::piece::State;

    const MIB: u64 = 1 << 20;

    #[test]
    fn finds_only_blocks_that_begin_at_the_offset() {
        let (mut live, mut pieces) = (LiveBlocks::new(1 << 30), Pieces::default());
        let offsets = [0, 2 * MIB - QUANTUM, 6 * MIB, 1 << 30, (1 << 30) + QUANTUM];
        let blocks = offsets.map(|offset| (offset, pieces.segment(offset, 2 * MIB, State::Live).1));
        for (offset, piece) in blocks {
            live.insert(offset, Live::Piece(piece));
        }
        live.insert(1 << 40, Live::Stitched(7));
        assert_eq!(live.len(), 6);
        for (offset, block) in
            [(0, 0), (2 * MIB - QUANTUM - 1, 0), (2 * MIB, 1), (6 * MIB - 1, 1), (6 * MIB, 2), (180 * MIB, 2)]
        {
            assert_eq!(live.last_at_home(offset, &pieces), Some(blocks[block].1), "{offset}");
        }
        for wrong in [1, 100, QUANTUM, MIB, 2 * MIB, 4 * MIB, 6 * MIB + 1, (1 << 30) + 1, 1 << 41, u64::MAX] {
            assert_eq!(live.get(wrong, &pieces), None, "{wrong}");
            assert_eq!(live.remove(wrong, &pieces), None, "{wrong}");
        }
        assert_eq!(live.iter(&pieces).filter(|block| offsets.contains(&block.0)).count(), 5);
        for (offset, piece) in blocks {
            assert_eq!(live.remove(offset, &pieces), Some(Live::Piece(piece)));
            assert_eq!(live.remove(offset, &pieces), None, "a double free");
        }
        assert_eq!(live.remove(1 << 40, &pieces), Some(Live::Stitched(7)));
        assert_eq!((live.len(), live.iter(&pieces).count()), (0, 0));
    }
}
