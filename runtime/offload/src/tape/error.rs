//! Errors of recorded events.

use crate::ItemId;

/// Event that cannot occur in the pass. The record is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TapeError {
    /// Item that the pass has not packed.
    #[error(
        "{item} was never packed in this pass, which packed {packed}: give the id that its pack returned"
    )]
    UnknownItem {
        /// Item of the event.
        item: ItemId,
        /// Number of items packed so far.
        packed: usize,
    },
    /// Item without a live handle.
    #[error("no handle of {item} lives any more: an item is unpacked and dropped only while one does")]
    NoHandle {
        /// Item of the event.
        item: ItemId,
    },
}
