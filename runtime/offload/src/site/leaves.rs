//! The leaves of a pass: their outputs, stored or not, until their scope is replayed.
//!
//! What a plan decides of an output must not change the record of the pass, or no later pass would be like it. So all
//! outputs of a scope are unpacked where its replay begins, stored or not, and one that is not stored counts as held by
//! its scope until the replay is over.

use crate::{ItemId, ScopeId, Verdict};

/// The leaves of one pass.
#[derive(Clone, Debug, Default)]
pub(super) struct Leaves {
    /// In the order of their packs.
    outputs: Vec<Output>,
    /// The scopes that are computed again at this moment.
    replaying: Vec<ScopeId>,
    replayed: bool,
    held: usize,
}

#[derive(Clone, Copy, Debug)]
struct Output {
    item: ItemId,
    scope: ScopeId,
    is_stored: bool,
    /// Its scope holds it.
    held: bool,
}

impl Leaves {
    /// An output is packed; where it is not stored its scope holds it from here on.
    pub(super) fn packed(&mut self, item: ItemId, scope: ScopeId, verdict: Verdict) {
        let held = verdict == Verdict::Recompute;
        self.held += usize::from(held);
        self.outputs.push(Output { item, scope, is_stored: !held, held });
    }

    /// Whether what was packed last is stored.
    pub(super) fn is_last_stored(&self) -> bool {
        self.outputs.last().is_some_and(|output| output.is_stored)
    }

    /// A scope is computed again: its outputs.
    pub(super) fn replays(&mut self, scope: ScopeId) -> Vec<ItemId> {
        self.replayed = true;
        self.replaying.push(scope);
        self.outputs.iter().filter(|output| output.scope == scope).map(|output| output.item).collect()
    }

    /// A scope was computed again: what it holds no more.
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

    /// Whether an item was unpacked as its scope's replay began, which goes on.
    pub(super) fn is_replaying(&self, item: ItemId) -> bool {
        !self.replaying.is_empty()
            && self.of(item).is_some_and(|output| self.replaying.contains(&output.scope))
    }

    /// Whether nobody but a scope ever had the item.
    pub(super) fn was_not_stored(&self, item: ItemId) -> bool {
        self.of(item).is_some_and(|output| !output.is_stored)
    }

    /// The outputs of a scope that were not stored.
    pub(super) fn not_stored(&self, scope: ScopeId) -> impl Iterator<Item = ItemId> {
        let of = move |output: &&Output| output.scope == scope && !output.is_stored;
        self.outputs.iter().filter(of).map(|output| output.item)
    }

    /// How many outputs scopes hold.
    pub(super) fn held(&self) -> usize {
        self.held
    }

    /// Whether a replay has begun, and none goes on.
    pub(super) fn is_behind_replays(&self) -> bool {
        self.replayed && self.replaying.is_empty()
    }

    fn of(&self, item: ItemId) -> Option<&Output> {
        // They are in the order of items.
        let at = self.outputs.binary_search_by_key(&item, |output| output.item).ok()?;
        self.outputs.get(at)
    }
}
