//! An extent's bytes copied while it stays in use.
//!
//! ```text
//! home   [ range ][    range    ]        copy   [ piece ][ piece ][ piece ] ─► digest of the copy
//! ```
//!
//! The digest is of the copy's own bytes, taken by the host: whatever a program wrote meanwhile, an extent that has the same digest
//! later has the copy's bytes.

use glake_device::owned::{PartialDigest, Span};
use glake_stitch::{ExtentId, HomeRange};
use glake_units::Bytes;
use parking_lot::{Mutex, MutexGuard};

use super::StoredCopy;
use super::copy::packed;
use crate::gpu::ResidentReads;
use crate::{GpuPool, HostBlock, MoveError, Mover, RegionError};

/// How much is copied at a time: whoever moves the region's extents waits for it, 0.3 ms over a link of its own.
const PIECE: Bytes = Bytes::mib(16);

/// How a copy of an extent that stays ended.
#[derive(Debug)]
pub(crate) enum ResidentCopy {
    Whole(StoredCopy),
    /// The extent changed or moves, or nobody wants the copy any more.
    GivenUp,
}

/// Whose extents are copied, and by what.
#[derive(Clone, Copy)]
pub(crate) struct ResidentCopies<'a> {
    pub(crate) pool: &'a GpuPool,
    pub(crate) tag: &'a str,
    /// Who holds it moves extents.
    pub(crate) turn: &'a Mutex<()>,
    pub(crate) mover: &'a dyn Mover,
    /// Asked before each piece.
    pub(crate) keep_going: &'a dyn Fn() -> bool,
}

impl ResidentCopies<'_> {
    /// Copies these ranges of an extent to a block that is large enough.
    ///
    /// # Errors
    /// What the copies meet.
    pub(crate) fn copy(
        &self,
        extent: ExtentId,
        ranges: Vec<HomeRange>,
        block: HostBlock,
    ) -> Result<ResidentCopy, RegionError> {
        let mut digest = PartialDigest::default();
        let mut at = Bytes::ZERO;
        for piece in pieces(&ranges) {
            let size: Bytes = piece.iter().map(|range| range.size).sum();
            if !(self.keep_going)() || !self.copy_piece(extent, &ranges, &piece, &block, at, size)? {
                return Ok(ResidentCopy::GivenUp);
            }
            // Beside no lock: it takes the host several times as long as the copy.
            digest.add(part(&block, at, size));
            at = at.saturating_add(size);
        }
        Ok(ResidentCopy::Whole(StoredCopy::of_block(block, ranges, digest.finish())))
    }

    /// False: the extent changed, or moves.
    fn copy_piece(
        &self,
        extent: ExtentId,
        ranges: &[HomeRange],
        piece: &[HomeRange],
        block: &HostBlock,
        at: Bytes,
        size: Bytes,
    ) -> Result<bool, RegionError> {
        let Some(turn) = self.turn.try_lock() else { return Ok(false) };
        let unmoved = |source: MoveError| RegionError::Move {
            device: self.pool.device(),
            tag: self.tag.to_owned(),
            size,
            source,
        };
        let copies =
            packed(self.pool.core(), piece, |offset, size| block.span(at.saturating_add(offset), size))?;
        let enqueued = ResidentReads::of(self.pool).with(extent, ranges, piece, |home| {
            let pairs: Vec<(Span, Span)> = copies.into_iter().zip(home).collect();
            self.mover.enqueue(&pairs)
        })?;
        let Some(enqueued) = enqueued else { return Ok(false) };
        enqueued.map_err(unmoved)?.wait().map_err(unmoved)?;
        // A shrink that waits goes first.
        MutexGuard::unlock_fair(turn);
        Ok(true)
    }
}

/// Some bytes of a block: what lies past its end is none.
fn part(block: &HostBlock, at: Bytes, size: Bytes) -> &[u8] {
    let place = |at: Bytes| usize::try_from(at.get()).unwrap_or(usize::MAX);
    block.as_slice().get(place(at)..place(at.saturating_add(size))).unwrap_or_default()
}

/// The same ranges in the same order, in lists of [`PIECE`] at most.
fn pieces(ranges: &[HomeRange]) -> Vec<Vec<HomeRange>> {
    let (mut pieces, mut room) = (Vec::<Vec<HomeRange>>::new(), Bytes::ZERO);
    for range in ranges {
        let mut rest = *range;
        while !rest.size.is_zero() {
            if room.is_zero() {
                pieces.push(Vec::new());
                room = PIECE;
            }
            let size = rest.size.min(room);
            if let Some(piece) = pieces.last_mut() {
                piece.push(HomeRange { offset: rest.offset, size });
            }
            room = room.saturating_sub(size);
            rest =
                HomeRange { offset: rest.offset.saturating_add(size), size: rest.size.saturating_sub(size) };
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_the_ranges_in_their_order() {
        let range = |offset, size| HomeRange { offset: Bytes::mib(offset), size: Bytes::mib(size) };
        assert!(pieces(&[]).is_empty());
        assert_eq!(pieces(&[range(0, 4), range(8, 12)]), [vec![range(0, 4), range(8, 12)]]);
        let found = pieces(&[range(0, 20), range(32, 13)]);
        assert_eq!(found, [vec![range(0, 16)], vec![range(16, 4), range(32, 12)], vec![range(44, 1)]]);
    }
}
