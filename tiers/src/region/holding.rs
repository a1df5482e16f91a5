//! What a region holds, as whoever divides a GPU's memory has to know it.

use glake_stitch::ExtentState;
use glake_units::Bytes;

use super::{Policy, Region};

/// What a region holds of its GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionHolding {
    /// Its memory on the GPU.
    pub resident: Bytes,
    /// What is evicted and can come back.
    pub evicted: Bytes,
    /// The part of `resident` that a shrink passes over: fixed, and exported.
    pub fixed: Bytes,
    /// The part of `resident` that leaves without a copy and comes back without one: given up by the region's policy, or with nothing live in it.
    pub discardable: Bytes,
    /// What would have to be copied if all left now.
    pub dirty: Bytes,
    /// The part of `resident` that has no live bytes now and would have to be copied once it has: a hit may put a block there at any time.
    pub unused: Bytes,
    /// Pinned host memory that copies take.
    pub hosted: Bytes,
}

impl Region {
    /// What it holds now. Waits for nobody who moves it.
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
