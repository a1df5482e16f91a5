//! Options of a region.

use glake_units::Bytes;

/// Treatment of a region's bytes at a shrink.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Copies the bytes out and back.
    #[default]
    Keep,
    /// Like `Keep`; once the region is sealed, its bytes are not written, so that a retained copy stays valid for the next shrink.
    Sealed,
    /// Gives the bytes up: after a refill, blocks have their addresses but undefined contents.
    Discard,
}

/// Treatment of the copy after a refill, wherever it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CopyPolicy {
    /// Drops the copy after the refill.
    #[default]
    Drop,
    /// Keeps the copy while the region is sealed. An unsealed region drops it, because the program may write.
    Retain,
    /// Like `Drop`, with host memory pinned ahead by [`super::Region::prepare`].
    Prepare,
}

/// Options of a region at its creation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionOptions {
    /// Name given by the program.
    pub tag: String,
    /// Treatment of the bytes at a shrink.
    pub policy: Policy,
    /// Treatment of the copy after a refill.
    pub host_copy: CopyPolicy,
    /// Whether the region is copied to the host while it is idle ([`super::Region::clean`]).
    pub clean: bool,
    /// Extent size, a multiple of the granularity. Large, because each mapping has a cost; not larger, because copies of one extent overlap
    /// with mapping the next.
    pub extent: Bytes,
    /// Whether the region's own domain is closed to devices that the pool is lent to ([`crate::GpuPool::close_domain`]).
    pub closed: bool,
}

impl RegionOptions {
    /// Returns the defaults: bytes kept, copies dropped, extents of 128 MiB, closed.
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
