//! Constants of the interface: statuses of calls, and options.

/// Status of a call that succeeded.
pub const GLAKE_OK: i32 = 0;
/// Not enough memory after everything reclaimable was reclaimed: request less, free memory, or raise the limit.
pub const GLAKE_OUT_OF_MEMORY: i32 = 1;
/// An argument is invalid, or names no device, block or pool; nothing was changed.
pub const GLAKE_INVALID: i32 = 2;
/// The driver refused, or GLake itself failed.
pub const GLAKE_DRIVER: i32 = 3;
/// The library is unavailable: no driver, an invalid configuration, a second copy of the library, a forked child, or the end of the
/// process.
pub const GLAKE_UNAVAILABLE: i32 = 4;
/// The operation is not supported here.
pub const GLAKE_UNSUPPORTED: i32 = 5;
/// The operation is not possible now. Memory to be used is evicted, a hook refused, or ranks did not agree: the call moved nothing.
pub const GLAKE_CLOSED: i32 = 6;
/// The timeout of the call expired. Uses did not end or a hook did not return: nothing was moved. A refill continues in the background.
pub const GLAKE_TIMEOUT: i32 = 7;

/// A use that begins while its memory is evicted refills the memory, and waits for it.
pub const GLAKE_WHEN_CLOSED_REFILL: u32 = 0;
/// A use that begins while its memory is evicted waits until another call refills it.
pub const GLAKE_WHEN_CLOSED_HOLD: u32 = 1;
/// A use that begins while its memory is evicted fails with `GLAKE_CLOSED`.
pub const GLAKE_WHEN_CLOSED_REFUSE: u32 = 2;

/// A region's bytes are copied out on eviction, and copied back on refill.
pub const GLAKE_POLICY_KEEP: u32 = 0;
/// `GLAKE_POLICY_KEEP` for a region that can be sealed: its bytes must not be written while it is sealed.
pub const GLAKE_POLICY_SEALED: u32 = 1;
/// The bytes are discarded on eviction: after a refill the blocks have their addresses, and undefined bytes.
pub const GLAKE_POLICY_DISCARD: u32 = 2;
/// The host copy is released once the bytes are back on the GPU.
pub const GLAKE_HOST_COPY_DROP: u32 = 0;
/// The host copy of a sealed region is kept: the next eviction needs no copy.
pub const GLAKE_HOST_COPY_RETAIN: u32 = 1;
/// `GLAKE_HOST_COPY_DROP` with host memory pinned ahead: by `glake_region_prepare`, and in the background while no use runs.
pub const GLAKE_HOST_COPY_PREPARE: u32 = 2;
/// Flag beside one of these: the bytes are copied to the host while no use runs, and stay on the GPU; bytes unchanged since are evicted
/// without a copy.
pub const GLAKE_HOST_COPY_CLEAN: u32 = 16;

/// Value of a lease that does not exist: only the limit bounds a pool.
pub const GLAKE_LEASE_NONE: u64 = u64::MAX;
/// Event of a lease: a refill is pending and needs this many more bytes, including the growth after it.
pub const GLAKE_LEASE_WANT: i32 = 0;
/// Event of a lease: an allocation exceeds it by this many bytes and waits; or a commit, or a refill whose grants were used by others.
pub const GLAKE_LEASE_GROW: i32 = 1;
/// Event of a lease: a shrink returned this many bytes, by which the lease is now lower.
pub const GLAKE_LEASE_RETURNED: i32 = 2;
/// Event of a lease: a thread still waits for a grant. Repeated on the waiting thread: a watcher may let other threads run.
pub const GLAKE_LEASE_WAITING: i32 = 3;

/// A copy of normal priority.
pub const GLAKE_COPY_NORMAL: u32 = 0;
/// A copy that background copies make way for.
pub const GLAKE_COPY_CRITICAL: u32 = 1;
/// A copy that makes way for others: few bytes of it are in flight at a time.
pub const GLAKE_COPY_BACKGROUND: u32 = 2;
/// The call returns once the copy is complete.
pub const GLAKE_COPY_BLOCKING: u32 = 0x10;
/// Verification of a copy with `GLAKE_COPY_BLOCKING`. Source and destination are read and compared, whatever path the copy took. Bytes that
/// differ are copied again by the driver; if they still differ, the call fails.
pub const GLAKE_COPY_VERIFY: u32 = 0x20;
/// Stream 0 means the calling thread's default stream instead of the legacy default stream.
pub const GLAKE_COPY_PTDS: u32 = 0x40;
/// The copy uses only the GPU's own link, as a copy by the driver does.
pub const GLAKE_COPY_DIRECT: u32 = 0x80;
/// Direction for `glake_copy_try` alone: the copy must be from host memory to a GPU, or is not taken. Not with `GLAKE_COPY_FROM_GPU`.
pub const GLAKE_COPY_TO_GPU: u32 = 0x100;
/// Direction for `glake_copy_try` alone: the copy must be from a GPU to host memory, or is not taken. Not with `GLAKE_COPY_TO_GPU`.
pub const GLAKE_COPY_FROM_GPU: u32 = 0x200;
/// Multiplied by a device's number plus one: streams 0, 1 and 2 are that device's default streams, not those of the calling thread's
/// current device.
pub const GLAKE_COPY_DEVICE: u32 = 0x10000;
