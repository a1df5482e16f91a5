//! Blocks that lie in an alias: their bytes are pieces of home, their addresses are the alias's.

use crate::ids::{AliasId, FreeListId, PieceId};

/// A block that lies in an alias.
#[derive(Clone, Debug)]
pub(crate) struct Stitched {
    pub(crate) alias: AliasId,
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) list: FreeListId,
    /// Where its parts that are slabs go back to.
    pub(crate) slabs: FreeListId,
    /// Other streams use it.
    pub(crate) recorded: bool,
    /// Its bytes at home, in alias order.
    pub(crate) parts: Vec<PieceId>,
}
