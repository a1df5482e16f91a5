//! Numbers of the interface: how a call ended, and what it may ask for.

/// Done.
pub const GLAKE_OK: i32 = 0;
/// Not enough memory, after everything that may be taken back was: ask for less, free something, raise the limit.
pub const GLAKE_OUT_OF_MEMORY: i32 = 1;
/// An argument is wrong, or names no device, block or pool; nothing was changed.
pub const GLAKE_INVALID: i32 = 2;
/// The driver refused, or GLake itself failed.
pub const GLAKE_DRIVER: i32 = 3;
/// Nothing is served: no driver, a bad configuration, a second copy of the library, a forked child, the end of the process.
pub const GLAKE_UNAVAILABLE: i32 = 4;
/// Not possible here.
pub const GLAKE_UNSUPPORTED: i32 = 5;
/// Not now: memory is in use that was to leave, or is evicted and was to be used, or a hook refused: the call moved nothing. Or time was
/// over: what was to come back goes on coming.
pub const GLAKE_CLOSED: i32 = 6;

/// A use that begins while its memory is evicted brings it back, and waits for that.
pub const GLAKE_WHEN_CLOSED_REFILL: u32 = 0;
/// It waits until somebody brings it back.
pub const GLAKE_WHEN_CLOSED_HOLD: u32 = 1;
/// It is refused: `GLAKE_CLOSED`.
pub const GLAKE_WHEN_CLOSED_REFUSE: u32 = 2;

/// A region's bytes are copied when it leaves, and copied back.
pub const GLAKE_POLICY_KEEP: u32 = 0;
/// As `GLAKE_POLICY_KEEP`, and the region can be sealed: nobody writes to its bytes then.
pub const GLAKE_POLICY_SEALED: u32 = 1;
/// Its bytes are given up: after a refill its blocks have their addresses, and any bytes.
pub const GLAKE_POLICY_DISCARD: u32 = 2;
/// The copy goes when the bytes are back.
pub const GLAKE_HOST_COPY_DROP: u32 = 0;
/// The copy of a sealed region stays: it leaves without copying the next time.
pub const GLAKE_HOST_COPY_RETAIN: u32 = 1;
/// As `GLAKE_HOST_COPY_DROP`, and host memory for it is pinned ahead: by `glake_region_prepare`, and in the background once no use runs.
pub const GLAKE_HOST_COPY_PREPARE: u32 = 2;
/// Beside one of these: the bytes are copied to the host while nobody uses them, and stay; what did not change then leaves at once.
pub const GLAKE_HOST_COPY_CLEAN: u32 = 16;

/// No lease: nothing but the limit bounds a pool.
pub const GLAKE_LEASE_NONE: u64 = u64::MAX;
/// Memory is to come back: so much more has to be granted for it, and for the growth after it.
pub const GLAKE_LEASE_WANT: i32 = 0;
/// An allocation is so much above the lease, and waits; or a commit, or a refill whose grants others took of.
pub const GLAKE_LEASE_GROW: i32 = 1;
/// A shrink gave so much back: the lease is lower by it.
pub const GLAKE_LEASE_RETURNED: i32 = 2;
/// Somebody still waits for a grant. Told again and again meanwhile, on the thread that waits: a watcher may let others run.
pub const GLAKE_LEASE_WAITING: i32 = 3;

/// A copy of the usual priority.
pub const GLAKE_COPY_NORMAL: u32 = 0;
/// A copy that background ones make way for.
pub const GLAKE_COPY_CRITICAL: u32 = 1;
/// A copy that makes way: few bytes of it are in flight at a time.
pub const GLAKE_COPY_BACKGROUND: u32 = 2;
/// The call returns when the bytes are there.
pub const GLAKE_COPY_BLOCKING: u32 = 0x10;
/// With `GLAKE_COPY_BLOCKING`: both sides are read and compared, whatever way the copy went; what differs is copied again by the driver, and
/// an error where it differs still.
pub const GLAKE_COPY_VERIFY: u32 = 0x20;
/// Stream 0 is the calling thread's own default stream, not the legacy one.
pub const GLAKE_COPY_PTDS: u32 = 0x40;
/// Over the GPU's own link alone, as the driver makes it.
pub const GLAKE_COPY_DIRECT: u32 = 0x80;
/// Of `glake_copy_try` alone: the copy is one from host memory to a GPU's, or none for it. Not with `GLAKE_COPY_FROM_GPU`.
pub const GLAKE_COPY_TO_GPU: u32 = 0x100;
/// Of `glake_copy_try` alone: the copy is one from a GPU's memory to host memory, or none for it. Not with `GLAKE_COPY_TO_GPU`.
pub const GLAKE_COPY_FROM_GPU: u32 = 0x200;
/// Times a device's number and one: streams 0, 1 and 2 are that device's default ones, not those of the calling thread's current device.
pub const GLAKE_COPY_DEVICE: u32 = 0x10000;
