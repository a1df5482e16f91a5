//! Memory ranges that asynchronous work may be enqueued on, as values.
//!
//! ```text
//!  Registration ─┐                                   ┌─ part ─► Span ─► copy, copy_on_host
//!  Buffer ───────┼─► Span { start, size, kind, reach }
//!  a caller's promise (`lent`) ┘                     └─ its owner, kept alive
//! ```
//!
//! Invariant: the memory of a span lives until all work has run that was enqueued on it while the span, or a part of it, was alive:
//! guaranteed by its owner, whose drop waits for all work, or by the promise of the lender.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use glake_units::Bytes;

use super::{DeviceSet, Registration};
use crate::{
    Address, CopyRequest, DeviceId, Driver, DriverError, PointerKind, Refusal, Result, Stream, Verb,
};

/// Kind and reach of memory, common to the ranges on one side of a list of copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Kind of the memory.
    pub kind: PointerKind,
    /// Devices whose streams may access the ranges directly.
    pub reach: DeviceSet,
}

/// A memory range that outlives the work enqueued on it.
#[derive(Clone, Debug)]
pub struct Span {
    start: Address,
    size: Bytes,
    kind: PointerKind,
    reach: DeviceSet,
    /// Owner kept alive by the span; `None` if the memory is lent.
    _owner: Option<Arc<dyn Owner>>,
}

/// Any value that keeps a span's memory alive.
trait Owner: Any + Send + Sync + fmt::Debug {}
impl<T: Any + Send + Sync + fmt::Debug> Owner for T {}

impl Span {
    /// Wraps memory that the caller lends, given its kind and the devices whose streams may access it directly.
    ///
    /// # Safety
    /// The range is memory of that kind, readable and writable by the work of every device of `reach`. It stays so until all
    /// work has run that is enqueued while the span or a part of it is alive, and nothing touches it unordered with
    /// that work.
    pub unsafe fn lent(start: Address, size: Bytes, kind: PointerKind, reach: DeviceSet) -> Span {
        Span { start, size, kind, reach, _owner: None }
    }

    /// Wraps a range of an owner's memory.
    ///
    /// # Safety
    /// As [`Span::lent`], for as long as the owner lives; dropping the owner waits for all work of `reach`.
    pub(super) unsafe fn owned<T: Send + Sync + fmt::Debug + 'static>(
        owner: &Arc<T>,
        range: (Address, Bytes),
        kind: PointerKind,
        reach: DeviceSet,
    ) -> Span {
        Span { start: range.0, size: range.1, kind, reach, _owner: Some(owner.clone()) }
    }

    /// Returns a range of pinned memory; `None` past its end.
    pub fn pinned(memory: &Arc<Registration>, offset: Bytes, size: Bytes) -> Option<Span> {
        let (kind, reach) = (PointerKind::Pinned, DeviceSet::ALL);
        // SAFETY: the whole range is pinned for every device; its end waits for all work of all devices.
        let whole = unsafe { Span::owned(memory, (memory.start(), memory.size()), kind, reach) };
        whole.part(offset, size)
    }

    /// Returns a part of the span; `None` past its end.
    pub fn part(&self, offset: Bytes, size: Bytes) -> Option<Span> {
        let end = offset.checked_add(size)?;
        let start = self.start.checked_add(offset.get())?;
        (end <= self.size).then(|| Span { start, size, ..self.clone() })
    }

    /// Returns the same span, which also keeps `also` alive, as do its parts.
    #[must_use]
    pub fn keeping<T: Send + Sync + fmt::Debug + 'static>(self, also: &Arc<T>) -> Span {
        let owners = Arc::new((self._owner.clone(), also.clone()));
        Span { _owner: Some(owners), ..self }
    }

    /// Returns the start address.
    pub fn start(&self) -> Address {
        self.start
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// Returns the kind of the memory.
    pub fn kind(&self) -> PointerKind {
        self.kind
    }

    /// Returns the devices whose streams may access the memory directly.
    pub fn reach(&self) -> DeviceSet {
        self.reach
    }

    /// Returns kind and reach together.
    pub fn side(&self) -> Side {
        Side { kind: self.kind, reach: self.reach }
    }

    /// Returns the GPU that owns the memory.
    pub fn device(&self) -> Option<DeviceId> {
        self.kind.device()
    }

    /// Returns whether the span contains a range.
    #[inline]
    pub fn holds(&self, start: Address, size: Bytes) -> bool {
        let offset = start.0.checked_sub(self.start.0);
        let end = offset.and_then(|offset| offset.checked_add(size.get()));
        end.is_some_and(|end| end <= self.size.get())
    }

    /// Copies the bytes to other host memory on the calling thread.
    ///
    /// # Errors
    /// [`Refusal::InvalidValue`] if either is memory of a GPU, or the sizes differ.
    pub fn copy_on_host(&self, to: &Span) -> Result<()> {
        let (from, to, length) = self.on_host(to)?;
        // SAFETY: both are host memory that lives and that nothing else touches unordered: the spans' promise. They may
        // overlap.
        unsafe { std::ptr::copy(from, to, length) };
        Ok(())
    }

    /// Copies like [`Span::copy_on_host`], bypassing the caches: for large copies that are not read soon.
    ///
    /// # Errors
    /// As [`Span::copy_on_host`]; also if the two overlap.
    pub fn copy_on_host_uncached(&self, to: &Span) -> Result<()> {
        let (source, target, length) = self.on_host(to)?;
        if self.start.0.abs_diff(to.start.0) < self.size.get() {
            return Err(refused(Verb::Copy, to.start));
        }
        // SAFETY: as above, and they do not overlap.
        unsafe { copy_bytes_uncached(target, source, length) };
        Ok(())
    }

    /// Returns source, destination and length of a copy between host memory.
    fn on_host(&self, to: &Span) -> Result<(*const u8, *mut u8, usize)> {
        if self.device().is_some() || to.device().is_some() || self.size != to.size {
            return Err(refused(Verb::Copy, to.start));
        }
        let length = usize::try_from(self.size.get()).map_err(|_| refused(Verb::Copy, to.start))?;
        Ok((host(self.start).cast_const(), host(to.start), length))
    }
}

/// Enqueues a copy between two spans of equal size on a stream of `device`.
///
/// # Errors
/// [`Refusal::InvalidValue`] if the sizes differ; any error of the driver.
pub fn copy(driver: &dyn Driver, device: DeviceId, stream: Stream, to: &Span, from: &Span) -> Result<()> {
    if to.size != from.size {
        return Err(refused(Verb::Copy, to.start));
    }
    let request = CopyRequest { to: to.start, from: from.start, size: to.size };
    // SAFETY: the spans' memory lives until the copy has run.
    unsafe { driver.copy(device, request, stream) }
}

fn refused(verb: Verb, address: Address) -> DriverError {
    DriverError::Refused { verb, address, reason: Refusal::InvalidValue }
}

fn host(address: Address) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address.0).unwrap_or(0))
}

/// Bytes copied per iteration: a cache line, so that a whole line is written at once.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Copies bytes with non-temporal stores, for memory that is not read soon. The written lines are not read first, so a large copy moves two
/// thirds of the bytes over the memory bus.
///
/// # Safety
/// `from` is readable and `to` writable for `length` bytes, nothing else touches either meanwhile, and they do not overlap.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_bytes_uncached(to: *mut u8, from: *const u8, length: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    let head = to.align_offset(LINE).min(length);
    let lines = (length - head) / LINE;
    // SAFETY: the caller's promise for the first `head` bytes.
    unsafe { std::ptr::copy_nonoverlapping(from, to, head) };
    for line in 0..lines {
        let at = head + line * LINE;
        // SAFETY: the line ends at most `length` bytes from the start of both; that of `to` is aligned to its size. Loads may
        // be at any address. Every x86-64 processor has these instructions.
        unsafe {
            let (from, to) = (from.add(at).cast::<__m128i>(), to.add(at).cast::<__m128i>());
            let held = [0, 1, 2, 3].map(|part| _mm_loadu_si128(from.add(part)));
            for (part, held) in held.into_iter().enumerate() {
                _mm_stream_si128(to.add(part), held);
            }
        }
    }
    let tail = head + lines * LINE;
    // SAFETY: the caller's promise, for the rest. The fence orders these stores before all later ones, like ordinary stores.
    unsafe {
        std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), length - tail);
        _mm_sfence();
    }
}

/// Copies bytes in the ordinary way: no non-temporal stores are used on this processor.
///
/// # Safety
/// `from` is readable and `to` writable for `length` bytes, nothing else touches either meanwhile, and they do not overlap.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_bytes_uncached(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, length) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owned::{CompletionEvents, Pages};
    use crate::stub::Stub;
    use crate::{Recorder, Verb};

    fn pinned(recorder: &Arc<Recorder>) -> Arc<Registration> {
        let completion_events = CompletionEvents::new(recorder.clone());
        let mut memory =
            Registration::new(&completion_events, Pages::new(Bytes::mib(2), 1).unwrap()).unwrap();
        memory.as_mut_slice()[..1024].fill(7);
        Arc::new(memory)
    }

    #[test]
    fn a_part_lies_in_its_span_and_keeps_the_owner() {
        let recorder = Arc::new(Recorder::measured(Stub::new()));
        let memory = pinned(&recorder);
        let whole = Span::pinned(&memory, Bytes::ZERO, Bytes::mib(2)).unwrap();
        assert!(whole.part(Bytes::mib(1), Bytes::new((1 << 20) + 1)).is_none());
        assert!(Span::pinned(&memory, Bytes::mib(2), Bytes::new(1)).is_none());
        let part = whole.part(Bytes::kib(4), Bytes::kib(4)).unwrap();
        assert_eq!((part.start().0 - whole.start().0, part.size()), (4096, Bytes::kib(4)));
        drop((whole, memory));
        assert_eq!(recorder.counters().of(Verb::HostUnregister).calls, 0);
        drop(part);
        assert_eq!(recorder.counters().of(Verb::HostUnregister).calls, 1);
    }

    #[test]
    fn kept_values_live_as_long_as_the_parts() {
        let memory = pinned(&Arc::new(Recorder::measured(Stub::new())));
        let also = Arc::new(7);
        let span = Span::pinned(&memory, Bytes::ZERO, Bytes::mib(2)).unwrap().keeping(&also);
        let part = span.part(Bytes::kib(4), Bytes::kib(4)).unwrap();
        drop((span, memory));
        assert_eq!(Arc::strong_count(&also), 2);
        drop(part);
        assert_eq!(Arc::strong_count(&also), 1);
    }

    #[test]
    fn host_spans_of_equal_size_are_copied() {
        let recorder = Arc::new(Recorder::measured(Stub::new()));
        let memory = pinned(&recorder);
        let span = |offset, size| Span::pinned(&memory, Bytes::new(offset), Bytes::new(size)).unwrap();
        span(0, 1024).copy_on_host(&span(4096, 1024)).unwrap();
        assert!(memory.as_slice()[4096..5120].iter().all(|byte| *byte == 7));
        assert_eq!(memory.as_slice()[5120], 0);
        span(4096, 1024).copy_on_host_uncached(&span(9001, 1024)).unwrap();
        assert!(memory.as_slice()[9001..10025].iter().all(|byte| *byte == 7));
        assert_eq!((memory.as_slice()[9000], memory.as_slice()[10025]), (0, 0));
        assert!(span(0, 1024).copy_on_host_uncached(&span(1023, 1024)).is_err());
        assert!(span(0, 10).copy_on_host(&span(4096, 11)).is_err());
        let kind = PointerKind::Device { device: DeviceId(0), mapped: true };
        // SAFETY: no work accesses the memory.
        let device = unsafe { Span::lent(Address(1 << 40), Bytes::new(10), kind, DeviceSet::EMPTY) };
        assert!(span(0, 10).copy_on_host(&device).is_err());
    }
}

#[cfg(test)]
mod uncached_tests {
    use super::*;

    #[test]
    fn every_alignment_and_size_is_copied_exactly() {
        let from: Vec<u8> = (0..1024_u32).map(|at| (at.wrapping_mul(167) >> 3) as u8).collect();
        for to_offset in 0..LINE {
            for from_offset in [0, 1, 7, 16, 33, 63] {
                for length in [0, 1, 15, 63, 64, 65, 127, 128, 200, 511, 640] {
                    let mut to = [0xEE_u8; 1024];
                    // SAFETY: 63 + 640 bytes lie in both.
                    unsafe {
                        copy_bytes_uncached(
                            to.as_mut_ptr().add(to_offset),
                            from.as_ptr().add(from_offset),
                            length,
                        )
                    };
                    let (before, rest) = to.split_at(to_offset);
                    let (copied, after) = rest.split_at(length);
                    assert_eq!(copied, &from[from_offset..from_offset + length]);
                    assert!(before.iter().chain(after).all(|byte| *byte == 0xEE));
                }
            }
        }
    }
}
