//! The sizes that torch's allocator goes by.
//!
//! Source: the note at the head of c10/cuda/CUDACachingAllocator.cpp and torch's documentation, "CUDA semantics,
//! memory management"; unchanged from torch 1.5 to 2.11 with the default configuration.

use glake_units::Bytes;

/// Every size is a multiple of this.
pub(super) const GRAIN: u64 = 512;
/// The largest request that goes to the small pool.
const SMALL_SIZE: u64 = 1 << 20;
/// What a small pool takes from the device at a time.
pub(super) const SMALL_BUFFER: u64 = 2 << 20;
/// What a large pool takes from the device at a time for requests below [`MIN_LARGE`].
pub(super) const LARGE_BUFFER: u64 = 20 << 20;
/// Requests from here on get a segment of their own size.
const MIN_LARGE: u64 = 10 << 20;
/// ... rounded up to this.
const ROUND_LARGE: u64 = 2 << 20;

/// Which of a stream's two pools a request goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Class {
    /// Up to 1 MiB.
    Small,
    /// Above it.
    Large,
}

impl Class {
    /// The class of a rounded size.
    pub(super) const fn of(size: u64) -> Class {
        if size <= SMALL_SIZE { Class::Small } else { Class::Large }
    }
}

/// What a request is rounded to.
pub(super) const fn rounded(bytes: Bytes) -> u64 {
    match bytes.get() {
        0..GRAIN => GRAIN,
        bytes => bytes.saturating_add(GRAIN - 1) / GRAIN * GRAIN,
    }
}

/// The segment that is taken from the device for a rounded size.
pub(super) const fn segment(size: u64) -> u64 {
    if size <= SMALL_SIZE {
        SMALL_BUFFER
    } else if size < MIN_LARGE {
        LARGE_BUFFER
    } else {
        size.saturating_add(ROUND_LARGE - 1) / ROUND_LARGE * ROUND_LARGE
    }
}

/// Whether what is left of a segment's block beyond the request becomes a block of its own.
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
