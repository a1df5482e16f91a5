//! Lists of blocks to copy: memory ranges that asynchronous work may be enqueued on, as with spans.
//!
//! ```text
//!  a caller's promise ─► Lent [ copy │ copy │ ... ] ─┬─ blocks ─► Blocks         once the kinds of the ends are known
//!                                                    └─ LentCopy ─┬─ spans ─► two Spans
//!                                                                 └─ enqueue, enqueue_in_current ─► the driver's own copy
//!  Blocks { to: Side, from: Side, [ block │ block │ ... ] }      properties common to all blocks are stored once
//!                                      └─ piece ─► Piece ─► copy_piece, copy_pieces, BlockList::push
//! ```
//!
//! A pair of spans for each of 100,000 blocks would be 11 MB, written and read again before the first byte moves. To query the kind of
//! the memory takes as long as the smallest copies gain. So the caller's promise to keep its memory alive comes first, once for all
//! copies of a call, and the kind is queried only where it can matter.
//!
//! Invariant: the memory of a block or copy lives until all work has run that was enqueued on it while its list, or a value made from it,
//! was alive: guaranteed by the spans that it was made of, or by the promise of the lender.

use glake_units::Bytes;

use super::{Side, Span};
use crate::{Address, CopyDevices, CopyRequest, DeviceId, Driver, Result, Stream};

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

/// Copies between ranges that the caller lends.
#[derive(Clone, Copy, Debug)]
pub struct Lent<'a>(&'a [CopyRequest]);

/// One lent copy, or a part of one.
#[derive(Clone, Copy, Debug)]
pub struct LentCopy(CopyRequest);

impl<'a> Lent<'a> {
    /// Wraps copies whose memory the caller keeps alive.
    ///
    /// # Safety
    /// Both ranges of each copy are memory. They stay so until all work has run that is enqueued while this value, or one made from it, is
    /// alive, and nothing touches them unordered with that work. A receiver names the [`Side`] of a range only as it was found: by the
    /// driver, or by the pool that owns the range.
    pub unsafe fn new(copies: &'a [CopyRequest]) -> Lent<'a> {
        Lent(copies)
    }

    /// Returns the address ranges of the copies.
    pub fn requests(&self) -> &'a [CopyRequest] {
        self.0
    }

    /// Iterates over the copies.
    pub fn each(&self) -> impl Iterator<Item = LentCopy> + use<'a> {
        self.0.iter().map(|request| LentCopy(*request))
    }

    /// Splits off the first `count` copies at most; returns them and the rest.
    #[must_use]
    pub fn split_at(&self, count: usize) -> (Lent<'a>, Lent<'a>) {
        let (first, others) = self.0.split_at(count.min(self.0.len()));
        (Lent(first), Lent(others))
    }

    /// Returns the copies as blocks, given the properties found for both sides.
    pub fn blocks(&self, to: Side, from: Side) -> Blocks<'a> {
        // SAFETY: the lender's promise.
        unsafe { Blocks::lent(to, from, self.0) }
    }
}

impl LentCopy {
    /// Returns the address ranges of the copy.
    pub fn request(&self) -> CopyRequest {
        self.0
    }

    /// Returns a part of the copy; `None` past its end.
    pub fn part(&self, offset: Bytes, size: Bytes) -> Option<LentCopy> {
        let at = |start: Address| start.checked_add(offset.get());
        let request = CopyRequest { to: at(self.0.to)?, from: at(self.0.from)?, size };
        (offset.checked_add(size)? <= self.0.size).then_some(LentCopy(request))
    }

    /// Returns destination and source as spans, given the properties found for both.
    pub fn spans(&self, to: Side, from: Side) -> (Span, Span) {
        let lent = |start, side: Side| {
            // SAFETY: the lender's promise.
            unsafe { Span::lent(start, self.0.size, side.kind, side.reach) }
        };
        (lent(self.0.to, to), lent(self.0.from, from))
    }

    /// Enqueues the driver's own copy on a stream of `device`.
    ///
    /// # Errors
    /// Any error of the driver.
    pub fn enqueue(&self, driver: &dyn Driver, device: DeviceId, stream: Stream) -> Result<()> {
        // SAFETY: the lender's promise.
        unsafe { driver.copy(device, self.0, stream) }
    }

    /// Enqueues the driver's own copy between two devices that need no peer access, on a stream of `device`.
    ///
    /// # Errors
    /// Any error of the driver.
    pub fn enqueue_between(
        &self,
        driver: &dyn Driver,
        device: DeviceId,
        owners: CopyDevices,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the lender's promise.
        unsafe { driver.copy_between(device, self.0, owners, stream) }
    }

    /// Enqueues like [`LentCopy::enqueue`], on a stream of any device that may access both ranges, in fewer calls.
    ///
    /// # Errors
    /// Any error of the driver.
    pub fn enqueue_in_current(&self, driver: &dyn Driver, stream: Stream) -> Result<()> {
        // SAFETY: the lender's promise.
        unsafe { driver.copy_on(self.0, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PointerKind;
    use crate::owned::DeviceSet;

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

#[cfg(test)]
mod lent_tests {
    use super::*;
    use crate::PointerKind;
    use crate::owned::DeviceSet;

    #[test]
    fn a_part_lies_in_its_copy_and_lists_are_split_in_order() {
        let at = |start: u64| CopyRequest {
            to: Address(start),
            from: Address(start << 20),
            size: Bytes::new(100),
        };
        let requests = [at(1000), at(2000), at(3000)];
        // SAFETY: nothing is enqueued.
        let lent = unsafe { Lent::new(&requests) };
        let (first, others) = lent.split_at(1);
        assert_eq!((first.requests(), others.requests()), (&requests[..1], &requests[1..]));
        assert!(lent.split_at(9).1.requests().is_empty());
        let copy = others.each().next().unwrap();
        let part = copy.part(Bytes::new(40), Bytes::new(60)).unwrap().request();
        assert_eq!(
            (part.to, part.from, part.size),
            (Address(2040), Address((2000 << 20) + 40), Bytes::new(60))
        );
        assert!(
            copy.part(Bytes::new(40), Bytes::new(61)).is_none()
                && copy.part(Bytes::MAX, Bytes::new(1)).is_none()
        );
        let side = Side { kind: PointerKind::Pinned, reach: DeviceSet::ALL };
        let (to, from) = copy.spans(side, side);
        assert_eq!(
            (to.start(), from.start(), to.size()),
            (Address(2000), Address(2000 << 20), Bytes::new(100))
        );
        assert_eq!(others.blocks(side, side).requests(), &requests[1..]);
    }
}
