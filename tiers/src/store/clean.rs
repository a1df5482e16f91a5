//! Copy of an extent that stays in use.
//!
//! ```text
//! home   [ range ][    range    ]        copy   [ piece ][ piece ][ piece ] ─► digest of the copy
//! ```
//!
//! The host computes the digest of the copy's own bytes. An extent with the same digest later therefore has the copy's bytes, whatever a
//! program wrote meanwhile.

use glake_device::owned::{PartialDigest, Span};
use glake_stitch::{ExtentId, HomeRange};
use glake_units::Bytes;
use parking_lot::{Mutex, MutexGuard};

use super::StoredCopy;
use super::copy::packed;
use crate::gpu::ResidentReads;
use crate::{GpuPool, HostBlock, MoveError, Mover, RegionError};

/// Bytes copied at a time. Threads that move the region's extents wait for one piece: 0.3 ms on a link of its own.
const PIECE_BYTES: Bytes = Bytes::mib(16);

/// Result of copying a resident extent.
#[derive(Debug)]
pub(crate) enum ResidentCopy {
    Whole(StoredCopy),
    /// Stopped: the extent changed or moves, or the copy is no longer wanted.
    GivenUp,
}

/// Context for copying resident extents of a region.
#[derive(Clone, Copy)]
pub(crate) struct ResidentCopies<'a> {
    pub(crate) pool: &'a GpuPool,
    pub(crate) tag: &'a str,
    /// Lock held by threads that move extents.
    pub(crate) turn: &'a Mutex<()>,
    pub(crate) mover: &'a dyn Mover,
    /// Whether to continue; called before each piece.
    pub(crate) keep_going: &'a dyn Fn() -> bool,
}

impl ResidentCopies<'_> {
    /// Copies these ranges of an extent to a block that is large enough.
    ///
    /// # Errors
    /// The error of a copy.
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
            // Computed without a lock: the digest takes the host several times as long as the copy.
            digest.add(part(&block, at, size));
            at = at.saturating_add(size);
        }
        Ok(ResidentCopy::Whole(StoredCopy::of_block(block, ranges, digest.finish())))
    }

    /// Copies one piece. Returns false if the extent changed or moves.
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
        // Lets a waiting shrink go first.
        MutexGuard::unlock_fair(turn);
        Ok(true)
    }
}

/// Returns a part of a block's bytes, clipped to its end.
fn part(block: &HostBlock, at: Bytes, size: Bytes) -> &[u8] {
    let place = |at: Bytes| usize::try_from(at.get()).unwrap_or(usize::MAX);
    block.as_slice().get(place(at)..place(at.saturating_add(size))).unwrap_or_default()
}

/// Splits ranges, in order, into lists of at most [`PIECE_BYTES`] bytes.
fn pieces(ranges: &[HomeRange]) -> Vec<Vec<HomeRange>> {
    let (mut pieces, mut room) = (Vec::<Vec<HomeRange>>::new(), Bytes::ZERO);
    for range in ranges {
        let mut rest = *range;
        while !rest.size.is_zero() {
            if room.is_zero() {
                pieces.push(Vec::new());
                room = PIECE_BYTES;
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
