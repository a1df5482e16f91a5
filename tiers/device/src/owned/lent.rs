//! Copies of memory that the caller owns: promised to stay alive, but not yet classified.
//!
//! ```text
//!  a caller's promise ─► Lent [ copy │ copy │ ... ] ─┬─ blocks ─► Blocks         once the kinds of the ends are known
//!                                                    └─ LentCopy ─┬─ spans ─► two Spans
//!                                                                 └─ enqueue, enqueue_in_current ─► the driver's own copy
//! ```
//!
//! To query the kind of the memory takes as long as the smallest copies gain. So the promise comes first, once for all copies of a call,
//! and the kind is queried only where it can matter.
//!
//! Invariant: the memory of a copy lives until all work has run that was enqueued on it while its list, or a value made from it, was alive:
//! by the promise of the lender.

use glake_units::Bytes;

use super::{Blocks, Side, Span};
use crate::{Address, CopyDevices, CopyRequest, DeviceId, Driver, Result, Stream};

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
