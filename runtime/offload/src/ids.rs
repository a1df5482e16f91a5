//! What names things of a pass.

use std::fmt;

/// One item: the bytes of a storage range at one version, numbered in the order in which a pass packs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ItemId(usize);

/// One run of a part of the program, such as a layer, whose items a checkpoint can recompute together. The program
/// numbers them; what runs twice in a pass has two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScopeId(pub u32);

/// A place in the recorded order of a pass: as many packs and unpacks have come before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(pub usize);

impl ItemId {
    /// The item that is packed as the `index`-th of its pass, from 0.
    pub const fn new(index: usize) -> Self {
        ItemId(index)
    }

    /// How many items its pass packed before it.
    pub const fn index(self) -> usize {
        self.0
    }
}

impl fmt::Display for ItemId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "item {}", self.0)
    }
}
