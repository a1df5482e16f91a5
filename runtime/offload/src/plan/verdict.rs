//! What becomes of an item.

use crate::Pack;

/// What becomes of an item between its last use in the forward and its first in the backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It stays in the GPU's memory.
    #[default]
    Keep,
    /// It is copied to pinned host memory when it is packed, and reloaded before it is unpacked.
    Offload,
    /// It is dropped, and made again when its scope is needed first.
    Recompute,
}

impl Verdict {
    /// Where there is no plan: leaves are computed again, everything else is offloaded.
    pub(crate) fn unplanned(pack: &Pack) -> Self {
        if pack.leaf.is_some() { Verdict::Recompute } else { Verdict::Offload }
    }
}
