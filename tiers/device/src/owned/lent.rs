//! Copies of memory that somebody else owns: promised, and not looked at yet.
//!
//! ```text
//!  a caller's promise ─► Lent [ copy │ copy │ ... ] ─┬─ blocks ─► Blocks         by whoever has found what the ends are
//!                                                    └─ LentCopy ─┬─ spans ─► two Spans
//!                                                                 └─ enqueue, enqueue_in_current ─► the driver's own copy
//! ```
//!
//! What memory is takes as long to ask as the smallest copies gain. So the promise comes first, once for all copies of a call, and
//! whoever makes them asks where the answer can matter.
//!
//! Invariant: the memory of a copy lives until everything has run that was enqueued on it while its list, or what was made of that, was
//! alive: by the promise of who lent it.

use glake_units::Bytes;

use super::{Blocks, Side, Span};
use crate::{Address, CopyDevices, CopyRequest, DeviceId, Driver, Result, Stream};

/// Copies between ranges that were lent.
#[derive(Clone, Copy, Debug)]
pub struct Lent<'a>(&'a [CopyRequest]);

/// One of them, or a part of one.
#[derive(Clone, Copy, Debug)]
pub struct LentCopy(CopyRequest);

impl<'a> Lent<'a> {
    /// Copies of a caller that keeps their memory.
    ///
    /// # Safety
    /// Both ranges of each copy are memory. They stay so until all work has run that is enqueued while this, or what was made of it,
    /// is alive, and nothing touches them unordered with that work. Whoever it is handed to names a [`Side`] of a range only as it was
    /// found: by the driver, or by the pool that owns the range.
    pub unsafe fn new(copies: &'a [CopyRequest]) -> Lent<'a> {
        Lent(copies)
    }

    /// Where each begins and ends.
    pub fn requests(&self) -> &'a [CopyRequest] {
        self.0
    }

    /// The copies one by one.
    pub fn each(&self) -> impl Iterator<Item = LentCopy> + use<'a> {
        self.0.iter().map(|request| LentCopy(*request))
    }

    /// The first of them, so many at most, and the others.
    #[must_use]
    pub fn split_at(&self, count: usize) -> (Lent<'a>, Lent<'a>) {
        let (first, others) = self.0.split_at(count.min(self.0.len()));
        (Lent(first), Lent(others))
    }

    /// Them as blocks, whose ends were found to be these.
    pub fn blocks(&self, to: Side, from: Side) -> Blocks<'a> {
        // SAFETY: the promise of who lent them.
        unsafe { Blocks::lent(to, from, self.0) }
    }
}

impl LentCopy {
    /// Where it begins and ends.
    pub fn request(&self) -> CopyRequest {
        self.0
    }

    /// A part of it; `None` past its end.
    pub fn part(&self, offset: Bytes, size: Bytes) -> Option<LentCopy> {
        let at = |start: Address| start.checked_add(offset.get());
        let request = CopyRequest { to: at(self.0.to)?, from: at(self.0.from)?, size };
        (offset.checked_add(size)? <= self.0.size).then_some(LentCopy(request))
    }

    /// Where it goes and where it comes from, which were found to be these.
    pub fn spans(&self, to: Side, from: Side) -> (Span, Span) {
        let lent = |start, side: Side| {
            // SAFETY: the promise of who lent it.
            unsafe { Span::lent(start, self.0.size, side.kind, side.reach) }
        };
        (lent(self.0.to, to), lent(self.0.from, from))
    }

    /// Enqueues it as the driver's own copy on a stream of `device`.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn enqueue(&self, driver: &dyn Driver, device: DeviceId, stream: Stream) -> Result<()> {
        // SAFETY: the promise of who lent it.
        unsafe { driver.copy(device, self.0, stream) }
    }

    /// Enqueues it as the driver's own copy between two devices that need no access to each other's memory, on a stream of `device`.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn enqueue_between(
        &self,
        driver: &dyn Driver,
        device: DeviceId,
        owners: CopyDevices,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the promise of who lent it.
        unsafe { driver.copy_between(device, self.0, owners, stream) }
    }

    /// As [`LentCopy::enqueue`], on a stream of any device which may touch both ranges, in fewer calls.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn enqueue_in_current(&self, driver: &dyn Driver, stream: Stream) -> Result<()> {
        // SAFETY: the promise of who lent it.
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
