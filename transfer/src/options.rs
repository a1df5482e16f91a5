//! Options of an engine and of a copy.

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::Bytes;

/// Options of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// GPUs whose links may serve copies of other GPUs' memory. All other links serve their own GPU's copies only. If empty, every copy is
    /// native.
    pub relays: DeviceSet,
    /// Size below which copies are native; `None`: the break-even size of the path graph.
    pub break_even: Option<Bytes>,
    /// Memory on each relay for staging GPU memory that GLake does not own (from `cudaMalloc`), at most 64 MiB. 0: such copies use their
    /// GPU's own link only.
    pub slots: Bytes,
    /// Number of program streams that can have split copies in flight at a time. Copies of further streams are native.
    pub streams: usize,
    /// Number of threads that fill and drain pinned slots for pageable memory. 0: the driver copies pageable memory.
    pub pageable_threads: usize,
    /// Pinned memory for these slots: two per thread, at most 2 MiB each. 0: the driver copies pageable memory.
    pub pageable_slots: Bytes,
    /// Pinned memory per GPU for lists of scattered blocks that its kernels copy, 24 bytes a block. Blocks beyond that are copied one by
    /// one.
    pub lists: Bytes,
    /// Whether copies captured into a graph are split: kernel nodes on relays in addition to a memcpy node. Such a graph cannot be launched
    /// from a GPU or be the body of a conditional node, and a capture does not reveal how its graph will be used. `false`: one memcpy node,
    /// like the driver's own copy.
    pub graphs: bool,
    /// Whether GPUs that the program uses may be relays. `false`: only GPUs without a primary context are.
    pub shared_gpus: bool,
}

impl Default for EngineOptions {
    /// No relays, 64 MiB of slots, 8 streams, 6 threads with 24 MiB, lists of 170,000 blocks; captured copies are single nodes.
    fn default() -> Self {
        EngineOptions {
            relays: DeviceSet::EMPTY,
            break_even: None,
            slots: Bytes::mib(64),
            streams: 8,
            pageable_threads: 6,
            pageable_slots: Bytes::mib(24),
            lists: Bytes::mib(4),
            graphs: false,
            shared_gpus: false,
        }
    }
}

/// Priority of a copy on contended links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Default priority.
    #[default]
    Normal,
    /// Priority over background copies.
    Critical,
    /// Lowest priority: the copy yields to others and keeps few bytes in flight.
    Background,
}

/// Options of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOptions {
    /// Priority on the links.
    pub priority: Priority,
    /// Whether [`crate::Engine::copy_blocking`] reads the bytes back and compares them. For other copies, call [`crate::Engine::verify`]
    /// after they have completed.
    pub verify: bool,
    /// Whether the caller will wait for the handle. Waiting for a copy without it waits for all work of the stream.
    pub waited: bool,
    /// Whether the parts may begin before earlier work of the stream, because none of it accesses the memory. Later work of the stream
    /// still waits for them. Consecutive copies of this kind leave no link idle in between. Applies to lists of a few large ranges
    /// ([`crate::Engine::copy_list`]) only.
    pub unordered: bool,
}

impl Default for CopyOptions {
    /// Default priority, waitable, ordered behind all earlier work of its stream.
    fn default() -> Self {
        CopyOptions { priority: Priority::Normal, verify: false, waited: true, unordered: false }
    }
}

/// Memory that a relay occupies on its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayCost {
    /// Relay GPU.
    pub relay: DeviceId,
    /// Decrease of free memory when the engine first used the GPU: the size of its context, unless the program had one. Allocations by
    /// other programs at that moment are included.
    pub context: Bytes,
    /// Size of its slots.
    pub slots: Bytes,
}
