//! Stitched blocks: their bytes are pieces of home, their addresses belong to an alias.

use crate::ids::{AliasId, FreeListId, PieceId};

/// A live block with addresses of an alias.
#[derive(Clone, Debug)]
pub(crate) struct Stitched {
    pub(crate) alias: AliasId,
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) list: FreeListId,
    /// Free list that its parts from slabs return to.
    pub(crate) slabs: FreeListId,
    /// Whether other streams use it.
    pub(crate) recorded: bool,
    /// Pieces at home behind the block, in alias order.
    pub(crate) parts: Vec<PieceId>,
}
