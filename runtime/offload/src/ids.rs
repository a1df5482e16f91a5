//! Identifiers within a pass.

use std::fmt;

/// Number of an item, in the order in which a pass packs them. An item is the bytes of a storage range at one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ItemId(usize);

/// Number of a scope: one execution of a part of the program, such as a layer, whose items a checkpoint can recompute together. The program
/// assigns the numbers; a part that runs twice in a pass has two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScopeId(pub u32);

/// Position in the recorded order of a pass: the number of packs and unpacks before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub usize);

impl ItemId {
    /// Creates the ID of the item with a pack index, counted from 0.
    pub const fn new(index: usize) -> Self {
        ItemId(index)
    }

    /// Returns the number of items that the pass packed before it.
    pub const fn index(self) -> usize {
        self.0
    }
}

impl fmt::Display for ItemId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "item {}", self.0)
    }
}
