//! The knobs of regions, and of where their bytes go.

use std::path::PathBuf;

use glake_units::Bytes;

use super::knob::{FOLDER, MAPPABLE, SIZE, SWITCH, is_mappable, knobs};

knobs! {
    /// Where bytes go that leave their GPU.
    Tiers as tiers {
        [tiers]
        /// The most host memory to pin, retained copies included.
        ///
        /// 0: nothing goes to the host. Where other programs need the host's memory, or retained copies shall not grow.
        host_budget: Option<Bytes> = None, SIZE, absent "what the host has available but `host_spare`" as "64GiB";
        /// How much of it is pinned ahead, in the background, when the first region is defined.
        ///
        /// 0: pinned with the first shrink, which then takes several times as long as the next. More than the budget or
        /// the host allows is refused. Where the first shrink has to be as fast as the next.
        host_prepare: Bytes = Bytes::ZERO, SIZE;
        /// How much of the host's memory is left to others.
        ///
        /// 0: nothing, at the risk that the kernel ends a process; any huge size: nothing is pinned. Larger, where
        /// others on the host need more.
        host_spare: Bytes = Bytes::gib(1), SIZE;
        /// The folder for bytes that go to files: one on a local disk, that nobody else may write to.
        files: Option<PathBuf> = None, FOLDER, absent "nothing goes to files" as "";
        /// Whether bytes are hashed on the GPU before they leave, and compared when they are back.
        ///
        /// To find out whether bytes are lost on the way.
        verify: bool = false, SWITCH;
        /// The full size of regions' extents, of a region of 4 GiB or more.
        ///
        /// A smaller region grows by a smaller unit, in proportion to what it holds. Smaller, where parts of blocks are
        /// decommitted; larger never: mapping costs by the extent, and copies of one overlap with mapping the next.
        extent: Bytes = Bytes::mib(128), MAPPABLE, if is_mappable;
        /// How long a shrink waits for uses of what it takes to end, where the request does not say.
        ///
        /// 0: it fails at once where anything is in use. Larger, where requests last longer than that.
        drain_timeout_ms: u64 = 30_000, "a whole number of milliseconds";
        /// How long a shrink waits for the GPU's work of uses that are parked at safe points.
        ///
        /// After it they go on and nothing has moved: what is enqueued waits for another rank, or for the host. Larger, where a step
        /// takes longer than that on the GPU.
        park_drain_ms: u64 = 2_000, "a whole number of milliseconds";
        /// How long a use runs at least between two times that it is parked.
        ///
        /// Larger, where bringing its memory back takes longer: else it does little but move.
        park_quantum_ms: u64 = 300, "a whole number of milliseconds";
        /// How long a region has to be idle before its bytes are copied to the host, or host memory for it is pinned, in the background.
        ///
        /// Of regions made with `clean`, or with `host_copy` `prepare`. Counted from when the work of its last use is done. 0: at once.
        /// Larger, where pauses between uses are long and the copies would be in vain.
        clean_after_ms: u64 = 1_000, "a whole number of milliseconds";
        /// Whether relays are suspended, and give their contexts back, when everything is evicted.
        ///
        /// True: the first refill then begins over one link, and the others join it when their contexts are made again.
        /// False: the first refill has all links, for a context (about half a GiB) on each relay while everything is
        /// evicted.
        suspend_relays: bool = true, SWITCH;

        [expert]
        /// How much host memory is pinned at once, where no more is asked for.
        ///
        /// Larger costs fewer driver calls, smaller lets copies begin earlier and suits where little is shrunk. 0 or any
        /// huge size: as much as is asked for.
        host_arena: Bytes = Bytes::mib(256), SIZE;
    }
}
