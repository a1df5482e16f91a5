//! What a tape knows of one item.

use std::time::Duration;

use glake_units::Bytes;

use crate::{Position, ScopeId};

/// What is known of an item when it is packed.
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
    /// What it takes of the GPU's memory.
    pub bytes: Bytes,
    /// What goes over the link each way, after exact narrowing; what it takes of the host's memory.
    pub link_bytes: Bytes,
    /// The layer that packs it.
    pub scope: Option<ScopeId>,
    /// What it is to a leaf of its scope; `None`: nothing, and no replay makes it again.
    pub leaf: Option<LeafPart>,
}

/// What a leaf leaves behind: a replay of its scope computes the leaf again where this was not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeafPart {
    /// What it gave.
    Output,
    /// What it saved beside the output, which is packed before it: stored where that is, as neither is of use without the other.
    Beside,
}

/// How an item comes to be again when its scope's forward is run once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    /// It is a leaf's output: the leaf takes this long, and is passed over where its output was stored.
    Leaf(Duration),
    /// It is made between leaves: it comes to be whenever its scope is replayed, and takes this long.
    Inner(Duration),
}

impl Recompute {
    /// How long it takes.
    pub const fn time(self) -> Duration {
        match self {
            Recompute::Leaf(time) | Recompute::Inner(time) => time,
        }
    }

    /// As `now` says, in the lesser time of both; no time is one that nobody measured.
    pub(super) fn lesser(self, now: Recompute) -> Recompute {
        let measured = [self.time(), now.time()].into_iter().filter(|time| !time.is_zero());
        let time = measured.min().unwrap_or_default();
        match now {
            Recompute::Leaf(_) => Recompute::Leaf(time),
            Recompute::Inner(_) => Recompute::Inner(time),
        }
    }
}

/// An item of a tape: where in the recorded order it was packed, used and unpacked.
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
    /// What was known when it was packed.
    pub const fn pack(&self) -> Pack {
        self.pack
    }

    /// How its scope can recompute it; `None` where the program checkpoints nothing there.
    pub const fn recompute(&self) -> Option<Recompute> {
        self.recompute
    }

    /// The step that packs it.
    pub const fn packed(&self) -> Position {
        self.packed
    }

    /// From this step on nothing of the forward holds its storage.
    pub const fn released(&self) -> Position {
        self.released
    }

    /// The steps that unpack it, in order; empty for a branch that no backward used.
    pub fn unpacks(&self) -> &[Position] {
        &self.unpacks
    }

    /// From this step on no handle of it lives.
    pub const fn dropped(&self) -> Position {
        self.dropped
    }
}

impl Pack {
    /// An item of `bytes`, all of which go over a link, in no scope.
    pub const fn new(bytes: Bytes) -> Self {
        Pack { bytes, link_bytes: bytes, scope: None, leaf: None }
    }

    /// The same, of which `link_bytes` go over a link.
    #[must_use]
    pub const fn narrowed_to(mut self, link_bytes: Bytes) -> Self {
        self.link_bytes = link_bytes;
        self
    }

    /// The same, packed by `scope`.
    #[must_use]
    pub const fn within(mut self, scope: ScopeId) -> Self {
        self.scope = Some(scope);
        self
    }

    /// The same, as the output of a leaf.
    #[must_use]
    pub const fn leaf(mut self) -> Self {
        self.leaf = Some(LeafPart::Output);
        self
    }

    /// The same, as what the leaf saved whose output was packed before.
    #[must_use]
    pub const fn beside(mut self) -> Self {
        self.leaf = Some(LeafPart::Beside);
        self
    }

    /// Whether it is a leaf's output.
    pub const fn is_output(&self) -> bool {
        matches!(self.leaf, Some(LeafPart::Output))
    }
}
