//! What is offloaded of live blocks, what that took, and what plans say of it.

use super::metrics;

metrics! {
    /// What is offloaded of live blocks, and what that took.
    #[derive(Copy, Default, Eq)]
    OffloadStats {
        /// What is offloaded and not released.
        entries: u64, Count, Stable;
        /// Its bytes in host memory.
        host_bytes: u64, Bytes, Stable;
        /// Pinned host memory that is kept for it, free or not.
        host_pinned_bytes: u64, Bytes, Stable;
        /// Copies to the host.
        copies_out: u64, Count, Stable;
        /// Their bytes.
        bytes_out: u64, Bytes, Stable;
        /// How long those ran that were timed and are over: while a copy waits for a program's work it does not run.
        busy_us_out: u64, Microseconds, Experimental;
        /// The bytes of those.
        timed_bytes_out: u64, Bytes, Experimental;
        /// Copies from the host.
        copies_in: u64, Count, Stable;
        /// Their bytes.
        bytes_in: u64, Bytes, Stable;
        /// How long those ran that were timed and are over.
        busy_us_in: u64, Microseconds, Experimental;
        /// The bytes of those.
        timed_bytes_in: u64, Bytes, Experimental;
        /// Times that there was no host memory, so that bytes stayed on their GPU.
        refused: u64, Count, Stable;
        /// Saves whose bytes were the same when their block was freed as when they were offloaded, of those that were checked.
        unchanged: u64, Count, Stable;
        /// Saves whose bytes were not, though nobody had said so: they were copied once more, and stay on their GPU from then on.
        changed: u64, Count, Stable;
        /// Saves that were to be checked and were not: they are checked another time.
        unchecked: u64, Count, Stable;
        /// Freed bytes of GPUs that copies still read: their stream's alone, behind a wait.
        held_bytes: u64, Bytes, Stable;
        /// Times that a stream took such bytes, and waits on its GPU for the copy.
        hold_waits: u64, Count, Stable;
    }

    /// What a site was asked for, what its last plan says, and what its passes were.
    #[derive(Default)]
    SiteStats {
        /// What its plans are for: `fit`, `memory`, `hidden`, `hybrid`.
        preset: &'static str, Word, Stable;
        /// What the GPU may show of the process; null: anything.
        budget: Option<u64>, Bytes, Stable;
        /// Whose memory it is; null where nothing was asked for.
        device: Option<u32>, Device, Stable;
        /// What of that GPU the process had beside the pool when that was looked at last.
        beside_bytes: u64, Bytes, Experimental;
        /// Physical memory that the pool holds; null: it has not started.
        reserved_bytes: Option<u64>, Bytes, Experimental;
        /// Requests that the pool served above the budget, for whatever site; null: it has not started.
        above_budget: Option<u64>, Count, Stable;
        /// Passes that are over. 0: another module is called, or it is on no GPU.
        passes: u64, Count, Stable;
        /// Those that were not as the plan that they began like.
        diverged: u64, Count, Experimental;
        /// Why there is no plan; null: there is one, or no pass is over.
        unplanned: Option<String>, Word, Stable;
        /// What the links give that copies from the GPU take.
        out_gb_s: f64, GigabytesPerSecond, Experimental;
        /// What those give that copies to the GPU take.
        in_gb_s: f64, GigabytesPerSecond, Experimental;
        /// What the host has room for.
        host_room_bytes: u64, Bytes, Experimental;
        /// How long the last pass took that was timed; null: none was.
        real_us: Option<u64>, Microseconds, Stable;
        /// For how much of it copies were waited for.
        real_exposed_us: Option<u64>, Microseconds, Stable;
        /// What the last plan says; null: there is none.
        plan: Option<PlanStats>, Object, Stable;
    }

    /// What a plan of a pass says.
    #[derive(Default)]
    PlanStats {
        /// What stays on the GPU.
        kept: ItemStats, Object, Stable;
        /// What leaves and comes back. No item, and none computed again: all fits, and the module has no hooks on.
        offloaded: ItemStats, Object, Stable;
        /// What is computed again.
        recomputed: ItemStats, Object, Stable;
        /// What the GPU shows of the process at the most, what is beside the pool included.
        peak_bytes: u64, Bytes, Experimental;
        /// Host memory that is taken at the most.
        host_bytes: u64, Bytes, Experimental;
        /// Whether it is made from a pass that was timed; else its times say nothing.
        is_timed: bool, Flag, Experimental;
        /// How long a pass takes by it.
        expected_us: u64, Microseconds, Stable;
        /// For how much of that copies are waited for.
        expected_exposed_us: u64, Microseconds, Stable;
        /// How much of it computes again.
        recompute_us: u64, Microseconds, Experimental;
        /// How long it would take over the links of other GPUs too; null: no less, or they are used as it is.
        all_links_us: Option<u64>, Microseconds, Stable;
    }

    /// Items of a plan that have one verdict.
    #[derive(Copy, Default, Eq)]
    ItemStats {
        /// How many they are.
        items: u64, Count, Stable;
        /// Their bytes on the GPU.
        bytes: u64, Bytes, Stable;
    }
}
