//! Items of a pass on the GPU as plans count them. All other memory of the process counts as the rest.

use std::collections::HashMap;

use glake_units::Bytes;

use crate::{ItemId, Pack, Verdict};

/// Items of one pass on the GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    bytes: Bytes,
    /// Size of each item on the GPU.
    there: HashMap<ItemId, Bytes>,
    sizes: Vec<(Bytes, bool)>,
    /// Items that stay until the next step begins.
    leaving: Vec<ItemId>,
}

impl Held {
    /// Returns the total size of the items.
    pub(super) fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Begins the next step of a pass.
    pub(super) fn step(&mut self) {
        for item in std::mem::take(&mut self.leaving) {
            if let Some(bytes) = self.there.remove(&item) {
                self.bytes = self.bytes.saturating_sub(bytes);
            }
        }
    }

    /// Records a pack. Unless the item is kept, its memory counts as part of the rest until it leaves: the time of that is unknown, and a
    /// plan that keeps the item must have room for later ones.
    pub(super) fn packed(&mut self, item: ItemId, pack: &Pack, verdict: Verdict) {
        self.sizes.push((pack.bytes, verdict == Verdict::Keep));
        if verdict == Verdict::Keep {
            self.comes(item);
        }
    }

    /// Records the begin of reloads.
    pub(super) fn reloaded(&mut self, items: &[ItemId]) {
        items.iter().for_each(|item| self.comes(*item));
    }

    /// Records that the step is the last to need a reloaded item.
    pub(super) fn freed(&mut self, item: ItemId) {
        if self.sizes.get(item.index()).is_some_and(|(_, kept)| !kept) {
            self.leaving.push(item);
        }
    }

    /// Records that no handle of an item is alive.
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
