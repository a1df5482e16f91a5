//! Walks over home: the pieces of a range, of an extent, or behind an edge.

use glake_units::Bytes;

use super::Home;
use crate::domain::Domains;
use crate::extent::Extents;
use crate::free_list::{Class, FreeList, FreeSums, Owner};
use crate::ids::{DomainId, ExtentId, FreeListId, PieceId, PointNumber};
use crate::piece::{self, Pieces, Run, State};

impl Home {
    /// Returns the piece of home at an offset; inside a slab, the slab's piece.
    pub(crate) fn piece_at(&self, offset: u64) -> Option<PieceId> {
        let id = self.piece_from(self.segments.last_at(offset)?, offset)?;
        if self.pieces[id].state == State::Slab {
            return self.piece_from(self.pieces[id].inside, offset);
        }
        Some(id)
    }

    /// Returns the piece at an offset between an edge and the next edge.
    pub(crate) fn piece_from(&self, edge: PieceId, offset: u64) -> Option<PieceId> {
        self.behind(edge).find(|&id| offset < self.pieces[id].end())
    }

    /// Iterates over the pieces from an edge to the next.
    pub(crate) fn behind(&self, edge: PieceId) -> impl Iterator<Item = PieceId> + '_ {
        let pieces = std::iter::successors(Some(self.pieces[edge].next), |&id| Some(self.pieces[id].next));
        pieces.take_while(|&id| self.pieces[id].state != State::Edge)
    }

    /// Returns the bytes of an extent in live blocks.
    pub(crate) fn live_in(&self, id: ExtentId) -> u64 {
        let (start, end) = (self.extents[id].start, self.extents[id].end());
        let mut live = 0;
        self.each_in(start, end, |id| {
            let piece = &self.pieces[id];
            if matches!(piece.state, State::Live | State::Part) {
                live += piece.end().min(end) - piece.start.max(start);
            }
        });
        live
    }

    /// Returns the free pieces that touch a range, those in slabs too.
    pub(crate) fn free_in(&self, start: u64, end: u64) -> Vec<PieceId> {
        let mut free = Vec::new();
        self.each_in(start, end, |id| {
            if self.pieces[id].state == State::Free {
                free.push(id);
            }
        });
        free
    }

    /// Calls `look` for every piece that touches a mapped range of home, in address order; for slabs, the pieces inside.
    pub(crate) fn each_in(&self, start: u64, end: u64, mut look: impl FnMut(PieceId)) {
        for outer in self.outer_in(start, end) {
            if self.pieces[outer].state != State::Slab {
                look(outer);
                continue;
            }
            let mut id = self.pieces[self.pieces[outer].inside].next;
            while self.pieces[id].state != State::Edge {
                if self.pieces[id].end() > start && self.pieces[id].start < end {
                    look(id);
                }
                id = self.pieces[id].next;
            }
        }
    }

    pub(crate) fn outer_in(&self, start: u64, end: u64) -> Vec<PieceId> {
        let first = self.segments.last_at(start).and_then(|edge| {
            // A segment may have as many pieces as the program has blocks, so the walk begins at the nearest large block before the range.
            let block = self.live.last_at_home(start, &self.pieces);
            let near = block.filter(|&block| self.pieces[block].start >= self.pieces[edge].start);
            self.piece_from(near.map_or(edge, |block| self.pieces[block].prev), start)
        });
        let next = |id: &PieceId| Some(self.pieces[*id].next);
        let within = |id: &PieceId| {
            let piece = &self.pieces[*id];
            piece.state != State::Edge && piece.start < end
        };
        std::iter::successors(first, next).take_while(within).collect()
    }

    /// Returns the ranges of an extent in live blocks as (start, end), joined where they touch.
    pub(crate) fn live_ranges(&self, start: u64, end: u64) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        self.each_in(start, end, |piece| {
            if matches!(self.pieces[piece].state, State::Live | State::Part) {
                let (from, to) = (self.pieces[piece].start.max(start), self.pieces[piece].end().min(end));
                match ranges.last_mut().filter(|last| last.1 == from) {
                    Some(last) => last.1 = to,
                    None => ranges.push((from, to)),
                }
            }
        });
        ranges
    }

    /// Converts a piece to a run.
    pub(crate) fn run_of(&self, first: PieceId) -> Run {
        let piece = &self.pieces[first];
        Run { start: piece.start, end: piece.end(), first }
    }

    /// Returns the runs of the pieces in `lists`, joined where they touch.
    pub(crate) fn runs_in(&self, lists: impl Iterator<Item = FreeListId>) -> Vec<Run> {
        let pieces = lists.flat_map(|list| self.lists[list].bins.iter());
        piece::join_runs(pieces.map(|id| self.run_of(id)).collect())
    }

    /// Iterates over the free pieces of home that some stream may take now or once their completion point has passed.
    pub(crate) fn free_at_home(&self) -> impl Iterator<Item = PieceId> + '_ {
        let is_free = |list: &FreeList| {
            list.class != Class::Small && !matches!(list.owner, Owner::Nobody | Owner::Evicted)
        };
        let lists = self.lists.iter().filter(move |(_, list)| is_free(list));
        lists.flat_map(|(_, list)| list.bins.iter())
    }

    /// Returns the figures of all free pieces if `passed` is the last passed completion point.
    pub(crate) fn free_sums(&mut self, passed: PointNumber) -> FreeSums {
        let Home { pieces, lists, domains, extents, .. } = self;
        lists.sums(|list| sums_of(list, pieces, domains, extents, passed))
    }

    /// Returns the figures of a free list, added up.
    pub(crate) fn sums_now(&self, list: &FreeList, passed: PointNumber) -> FreeSums {
        sums_of(list, &self.pieces, &self.domains, &self.extents, passed).0
    }

    /// Returns the bytes of a piece that form whole extents.
    pub(crate) fn whole_extents(&self, id: PieceId) -> u64 {
        let piece = &self.pieces[id];
        self.extents.whole_in(piece.start, piece.end())
    }

    /// Returns the free bytes in whole free extents.
    pub(crate) fn stitchable_bytes(&self) -> u64 {
        self.free_at_home().map(|id| self.whole_extents(id)).sum()
    }

    /// Returns the runs of a domain's slabs without live blocks.
    pub(crate) fn free_slabs(&self, id: DomainId) -> Vec<Run> {
        let begins = self.segments.begins().filter(|&edge| self.pieces[edge].start >= self.slab_zone);
        let of_domain = |edge: &PieceId| self.extents[self.extents.at(self.pieces[*edge].start)].domain == id;
        let is_free = |id: PieceId| self.pieces[id].state == State::Free;
        let free = begins.filter(of_domain).flat_map(|edge| self.behind(edge)).filter(|&id| {
            if self.pieces[id].state == State::Slab {
                return self.behind(self.pieces[id].inside).all(is_free);
            }
            is_free(id)
        });
        piece::join_runs(free.map(|id| self.run_of(id)).collect())
    }
}

/// Returns the figures of a free list, and whether they change with the next completion point.
fn sums_of(
    list: &FreeList,
    pieces: &Pieces,
    domains: &Domains,
    extents: &Extents,
    passed: PointNumber,
) -> (FreeSums, bool) {
    let mut sums = FreeSums::default();
    if list.owner == Owner::Evicted {
        return (sums, false);
    }
    if list.class == Class::Small {
        // All pieces lie in open slabs, so that none has a whole extent.
        sums.inactive_small.ranges = list.bins.len() as u64;
        sums.inactive_small.bytes = Bytes::new(list.bytes);
        return (sums, false);
    }
    let is_shared = list.owner != Owner::Nobody && domains[list.domain].streams.len() > 1;
    let (mut partly, mut partly_bytes) = (0, 0);
    for piece in list.bins.unsorted().map(|id| &pieces[id]) {
        let whole = extents.whole_in(piece.start, piece.end());
        partly += u64::from(whole < piece.size);
        partly_bytes += piece.size - whole;
        if list.owner == Owner::Nobody {
            continue;
        }
        if is_shared && piece.point > passed {
            sums.stream += piece.size;
        } else {
            sums.soft += whole;
        }
    }
    let inactive =
        if list.class == Class::Large { &mut sums.inactive_large } else { &mut sums.inactive_small };
    (inactive.ranges, inactive.bytes) = (partly, Bytes::new(partly_bytes));
    (sums, sums.stream > 0)
}
