//! What was handed out, by the offset that it begins at.
//!
//! ```text
//! home:  page of 2 MiB ─► two slots     a large block is longer than 1 MiB, so at most two begin in a page
//! slabs, aliases ───────► hash table
//! ```
//!
//! A table of pages answers with one memory access and no hashing: most bytes, and most of a training run's calls, are in
//! large blocks.

use rustc_hash::FxHashMap;

use crate::bins::QUANTUM;
use crate::ids::PieceId;

const PAGE: u64 = 2 << 20;

/// What begins at an offset that was handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Live {
    Piece(PieceId),
    /// Index among the stitched blocks.
    Stitched(u32),
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    piece: PieceId,
    /// Where in its page it begins, in quanta.
    quantum: u32,
}

const EMPTY: Slot = Slot { piece: PieceId::NONE, quantum: u32::MAX };

/// All live blocks of a device.
#[derive(Debug)]
pub(crate) struct LiveBlocks {
    /// Offsets below are large blocks at home.
    home_end: u64,
    pages: Vec<[Slot; 2]>,
    others: FxHashMap<u64, Live>,
    at_home: usize,
}

fn place_of(offset: u64) -> (usize, u32) {
    #[allow(clippy::cast_possible_truncation)]
    ((offset / PAGE) as usize, (offset % PAGE / QUANTUM) as u32)
}

impl LiveBlocks {
    pub(crate) fn new(home_end: u64) -> Self {
        LiveBlocks { home_end, pages: Vec::new(), others: FxHashMap::default(), at_home: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.at_home + self.others.len()
    }

    /// Home is mapped up to `end` now: makes room for the blocks that will begin there, so that no hit has to.
    pub(crate) fn reach(&mut self, end: u64) {
        let pages = place_of(end.min(self.home_end)).0 + 1;
        if pages > self.pages.len() {
            self.pages.resize(pages, [EMPTY; 2]);
        }
    }

    /// Adds a block; a large one at home begins in a page with at most one other.
    pub(crate) fn insert(&mut self, offset: u64, live: Live) {
        let Live::Piece(piece) = live else {
            self.others.insert(offset, live);
            return;
        };
        if offset >= self.home_end {
            self.others.insert(offset, live);
            return;
        }
        let (page, quantum) = place_of(offset);
        if page >= self.pages.len() {
            self.reach(offset);
        }
        let slots = &mut self.pages[page];
        let slot = usize::from(slots[0].piece != PieceId::NONE);
        debug_assert_eq!(slots[slot].piece, PieceId::NONE, "a page with three large blocks");
        slots[slot] = Slot { piece, quantum };
        self.at_home += 1;
    }

    pub(crate) fn remove(&mut self, offset: u64) -> Option<Live> {
        if offset >= self.home_end {
            return self.others.remove(&offset);
        }
        let (page, slot) = self.slot(offset)?;
        self.at_home -= 1;
        let gone = std::mem::replace(&mut self.pages[page][slot], EMPTY);
        Some(Live::Piece(gone.piece))
    }

    pub(crate) fn get(&self, offset: u64) -> Option<Live> {
        if offset >= self.home_end {
            return self.others.get(&offset).copied();
        }
        let (page, slot) = self.slot(offset)?;
        Some(Live::Piece(self.pages[page][slot].piece))
    }

    /// The last large block at home that begins at or before an offset of home: walks back over pages where none begins.
    pub(crate) fn last_at_home(&self, offset: u64) -> Option<PieceId> {
        let (page, quantum) = place_of(offset);
        let (page, quantum) = if page < self.pages.len() { (page, quantum) } else { (self.pages.len(), 0) };
        let here = self.pages.get(page).into_iter().flatten().filter(|slot| slot.quantum <= quantum);
        let last = |slots: &[Slot; 2]| {
            slots.iter().filter(|slot| slot.piece != PieceId::NONE).max_by_key(|slot| slot.quantum).copied()
        };
        let here = here.max_by_key(|slot| slot.quantum).copied();
        here.or_else(|| self.pages[..page].iter().rev().find_map(last)).map(|slot| slot.piece)
    }

    fn slot(&self, offset: u64) -> Option<(usize, usize)> {
        let (page, quantum) = place_of(offset);
        let slots = self.pages.get(page)?;
        let slot = slots.iter().position(|slot| slot.quantum == quantum)?;
        offset.is_multiple_of(QUANTUM).then_some((page, slot))
    }

    /// Every block, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, Live)> + '_ {
        let home = self.pages.iter().enumerate().flat_map(|(page, slots)| {
            let taken = slots.iter().filter(|slot| slot.piece != PieceId::NONE);
            taken.map(move |slot| {
                (page as u64 * PAGE + u64::from(slot.quantum) * QUANTUM, Live::Piece(slot.piece))
            })
        });
        home.chain(self.others.iter().map(|(&offset, &live)| (offset, live)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_begins_exactly_there() {
        let mut live = LiveBlocks::new(1 << 30);
        let blocks = [(0, 1), (PAGE - QUANTUM, 2), (3 * PAGE, 3), (1 << 30, 4), ((1 << 30) + QUANTUM, 5)];
        for (offset, id) in blocks {
            live.insert(offset, Live::Piece(PieceId::at(id)));
        }
        live.insert(1 << 40, Live::Stitched(7));
        assert_eq!(live.len(), 6);
        for (offset, id) in
            [(0, 1), (PAGE - 1, 2), (PAGE, 2), (3 * PAGE - 1, 2), (3 * PAGE, 3), (90 * PAGE, 3)]
        {
            assert_eq!(live.last_at_home(offset), Some(PieceId::at(id)), "{offset}");
        }
        for wrong in [1, 100, QUANTUM, PAGE, 2 * PAGE, 3 * PAGE + 1, (1 << 30) + 1, 1 << 41, u64::MAX] {
            assert_eq!(live.get(wrong), None, "{wrong}");
            assert_eq!(live.remove(wrong), None, "{wrong}");
        }
        for (offset, id) in blocks {
            assert_eq!(live.remove(offset), Some(Live::Piece(PieceId::at(id))));
            assert_eq!(live.remove(offset), None, "a double free");
        }
        assert_eq!(live.remove(1 << 40), Some(Live::Stitched(7)));
        assert_eq!((live.len(), live.iter().count()), (0, 0));
    }
}
