//! One bin of free pieces: a handful in place, the rest behind them.
//!
//! ```text
//! keys    │ k5 │ k1 │ k7 │ k2 │ -- │ -- │ -- │ -- │     a cache line, in no order, vacant keys above all others
//! pieces  │ p5 │ p1 │ p7 │ p2 │                         half a cache line
//! more    │ k9 │ k8 │                                   descending: the next to move up is the last
//! ```
//!
//! Invariant: there is more only where all places are taken, and every key there is above every key in place.
//!
//! A sorted vector costs a mispredicted branch or two a search and a call of `memmove` a change. Here a search reads all
//! places, whatever is in them, and a change moves one entry: a malloc and a free take
//! 15 to 20 ns less of 107.

use std::hint::select_unpredictable;

use smallvec::SmallVec;

use crate::ids::PieceId;

pub(crate) const PLACES: usize = 8;
/// No key is as large as half of this.
const VACANT: u64 = u64::MAX;

#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Bin {
    keys: [u64; PLACES],
    pieces: [PieceId; PLACES],
    taken: usize,
    more: Vec<Entry>,
}

/// A free piece by its key: the order of best fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) key: u64,
    pub(crate) piece: PieceId,
}

/// Where in a bin an entry is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum At {
    Place(usize),
    More(usize),
}

impl Bin {
    pub(crate) fn new() -> Self {
        Bin { keys: [VACANT; PLACES], pieces: [PieceId::NONE; PLACES], taken: 0, more: Vec::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.taken == 0
    }

    #[inline]
    pub(crate) fn insert(&mut self, entry: Entry, rooms: &mut Rooms) {
        let at = self.taken;
        if at >= PLACES {
            return self.insert_more(entry, rooms);
        }
        self.keys[at] = entry.key;
        self.pieces[at] = entry.piece;
        self.taken = at + 1;
    }

    #[inline(never)]
    fn insert_more(&mut self, entry: Entry, rooms: &mut Rooms) {
        // All places are taken: the largest is the one nearest below vacant.
        let (_, last) = self.nearest(|key| VACANT - key);
        let mut entry = entry;
        if entry.key < self.keys[last] {
            let here = std::mem::replace(&mut self.keys[last], entry.key);
            entry = Entry { key: here, piece: std::mem::replace(&mut self.pieces[last], entry.piece) };
        }
        if self.more.capacity() == 0 {
            self.more = rooms.lend();
        }
        let at = self.more.partition_point(|other| other.key > entry.key);
        self.more.insert(at, entry);
        rooms.crowded |= self.is_crowded();
    }

    fn is_crowded(&self) -> bool {
        self.more.len() > self.more.capacity() / 2
    }

    /// Makes the room behind the places larger, where it is half full.
    pub(crate) fn make_room(&mut self) {
        if self.is_crowded() {
            self.more.reserve(self.more.capacity());
        }
    }

    /// Where the entry of this key is.
    #[inline]
    pub(crate) fn find(&self, key: u64) -> Option<At> {
        let at =
            (0..PLACES).fold(PLACES, |at, place| select_unpredictable(self.keys[place] == key, place, at));
        if at < PLACES {
            return Some(At::Place(at));
        }
        let at = self.more.partition_point(|other| other.key > key);
        self.more.get(at).is_some_and(|entry| entry.key == key).then_some(At::More(at))
    }

    /// Where the smallest entry of at least this key is.
    #[inline]
    pub(crate) fn best(&self, wanted: u64) -> Option<At> {
        // What is below wraps to above everything.
        let (distance, at) = self.nearest(|key| key.wrapping_sub(wanted));
        if distance <= VACANT / 2 {
            return Some(At::Place(at));
        }
        let above = self.more.partition_point(|other| other.key >= wanted);
        above.checked_sub(1).map(At::More)
    }

    /// The least distance of a key in place, and the place: a tree of comparisons without a branch.
    #[inline]
    fn nearest(&self, distance: impl Fn(u64) -> u64) -> (u64, usize) {
        let leaf = |at: usize| (distance(self.keys[at]), at);
        let less = |a: (u64, usize), b: (u64, usize)| {
            let first = a.0 < b.0;
            (select_unpredictable(first, a.0, b.0), select_unpredictable(first, a.1, b.1))
        };
        let front = less(less(leaf(0), leaf(1)), less(leaf(2), leaf(3)));
        let back = less(less(leaf(4), leaf(5)), less(leaf(6), leaf(7)));
        less(front, back)
    }

    /// Takes an entry out.
    #[inline]
    pub(crate) fn take(&mut self, at: At, rooms: &mut Rooms) -> Entry {
        match at {
            At::Place(at) => {
                let entry = Entry { key: self.keys[at], piece: self.pieces[at] };
                self.refill(at, rooms);
                entry
            }
            At::More(at) => {
                let entry = self.more.remove(at);
                self.give_room_back(rooms);
                entry
            }
        }
    }

    #[inline]
    fn refill(&mut self, at: usize, rooms: &mut Rooms) {
        if let Some(next) = self.more.pop() {
            self.keys[at] = next.key;
            self.pieces[at] = next.piece;
            return self.give_room_back(rooms);
        }
        let last = (self.taken - 1) % PLACES;
        self.keys[at] = self.keys[last];
        self.pieces[at] = self.pieces[last];
        self.keys[last] = VACANT;
        self.taken = last;
    }

    /// Gives the room behind the places back once it is empty.
    fn give_room_back(&mut self, rooms: &mut Rooms) {
        if self.more.is_empty() {
            rooms.take_back(std::mem::take(&mut self.more));
        }
    }

    /// Every piece, smallest first.
    pub(crate) fn sorted(&self) -> impl Iterator<Item = PieceId> {
        let placed = self.keys.iter().zip(&self.pieces).take(self.taken);
        let mut entries: SmallVec<[Entry; PLACES]> =
            placed.map(|(&key, &piece)| Entry { key, piece }).collect();
        entries.extend(self.more.iter().copied());
        entries.sort_unstable_by_key(|entry| entry.key);
        entries.into_iter().map(|entry| entry.piece)
    }

    /// Every piece, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = PieceId> + '_ {
        self.pieces.iter().take(self.taken).copied().chain(self.more.iter().map(|entry| entry.piece))
    }
}

/// Room for what does not fit in the places of a bin, lent to those that need it and as large as it ever had to be. It is
/// made in batches, so that a free list soon has all that it will ever need and a hit finds it.
#[derive(Debug, Default)]
pub(crate) struct Rooms {
    spare: Vec<Vec<Entry>>,
    /// Whether one that is lent is half full.
    pub(crate) crowded: bool,
}

impl Rooms {
    const BATCH: usize = 64;
    const FEW: usize = 8;
    const SIZE: usize = 96;

    /// Few of them: there may be thousands of free lists, and most need none.
    pub(crate) fn make_room(&mut self) {
        self.make(Self::FEW);
    }

    fn make(&mut self, rooms: usize) {
        if self.spare.len() < rooms {
            self.spare.resize_with(rooms, || Vec::with_capacity(Self::SIZE));
        }
    }

    fn lend(&mut self) -> Vec<Entry> {
        if self.spare.is_empty() {
            self.make(Self::BATCH);
        }
        self.spare.pop().unwrap_or_default()
    }

    fn take_back(&mut self, room: Vec<Entry>) {
        self.spare.push(room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bin_is_two_cache_lines() {
        assert_eq!(size_of::<Bin>(), 128);
    }
}
