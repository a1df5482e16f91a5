//! An extent's bytes copied while it stays in use.
//!
//! ```text
//! home   [ range ][    range    ]        copy   [ piece ][ piece ][ piece ] ─► digest of the copy
//! ```
//!
//! The digest is of the copy's own bytes, taken by the host: whatever a program wrote meanwhile, an extent that has the same digest
//! later has the copy's bytes.

use std::sync::Arc;

use glake_device::owned::{Digest, Span};
use glake_stitch::{ExtentId, HomeRange};
use glake_units::Bytes;

use super::StoredCopy;
use super::copy::packed;
use crate::gpu::ResidentReads;
use crate::{GpuPool, HostPool, MoveError, Mover, RegionError};

/// How much is copied at a time: whoever maps or unmaps memory waits for it, 0.3 ms over a link of its own.
const PIECE: Bytes = Bytes::mib(16);

/// How a copy of an extent that stays ended.
#[derive(Debug)]
pub(crate) enum ResidentCopy {
    Whole(StoredCopy),
    /// The extent changed, or nobody wants the copy any more.
    GivenUp,
    /// There is no host memory to spare.
    NoMemory,
}

/// Copies these ranges of an extent to memory of the host that nobody else wants.
///
/// # Errors
/// What the copies meet.
pub(crate) fn copy_resident(
    pool: &GpuPool,
    tag: &str,
    (extent, ranges): (ExtentId, Vec<HomeRange>),
    host: &Arc<HostPool>,
    mover: &dyn Mover,
    keep_going: &dyn Fn() -> bool,
) -> Result<ResidentCopy, RegionError> {
    let size: Bytes = ranges.iter().map(|range| range.size).sum();
    let Some(block) = host.take_spare(size)? else { return Ok(ResidentCopy::NoMemory) };
    let unmoved = |size, source: MoveError| RegionError::Move {
        device: pool.device(),
        tag: tag.to_owned(),
        size,
        source,
    };
    let mut at = Bytes::ZERO;
    for piece in pieces(&ranges) {
        if !keep_going() {
            return Ok(ResidentCopy::GivenUp);
        }
        let size: Bytes = piece.iter().map(|range| range.size).sum();
        let copies = packed(pool.core(), &piece, |offset, size| block.span(at.saturating_add(offset), size))?;
        let copied = ResidentReads::of(pool).with(extent, &ranges, &piece, |home| {
            let pairs: Vec<(Span, Span)> = copies.into_iter().zip(home).collect();
            mover.enqueue(&pairs)?.wait()
        })?;
        match copied {
            Some(copied) => copied.map_err(|source| unmoved(size, source))?,
            None => return Ok(ResidentCopy::GivenUp),
        }
        at = at.saturating_add(size);
    }
    let digest = Digest::of(block.as_slice());
    Ok(ResidentCopy::Whole(StoredCopy::of_block(block, ranges, digest)))
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
