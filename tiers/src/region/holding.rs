//! Memory account of a region, as needed for dividing a GPU's memory.

use glake_stitch::ExtentState;
use glake_units::Bytes;

use super::{Policy, Region};

/// Memory account of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionHolding {
    /// Bytes on the GPU.
    pub resident: Bytes,
    /// Evicted bytes that can be refilled.
    pub evicted: Bytes,
    /// Part of `resident` that a shrink skips: fixed and exported extents.
    pub fixed: Bytes,
    /// Part of `resident` that moves without copying: discarded by the region's policy, or without live bytes.
    pub discardable: Bytes,
    /// Bytes to copy if all of the region left now.
    pub dirty: Bytes,
    /// Part of `resident` without live bytes that would have to be copied if it had any: an allocation may use it at any time.
    pub unused: Bytes,
    /// Pinned host memory of the region's copies.
    pub hosted: Bytes,
}

impl Region {
    /// Returns the current account. Does not wait for threads that move the region.
    pub fn holding(&self) -> RegionHolding {
        let standing = self.pool.records().standing(self.domain);
        let mut stays = self.pool.fixed().extents(self.domain);
        stays.extend(self.pool.evictions().exported(standing.iter().map(|(view, _)| view.extent)));
        let is_discarded = self.options.policy == Policy::Discard;
        let keeps_all = self.pool.domains().is_held(self.domain);
        let mut held = RegionHolding {
            hosted: self.pool.records().hosted(self.domain).saturating_add(self.clean.hosted()),
            ..RegionHolding::default()
        };
        let (mut leaving, mut kept) = (Vec::new(), Vec::new());
        for (view, _) in standing.iter().filter(|(_, residency)| !residency.is_decommitted()) {
            if view.state == ExtentState::Evicted {
                held.evicted = held.evicted.saturating_add(view.size);
                continue;
            }
            held.resident = held.resident.saturating_add(view.size);
            if !is_discarded && !stays.contains(&view.extent) {
                kept.push(*view);
            }
            if stays.contains(&view.extent) {
                held.fixed = held.fixed.saturating_add(view.size);
            } else if is_discarded || view.live.is_zero() && !keeps_all {
                held.discardable = held.discardable.saturating_add(view.size);
            } else {
                leaving.push(*view);
            }
        }
        held.dirty = self.copied_sizes(&standing, &leaving).into_iter().sum();
        let uncopied: Bytes = self.uncopied(&standing, &kept).into_iter().map(|view| view.size).sum();
        held.unused = uncopied.saturating_sub(held.dirty);
        held
    }
}
