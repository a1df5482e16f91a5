//! Parts of pinned memory, each with one owner.
//!
//! ```text
//!  Registration ──whole──► [          0          ]
//!                 split──► [   0   ][      1      ]     two owners of two ranges
//!                  join──► [          0          ]
//! ```
//!
//! Invariant: the ranges of one registration do not overlap, and the registration itself is reached through them only. So the owner of a
//! range may change its bytes; dropping the last range unpins the memory.

use std::sync::Arc;

use glake_units::Bytes;

use super::{DeviceSet, Registration, Span};
use crate::{Address, PointerKind};

/// An exclusively owned range of pinned memory.
///
/// Dropping it does not wait for work on it: the memory stays pinned while any range of it is left.
#[derive(Debug)]
pub struct PinnedRange {
    memory: Arc<Registration>,
    offset: Bytes,
    size: Bytes,
}

impl PinnedRange {
    /// Returns a registration as one range.
    pub fn whole(memory: Registration) -> Self {
        let size = memory.size();
        PinnedRange { memory: Arc::new(memory), offset: Bytes::ZERO, size }
    }

    /// Returns whether the range is a whole registration, so that dropping it unpins memory.
    pub fn is_whole(&self) -> bool {
        self.size == self.memory.size()
    }

    /// Returns the start address.
    pub fn start(&self) -> Address {
        Address(self.memory.start().0 + self.offset.get())
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// Splits the range into its first `size` bytes and the rest.
    ///
    /// # Errors
    /// The unchanged range, if one of the parts would be empty.
    pub fn split(self, size: Bytes) -> Result<(PinnedRange, PinnedRange), PinnedRange> {
        let rest = self.size.saturating_sub(size);
        if size.is_zero() || rest.is_zero() {
            return Err(self);
        }
        let offset = self.offset.saturating_add(size);
        let second = PinnedRange { memory: self.memory.clone(), offset, size: rest };
        Ok((PinnedRange { size, ..self }, second))
    }

    /// Returns whether `next` belongs to the same registration and begins where this range ends.
    pub fn is_before(&self, next: &PinnedRange) -> bool {
        let touches = self.offset.checked_add(self.size) == Some(next.offset);
        touches && Arc::ptr_eq(&self.memory, &next.memory)
    }

    /// Joins the range with the one that begins where it ends.
    ///
    /// # Errors
    /// Both ranges, if they are not adjacent parts of one registration.
    pub fn join(self, next: PinnedRange) -> Result<PinnedRange, (PinnedRange, PinnedRange)> {
        if !self.is_before(&next) {
            return Err((self, next));
        }
        Ok(PinnedRange { size: self.size.saturating_add(next.size), ..self })
    }

    /// Returns the bytes as a slice. The caller must wait for device work on them.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the memory is pinned as long as this value lives, initialised by the system, and only this value reaches it.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.length()) }
    }

    /// Returns the bytes for writing. The caller must wait for device work on them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow of this value is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(), self.length()) }
    }

    /// Returns a part of the range for asynchronous work; `None` past its end.
    pub fn span(self: &Arc<Self>, offset: Bytes, size: Bytes) -> Option<Span> {
        let range = (self.start(), self.size);
        // SAFETY: pinned for every device; the end of the registration, which this value keeps, waits for all their work.
        let whole = unsafe { Span::owned(self, range, PointerKind::Pinned, DeviceSet::ALL) };
        whole.part(offset, size)
    }

    fn pointer(&self) -> *mut u8 {
        // The registration's bytes are never borrowed as a whole: other ranges may be borrowed mutably.
        std::ptr::with_exposed_provenance_mut(usize::try_from(self.start().0).unwrap_or(0))
    }

    /// Returns the length in bytes. It fits, because the range lies in this process's memory.
    fn length(&self) -> usize {
        usize::try_from(self.size.get()).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owned::{CompletionEvents, Pages};
    use crate::stub::Stub;
    use crate::{Recorder, Verb};

    fn ranges() -> (Arc<Recorder>, PinnedRange) {
        let recorder = Arc::new(Recorder::measured(Stub::new()));
        let completion_events = CompletionEvents::new(recorder.clone());
        let memory = Registration::new(&completion_events, Pages::new(Bytes::mib(4), 1).unwrap()).unwrap();
        (recorder, PinnedRange::whole(memory))
    }

    #[test]
    fn ranges_have_disjoint_bytes() {
        let (recorder, whole) = ranges();
        let start = whole.start();
        assert!(whole.is_whole());
        let (mut first, second) = whole.split(Bytes::mib(1)).unwrap();
        let (mut second, mut third) = second.split(Bytes::mib(1)).unwrap();
        assert!(!first.is_whole());
        let slices = [first.as_mut_slice(), second.as_mut_slice(), third.as_mut_slice()];
        for (slice, byte) in slices.into_iter().zip(1..) {
            slice.fill(byte);
        }
        assert_eq!([first.size(), second.size(), third.size()], [1, 1, 2].map(Bytes::mib));
        assert_eq!(second.start().0 - start.0, 1 << 20);
        let (first, third) = first.join(third).unwrap_err();
        let (third, second) = third.join(second).unwrap_err();
        let whole = first.join(second).unwrap().join(third).unwrap();
        assert!(whole.is_whole());
        let seams = [0, (1 << 20) - 1, 1 << 20, (2 << 20) - 1, 2 << 20, (4 << 20) - 1];
        assert_eq!(seams.map(|at: usize| whole.as_slice()[at]), [1, 1, 2, 2, 3, 3]);
        let whole = whole.split(Bytes::ZERO).unwrap_err();
        let whole = whole.split(Bytes::mib(4)).unwrap_err();
        drop(whole.split(Bytes::MAX).unwrap_err());
        assert_eq!(recorder.counters().of(Verb::HostUnregister).calls, 1);
    }

    #[test]
    fn ranges_of_two_registrations_do_not_join() {
        let ((_, one), (_, other)) = (ranges(), ranges());
        let (first, _rest) = one.split(Bytes::mib(1)).unwrap();
        let (_first, rest) = other.split(Bytes::mib(1)).unwrap();
        assert!(first.join(rest).is_err());
    }

    #[test]
    fn the_last_range_or_span_unpins() {
        let (recorder, whole) = ranges();
        let (first, second) = whole.split(Bytes::mib(1)).unwrap();
        let first = Arc::new(first);
        assert!(first.span(Bytes::mib(1), Bytes::new(1)).is_none());
        let span = first.span(Bytes::kib(4), Bytes::kib(4)).unwrap();
        assert_eq!((span.start().0 - first.start().0, span.size()), (4096, Bytes::kib(4)));
        drop((first, second));
        assert_eq!(recorder.counters().of(Verb::HostUnregister).calls, 0);
        drop(span);
        assert_eq!(recorder.counters().of(Verb::HostUnregister).calls, 1);
    }
}
