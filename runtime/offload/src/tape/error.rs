//! Why an event of a pass is not one of it.

use crate::ItemId;

/// Why an event cannot have happened in a pass. Nothing of the record has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TapeError {
    /// No such item was packed.
    #[error(
        "{item} was never packed in this pass, which packed {packed}: give the id that its pack returned"
    )]
    UnknownItem {
        /// What was named.
        item: ItemId,
        /// How many items the pass has packed.
        packed: usize,
    },
    /// Its last handle is gone.
    #[error("no handle of {item} lives any more: an item is unpacked and dropped only while one does")]
    NoHandle {
        /// What was named.
        item: ItemId,
    },
}
