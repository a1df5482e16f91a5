//! What a user can tune.

use glake_units::Bytes;

/// How a block may be reused across streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Borrow {
    /// A stream reuses only what it freed itself.
    Off,
    /// Another stream's bytes can be taken once the completion point of their free has passed: no waits, no deadlock.
    #[default]
    Completed,
    /// As `Completed`, and before the completion point the owner may wait on the GPU for the stream that freed them: whole pieces or parts, the one
    /// that fits best first, then several that touch or are stitched.
    Wait,
}

/// The knobs of one device's allocator.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The device's memory: home is twice as long, and reserved memory never exceeds it.
    pub memory: Bytes,
    /// The unit of extents and mappings (2 MiB on every GPU so far).
    pub granularity: Bytes,
    /// The full size of extents, which domains reach that hold much.
    pub extent: Bytes,
    /// The smallest size of extents: of domains that hold little, and of all once reserved memory is near its limit.
    pub extent_near_limit: Bytes,
    /// The part of the device's memory above which extents are small.
    pub near_full: f64,
    /// The part of a limit below the device's memory above which extents are small.
    pub near_limit: f64,
    /// The size of the slabs that small requests are cut from.
    pub slab: Bytes,
    /// Whether free pieces are stitched at all.
    pub alias: bool,
    /// Requests below are never stitched; `None`: below one extent.
    pub fragment_limit: Option<Bytes>,
    /// An idle alias serves a request if it is at most this many times as long.
    pub reuse_limit: f64,
    /// Stitch only where growing is not possible.
    pub stitch_only_when_full: bool,
    /// Idle aliases above this much are collected, the oldest first.
    pub idle_aliases: Bytes,
    /// How many extents may be mapped at once, at home and in aliases together.
    pub max_mappings: u64,
    /// Reserved memory stays at or below.
    pub limit: Bytes,
    /// Reserved memory stays at or below for requests, below the limit. It asks for no tight packing.
    pub budget: Bytes,
    /// Reuse across streams.
    pub borrow: Borrow,
}

impl Settings {
    /// The defaults for a device with so much memory.
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
