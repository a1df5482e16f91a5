//! Table of the free lists of a device.

use std::ops::{Index, IndexMut};

use slab::Slab;

use crate::free_list::{FreeList, Owner};
use crate::ids::{FreeListId, PieceId};
use crate::piece::Pieces;

/// Free lists of a device.
#[derive(Debug, Default)]
pub(crate) struct FreeLists(Slab<FreeList>);

impl Index<FreeListId> for FreeLists {
    type Output = FreeList;

    #[inline]
    fn index(&self, id: FreeListId) -> &FreeList {
        &self.0[id.index()]
    }
}

impl IndexMut<FreeListId> for FreeLists {
    #[inline]
    fn index_mut(&mut self, id: FreeListId) -> &mut FreeList {
        &mut self.0[id.index()]
    }
}

impl FreeLists {
    /// Adds an empty free list.
    pub(crate) fn add(&mut self, list: FreeList) -> FreeListId {
        FreeListId::at(self.0.insert(list))
    }

    /// Removes a free list, which must be empty.
    pub(crate) fn forget(&mut self, id: FreeListId) {
        self.0.remove(id.index());
    }

    /// Returns a free list that may have been removed.
    pub(crate) fn get(&self, id: FreeListId) -> Option<&FreeList> {
        self.0.get(id.index())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (FreeListId, &FreeList)> {
        self.0.iter().map(|(index, list)| (FreeListId::at(index), list))
    }

    /// Calls [`FreeList::make_room`] for each list.
    pub(crate) fn make_room(&mut self) {
        self.0.iter_mut().for_each(|(_, list)| list.make_room());
    }

    /// Puts a free piece into the list that it names.
    pub(crate) fn insert(&mut self, pieces: &mut Pieces, piece: PieceId) {
        self[pieces[piece].list].insert(pieces, piece);
    }

    /// Removes a free piece from its list.
    pub(crate) fn remove(&mut self, pieces: &mut Pieces, piece: PieceId) {
        self[pieces[piece].list].remove(pieces, piece);
    }

    /// Returns the owner of the list that a piece names.
    pub(crate) fn owner_of(&self, pieces: &Pieces, piece: PieceId) -> Owner {
        self[pieces[piece].list].owner
    }
}
