//! Counters in the manner of torch's allocator, and the breakdown of what is reserved but not in use.

use glake_units::Bytes;
use serde::Serialize;

/// A gauge with its peak and its totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Gauge {
    /// Now.
    pub current: u64,
    /// The most since the last reset of peaks.
    pub peak: u64,
    /// All that was ever added.
    pub allocated: u64,
    /// All that was ever taken away.
    pub freed: u64,
}

impl Gauge {
    pub(crate) fn add(&mut self, amount: u64) {
        self.current += amount;
        self.allocated += amount;
        if self.current > self.peak {
            self.peak = self.current;
        }
    }

    pub(crate) fn sub(&mut self, amount: u64) {
        self.current -= amount;
        self.freed += amount;
    }

    fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    fn reset_totals(&mut self) {
        self.allocated = 0;
        self.freed = 0;
    }
}

/// One pool's gauges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolGauges {
    /// Blocks handed out and not freed (torch: `allocation`).
    pub allocation: Gauge,
    /// Their bytes, rounded up to 512 (torch: `allocated_bytes`).
    pub allocated_bytes: Gauge,
    /// Their bytes as asked for (torch: `requested_bytes`).
    pub requested_bytes: Gauge,
    /// Blocks that are in use, freed ones that wait for other streams too (torch: `active`).
    pub active: Gauge,
    /// Their bytes (torch: `active_bytes`).
    pub active_bytes: Gauge,
    /// Extents held (torch's segments are runs of these).
    pub extents: Gauge,
    /// Physical bytes held (torch: `reserved_bytes`).
    pub reserved_bytes: Gauge,
}

impl PoolGauges {
    pub(crate) fn handed_out(&mut self, size: u64, requested: u64) {
        self.allocation.add(1);
        self.allocated_bytes.add(size);
        self.requested_bytes.add(requested);
        self.active.add(1);
        self.active_bytes.add(size);
    }

    pub(crate) fn freed(&mut self, size: u64, requested: u64) {
        self.allocation.sub(1);
        self.allocated_bytes.sub(size);
        self.requested_bytes.sub(requested);
    }

    pub(crate) fn completed(&mut self, blocks: u64, size: u64) {
        self.active.sub(blocks);
        self.active_bytes.sub(size);
    }

    fn each(&mut self, mut change: impl FnMut(&mut Gauge)) {
        for gauge in [
            &mut self.allocation,
            &mut self.allocated_bytes,
            &mut self.requested_bytes,
            &mut self.active,
            &mut self.active_bytes,
            &mut self.extents,
            &mut self.reserved_bytes,
        ] {
            change(gauge);
        }
    }
}

/// What an allocator has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Aliases made.
    pub stitches: u64,
    /// Blocks handed out through an alias that was there.
    pub alias_reuses: u64,
    /// Extents mapped, at home and in aliases.
    pub extent_maps: u64,
    /// Waits of one stream for another that the program did not ask for.
    pub stream_waits: u64,
    /// Completion edges, because bytes changed their address.
    pub edges: u64,
    /// Idle aliases unmapped.
    pub aliases_collected: u64,
    /// Requests that had to take memory back first (torch: `num_alloc_retries`).
    pub retries: u64,
    /// Requests refused (torch: `num_ooms`).
    pub ooms: u64,
}

/// Reserved memory that is not in use, by the reason why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waste {
    /// Free, but no whole extent.
    pub hard: Bytes,
    /// Whole free extents, not joined.
    pub soft: Bytes,
    /// Free, but pending on a stream.
    pub stream: Bytes,
}

/// Everything that is counted for one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Both pools.
    pub all: PoolGauges,
    /// Requests up to 1 MiB, in slabs.
    pub small_pool: PoolGauges,
    /// Larger requests.
    pub large_pool: PoolGauges,
    /// What was done.
    pub counters: Counters,
    /// Extents mapped now, at home and in aliases.
    pub mappings: u64,
    /// Address ranges of aliases now.
    pub alias_bytes: Bytes,
    /// Of them, idle.
    pub idle_alias_bytes: Bytes,
    /// Reserved and not in use.
    pub waste: Waste,
}

impl Stats {
    /// Starts the peaks from what is now.
    pub(crate) fn reset_peaks(&mut self) {
        self.each(Gauge::reset_peak);
    }

    /// Starts the totals from zero.
    pub(crate) fn reset_totals(&mut self) {
        self.each(Gauge::reset_totals);
        self.counters = Counters::default();
    }

    fn each(&mut self, change: impl Fn(&mut Gauge)) {
        for pool in [&mut self.all, &mut self.small_pool, &mut self.large_pool] {
            pool.each(&change);
        }
    }

    pub(crate) fn pools(&mut self, small: bool) -> [&mut PoolGauges; 2] {
        [&mut self.all, if small { &mut self.small_pool } else { &mut self.large_pool }]
    }
}
