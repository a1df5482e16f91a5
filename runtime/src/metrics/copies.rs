//! What copies did, and what their relays cost.

use glake_transfer::paths::{Direction, Way};
use glake_transfer::{PathStatistics, RelayCost};

use super::{metrics, micros};

metrics! {
    /// What copies did, and what their relays cost.
    #[derive(Default)]
    CopyStats {
        /// Whether relays are asked for.
        multi_path: bool, Flag, Stable;
        /// GPUs whose links carry parts of copies.
        relays: Vec<u32>, Device, Stable;
        /// Whether relays and their paths are ready.
        ready: bool, Flag, Stable;
        /// What each relay takes of its GPU's memory.
        relay_costs: Vec<RelayStats>, List, Experimental;
        /// Whether the rates of paths were measured (`glake topo --calibrate`).
        calibrated: bool, Flag, Experimental;
        /// The least size that goes over several links now.
        break_even: u64, Bytes, Experimental;
        /// Copies that were made as one native copy.
        native_copies: u64, Count, Stable;
        /// Their bytes.
        native_bytes: u64, Bytes, Stable;
        /// Copies over several links.
        split_copies: u64, Count, Stable;
        /// Copies whose bytes may not have arrived, because a relay was lost.
        lost_copies: u64, Count, Stable;
        /// Copies over several links, by path: those that carried something.
        paths: Vec<PathStats>, List, Experimental;
    }

    /// What a relay takes of its GPU's memory.
    #[derive(Default)]
    RelayStats {
        /// Which.
        relay: u32, Device, Experimental;
        /// What its free memory fell by when it was first used: its context, if the program had none there.
        context_bytes: u64, Bytes, Experimental;
        /// What its staging buffers take.
        slot_bytes: u64, Bytes, Experimental;
    }

    /// One path of one target.
    PathStats {
        /// Whose link; the target for its own.
        relay: u32, Device, Experimental;
        /// Whose memory.
        target: u32, Device, Experimental;
        /// Which way the bytes went: `to_gpu`, `from_gpu`.
        direction: Direction, Word, Experimental;
        /// How the relay served it: `direct`, `zero_staging`, `staged`.
        way: Way, Word, Experimental;
        /// What was enqueued.
        bytes: u64, Bytes, Experimental;
        /// In so many copies of the driver's.
        slices: u64, Count, Experimental;
        /// How long the path was busy: measured on a sample of the copies, and scaled to all bytes.
        busy_us: u64, Microseconds, Experimental;
        /// Shares that went another way because this one failed.
        retries: u64, Count, Experimental;
        /// Whether it is out of use for the rest of the process.
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
