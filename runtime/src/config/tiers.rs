//! Configuration keys of regions, and of the destinations of their bytes.

use std::path::PathBuf;

use glake_units::Bytes;

use super::knob::{FOLDER, MAPPABLE, SIZE, SWITCH, is_mappable, knobs};

knobs! {
    /// Destinations of evicted bytes.
    Tiers as tiers {
        [tiers]
        /// Maximum pinned host memory, including retained copies.
        ///
        /// 0: no bytes go to the host. Set it if other programs need host memory or retained copies must not grow.
        host_budget: Option<Bytes> = None, SIZE, absent "what the host has available but `host_spare`" as "64GiB";
        /// Host memory pinned in the background when the first region is defined.
        ///
        /// 0: memory is pinned by the first shrink, which then takes several times as long as the next one. More than the budget or the
        /// host allows is an error. Set it if the first shrink has to be as fast as later ones.
        host_prepare: Bytes = Bytes::ZERO, SIZE;
        /// Host memory left to other programs.
        ///
        /// 0: none, at the risk that the kernel kills a process; a very large size: nothing is pinned. Raise it if other programs on the
        /// host need more.
        host_spare: Bytes = Bytes::gib(1), SIZE;
        /// Folder for bytes that go to files: on a local disk, and writable by nobody else.
        files: Option<PathBuf> = None, FOLDER, absent "nothing goes to files" as "";
        /// Whether bytes are hashed on the GPU before eviction and compared after the refill.
        ///
        /// Use it to find out whether bytes are corrupted on the way.
        verify: bool = false, SWITCH;
        /// Full size of a region's extent, for regions of 4 GiB or more.
        ///
        /// A smaller region grows by a smaller unit in proportion to its size. Lower it if parts of blocks are decommitted. A larger size
        /// never helps: the cost of mapping depends on the number of extents, and copies of one extent overlap with mapping the next.
        extent: Bytes = Bytes::mib(128), MAPPABLE, if is_mappable;
        /// Timeout of a shrink for active uses of its regions, unless the request sets one.
        ///
        /// 0: the shrink fails at once if anything is in use. Raise it if requests take longer.
        drain_timeout_ms: u64 = 30_000, "a whole number of milliseconds";
        /// Idle time after which a region's bytes are copied to the host, or host memory for them is pinned, in the background.
        ///
        /// Applies to regions created with `clean`, or with `host_copy` `prepare`. Counted from the completion of the work of the last use.
        /// 0: at once. Raise it if pauses between uses are long and the copies would be wasted.
        clean_after_ms: u64 = 1_000, "a whole number of milliseconds";

        @constants
        /// Minimum running time of a use between two parks, in milliseconds. Without it, a use whose refill takes long would do little
        /// but move.
        park_quantum_ms: u64 = 300;
        /// Host memory pinned at once, unless a request needs more.
        host_arena: Bytes = Bytes::mib(256);
    }
}
