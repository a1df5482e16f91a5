//! Metrics of copies and their relays.

use glake_transfer::paths::{Direction, Way};
use glake_transfer::{PathStatistics, RelayCost};

use super::{metrics, micros};

metrics! {
    /// Metrics of copies and their relays.
    #[derive(Default)]
    CopyStats {
        /// Whether relays are requested.
        multi_path: bool, Flag, Stable;
        /// GPUs whose links carry parts of copies.
        relays: Vec<u32>, Device, Stable;
        /// Whether relays and their paths are ready.
        ready: bool, Flag, Stable;
        /// Memory use of each relay on its GPU.
        relay_costs: Vec<RelayStats>, List, Experimental;
        /// Whether the rates of paths were measured (`glake topo --calibrate`).
        calibrated: bool, Flag, Experimental;
        /// Minimum size of a copy over several links at present.
        break_even: u64, Bytes, Experimental;
        /// Copies executed as one native copy.
        native_copies: u64, Count, Stable;
        /// Bytes of native copies.
        native_bytes: u64, Bytes, Stable;
        /// Copies over several links.
        split_copies: u64, Count, Stable;
        /// Copies whose bytes may not have arrived, because a relay was lost.
        lost_copies: u64, Count, Stable;
        /// Paths that carried bytes of copies over several links.
        paths: Vec<PathStats>, List, Experimental;
    }

    /// Memory use of a relay on its GPU.
    #[derive(Default)]
    RelayStats {
        /// Device number of the relay.
        relay: u32, Device, Experimental;
        /// Decrease of free memory at the relay's first use: its context, unless the program had one there.
        context_bytes: u64, Bytes, Experimental;
        /// Bytes of staging buffers on the relay.
        slot_bytes: u64, Bytes, Experimental;
    }

    /// Path from the host to one target, or back.
    PathStats {
        /// GPU whose link is used; the target itself for its own link.
        relay: u32, Device, Experimental;
        /// GPU whose memory is copied.
        target: u32, Device, Experimental;
        /// Direction of the bytes: `to_gpu`, `from_gpu`.
        direction: Direction, Word, Experimental;
        /// Kind of relaying: `direct`, `zero_staging`, `staged`.
        way: Way, Word, Experimental;
        /// Bytes enqueued on the path.
        bytes: u64, Bytes, Experimental;
        /// Driver copies enqueued on the path.
        slices: u64, Count, Experimental;
        /// Busy time of the path: measured on a sample of the copies and scaled to all bytes.
        busy_us: u64, Microseconds, Experimental;
        /// Shares that took another path because this one failed.
        retries: u64, Count, Experimental;
        /// Whether the path is disabled for the rest of the process.
        fenced: bool, Flag, Experimental;
    }
}

impl From<&RelayCost> for RelayStats {
    fn from(cost: &RelayCost) -> RelayStats {
        RelayStats { relay: cost.relay.0, context_bytes: cost.context.get(), slot_bytes: cost.slots.get() }
    }
}

impl From<&PathStatistics> for PathStats {
    fn from(path: &PathStatistics) -> PathStats {
        PathStats {
            relay: path.relay.0,
            target: path.target.0,
            direction: path.direction,
            way: path.way,
            bytes: path.bytes.get(),
            slices: path.slices,
            busy_us: micros(path.busy),
            retries: path.retries,
            fenced: path.fenced,
        }
    }
}
