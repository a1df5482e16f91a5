//! Settings of an allocator that users can tune, and the sizes of new extents that follow from them.
//!
//! An extent costs the same whatever its size. So a growth takes few large extents, and rounds up to a unit that grows with the domain: a
//! small domain has little unused memory, a large one few extents, however slowly it grew.
//!
//! ```text
//! holds      0 ────── 4 GiB ── 8 ── 16 ──       of a domain in extents of 16 MiB
//! unit         2 MiB      4     8     16
//! growth     [ 64 ][ 64 ][ 32 ][ 4 ][ 2 ]        the largest first, down to the unit
//! ```

use glake_units::Bytes;

use crate::error::StitchError;

/// Policy for reusing memory across streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Borrow {
    /// A stream reuses only memory that it freed itself.
    Off,
    /// A stream may also reuse memory of other streams once the completion point of the free has passed: no waits, no deadlock.
    #[default]
    Completed,
    /// `Completed`, and before the completion point the new owner may wait on the GPU for the stream that freed the memory: whole pieces or
    /// parts, the best fit first, then several that touch or are stitched.
    Wait,
}

/// The settings of one device's allocator.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Memory of the device: home is twice as long, and reserved memory never exceeds it.
    pub memory: Bytes,
    /// Unit of extents and mappings (2 MiB on every GPU so far).
    pub granularity: Bytes,
    /// Full size of extents, used by domains that hold much memory.
    pub extent: Bytes,
    /// Smallest size of extents, used by domains that hold little, and by all once reserved memory is near its limit.
    pub extent_near_limit: Bytes,
    /// Fraction of the device's memory above which extents are small.
    pub near_full: f64,
    /// Fraction of a limit below the device's memory above which extents are small.
    pub near_limit: f64,
    /// Size of the slabs that serve small requests.
    pub slab: Bytes,
    /// Whether free pieces are stitched at all.
    pub alias: bool,
    /// Smallest request that is stitched; `None`: one extent.
    pub fragment_limit: Option<Bytes>,
    /// Largest ratio of an idle alias's size to the request at which the alias is reused.
    pub reuse_limit: f64,
    /// Whether to stitch only if growing is not possible.
    pub stitch_only_when_full: bool,
    /// Limit of idle aliases, in bytes; above it the oldest are collected.
    pub idle_aliases: Bytes,
    /// Maximum number of mapped extents, at home and in aliases together.
    pub max_mappings: u64,
    /// Limit of reserved memory.
    pub limit: Bytes,
    /// Limit of memory reserved by requests, below `limit`. It does not ask for tight packing.
    pub budget: Bytes,
    /// Policy for reuse across streams.
    pub borrow: Borrow,
}

impl Settings {
    /// Returns the defaults for a device with `memory` bytes.
    pub fn for_memory(memory: Bytes) -> Self {
        Settings {
            memory,
            granularity: Bytes::mib(2),
            extent: Bytes::mib(16),
            extent_near_limit: Bytes::mib(2),
            near_full: 0.9,
            near_limit: 0.25,
            slab: Bytes::mib(2),
            alias: true,
            fragment_limit: None,
            reuse_limit: 10.0,
            stitch_only_when_full: false,
            idle_aliases: Bytes::gib(1000),
            max_mappings: 400_000,
            limit: memory,
            budget: memory,
            borrow: Borrow::Completed,
        }
    }
}

/// Bytes at which a domain's unit of growth reaches the full size, for domains with extents of the device's size. Regions have larger
/// extents of their own and reach theirs there too.
const FULL: u64 = 16 << 30;
const FULL_OWN: u64 = 4 << 30;

/// Largest extent of a growth, in full sizes.
const LARGEST: u64 = 4;

/// Smallest request that is stitched in a domain of several streams, in units of growth. On sizes of a training run, with three streams
/// that free and allocate at random, 100,000 pairs take 9 driver calls; with one unit they take 76,000.
const SHARED: u64 = 4;

impl Settings {
    /// Returns the device's memory in whole granules, in bytes.
    pub(crate) fn whole_memory(&self) -> u64 {
        self.memory.get().next_multiple_of(self.granularity.get())
    }

    /// Returns the unit of growth of a domain that holds `held` bytes: proportional to them, rounded down to a power of two, from the
    /// smallest size to the full one, which is the domain's `own` or else `extent`.
    pub(crate) fn unit(&self, own: Option<Bytes>, held: u64) -> u64 {
        let full = own.unwrap_or(self.extent).get();
        let whole = if own.is_some() { FULL_OWN } else { FULL };
        let share = held / (whole / full).max(1);
        (1 << share.max(1).ilog2()).max(self.extent_near_limit.get()).min(full)
    }

    /// Returns the size from which requests are stitched, in a domain that grows in units of `unit`. Free memory of several streams changes
    /// hands all the time: stitched in smaller parts, it would be mapped again and again. Near a limit every byte counts.
    pub(crate) fn stitched_from(&self, own: Option<Bytes>, unit: u64, streams: usize, reserved: u64) -> u64 {
        let is_shared = streams > 1 && self.limit >= self.memory && reserved <= self.small_from();
        if is_shared { (SHARED * unit).min(own.unwrap_or(self.extent).get()) } else { unit }
    }

    /// Returns the sizes of the new extents for a growth of a domain. Near the limit all are of the smallest size; in a domain with its own
    /// extent size only if larger ones do not fit.
    pub(crate) fn extent_sizes(
        &self,
        missing: u64,
        own: Option<Bytes>,
        held: u64,
        reserved: u64,
    ) -> Vec<u64> {
        let full = own.unwrap_or(self.extent).get();
        let near = if own.is_some() { self.most().get() } else { self.small_from() };
        let (mut unit, mut largest) = (self.unit(own, held + missing), LARGEST * full);
        if reserved + missing.next_multiple_of(unit) > near {
            unit = self.extent_near_limit.get().min(full);
            largest = unit;
        }
        let (mut left, mut size) = (missing.next_multiple_of(unit), unit << (largest / unit).ilog2());
        let mut sizes = Vec::new();
        while left > 0 {
            if left < size {
                size /= 2;
                continue;
            }
            sizes.push(size);
            left -= size;
        }
        sizes
    }

    /// Returns the reserved memory above which extents become small. A limit below the device's memory asks for tight packing long before
    /// the device itself or a budget does.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    fn small_from(&self) -> u64 {
        let of = |whole: Bytes, part: f64| (whole.get() as f64 * part) as u64;
        let near = of(self.limit, if self.limit < self.memory { self.near_limit } else { self.near_full });
        if self.budget < self.limit { near.min(of(self.budget, self.near_full)) } else { near }
    }

    /// Returns the most that requests may reserve.
    pub(crate) fn most(&self) -> Bytes {
        self.budget.min(self.limit)
    }

    /// Returns whether the limit allows new extents at the given reserved memory.
    pub(crate) fn allows(&self, sizes: &[u64], reserved: u64) -> bool {
        reserved + sizes.iter().sum::<u64>() <= self.most().get()
    }

    /// Returns the size of the longest alias that a request of this size may reuse.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    pub(crate) fn longest_reused(&self, size: u64) -> u64 {
        (size as f64 * self.reuse_limit) as u64
    }

    /// Checks the settings for consistency.
    ///
    /// # Errors
    /// [`StitchError::BadSetting`] for the first invalid setting.
    pub(crate) fn check(&self) -> Result<(), StitchError> {
        let granularity = self.granularity;
        let bad = |knob, value, allowed| Err(StitchError::BadSetting { knob, value, allowed });
        if !granularity.get().is_power_of_two() || granularity < Bytes::kib(64) {
            return bad("granularity", granularity, "a power of two, at least 64 KiB");
        }
        if self.memory < granularity || self.memory > Bytes::gib(512) {
            return bad("memory", self.memory, "from one granule to 512 GiB");
        }
        for (knob, value) in
            [("extent", self.extent), ("extent_near_limit", self.extent_near_limit), ("slab", self.slab)]
        {
            if value.is_zero() || !value.is_aligned(granularity) {
                return bad(knob, value, "a multiple of the device's granularity, at least one");
            }
        }
        if self.slab < Bytes::mib(2) || self.slab > self.extent_near_limit {
            return bad("slab", self.slab, "at least 2 MiB and at most extent_near_limit");
        }
        if self.extent_near_limit > self.extent {
            return bad("extent_near_limit", self.extent_near_limit, "at most extent");
        }
        Ok(())
    }
}

#[cfg(test)]
mod sizes_tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Generates settings with extents of any size, and optionally a domain's own.
    fn settings() -> impl Strategy<Value = (Settings, Option<Bytes>)> {
        let size = |granules: u64| Bytes::mib(2 * granules);
        (1..=40u64, 1..=4u64, prop::option::of(1..=100u64)).prop_map(move |(extent, small, own)| {
            let (extent, extent_near_limit) = (size(extent.max(small)), size(small));
            (Settings { extent, extent_near_limit, ..Settings::for_memory(Bytes::gib(64)) }, own.map(size))
        })
    }

    fn full(settings: &Settings, own: Option<Bytes>) -> u64 {
        own.unwrap_or(settings.extent).get()
    }

    fn small(settings: &Settings, own: Option<Bytes>) -> u64 {
        settings.extent_near_limit.get().min(full(settings, own))
    }

    proptest! {
        #[test]
        fn the_unit_is_proportional_to_the_held_bytes((settings, own) in settings(), held in 0..(1u64 << 37), more in 0..(1u64 << 37)) {
            let (full, small) = (full(&settings, own), small(&settings, own));
            let whole = if own.is_some() { FULL_OWN } else { FULL };
            let unit = settings.unit(own, held);
            prop_assert!((small..=full).contains(&unit) && unit.is_multiple_of(settings.granularity.get()));
            prop_assert!(unit == small || unit <= held / (whole / full));
            prop_assert!(unit <= settings.unit(own, held + more), "it falls");
            prop_assert_eq!(settings.unit(own, 2 * whole + more), full);
        }

        #[test]
        fn a_growth_is_the_missing_bytes_rounded_up_to_a_unit(
            (settings, own) in settings(), missing in 1..(1u64 << 33), held in 0..(1u64 << 35), reserved in 0..(1u64 << 36),
        ) {
            let (full, small) = (full(&settings, own), small(&settings, own));
            let sizes = settings.extent_sizes(missing, own, held, reserved);
            let total: u64 = sizes.iter().sum();
            let unit = if total + reserved > settings.small_from() { small } else { settings.unit(own, held + missing) };
            prop_assert!(total >= missing);
            prop_assert!(own.is_some() || total < missing + unit, "{total} for {missing}, by {unit}");
            prop_assert!(sizes.is_sorted_by(|a, b| a >= b));
            let fits = |size: &u64| size.is_multiple_of(settings.granularity.get()) && (small..=LARGEST * full).contains(size);
            prop_assert!(sizes.iter().all(fits), "{sizes:?}");
        }

        #[test]
        fn a_domain_that_grows_slowly_has_few_extents((settings, own) in settings(), step in 1..(64u64 << 20)) {
            let full = full(&settings, own);
            let whole = if own.is_some() { FULL_OWN } else { FULL };
            let (mut held, mut extents) = (0, 0);
            while held < 40 << 30 {
                let sizes = settings.extent_sizes(step, own, held, 0);
                held += sizes.iter().sum::<u64>();
                extents += sizes.len() as u64;
            }
            // Bound: the extents of full size, and of each smaller size at most as many as cover the bytes up to the next size.
            let doublings = u64::from((full / small(&settings, own)).ilog2()) + 2;
            let bound = held / full + 2 * doublings * (whole / full);
            prop_assert!(extents <= bound, "{extents} extents, bound {bound}");
        }
    }

    #[test]
    fn a_large_growth_takes_few_large_extents_and_small_ones_near_the_limit() {
        let settings = Settings::for_memory(Bytes::gib(1));
        assert_eq!(settings.extent_sizes(20 * MIB, None, 0, 0), [16 * MIB, 4 * MIB]);
        assert_eq!(settings.extent_sizes(20 * MIB, None, FULL, 0), [32 * MIB]);
        assert_eq!(settings.extent_sizes(150 * MIB, None, 0, 0), [64, 64, 16, 4, 2].map(|size| size * MIB));
        assert_eq!(settings.extent_sizes(5 * MIB, None, FULL, 1000 * MIB), [2 * MIB; 3]);
        let own = Some(Bytes::mib(8));
        assert_eq!(settings.extent_sizes(5 * MIB, own, FULL, 1000 * MIB), [8 * MIB], "as long as it fits");
        assert_eq!(settings.extent_sizes(5 * MIB, own, FULL, 1020 * MIB), [2 * MIB; 3]);
        assert!(settings.allows(&[16 * MIB], 1008 * MIB) && !settings.allows(&[16 * MIB], 1009 * MIB));
    }

    #[test]
    fn a_configured_limit_makes_extents_small_early() {
        let settings = Settings { limit: Bytes::mib(512), ..Settings::for_memory(Bytes::gib(1)) };
        assert_eq!(settings.extent_sizes(MIB, None, FULL, 64 * MIB), [16 * MIB]);
        assert_eq!(settings.extent_sizes(MIB, None, FULL, 120 * MIB), [2 * MIB]);
    }

    #[test]
    fn a_budget_makes_extents_small_only_near_its_end() {
        let settings = Settings { budget: Bytes::mib(512), ..Settings::for_memory(Bytes::gib(1)) };
        assert_eq!(settings.extent_sizes(MIB, None, FULL, 400 * MIB), [16 * MIB]);
        assert_eq!(settings.extent_sizes(MIB, None, FULL, 460 * MIB), [2 * MIB]);
        assert!(settings.allows(&[2 * MIB], 510 * MIB) && !settings.allows(&[2 * MIB], 511 * MIB));
    }
}
