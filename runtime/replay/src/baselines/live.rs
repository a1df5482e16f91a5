//! What a model remembers of each block of the trace.

use crate::trace::BlockId;

/// Where the live blocks of the trace are: a table with one entry a block.
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

    /// The free of a block was requested.
    pub(super) fn request(&mut self, block: BlockId) {
        if let Some(Some(entry)) = self.entries.get_mut(block.index()) {
            entry.requested = true;
        }
    }

    /// Takes a block out; `None` where it is not live, or was taken by [`Live::take_requested`].
    pub(super) fn take(&mut self, block: BlockId) -> Option<T> {
        self.entries.get_mut(block.index())?.take().map(|entry| entry.place)
    }

    /// Takes out every block whose free was requested and is not completed, in the order of their allocation.
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
