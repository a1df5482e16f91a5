//! State that a model keeps for each live block of the trace.

use crate::trace::BlockId;

/// Locations of the live blocks, in a table indexed by block.
pub(super) struct Live<T> {
    entries: Vec<Option<Entry<T>>>,
}

#[derive(Clone, Copy)]
struct Entry<T> {
    place: T,
    requested: bool,
}

impl<T: Copy> Live<T> {
    pub(super) const fn new() -> Self {
        Live { entries: Vec::new() }
    }

    pub(super) fn insert(&mut self, block: BlockId, place: T) {
        if self.entries.len() <= block.index() {
            self.entries.resize(block.index() + 1, None);
        }
        self.entries[block.index()] = Some(Entry { place, requested: false });
    }

    /// Marks a block's free as requested.
    pub(super) fn request(&mut self, block: BlockId) {
        if let Some(Some(entry)) = self.entries.get_mut(block.index()) {
            entry.requested = true;
        }
    }

    /// Removes a block; `None` if it is not live or was removed by [`Live::take_requested`].
    pub(super) fn take(&mut self, block: BlockId) -> Option<T> {
        self.entries.get_mut(block.index())?.take().map(|entry| entry.place)
    }

    /// Removes all blocks with a requested and uncompleted free, in the order of their allocation.
    pub(super) fn take_requested(&mut self) -> Vec<T> {
        let due = |entry: &&mut Option<Entry<T>>| entry.is_some_and(|entry| entry.requested);
        self.entries
            .iter_mut()
            .filter(due)
            .filter_map(|entry| entry.take())
            .map(|entry| entry.place)
            .collect()
    }
}

#[cfg(test)]
impl<T: Copy> Live<T> {
    pub(super) fn get(&self, block: BlockId) -> Option<T> {
        self.entries.get(block.index()).copied().flatten().map(|entry| entry.place)
    }

    pub(super) fn all(&self) -> Vec<T> {
        self.entries.iter().flatten().map(|entry| entry.place).collect()
    }
}
