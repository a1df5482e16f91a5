//! Index of the segments at home: runs of extents of one domain.

use std::collections::BTreeMap;

use crate::ids::PieceId;

/// Edges of all segments, by offset.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    pub(crate) begins: BTreeMap<u64, PieceId>,
    pub(crate) ends: BTreeMap<u64, PieceId>,
}

impl Segments {
    /// Iterates over the first edge of every segment, in address order.
    pub(crate) fn begins(&self) -> impl Iterator<Item = PieceId> + '_ {
        self.begins.values().copied()
    }

    /// Returns the first edge of the last segment that begins at or before an offset.
    pub(crate) fn last_at(&self, offset: u64) -> Option<PieceId> {
        self.begins.range(..=offset).next_back().map(|(_, &edge)| edge)
    }
}
