//! Metrics of offloading, its plans and their passes.

use super::metrics;

metrics! {
    /// Metrics of offloaded blocks and their copies.
    #[derive(Copy, Default, Eq)]
    OffloadStats {
        /// Offloaded spans that are not yet released.
        entries: u64, Count, Stable;
        /// Bytes of these spans in host memory.
        host_bytes: u64, Bytes, Stable;
        /// Pinned host memory reserved for offloading, free or not.
        host_pinned_bytes: u64, Bytes, Stable;
        /// Copies to the host.
        copies_out: u64, Count, Stable;
        /// Bytes of copies to the host.
        bytes_out: u64, Bytes, Stable;
        /// Total duration of timed copies to the host. The wait of a copy for the program's work does not count.
        busy_us_out: u64, Microseconds, Experimental;
        /// Bytes of timed copies to the host.
        timed_bytes_out: u64, Bytes, Experimental;
        /// Copies from the host.
        copies_in: u64, Count, Stable;
        /// Bytes of copies from the host.
        bytes_in: u64, Bytes, Stable;
        /// Total duration of timed copies from the host.
        busy_us_in: u64, Microseconds, Experimental;
        /// Bytes of timed copies from the host.
        timed_bytes_in: u64, Bytes, Experimental;
        /// Requests without host memory, after which the bytes stayed on their GPU.
        refused: u64, Count, Stable;
        /// Checked saves whose bytes did not change between the offload and the free of their block.
        unchanged: u64, Count, Stable;
        /// Checked saves whose bytes changed without a notice: they were copied again and stay on their GPU from then on.
        changed: u64, Count, Stable;
        /// Saves whose check did not take place; they are checked another time.
        unchecked: u64, Count, Stable;
        /// Freed GPU bytes that copies still read: available to their own stream, behind a wait.
        held_bytes: u64, Bytes, Stable;
        /// Allocations of such bytes, each with a wait on the GPU for the copy.
        hold_waits: u64, Count, Stable;
    }

    /// Metrics of an offload site: its request, its last plan and its passes.
    #[derive(Default)]
    SiteStats {
        /// Goal of its plans: `fit`, `memory`, `hybrid`.
        preset: &'static str, Word, Stable;
        /// Maximum GPU memory of the process; null: unlimited.
        budget: Option<u64>, Bytes, Stable;
        /// GPU of the budget; null: no budget was requested.
        device: Option<u32>, Device, Stable;
        /// GPU memory of the process outside of the pool, at the last reading.
        beside_bytes: u64, Bytes, Experimental;
        /// Physical memory of the pool; null: the pool has not started.
        reserved_bytes: Option<u64>, Bytes, Experimental;
        /// Requests that the pool served above the budget, for any site; null: the pool has not started.
        above_budget: Option<u64>, Count, Stable;
        /// Completed passes. 0: another module is called, or it is on no GPU.
        passes: u64, Count, Stable;
        /// Passes that diverged from the plan they began with.
        diverged: u64, Count, Experimental;
        /// Reason for having no plan; null: there is a plan, or no pass has completed.
        unplanned: Option<String>, Word, Stable;
        /// Rate of the links for copies from the GPU.
        out_gb_s: f64, GigabytesPerSecond, Experimental;
        /// Rate of the links for copies to the GPU.
        in_gb_s: f64, GigabytesPerSecond, Experimental;
        /// Host memory available for offloading.
        host_room_bytes: u64, Bytes, Experimental;
        /// Duration of the last timed pass; null: none.
        real_us: Option<u64>, Microseconds, Stable;
        /// Time that the pass waited for copies.
        real_exposed_us: Option<u64>, Microseconds, Stable;
        /// Last plan; null: none.
        plan: Option<PlanStats>, Object, Stable;
    }

    /// Metrics of a plan for a pass.
    #[derive(Default)]
    PlanStats {
        /// Items that stay on the GPU.
        kept: ItemStats, Object, Stable;
        /// Items that are offloaded and reloaded. If there are none, and none is recomputed: everything fits, and the module has no hooks.
        offloaded: ItemStats, Object, Stable;
        /// Items that are recomputed.
        recomputed: ItemStats, Object, Stable;
        /// Peak GPU memory of the process, including memory outside of the pool.
        peak_bytes: u64, Bytes, Experimental;
        /// Peak host memory of the plan.
        host_bytes: u64, Bytes, Experimental;
        /// Whether the plan is based on a timed pass; otherwise its times are meaningless.
        is_timed: bool, Flag, Experimental;
        /// Expected duration of a pass.
        expected_us: u64, Microseconds, Stable;
        /// Expected time that a pass waits for copies.
        expected_exposed_us: u64, Microseconds, Stable;
        /// Expected time of recomputation.
        recompute_us: u64, Microseconds, Experimental;
        /// Expected duration with the links of other GPUs; null: no gain, or they are already used.
        all_links_us: Option<u64>, Microseconds, Stable;
    }

    /// Items of a plan with the same verdict.
    #[derive(Copy, Default, Eq)]
    ItemStats {
        /// Number of items.
        items: u64, Count, Stable;
        /// Bytes of the items on the GPU.
        bytes: u64, Bytes, Stable;
    }
}
