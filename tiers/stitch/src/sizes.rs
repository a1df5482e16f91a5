//! Sizes of new extents, and whether a limit allows them.
//!
//! An extent costs the same whatever its size. So a growth takes few large extents, and rounds up to a unit that grows with the domain:
//! a small domain has little unused, a large one few extents, however slowly it grew.
//!
//! ```text
//! holds      0 ────── 4 GiB ── 8 ── 16 ──       of a domain in extents of 16 MiB
//! unit         2 MiB      4     8     16
//! growth     [ 64 ][ 64 ][ 32 ][ 4 ][ 2 ]        the largest first, down to the unit
//! ```

use glake_units::Bytes;

use crate::error::StitchError;
use crate::settings::Settings;

/// Bytes of a domain whose unit of growth is the full size: of one in extents of the device's size, and of one that moves as a whole,
/// in larger extents of its own.
const FULL: u64 = 16 << 30;
const FULL_OWN: u64 = 4 << 30;

/// Largest extent of a growth, in full sizes.
const LARGEST: u64 = 4;

impl Settings {
    /// The device's memory in whole granules.
    pub(crate) fn whole_memory(&self) -> u64 {
        self.memory.get().next_multiple_of(self.granularity.get())
    }

    /// Returns the unit of growth of a domain that holds so many bytes: in proportion to them, rounded down to a power of two, from
    /// the smallest size to the full one, which is the domain's `own` or else `extent`.
    pub(crate) fn unit(&self, own: Option<Bytes>, held: u64) -> u64 {
        let full = own.unwrap_or(self.extent).get();
        let whole = if own.is_some() { FULL_OWN } else { FULL };
        let share = held / (whole / full).max(1);
        (1 << share.max(1).ilog2()).max(self.extent_near_limit.get()).min(full)
    }

    /// Returns the sizes of new extents for so many bytes of a domain, which holds so many, where so much is reserved in all. Near the
    /// limit all are of the smallest size; of a domain that has a size of its own only where they do not fit otherwise.
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

    /// Where extents become small: a limit that was set asks for tight packing long before the device itself does, or a budget.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    fn small_from(&self) -> u64 {
        let of = |whole: Bytes, part: f64| (whole.get() as f64 * part) as u64;
        let near = of(self.limit, if self.limit < self.memory { self.near_limit } else { self.near_full });
        if self.budget < self.limit { near.min(of(self.budget, self.near_full)) } else { near }
    }

    /// What requests may have at most.
    pub(crate) fn most(&self) -> Bytes {
        self.budget.min(self.limit)
    }

    /// Whether the limit allows new extents, where so much is reserved.
    pub(crate) fn allows(&self, sizes: &[u64], reserved: u64) -> bool {
        reserved + sizes.iter().sum::<u64>() <= self.most().get()
    }

    /// The longest alias that a request of this size uses again.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    pub(crate) fn longest_reused(&self, size: u64) -> u64 {
        (size as f64 * self.reuse_limit) as u64
    }

    /// Refuses the first knob that makes no sense.
    ///
    /// # Errors
    /// [`StitchError::BadSetting`].
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Extents of any size, and a domain's own.
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
        fn the_unit_is_a_share_of_what_is_held((settings, own) in settings(), held in 0..(1u64 << 37), more in 0..(1u64 << 37)) {
            let (full, small) = (full(&settings, own), small(&settings, own));
            let whole = if own.is_some() { FULL_OWN } else { FULL };
            let unit = settings.unit(own, held);
            prop_assert!((small..=full).contains(&unit) && unit.is_multiple_of(settings.granularity.get()));
            prop_assert!(unit == small || unit <= held / (whole / full));
            prop_assert!(unit <= settings.unit(own, held + more), "it falls");
            prop_assert_eq!(settings.unit(own, 2 * whole + more), full);
        }

        #[test]
        fn a_growth_is_what_is_missing_up_to_a_unit(
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
            // As many as the full size takes, and each smaller size at most as many as hold the bytes up to the next.
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
    fn a_limit_that_was_set_makes_extents_small_early() {
        let settings = Settings { limit: Bytes::mib(512), ..Settings::for_memory(Bytes::gib(1)) };
        assert_eq!(settings.extent_sizes(MIB, None, FULL, 64 * MIB), [16 * MIB]);
        assert_eq!(settings.extent_sizes(MIB, None, FULL, 120 * MIB), [2 * MIB]);
    }

    #[test]
    fn a_budget_makes_extents_small_near_its_end_alone() {
        let settings = Settings { budget: Bytes::mib(512), ..Settings::for_memory(Bytes::gib(1)) };
        assert_eq!(settings.extent_sizes(MIB, None, FULL, 400 * MIB), [16 * MIB]);
        assert_eq!(settings.extent_sizes(MIB, None, FULL, 460 * MIB), [2 * MIB]);
        assert!(settings.allows(&[2 * MIB], 510 * MIB) && !settings.allows(&[2 * MIB], 511 * MIB));
    }
}
