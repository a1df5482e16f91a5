//! What an engine may use, and what a copy asks for.

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::Bytes;

/// How an engine is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineOptions {
    /// GPUs whose links may serve others' copies. A link of a GPU that is not among them serves its own copies only. None:
    /// every copy is native.
    pub relays: DeviceSet,
    /// Smaller copies are native; `None`: what the graph says of the target.
    pub break_even: Option<Bytes>,
    /// Memory of each relay through which copies of GPU memory go that is not ours (that of `cudaMalloc`), at most 64 MiB; 0: such
    /// copies take their GPU's own link.
    pub slots: Bytes,
    /// How many streams of the program can have copies over several links under way at a time; those of further ones are
    /// native.
    pub streams: usize,
    /// Threads that fill and empty pinned slots for pageable memory; 0: the driver copies it.
    pub pageable_threads: usize,
    /// Pinned memory for those slots, two a thread, of 2 MiB at most; 0: the driver copies pageable memory.
    pub pageable_slots: Bytes,
    /// Pinned memory, for each GPU, for the lists of scattered blocks that its kernels are copying: 24 bytes a block. Blocks past
    /// that are copied one by one.
    pub lists: Bytes,
    /// Whether copies that a stream records into a graph are split: kernel nodes on relays beside a memcpy node. Such a graph
    /// cannot be launched from a GPU, nor be the body of a conditional node, and what a capture will be used for cannot be asked
    /// of it. False: one memcpy node, as the driver's own copy.
    pub graphs: bool,
    /// Whether links of GPUs that the program uses too are lent to copies; else relays are only GPUs whose primary context nobody
    /// has.
    pub shared_gpus: bool,
}

impl Default for EngineOptions {
    /// No relays; 64 MiB of slots, 8 streams, 6 threads with 24 MiB, lists of 170,000 blocks; captured copies are single nodes.
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

/// What comes first where copies want the same link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Priority {
    /// Nothing special.
    #[default]
    Normal,
    /// Background copies give way to it.
    Critical,
    /// Gives way: few bytes of it are in flight at a time.
    Background,
}

/// What a copy asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOptions {
    /// Its turn on the links.
    pub priority: Priority,
    /// Whether the bytes are read back and compared: of [`crate::Engine::copy_blocking`]. For copies of another shape, once they were
    /// waited for, there is [`crate::Engine::verify`].
    pub verify: bool,
    /// Whether somebody will wait for the handle. A handle of a copy without it waits for all work of the stream.
    pub waited: bool,
    /// Whether its parts need not wait for what the stream has, because nothing of that touches the memory; the stream still waits for them.
    /// Such copies one after another leave no link idle in between. Of lists of a few large ranges ([`crate::Engine::copy_list`]); all
    /// others wait.
    pub unordered: bool,
}

impl Default for CopyOptions {
    /// A normal copy that somebody may wait for, behind all that its stream has.
    fn default() -> Self {
        CopyOptions { priority: Priority::Normal, verify: false, waited: true, unordered: false }
    }
}

/// What being a relay costs a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelayCost {
    /// Which.
    pub relay: DeviceId,
    /// What its free memory fell by when the engine first used it: its context, if the program had none there. Other
    /// programs' work at that moment counts too.
    pub context: Bytes,
    /// What its slots take.
    pub slots: Bytes,
}
