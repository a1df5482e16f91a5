//! Carving: ranges taken out of home's free lists for a plan or a block, and put back unchanged.

use smallvec::SmallVec;

use super::Home;
use crate::free_list::Owner;
use crate::ids::{FreeListId, Move, PieceId, PointNumber};
use crate::piece::State;
use crate::run::Run;

/// State of a piece before it was carved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Former {
    pub(crate) size: u64,
    pub(crate) list: FreeListId,
    pub(crate) point: PointNumber,
    pub(crate) moved: Move,
    /// Free list that a held or withheld piece goes to later.
    pub(crate) returns_to: FreeListId,
}

/// A home range taken out of its free lists as one piece.
#[derive(Debug)]
pub(crate) struct Carved {
    pub(crate) piece: PieceId,
    /// Earlier state of the pieces that it was made of, in order.
    pub(crate) former: SmallVec<[Former; 2]>,
}

impl Home {
    /// Carves `from..to` out of a run as one piece in no free list.
    pub(crate) fn carve(&mut self, run: &Run, from: u64, to: u64) -> Carved {
        let mut id = run.first;
        while self.pieces[id].end() <= from {
            id = self.pieces[id].next;
        }
        let mut former = SmallVec::new();
        let mut whole = PieceId::NONE;
        loop {
            id = self.cut_out(id, from, to);
            let piece = &mut self.pieces[id];
            piece.state = State::Part;
            former.push(Former {
                size: piece.size,
                list: piece.list,
                point: piece.point,
                moved: piece.moved,
                returns_to: piece.returns_to,
            });
            let (end, next) = (piece.end(), piece.next);
            whole = self.pieces.append(whole, id);
            if end == to {
                return Carved { piece: whole, former };
            }
            id = next;
        }
    }

    /// Takes the part of a free piece inside a range out of its free list as a piece of its own; the rest stays. If a withheld piece is
    /// cut, the part that stays completes its blocks.
    pub(crate) fn cut_out(&mut self, id: PieceId, from: u64, to: u64) -> PieceId {
        let mut id = id;
        self.lists.remove(&mut self.pieces, id);
        if self.pieces[id].start < from {
            let front = id;
            id = self.pieces.split(front, from - self.pieces[front].start);
            self.lists.insert(&mut self.pieces, front);
            self.pieces[id].requested = 0;
        }
        if self.pieces[id].end() > to {
            let rest = self.pieces.split(id, to - self.pieces[id].start);
            self.lists.insert(&mut self.pieces, rest);
            self.pieces[id].requested = 0;
        }
        id
    }

    /// Carves several home ranges (start, size) out of the runs that contain them.
    pub(crate) fn carve_all(&mut self, runs: &[Run], ranges: &[(u64, u64)]) -> Vec<Carved> {
        let carve = |&(start, size): &(u64, u64)| {
            let run = runs.get(runs.partition_point(|run| run.end <= start))?;
            Some(self.carve(run, start, start + size))
        };
        ranges.iter().filter_map(carve).collect()
    }

    /// Puts a carved range back in its earlier state.
    pub(crate) fn put_back(&mut self, carved: Carved) {
        let mut id = carved.piece;
        let mut pieces = SmallVec::<[(PieceId, bool); 4]>::new();
        for former in &carved.former {
            let rest = (self.pieces[id].size > former.size).then(|| self.pieces.split(id, former.size));
            // The domain may have been released meanwhile.
            let released = self.domains[self.lists[former.list].domain].released;
            let is_held = matches!(self.lists[former.list].owner, Owner::Held(_));
            let piece = &mut self.pieces[id];
            piece.list = if is_held { former.returns_to } else { former.list };
            piece.point = former.point.max(released.unwrap_or_default());
            piece.moved = former.moved;
            pieces.push((id, is_held));
            id = rest.unwrap_or(id);
        }
        for (id, is_held) in pieces {
            if is_held {
                self.hold_back(id);
            } else {
                self.give(id);
            }
        }
    }
}
