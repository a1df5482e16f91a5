//! What a region is made for, as data.

use glake_units::Bytes;

/// What becomes of a region's bytes when it is shrunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// They are copied, and copied back.
    #[default]
    Keep,
    /// As `Keep`, and once the region is sealed nobody writes to them: a copy that was retained is good for the next time.
    Sealed,
    /// They are given up: after a refill blocks have their addresses, and any bytes.
    Discard,
}

/// What becomes of the copy, wherever it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CopyPolicy {
    /// It goes when the bytes are back.
    #[default]
    Drop,
    /// It stays while the region is sealed. Of one that is not it goes: the program may write to the bytes.
    Retain,
    /// As `Drop`, and host memory for it is pinned ahead, by [`super::Region::prepare`].
    Prepare,
}

/// How a region is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionOptions {
    /// By what the program knows it.
    pub tag: String,
    /// What becomes of its bytes.
    pub policy: Policy,
    /// What becomes of their copy.
    pub host_copy: CopyPolicy,
    /// Whether its bytes are copied to the host while nobody uses it ([`super::Region::clean`]).
    pub clean: bool,
    /// The size of its extents, a multiple of the granularity: mapping costs by the extent, so they are large; copies of
    /// one overlap with mappings of the next, so they are not larger.
    pub extent: Bytes,
    /// Whether it is closed to whom its pool is lent ([`crate::GpuPool::close_domain`]), where it has a domain of its own.
    pub closed: bool,
}

impl RegionOptions {
    /// Bytes are kept, copies dropped, extents of 128 MiB, and it is closed.
    pub fn of(tag: impl Into<String>) -> Self {
        let (policy, host_copy) = (Policy::default(), CopyPolicy::default());
        RegionOptions {
            tag: tag.into(),
            policy,
            host_copy,
            clean: false,
            extent: Bytes::mib(128),
            closed: true,
        }
    }
}
