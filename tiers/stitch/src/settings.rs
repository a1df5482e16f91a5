//! Settings of an allocator that users can tune.

use glake_units::Bytes;

/// Policy for reusing memory across streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Borrow {
    /// A stream reuses only memory that it freed itself.
    Off,
    /// A stream may also reuse memory of other streams once the completion point of the free has passed: no waits, no deadlock.
    #[default]
    Completed,
    /// `Completed`, and before the completion point the new owner may wait on the GPU for the stream that freed the memory: whole pieces or
    /// parts, the best fit first, then several that touch or are stitched.
    Wait,
}

/// The settings of one device's allocator.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Memory of the device: home is twice as long, and reserved memory never exceeds it.
    pub memory: Bytes,
    /// Unit of extents and mappings (2 MiB on every GPU so far).
    pub granularity: Bytes,
    /// Full size of extents, used by domains that hold much memory.
    pub extent: Bytes,
    /// Smallest size of extents, used by domains that hold little, and by all once reserved memory is near its limit.
    pub extent_near_limit: Bytes,
    /// Fraction of the device's memory above which extents are small.
    pub near_full: f64,
    /// Fraction of a limit below the device's memory above which extents are small.
    pub near_limit: f64,
    /// Size of the slabs that serve small requests.
    pub slab: Bytes,
    /// Whether free pieces are stitched at all.
    pub alias: bool,
    /// Smallest request that is stitched; `None`: one extent.
    pub fragment_limit: Option<Bytes>,
    /// Largest ratio of an idle alias's size to the request at which the alias is reused.
    pub reuse_limit: f64,
    /// Whether to stitch only if growing is not possible.
    pub stitch_only_when_full: bool,
    /// Limit of idle aliases, in bytes; above it the oldest are collected.
    pub idle_aliases: Bytes,
    /// Maximum number of mapped extents, at home and in aliases together.
    pub max_mappings: u64,
    /// Limit of reserved memory.
    pub limit: Bytes,
    /// Limit of memory reserved by requests, below `limit`. It does not ask for tight packing.
    pub budget: Bytes,
    /// Policy for reuse across streams.
    pub borrow: Borrow,
}

impl Settings {
    /// Returns the defaults for a device with `memory` bytes.
    pub fn for_memory(memory: Bytes) -> Self {
        Settings {
            memory,
            granularity: Bytes::mib(2),
            extent: Bytes::mib(16),
            extent_near_limit: Bytes::mib(2),
            near_full: 0.9,
            near_limit: 0.25,
            slab: Bytes::mib(2),
            alias: true,
            fragment_limit: None,
            reuse_limit: 10.0,
            stitch_only_when_full: false,
            idle_aliases: Bytes::gib(1000),
            max_mappings: 400_000,
            limit: memory,
            budget: memory,
            borrow: Borrow::Completed,
        }
    }
}
