//! Leaves of a pass and their outputs, stored or not, until their scope is replayed.
//!
//! A plan's verdict on an output must not change the record of the pass, or no later pass would match it. Therefore all outputs of a scope
//! are unpacked when its replay begins, stored or not, and an output that is not stored counts as held by its scope until the replay ends.

use crate::{ItemId, ScopeId, Verdict};

/// Leaves of one pass.
#[derive(Clone, Debug, Default)]
pub(super) struct Leaves {
    /// Outputs in the order of their packs.
    outputs: Vec<Output>,
    /// Scopes whose replay is in progress.
    replaying: Vec<ScopeId>,
    replayed: bool,
    held: usize,
}

#[derive(Clone, Copy, Debug)]
struct Output {
    item: ItemId,
    scope: ScopeId,
    is_stored: bool,
    /// Whether the scope holds the output.
    held: bool,
}

impl Leaves {
    /// Records the pack of an output. If it is not stored, its scope holds it from here on.
    pub(super) fn packed(&mut self, item: ItemId, scope: ScopeId, verdict: Verdict) {
        let held = verdict == Verdict::Recompute;
        self.held += usize::from(held);
        self.outputs.push(Output { item, scope, is_stored: !held, held });
    }

    /// Returns whether the last packed output is stored.
    pub(super) fn is_last_stored(&self) -> bool {
        self.outputs.last().is_some_and(|output| output.is_stored)
    }

    /// Records the begin of a scope's replay and returns its outputs.
    pub(super) fn replays(&mut self, scope: ScopeId) -> Vec<ItemId> {
        self.replayed = true;
        self.replaying.push(scope);
        self.outputs.iter().filter(|output| output.scope == scope).map(|output| output.item).collect()
    }

    /// Records the end of a scope's replay and returns the outputs it no longer holds.
    pub(super) fn replayed(&mut self, scope: ScopeId) -> Vec<ItemId> {
        if let Some(at) = self.replaying.iter().rposition(|replaying| *replaying == scope) {
            self.replaying.remove(at);
        }
        let of = |output: &&mut Output| output.held && output.scope == scope;
        let gone = self.outputs.iter_mut().filter(of).map(|output| {
            output.held = false;
            output.item
        });
        let gone: Vec<ItemId> = gone.collect();
        self.held -= gone.len();
        gone
    }

    /// Returns whether the item was unpacked by a replay that is still running.
    pub(super) fn is_replaying(&self, item: ItemId) -> bool {
        !self.replaying.is_empty()
            && self.of(item).is_some_and(|output| self.replaying.contains(&output.scope))
    }

    /// Returns whether only a scope ever held the item.
    pub(super) fn was_not_stored(&self, item: ItemId) -> bool {
        self.of(item).is_some_and(|output| !output.is_stored)
    }

    /// Returns the outputs of a scope that were not stored.
    pub(super) fn not_stored(&self, scope: ScopeId) -> impl Iterator<Item = ItemId> {
        let of = move |output: &&Output| output.scope == scope && !output.is_stored;
        self.outputs.iter().filter(of).map(|output| output.item)
    }

    /// Returns the number of outputs held by scopes.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Returns whether a replay has begun and none is running.
    pub(super) fn is_behind_replays(&self) -> bool {
        self.replayed && self.replaying.is_empty()
    }

    fn of(&self, item: ItemId) -> Option<&Output> {
        // They are in the order of items.
        let at = self.outputs.binary_search_by_key(&item, |output| output.item).ok()?;
        self.outputs.get(at)
    }
}
