//! Statistics in torch's scheme, and the breakdown of reserved memory that is not in use. The hot path counts with the fewest additions from
//! which the statistics can be derived.

use glake_units::Bytes;
use serde::Serialize;

use crate::free_list::FreeSums;

/// A gauge with its peak and its totals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Gauge {
    /// Value at this time.
    pub current: u64,
    /// Maximum since the last reset of peaks.
    pub peak: u64,
    /// Sum of all increases.
    pub allocated: u64,
    /// Sum of all decreases.
    pub freed: u64,
}

/// Gauges of one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolGauges {
    /// Live blocks, not yet freed (torch: `allocation`).
    pub allocation: Gauge,
    /// Bytes of live blocks, rounded up to 512 (torch: `allocated_bytes`).
    pub allocated_bytes: Gauge,
    /// Bytes of live blocks as requested (torch: `requested_bytes`).
    pub requested_bytes: Gauge,
    /// Blocks in use, including freed blocks that wait for other streams (torch: `active`).
    pub active: Gauge,
    /// Bytes of blocks in use (torch: `active_bytes`).
    pub active_bytes: Gauge,
    /// Extents with memory; torch's segments are runs of these.
    pub extents: Gauge,
    /// Physical bytes reserved (torch: `reserved_bytes`).
    pub reserved_bytes: Gauge,
}

/// Event counters of an allocator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Number of aliases made.
    pub stitches: u64,
    /// Number of blocks handed out through an existing alias.
    pub alias_reuses: u64,
    /// Number of extents mapped, at home and in aliases.
    pub extent_maps: u64,
    /// Number of waits of one stream for another that the program did not ask for.
    pub stream_waits: u64,
    /// Number of waits of a stream for holds on memory that it freed.
    pub hold_waits: u64,
    /// Number of completion edges, because bytes changed their address.
    pub edges: u64,
    /// Number of idle aliases unmapped.
    pub aliases_collected: u64,
    /// Number of requests that had to take memory back first (torch: `num_alloc_retries`).
    pub retries: u64,
    /// Number of requests refused (torch: `num_ooms`).
    pub ooms: u64,
    /// Number of waits of a request on the host for a completion point, the last way before a refusal (torch: `num_sync_all_streams`).
    pub host_waits: u64,
    /// Number of extents created (torch: `num_device_alloc`).
    pub extents_created: u64,
    /// Number of extents released (torch: `num_device_free`).
    pub extents_released: u64,
}

/// Free ranges that share an extent with memory in use (torch: `inactive_split`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Inactive {
    /// Number of such ranges.
    pub ranges: u64,
    /// Bytes of the ranges outside of whole free extents.
    pub bytes: Bytes,
}

/// Reserved memory that is not in use, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Waste {
    /// Free bytes outside of whole free extents.
    pub hard: Bytes,
    /// Bytes of whole free extents that are not joined.
    pub soft: Bytes,
    /// Free bytes pending on a stream.
    pub stream: Bytes,
}

/// Statistics of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Sum of both pools.
    pub all: PoolGauges,
    /// Requests up to 1 MiB, served from slabs.
    pub small_pool: PoolGauges,
    /// Requests above 1 MiB.
    pub large_pool: PoolGauges,
    /// Event counters of the allocator.
    pub counters: Counters,
    /// Extents mapped now, at home and in aliases.
    pub mappings: u64,
    /// Bytes of alias addresses now.
    pub alias_bytes: Bytes,
    /// Bytes of idle aliases now.
    pub idle_alias_bytes: Bytes,
    /// Reserved memory not in use.
    pub waste: Waste,
    /// Free ranges of the small pool, in slabs in use and beside them.
    pub inactive_small: Inactive,
    /// Free ranges of the large pool.
    pub inactive_large: Inactive,
}

/// A gauge reduced to the values that the others follow from.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Count {
    pub(crate) current: u64,
    peak: u64,
    added: u64,
    /// Value when the totals were last reset.
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

    /// Sets a value that is added up elsewhere; only its peak is kept here.
    #[inline]
    fn set(&mut self, current: u64) {
        self.peak = self.peak.max(current);
    }

    /// Returns the sum of two counts, with the given peak.
    fn with(&self, other: &Count, peak: u64) -> Count {
        let Count { current, added, base, .. } = *other;
        Count { current: self.current + current, peak, added: self.added + added, base: self.base + base }
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

/// Freed blocks that count as active because other streams use them.
#[derive(Clone, Copy, Debug, Default)]
struct Withheld {
    blocks: u64,
    bytes: u64,
    /// Peak number of blocks, live and withheld together, while some were withheld.
    peak_blocks: u64,
    peak_bytes: u64,
}

/// Counts of one pool.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    blocks: Count,
    bytes: Count,
    requested: Count,
    withheld: Withheld,
    extents: Count,
    reserved: Count,
}

impl Tally {
    fn peak_withheld(&mut self) {
        let withheld = &mut self.withheld;
        withheld.peak_blocks = withheld.peak_blocks.max(self.blocks.current + withheld.blocks);
        withheld.peak_bytes = withheld.peak_bytes.max(self.bytes.current + withheld.bytes);
    }

    /// Returns the bytes of live blocks and of freed blocks still in use.
    pub(crate) fn active_bytes(&self) -> u64 {
        self.bytes.current + self.withheld.bytes
    }

    pub(crate) fn gauges(&self) -> PoolGauges {
        let active = |count: &Count, withheld: u64, peak: u64| {
            let gauge = count.gauge();
            let current = gauge.current + withheld;
            let freed = gauge.freed.saturating_sub(withheld);
            Gauge { current, peak: gauge.peak.max(peak), allocated: gauge.allocated, freed }
        };
        let withheld = &self.withheld;
        PoolGauges {
            allocation: self.blocks.gauge(),
            allocated_bytes: self.bytes.gauge(),
            requested_bytes: self.requested.gauge(),
            active: active(&self.blocks, withheld.blocks, withheld.peak_blocks),
            active_bytes: active(&self.bytes, withheld.bytes, withheld.peak_bytes),
            extents: self.extents.gauge(),
            reserved_bytes: self.reserved.gauge(),
        }
    }

    fn counts(&mut self) -> [&mut Count; 5] {
        [&mut self.blocks, &mut self.bytes, &mut self.requested, &mut self.extents, &mut self.reserved]
    }

    fn reset_peaks(&mut self) {
        self.counts().into_iter().for_each(Count::reset_peak);
        self.withheld.peak_blocks = self.blocks.current + self.withheld.blocks;
        self.withheld.peak_bytes = self.active_bytes();
    }

    fn reset_totals(&mut self) {
        self.counts().into_iter().for_each(Count::reset_totals);
    }
}

/// Values that are counted as events happen.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tallies {
    /// Values of both pools together that are not the sum of the two: peaks of live blocks, withheld memory, and reserved memory.
    both: Tally,
    small: Tally,
    large: Tally,
    pub(crate) counters: Counters,
    /// Bytes of new extents of pending plans, which the driver has not made yet.
    pub(crate) planned: u64,
    pub(crate) mappings: u64,
    pub(crate) alias_bytes: Bytes,
    pub(crate) idle_alias_bytes: Bytes,
    /// Maximum of active bytes since [`Tallies::take_most`].
    most: u64,
}

impl Tallies {
    #[inline]
    fn pool(&mut self, small: bool) -> &mut Tally {
        if small { &mut self.small } else { &mut self.large }
    }

    /// Counts a block that is handed out.
    #[inline]
    pub(crate) fn handed_out(&mut self, small: bool, size: u64, requested: u64) {
        let pool = self.pool(small);
        pool.blocks.add(1);
        pool.bytes.add(size);
        pool.requested.add(requested);
        let (both, small, large) = (&mut self.both, &self.small, &self.large);
        both.blocks.set(small.blocks.current + large.blocks.current);
        let live = small.bytes.current + large.bytes.current;
        both.bytes.set(live);
        self.most = self.most.max(live + both.withheld.bytes);
        both.requested.set(small.requested.current + large.requested.current);
        if both.withheld.bytes > 0 {
            self.peak_withheld();
        }
    }

    /// Updates the active peaks while freed memory is still in use by other streams.
    #[cold]
    fn peak_withheld(&mut self) {
        self.both = self.all();
        self.each(Tally::peak_withheld);
    }

    /// Counts a freed block; it stays active if `withheld`.
    #[inline]
    pub(crate) fn freed(&mut self, small: bool, size: u64, requested: u64, withheld: bool) {
        let pool = self.pool(small);
        pool.blocks.sub(1);
        pool.bytes.sub(size);
        pool.requested.sub(requested);
        if withheld {
            self.withheld(small, 1, size);
        }
    }

    /// Counts freed bytes that wait for other streams; `blocks` blocks complete with them.
    pub(crate) fn withheld(&mut self, small: bool, blocks: u64, size: u64) {
        for pool in self.pools(small) {
            pool.withheld.blocks += blocks;
            pool.withheld.bytes += size;
        }
    }

    /// Counts withheld bytes that are free now; `blocks` blocks complete with them.
    pub(crate) fn completed(&mut self, small: bool, blocks: u64, size: u64) {
        for pool in self.pools(small) {
            pool.withheld.blocks -= blocks;
            pool.withheld.bytes -= size;
        }
    }

    /// Returns the bytes of live blocks and of freed blocks still in use.
    pub(crate) fn active(&self) -> u64 {
        self.small.active_bytes() + self.large.active_bytes()
    }

    /// Returns the active bytes, and their maximum since the last call.
    pub(crate) fn take_most(&mut self) -> (u64, u64) {
        let now = self.active();
        (now, std::mem::replace(&mut self.most, now).max(now))
    }

    /// Returns the two tallies that count reserved memory of a pool.
    fn pools(&mut self, small: bool) -> [&mut Tally; 2] {
        [&mut self.both, if small { &mut self.small } else { &mut self.large }]
    }

    /// Returns the physical bytes reserved.
    pub(crate) fn reserved(&self) -> u64 {
        self.both.reserved.current
    }

    /// Returns the physical bytes reserved, including those of pending plans.
    pub(crate) fn committed(&self) -> u64 {
        self.reserved() + self.planned
    }

    /// Counts extents that the driver has made.
    pub(crate) fn add_extents(&mut self, small: bool, count: u64, bytes: u64) {
        for pool in self.pools(small) {
            pool.reserved.add(bytes);
            pool.extents.add(count);
        }
        self.counters.extents_created += count;
    }

    /// Counts extents that the driver has released.
    pub(crate) fn remove_extents(&mut self, small: bool, count: u64, bytes: u64) {
        for pool in self.pools(small) {
            pool.reserved.sub(bytes);
            pool.extents.sub(count);
        }
        self.counters.extents_released += count;
    }

    /// Counts extents that were mapped.
    pub(crate) fn add_mappings(&mut self, count: u64) {
        self.mappings += count;
        self.counters.extent_maps += count;
    }

    /// Counts an alias that became idle, or is in use again.
    pub(crate) fn set_idle(&mut self, idle: bool, size: Bytes) {
        let sum = self.idle_alias_bytes;
        self.idle_alias_bytes = if idle { sum.saturating_add(size) } else { sum.saturating_sub(size) };
    }

    /// Returns the bytes of live blocks.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        self.small.bytes.current + self.large.bytes.current
    }

    /// Returns the bytes of live blocks and of freed blocks still in use.
    pub(crate) fn active_bytes(&self) -> u64 {
        self.small.active_bytes() + self.large.active_bytes()
    }

    /// Returns the full tally of both pools.
    fn all(&self) -> Tally {
        let sum = |of: fn(&Tally) -> &Count| of(&self.small).with(of(&self.large), of(&self.both).peak);
        Tally {
            blocks: sum(|pool| &pool.blocks),
            bytes: sum(|pool| &pool.bytes),
            requested: sum(|pool| &pool.requested),
            ..self.both
        }
    }

    /// Returns all statistics; `free_bytes` is the size of the reserved memory that no block uses, and `free` has the figures of its pieces.
    pub(crate) fn stats(&self, free_bytes: u64, free: &FreeSums) -> Stats {
        let hard = free_bytes.saturating_sub(free.soft + free.stream);
        Stats {
            all: self.all().gauges(),
            small_pool: self.small.gauges(),
            large_pool: self.large.gauges(),
            counters: self.counters,
            mappings: self.mappings,
            alias_bytes: self.alias_bytes,
            idle_alias_bytes: self.idle_alias_bytes,
            waste: Waste {
                hard: Bytes::new(hard),
                soft: Bytes::new(free.soft),
                stream: Bytes::new(free.stream),
            },
            inactive_small: free.inactive_small,
            inactive_large: free.inactive_large,
        }
    }

    /// Resets the peaks to the current values.
    pub(crate) fn reset_peaks(&mut self) {
        self.both = self.all();
        self.each(Tally::reset_peaks);
    }

    /// Resets the totals to zero.
    pub(crate) fn reset_totals(&mut self) {
        self.each(Tally::reset_totals);
        self.counters = Counters::default();
    }

    fn each(&mut self, change: fn(&mut Tally)) {
        [&mut self.both, &mut self.small, &mut self.large].into_iter().for_each(change);
    }
}

#[cfg(test)]
mod tally_tests {
    use proptest::prelude::*;

    use super::*;

    /// Reference model with every gauge of both pools and of each, added up directly: blocks, bytes, requested, active, active bytes.
    #[derive(Default)]
    struct Model([[Gauge; 5]; 3]);

    impl Model {
        fn change(&mut self, small: bool, added: [u64; 5], taken: [u64; 5]) {
            for pool in [0, if small { 1 } else { 2 }] {
                for (gauge, (added, taken)) in self.0[pool].iter_mut().zip(added.into_iter().zip(taken)) {
                    gauge.current = gauge.current + added - taken;
                    gauge.peak = gauge.peak.max(gauge.current);
                    gauge.allocated += added;
                    gauge.freed += taken;
                }
            }
        }

        fn each(&mut self, change: fn(&mut Gauge)) {
            self.0.iter_mut().flatten().for_each(change);
        }
    }

    fn gauges(pool: PoolGauges) -> [Gauge; 5] {
        [pool.allocation, pool.allocated_bytes, pool.requested_bytes, pool.active, pool.active_bytes]
    }

    proptest! {
        #[test]
        fn all_gauges_follow_from_the_counts(program in prop::collection::vec((0..8, any::<prop::sample::Index>(), 1u64..5000), 1..200)) {
            let (mut tallies, mut model) = (Tallies::default(), Model::default());
            let (mut live, mut withheld) = (Vec::new(), Vec::new());
            for (step, which, requested) in program {
                let (small, size) = (requested < 2500, requested.next_multiple_of(512));
                match step {
                    0..4 => {
                        tallies.handed_out(small, size, requested);
                        model.change(small, [1, size, requested, 1, size], [0; 5]);
                        live.push((small, size, requested));
                    }
                    4 | 5 if !live.is_empty() => {
                        let (small, size, requested) = live.swap_remove(which.index(live.len()));
                        let stays = step == 5;
                        tallies.freed(small, size, requested, stays);
                        let active = u64::from(!stays);
                        model.change(small, [0; 5], [1, size, requested, active, active * size]);
                        if stays {
                            withheld.push((small, size));
                        }
                    }
                    6 if !withheld.is_empty() => {
                        let (small, size) = withheld.swap_remove(which.index(withheld.len()));
                        tallies.completed(small, 1, size);
                        model.change(small, [0; 5], [0, 0, 0, 1, size]);
                    }
                    7 if requested % 2 == 0 => {
                        tallies.reset_peaks();
                        model.each(|gauge| gauge.peak = gauge.current);
                    }
                    _ => {}
                }
            }
            let stats = tallies.stats(0, &FreeSums::default());
            for (pool, model) in [stats.all, stats.small_pool, stats.large_pool].into_iter().zip(model.0) {
                prop_assert_eq!(gauges(pool), model);
            }
        }
    }
}
