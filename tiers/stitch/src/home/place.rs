//! Extents added to and removed from home: begin, join and end of segments.

use super::Home;
use crate::extent::{Extent, ExtentState};
use crate::free_list::Class;
use crate::ids::{DomainId, ExtentId, PieceId};
use crate::piece::State;

impl Home {
    /// Adds extents of these sizes side by side from `start` on, which the zone has already reserved.
    pub(crate) fn add_extents(
        &mut self,
        start: u64,
        sizes: &[u64],
        domain: DomainId,
        class: Class,
    ) -> Vec<ExtentId> {
        let mut at = start;
        sizes
            .iter()
            .map(|&size| {
                let extent = Extent {
                    start: at,
                    size,
                    domain,
                    class,
                    aliases: Default::default(),
                    state: ExtentState::Resident,
                    live: 0,
                };
                at += size;
                self.extents.insert(extent)
            })
            .collect()
    }

    /// Turns a mapped range into a piece, joined to the segments of its domain on both sides.
    pub(crate) fn add_piece(&mut self, start: u64, size: u64, domain: DomainId, state: State) -> PieceId {
        let (first, piece, last) = self.pieces.segment(start, size, state);
        match self.segments.ends.get(&start).copied().filter(|_| self.owner_of(start - 1) == domain) {
            Some(left_end) => {
                self.segments.ends.remove(&start);
                let left = self.pieces[left_end].prev;
                self.pieces.link(left, piece);
                self.pieces.forget(left_end);
                self.pieces.forget(first);
            }
            None => {
                self.segments.begins.insert(start, first);
            }
        }
        let end = start + size;
        match self.segments.begins.get(&end).copied().filter(|_| self.owner_of(end) == domain) {
            Some(right_begin) => {
                self.segments.begins.remove(&end);
                let right = self.pieces[right_begin].next;
                self.pieces.link(piece, right);
                self.pieces.forget(right_begin);
                self.pieces.forget(last);
            }
            None => {
                self.segments.ends.insert(end, last);
            }
        }
        piece
    }

    fn owner_of(&self, offset: u64) -> DomainId {
        self.extents[self.extents.at(offset)].domain
    }

    /// Removes a piece of whole extents, in no free list, from home; its segment is split around it.
    pub(crate) fn remove_piece(&mut self, id: PieceId) {
        let (start, end) = (self.pieces[id].start, self.pieces[id].end());
        let (prev, next) = (self.pieces[id].prev, self.pieces[id].next);
        if self.pieces[prev].state == State::Edge {
            self.segments.begins.remove(&start);
            self.pieces.forget(prev);
        } else {
            let edge = self.pieces.edge(start);
            self.pieces.link(prev, edge);
            self.segments.ends.insert(start, edge);
        }
        if self.pieces[next].state == State::Edge {
            self.segments.ends.remove(&end);
            self.pieces.forget(next);
        } else {
            let edge = self.pieces.edge(end);
            self.pieces.link(edge, next);
            self.segments.begins.insert(end, edge);
        }
        self.pieces.forget(id);
    }
}
