//! Orders of one step.

use crate::{ItemId, Position, ScopeId, Verdict};

/// Orders of one step of a pass, in this sequence: wait, begin reloads, replay, then the step itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orders<'c> {
    /// Position of the step.
    pub position: Position,
    /// Items whose copies out must have completed before the step's work (a wait on the GPU). Their memory is free from then on unless the
    /// program still holds it.
    pub settle: &'c [ItemId],
    /// Items whose reloads begin, in this order. They occupy memory from here on.
    pub reload: &'c [ItemId],
    /// Scope to replay, which recomputes its dropped items.
    pub replay: Option<ScopeId>,
    /// For a pack, the verdict on the item; for an unpack, the verdict it was given.
    pub verdict: Verdict,
}
