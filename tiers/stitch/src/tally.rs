//! The counting itself, on the hot path: as few additions as the statistics can be told from.

use glake_units::Bytes;

use crate::stats::{Counters, Gauge, Inactive, PoolGauges, Stats, Waste};

/// A gauge without what follows from the rest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Count {
    pub(crate) current: u64,
    peak: u64,
    added: u64,
    /// What there was when the totals were last reset.
    base: u64,
}

impl Count {
    #[inline]
    pub(crate) fn add(&mut self, amount: u64) {
        self.current += amount;
        self.added += amount;
        self.peak = self.peak.max(self.current);
    }

    #[inline]
    pub(crate) fn sub(&mut self, amount: u64) {
        self.current -= amount;
    }

    pub(crate) fn gauge(&self) -> Gauge {
        let freed = self.base + self.added - self.current;
        Gauge { current: self.current, peak: self.peak, allocated: self.added, freed }
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    pub(crate) fn reset_totals(&mut self) {
        self.added = 0;
        self.base = self.current;
    }
}

/// Blocks that were freed and still count as active: other streams use them.
#[derive(Clone, Copy, Debug, Default)]
struct Withheld {
    current: u64,
    /// The peak of handed out and withheld together.
    active_peak: u64,
}

/// One pool's counts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    blocks: Count,
    pub(crate) bytes: Count,
    requested: Count,
    withheld_blocks: Withheld,
    withheld_bytes: Withheld,
    pub(crate) extents: Count,
    pub(crate) reserved: Count,
}

impl Tally {
    #[inline]
    pub(crate) fn handed_out(&mut self, size: u64, requested: u64) {
        self.blocks.add(1);
        self.bytes.add(size);
        self.requested.add(requested);
        let blocks = &mut self.withheld_blocks;
        blocks.active_peak = blocks.active_peak.max(self.blocks.current + blocks.current);
        let bytes = &mut self.withheld_bytes;
        bytes.active_peak = bytes.active_peak.max(self.bytes.current + bytes.current);
    }

    #[inline]
    pub(crate) fn freed(&mut self, size: u64, requested: u64) {
        self.blocks.sub(1);
        self.bytes.sub(size);
        self.requested.sub(requested);
    }

    /// A freed block stays active.
    pub(crate) fn withheld(&mut self, size: u64) {
        self.withheld_blocks.current += 1;
        self.withheld_bytes.current += size;
    }

    /// Withheld bytes are free now; `blocks` are complete with them.
    pub(crate) fn completed(&mut self, blocks: u64, size: u64) {
        for (withheld, amount) in [(&mut self.withheld_blocks, blocks), (&mut self.withheld_bytes, size)] {
            withheld.current -= amount;
        }
    }

    /// Bytes handed out, or freed and still in use.
    pub(crate) fn active_bytes(&self) -> u64 {
        self.bytes.current + self.withheld_bytes.current
    }

    pub(crate) fn gauges(&self) -> PoolGauges {
        let active = |count: &Count, withheld: &Withheld| {
            let gauge = count.gauge();
            let current = gauge.current + withheld.current;
            let freed = gauge.freed.saturating_sub(withheld.current);
            Gauge { current, peak: withheld.active_peak, allocated: gauge.allocated, freed }
        };
        PoolGauges {
            allocation: self.blocks.gauge(),
            allocated_bytes: self.bytes.gauge(),
            requested_bytes: self.requested.gauge(),
            active: active(&self.blocks, &self.withheld_blocks),
            active_bytes: active(&self.bytes, &self.withheld_bytes),
            extents: self.extents.gauge(),
            reserved_bytes: self.reserved.gauge(),
        }
    }

    fn counts(&mut self) -> [&mut Count; 5] {
        [&mut self.blocks, &mut self.bytes, &mut self.requested, &mut self.extents, &mut self.reserved]
    }

    pub(crate) fn reset_peaks(&mut self) {
        self.withheld_blocks.active_peak = self.blocks.current + self.withheld_blocks.current;
        self.withheld_bytes.active_peak = self.active_bytes();
        self.counts().into_iter().for_each(Count::reset_peak);
    }

    pub(crate) fn reset_totals(&mut self) {
        self.counts().into_iter().for_each(Count::reset_totals);
    }
}

/// Everything that is counted while it happens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tallies {
    /// Both pools.
    pub(crate) all: Tally,
    pub(crate) small: Tally,
    pub(crate) large: Tally,
    pub(crate) counters: Counters,
    pub(crate) mappings: u64,
    pub(crate) alias_bytes: Bytes,
    pub(crate) idle_alias_bytes: Bytes,
}

impl Tallies {
    #[inline]
    pub(crate) fn pools(&mut self, small: bool) -> [&mut Tally; 2] {
        [&mut self.all, if small { &mut self.small } else { &mut self.large }]
    }

    pub(crate) fn stats(&self, waste: Waste, [inactive_small, inactive_large]: [Inactive; 2]) -> Stats {
        Stats {
            all: self.all.gauges(),
            small_pool: self.small.gauges(),
            large_pool: self.large.gauges(),
            counters: self.counters,
            mappings: self.mappings,
            alias_bytes: self.alias_bytes,
            idle_alias_bytes: self.idle_alias_bytes,
            waste,
            inactive_small,
            inactive_large,
        }
    }

    pub(crate) fn each(&mut self, change: fn(&mut Tally)) {
        [&mut self.all, &mut self.small, &mut self.large].into_iter().for_each(change);
    }
}
