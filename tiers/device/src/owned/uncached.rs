//! Host copies that bypass the caches, for memory that is not read soon. The written lines are not read first, so a large copy moves two
//! thirds of the bytes over the memory bus.

/// Bytes copied per iteration: a cache line, so that a whole line is written at once.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Copies bytes with non-temporal stores.
///
/// # Safety
/// `from` is readable and `to` writable for `length` bytes, nothing else touches either meanwhile, and they do not overlap.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, length: usize) {
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
pub(super) unsafe fn copy(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, length) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_and_size_is_copied_exactly() {
        let from: Vec<u8> = (0..1024_u32).map(|at| (at.wrapping_mul(167) >> 3) as u8).collect();
        for to_offset in 0..LINE {
            for from_offset in [0, 1, 7, 16, 33, 63] {
                for length in [0, 1, 15, 63, 64, 65, 127, 128, 200, 511, 640] {
                    let mut to = [0xEE_u8; 1024];
                    // SAFETY: 63 + 640 bytes lie in both.
                    unsafe { copy(to.as_mut_ptr().add(to_offset), from.as_ptr().add(from_offset), length) };
                    let (before, rest) = to.split_at(to_offset);
                    let (copied, after) = rest.split_at(length);
                    assert_eq!(copied, &from[from_offset..from_offset + length]);
                    assert!(before.iter().chain(after).all(|byte| *byte == 0xEE));
                }
            }
        }
    }
}
