//! Items of a tape.

use std::time::Duration;

use glake_units::Bytes;

use crate::{Position, ScopeId};

/// Properties of an item when it is packed.
///
/// ```
/// use glake_offload::{Pack, ScopeId};
/// use glake_units::Bytes;
///
/// let pack = Pack::new(Bytes::mib(64)).narrowed_to(Bytes::mib(32)).within(ScopeId(3));
/// assert_eq!((pack.bytes, pack.link_bytes), (Bytes::mib(64), Bytes::mib(32)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pack {
    /// Size in GPU memory.
    pub bytes: Bytes,
    /// Bytes copied over the link each way, after exact narrowing; also its size in host memory.
    pub link_bytes: Bytes,
    /// Layer that packs it.
    pub scope: Option<ScopeId>,
    /// Role in a leaf of its scope; `None`: none, and no replay recomputes it.
    pub leaf: Option<LeafPart>,
}

/// Data that a leaf leaves behind. A replay of its scope recomputes the leaf unless the data was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeafPart {
    /// Output of the leaf.
    Output,
    /// Data that it saved in addition to its output, which is packed before: stored together with it, as neither is of use alone.
    Beside,
}

/// Method by which a replay of the scope recreates an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// Output of a leaf that takes this long and is skipped if its output was stored.
    Leaf(Duration),
    /// Item between leaves, recreated by every replay of its scope, which takes this long.
    Inner(Duration),
}

impl Recompute {
    /// Returns the time to recompute the item.
    pub const fn time(self) -> Duration {
        match self {
            Recompute::Leaf(time) | Recompute::Inner(time) => time,
        }
    }

    /// Returns `now` with the lesser of both times. A time of zero counts as unmeasured.
    pub(super) fn lesser(self, now: Recompute) -> Recompute {
        let measured = [self.time(), now.time()].into_iter().filter(|time| !time.is_zero());
        let time = measured.min().unwrap_or_default();
        match now {
            Recompute::Leaf(_) => Recompute::Leaf(time),
            Recompute::Inner(_) => Recompute::Inner(time),
        }
    }
}

/// Item of a tape, with the positions at which it was packed, released and unpacked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub(crate) pack: Pack,
    pub(crate) recompute: Option<Recompute>,
    pub(crate) packed: Position,
    pub(crate) released: Position,
    pub(crate) unpacks: Vec<Position>,
    pub(crate) dropped: Position,
}

impl Item {
    /// Returns the properties at its pack.
    pub const fn pack(&self) -> Pack {
        self.pack
    }

    /// Returns how its scope can recompute it; `None` if the program checkpoints nothing there.
    pub const fn recompute(&self) -> Option<Recompute> {
        self.recompute
    }

    /// Returns the step that packs it.
    pub const fn packed(&self) -> Position {
        self.packed
    }

    /// Returns the first step before which the forward pass no longer holds its storage.
    pub const fn released(&self) -> Position {
        self.released
    }

    /// Returns the steps that unpack it, in order; empty for a branch that no backward pass used.
    pub fn unpacks(&self) -> &[Position] {
        &self.unpacks
    }

    /// Returns the first step before which no handle of it is alive.
    pub const fn dropped(&self) -> Position {
        self.dropped
    }
}

impl Pack {
    /// Creates an item of `bytes` that is copied completely, in no scope.
    pub const fn new(bytes: Bytes) -> Self {
        Pack { bytes, link_bytes: bytes, scope: None, leaf: None }
    }

    /// Reduces the bytes copied over the link.
    #[must_use]
    pub const fn narrowed_to(mut self, link_bytes: Bytes) -> Self {
        self.link_bytes = link_bytes;
        self
    }

    /// Sets the scope that packs it.
    #[must_use]
    pub const fn within(mut self, scope: ScopeId) -> Self {
        self.scope = Some(scope);
        self
    }

    /// Marks it as the output of a leaf.
    #[must_use]
    pub const fn leaf(mut self) -> Self {
        self.leaf = Some(LeafPart::Output);
        self
    }

    /// Marks it as additional data of the leaf whose output was packed before.
    #[must_use]
    pub const fn beside(mut self) -> Self {
        self.leaf = Some(LeafPart::Beside);
        self
    }

    /// Returns whether it is a leaf's output.
    pub const fn is_output(&self) -> bool {
        matches!(self.leaf, Some(LeafPart::Output))
    }
}
