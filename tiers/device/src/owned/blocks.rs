//! Lists of blocks to copy: memory ranges that asynchronous work may be enqueued on, as with spans.
//!
//! ```text
//!  Blocks { to: Side, from: Side, [ block │ block │ ... ] }      properties common to all blocks are stored once
//!                                      └─ piece ─► Piece ─► copy_piece, copy_pieces, BlockList::push
//! ```
//!
//! A pair of spans for each of 100,000 blocks would be 11 MB, written and read again before the first byte moves.
//!
//! Invariant: a block's memory lives until all work has run that was enqueued on it while its list, or a piece of it, was alive: guaranteed
//! by the spans that it was made of, or by the promise of the lender.

use glake_units::Bytes;

use super::{DeviceSet, Span};
use crate::{Address, CopyRequest, DeviceId, Driver, PointerKind, Result, Stream};

/// Properties common to the ranges on one side of a copy list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Kind of the memory.
    pub kind: PointerKind,
    /// Devices whose streams may access the ranges directly.
    pub reach: DeviceSet,
}

/// Blocks with equal kinds of ends, copied in no particular order.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    to: Side,
    from: Side,
    requests: Requests<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Requests<'a> {
    One(CopyRequest),
    Many(&'a [CopyRequest]),
}

impl<'a> Blocks<'a> {
    /// Builds a list of blocks in memory that the caller lends.
    ///
    /// # Safety
    /// As [`Span::lent`], for both ranges of each block, until the last value of this lifetime is gone.
    pub unsafe fn lent(to: Side, from: Side, requests: &'a [CopyRequest]) -> Blocks<'a> {
        Blocks { to, from, requests: Requests::Many(requests) }
    }

    /// Builds a list of one block from two spans; `None` if their sizes differ.
    pub fn pair(to: &'a Span, from: &'a Span) -> Option<Blocks<'a>> {
        let request = CopyRequest { to: to.start(), from: from.start(), size: to.size() };
        let requests = Requests::One(request);
        (to.size() == from.size()).then(|| Blocks { to: to.side(), from: from.side(), requests })
    }

    /// Builds a list of blocks that lie in two spans; `None` if a block does not.
    pub fn between(to: &'a Span, from: &'a Span, requests: &'a [CopyRequest]) -> Option<Blocks<'a>> {
        let lies = |block: &CopyRequest| to.holds(block.to, block.size) && from.holds(block.from, block.size);
        let requests = requests.iter().all(lies).then_some(Requests::Many(requests))?;
        Some(Blocks { to: to.side(), from: from.side(), requests })
    }

    /// Returns the properties of the destinations.
    pub fn to(&self) -> Side {
        self.to
    }

    /// Returns the properties of the sources.
    pub fn from(&self) -> Side {
        self.from
    }

    /// Returns the address ranges of the blocks.
    pub fn requests(&self) -> &[CopyRequest] {
        match &self.requests {
            Requests::One(request) => std::slice::from_ref(request),
            Requests::Many(requests) => requests,
        }
    }

    /// Returns a part of the block at `index`, at most `most` long; `None` if there is no such block, or nothing of it is left after
    /// `offset`.
    #[inline]
    pub fn piece(&self, index: usize, offset: Bytes, most: Bytes) -> Option<Piece<'_>> {
        let CopyRequest { to, from, size } = *self.requests().get(index)?;
        let size = size.saturating_sub(offset).min(most);
        let at = |start: Address| start.checked_add(offset.get());
        let request = CopyRequest { to: at(to)?, from: at(from)?, size };
        (!size.is_zero()).then_some(Piece { blocks: self, request })
    }
}

/// A part of a block, or all of it.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    blocks: &'a Blocks<'a>,
    request: CopyRequest,
}

impl Piece<'_> {
    /// Returns the properties of the destination.
    pub fn to(&self) -> Side {
        self.blocks.to
    }

    /// Returns the properties of the source.
    pub fn from(&self) -> Side {
        self.blocks.from
    }

    /// Returns the address ranges of the piece.
    pub fn request(&self) -> CopyRequest {
        self.request
    }

    /// Returns the length of the piece.
    pub fn size(&self) -> Bytes {
        self.request.size
    }
}

/// Enqueues the copy of a piece on a stream of `device`.
///
/// # Errors
/// What the driver answers.
pub fn copy_piece(driver: &dyn Driver, device: DeviceId, stream: Stream, piece: &Piece<'_>) -> Result<()> {
    // SAFETY: the piece's memory lives until the copy has run.
    unsafe { driver.copy(device, piece.request, stream) }
}

/// Enqueues the copies of pieces, unordered among themselves.
///
/// # Errors
/// As [`copy_piece`].
pub fn copy_pieces(
    driver: &dyn Driver,
    device: DeviceId,
    stream: Stream,
    pieces: &[Piece<'_>],
) -> Result<()> {
    let requests: Vec<CopyRequest> = pieces.iter().map(Piece::request).collect();
    // SAFETY: the pieces' memory lives until the copies have run.
    unsafe { driver.copy_batch(device, &requests, stream) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_lies_in_its_block() {
        let side = Side { kind: PointerKind::Pinned, reach: DeviceSet::ALL };
        let block = |to: u64, from: u64, size| CopyRequest {
            to: Address(to),
            from: Address(from),
            size: Bytes::new(size),
        };
        let requests = [block(100, 200, 70), block(0, 0, 0), block(u64::MAX - 9, 5, 9)];
        // SAFETY: no work accesses the memory.
        let blocks = unsafe { Blocks::lent(side, side, &requests) };
        let piece = |index, offset| {
            blocks.piece(index, Bytes::new(offset), Bytes::new(64)).map(|piece| piece.request())
        };
        assert_eq!(piece(0, 0), Some(block(100, 200, 64)));
        assert_eq!(piece(0, 64), Some(block(164, 264, 6)));
        assert_eq!(piece(2, 4), Some(block(u64::MAX - 5, 9, 5)));
        for (index, offset) in [(0, 70), (0, u64::MAX), (1, 0), (2, 9), (3, 0)] {
            assert_eq!(piece(index, offset), None);
        }
    }

    #[test]
    fn blocks_lie_in_their_spans() {
        let span = |start, size| {
            // SAFETY: no work accesses the memory.
            unsafe { Span::lent(Address(start), Bytes::new(size), PointerKind::Pageable, DeviceSet::EMPTY) }
        };
        let (to, from, other) = (span(10, 5), span(20, 5), span(30, 6));
        let pair = Blocks::pair(&to, &from).unwrap();
        let request = CopyRequest { to: Address(10), from: Address(20), size: Bytes::new(5) };
        assert_eq!((pair.requests(), pair.to()), (&[request][..], to.side()));
        assert!(Blocks::pair(&to, &other).is_none());
        let block =
            |to, from, size| CopyRequest { to: Address(to), from: Address(from), size: Bytes::new(size) };
        let requests = [block(10, 30, 5), block(14, 35, 1)];
        assert_eq!(Blocks::between(&to, &other, &requests).unwrap().requests(), requests);
        for wrong in [block(9, 30, 1), block(14, 30, 2), block(12, 34, 3)] {
            assert!(Blocks::between(&to, &other, &[requests[0], wrong]).is_none());
        }
    }
}
