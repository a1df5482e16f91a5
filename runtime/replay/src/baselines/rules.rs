//! Size rules of torch's allocator.
//!
//! Source: the note at the head of c10/cuda/CUDACachingAllocator.cpp and torch's documentation, "CUDA semantics,
//! memory management"; unchanged from torch 1.5 to 2.11 with the default configuration.

use glake_units::Bytes;

/// Granularity of block sizes in bytes.
pub(super) const GRAIN: u64 = 512;
/// Maximum size of requests in the small pool.
const SMALL_SIZE: u64 = 1 << 20;
/// Segment size of a small pool.
pub(super) const SMALL_BUFFER: u64 = 2 << 20;
/// Segment size of a large pool for requests below [`MIN_LARGE`].
pub(super) const LARGE_BUFFER: u64 = 20 << 20;
/// Minimum size of requests that get a segment of their own.
const MIN_LARGE: u64 = 10 << 20;
/// Granularity of segments for such requests.
const ROUND_LARGE: u64 = 2 << 20;

/// Pool of a stream, by request size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Class {
    /// Requests up to 1 MiB.
    Small,
    /// Requests above 1 MiB.
    Large,
}

impl Class {
    /// Returns the class of a rounded size.
    pub(super) const fn of(size: u64) -> Class {
        if size <= SMALL_SIZE { Class::Small } else { Class::Large }
    }
}

/// Returns the rounded size of a request.
pub(super) const fn rounded(bytes: Bytes) -> u64 {
    match bytes.get() {
        0..GRAIN => GRAIN,
        bytes => bytes.saturating_add(GRAIN - 1) / GRAIN * GRAIN,
    }
}

/// Returns the size of the segment to take from the device for a rounded size.
pub(super) const fn segment(size: u64) -> u64 {
    if size <= SMALL_SIZE {
        SMALL_BUFFER
    } else if size < MIN_LARGE {
        LARGE_BUFFER
    } else {
        size.saturating_add(ROUND_LARGE - 1) / ROUND_LARGE * ROUND_LARGE
    }
}

/// Returns whether a remainder of `left` bytes becomes a block of its own.
pub(super) const fn splits(class: Class, left: u64) -> bool {
    match class {
        Class::Small => left >= GRAIN,
        Class::Large => left > SMALL_SIZE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_note() {
        for (asked, size, segment_mib) in [
            (1, 512, 2),
            (513, 1024, 2),
            (1 << 20, 1 << 20, 2),
            ((1 << 20) + 1, (1 << 20) + 512, 20),
            ((10 << 20) - 1, 10 << 20, 10),
            ((10 << 20) - 512, (10 << 20) - 512, 20),
            (21 << 20, 21 << 20, 22),
        ] {
            assert_eq!(rounded(Bytes::new(asked)), size);
            assert_eq!(segment(size), segment_mib << 20, "{asked}");
        }
    }
}
