//! Public value types: options of an engine and of a copy, the program's stream, predictions and statistics.

use std::time::Duration;

use glake_device::owned::{DeviceSet, StreamRef};
use glake_device::{DeviceId, Driver, Stream, StreamId};
use glake_units::Bytes;
use serde::Serialize;

use crate::Result;
use crate::paths::{Direction, Way};

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

/// Stream handle of the program. May be the legacy or per-thread default stream of the calling thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UserStream {
    /// GPU of the stream's context.
    pub device: DeviceId,
    /// CUDA handle.
    pub raw: Stream,
    /// Identity of the stream that the handle denotes.
    pub id: StreamId,
}

impl UserStream {
    /// Resolves a stream handle in a device's context for the calling thread.
    pub fn of(driver: &dyn Driver, device: DeviceId, raw: Stream) -> Result<UserStream> {
        Ok(UserStream { device, raw, id: driver.stream_id(device, raw)? })
    }

    /// Returns the stream for calls of the program's driver.
    pub(crate) fn of_driver(self, driver: &dyn Driver) -> StreamRef<'_> {
        StreamRef::new(driver, self.device, self.raw)
    }
}

/// Totals of an engine since its creation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Statistics {
    /// Paths that carried parts of split copies.
    pub paths: Vec<PathStatistics>,
    /// Number of copies made as one driver copy.
    pub native_copies: u64,
    /// Bytes of native copies.
    pub native_bytes: Bytes,
    /// Number of copies over several links.
    pub split_copies: u64,
    /// Number of copies with bytes that may not have arrived, because a relay was lost.
    pub lost_copies: u64,
}

/// Statistics of one path.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PathStatistics {
    /// GPU whose link is used; the target itself for its own link.
    pub relay: DeviceId,
    /// GPU whose memory is copied.
    pub target: DeviceId,
    /// Direction of the copy.
    pub direction: Direction,
    /// Method by which the relay passes bytes on.
    pub way: Way,
    /// Bytes enqueued.
    pub bytes: Bytes,
    /// Number of driver copies.
    pub slices: u64,
    /// Estimated busy time: timed by events for a sample of the copies, scaled to all bytes.
    pub busy: Duration,
    /// Number of parts that failed on this path and took another one.
    pub retries: u64,
    /// Whether the path is disabled until the process ends.
    pub fenced: bool,
}

/// Copies for which the engine can be faster than the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Benefit {
    /// No copies: the driver is as fast as the engine for any kind of host memory.
    Nothing,
    /// Copies from or to pageable host memory.
    Pageable,
    /// Possibly copies of any memory kind.
    Anything,
}
