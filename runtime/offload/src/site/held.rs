//! What of a pass's items is on the GPU, as plans count it: what memory has beside is the rest.

use std::collections::HashMap;

use glake_units::Bytes;

use crate::{ItemId, Pack, Verdict};

/// The items of one pass on the GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    bytes: Bytes,
    /// What each of them takes that is there.
    there: HashMap<ItemId, Bytes>,
    sizes: Vec<(Bytes, bool)>,
    /// They are there until the next step begins.
    leaving: Vec<ItemId>,
}

impl Held {
    /// What they take.
    pub(super) fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// A step begins.
    pub(super) fn step(&mut self) {
        for item in std::mem::take(&mut self.leaving) {
            if let Some(bytes) = self.there.remove(&item) {
                self.bytes = self.bytes.saturating_sub(bytes);
            }
        }
    }

    /// The step packs an item. Unless it is kept, what memory still has of it until it leaves is of the rest: nobody says when it leaves, and
    /// a plan that keeps it must have room for what comes after it.
    pub(super) fn packed(&mut self, item: ItemId, pack: &Pack, verdict: Verdict) {
        self.sizes.push((pack.bytes, verdict == Verdict::Keep));
        if verdict == Verdict::Keep {
            self.comes(item);
        }
    }

    /// Reloads begin.
    pub(super) fn reloaded(&mut self, items: &[ItemId]) {
        items.iter().for_each(|item| self.comes(*item));
    }

    /// The step is the last that needs what was reloaded of an item.
    pub(super) fn freed(&mut self, item: ItemId) {
        if self.sizes.get(item.index()).is_some_and(|(_, kept)| !kept) {
            self.leaving.push(item);
        }
    }

    /// No handle of an item lives any more.
    pub(super) fn dropped(&mut self, item: ItemId) {
        self.leaving.push(item);
    }

    fn comes(&mut self, item: ItemId) {
        if let Some((bytes, _)) = self.sizes.get(item.index()).copied()
            && self.there.insert(item, bytes).is_none()
        {
            self.bytes = self.bytes.saturating_add(bytes);
        }
    }
}
