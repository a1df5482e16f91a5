//! How large new extents are, and whether a limit allows them.
//!
//! Setting access costs the same for any extent, so a large growth takes few large ones; near the limit they are small, so that little
//! of them stays unused.

use glake_units::Bytes;

use crate::error::StitchError;
use crate::settings::Settings;

/// Extents of a growth are so many times larger, where it holds so many of them.
const LARGER: [(u64, u64); 2] = [(4, 2), (2, 1)];

/// So many extents of one size as hold `bytes`.
fn side_by_side(bytes: u64, size: u64) -> Vec<u64> {
    #[allow(clippy::cast_possible_truncation)]
    let count = bytes.div_ceil(size) as usize;
    vec![size; count]
}

impl Settings {
    /// The device's memory in whole granules.
    pub(crate) fn whole_memory(&self) -> u64 {
        self.memory.get().next_multiple_of(self.granularity.get())
    }

    /// The size of extents of a domain, which may have its own.
    pub(crate) fn extent_size(&self, own: Option<Bytes>) -> u64 {
        own.unwrap_or(self.extent).get()
    }

    /// The sizes of new extents for so many bytes, where so much is reserved. A domain that has a size of its own has a reason for it:
    /// there they are small only where others do not fit.
    pub(crate) fn extent_sizes(&self, missing: u64, own: Option<Bytes>, reserved: u64) -> Vec<u64> {
        let (full, small) = (self.extent_size(own), self.extent_near_limit.get());
        let near = if own.is_some() { self.most().get() } else { self.small_from() };
        if reserved + missing.next_multiple_of(full) > near {
            return side_by_side(missing, small.min(full));
        }
        let large =
            LARGER.iter().find(|(times, few)| missing >= few * times * full).map(|(times, _)| times * full);
        let Some(large) = large else { return side_by_side(missing, full) };
        let mut sizes = side_by_side(missing - missing % large, large);
        sizes.extend(side_by_side(missing % large, full));
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
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_large_growth_takes_few_large_extents_and_small_ones_near_the_limit() {
        let settings = Settings::for_memory(Bytes::gib(1));
        assert_eq!(settings.extent_sizes(20 * MIB, None, 0), [16 * MIB; 2]);
        assert_eq!(settings.extent_sizes(150 * MIB, None, 0), [64 * MIB, 64 * MIB, 16 * MIB, 16 * MIB]);
        assert_eq!(settings.extent_sizes(5 * MIB, None, 1000 * MIB), [2 * MIB; 3]);
        let own = Some(Bytes::mib(8));
        assert_eq!(settings.extent_sizes(5 * MIB, own, 1000 * MIB), [8 * MIB], "as long as it fits");
        assert_eq!(settings.extent_sizes(5 * MIB, own, 1020 * MIB), [2 * MIB; 3]);
        assert!(settings.allows(&[16 * MIB], 1008 * MIB) && !settings.allows(&[16 * MIB], 1009 * MIB));
    }

    #[test]
    fn a_limit_that_was_set_makes_extents_small_early() {
        let settings = Settings { limit: Bytes::mib(512), ..Settings::for_memory(Bytes::gib(1)) };
        assert_eq!(settings.extent_sizes(MIB, None, 64 * MIB), [16 * MIB]);
        assert_eq!(settings.extent_sizes(MIB, None, 120 * MIB), [2 * MIB]);
    }

    #[test]
    fn a_budget_makes_extents_small_near_its_end_alone() {
        let settings = Settings { budget: Bytes::mib(512), ..Settings::for_memory(Bytes::gib(1)) };
        assert_eq!(settings.extent_sizes(MIB, None, 400 * MIB), [16 * MIB]);
        assert_eq!(settings.extent_sizes(MIB, None, 460 * MIB), [2 * MIB]);
        assert!(settings.allows(&[2 * MIB], 510 * MIB) && !settings.allows(&[2 * MIB], 511 * MIB));
    }
}
