//! Verdict on an item.

use crate::Pack;

/// Treatment of an item between its last use in the forward pass and its first use in the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Stays in GPU memory.
    #[default]
    Keep,
    /// Copied to pinned host memory when packed, and reloaded before it is unpacked.
    Offload,
    /// Dropped, and recomputed when its scope is first needed.
    Recompute,
}

impl Verdict {
    /// Returns the verdict of an item without a plan: leaves are recomputed, all others offloaded.
    pub(crate) fn unplanned(pack: &Pack) -> Self {
        if pack.leaf.is_some() { Verdict::Recompute } else { Verdict::Offload }
    }
}
