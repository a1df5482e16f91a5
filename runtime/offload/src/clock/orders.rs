//! What is to be done at a step.

use crate::{ItemId, Position, ScopeId, Verdict};

/// What is to be done at one step of a pass, in this order: wait, begin reloads, replay, and then the step itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orders<'c> {
    /// The step.
    pub position: Position,
    /// The copies out of these have ended before the step's work (a wait on the GPU): their memory is free from then
    /// on, where the program holds it no more.
    pub settle: &'c [ItemId],
    /// The reloads of these begin, in this order; their memory is taken.
    pub reload: &'c [ItemId],
    /// This scope is replayed: what of it is to be recomputed comes to be.
    pub replay: Option<ScopeId>,
    /// Of a pack: what becomes of the item. Of an unpack: what became of it.
    pub verdict: Verdict,
}
