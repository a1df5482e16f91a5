//! Runs: contiguous free bytes at home that one stream may take, across free lists.

use crate::ids::PieceId;

/// A run of free pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Piece that begins at `start`.
    pub(crate) first: PieceId,
}

impl Run {
    pub(crate) fn size(&self) -> u64 {
        self.end - self.start
    }
}

/// Joins free ranges (start, end, piece) that touch into runs, in address order.
pub(crate) fn join(mut ranges: Vec<Run>) -> Vec<Run> {
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, run| {
        let touches = run.end == next.start;
        if touches {
            run.end = next.end;
        }
        touches
    });
    ranges
}
