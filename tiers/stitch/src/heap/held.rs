//! Freed bytes that holds keep from their stream, or from all streams, until the holds pass.

use super::Heap;
use crate::domain::StreamLists;
use crate::free_list::Owner;
use crate::holds::HoldIds;
use crate::home::Carved;
use crate::ids::{DomainId, HoldId, PieceId, PointNumber};
use crate::run::{self, Run};
use crate::want::{Runs, Want};

impl Heap {
    /// Keeps a freed piece for its stream until `holds` have passed.
    pub(crate) fn hold_back(&mut self, id: PieceId, holds: &[HoldId]) {
        let (start, end) = (self.home.pieces[id].start, self.home.pieces[id].end());
        self.holds.cover(holds, start, end);
        self.home.hold_back(id);
    }

    /// Marks a hold as passed; bytes without other holds return to their stream.
    pub(crate) fn pass_hold(&mut self, hold: HoldId) {
        for (start, end) in self.holds.pass(hold) {
            self.let_go_unheld(start, end);
        }
    }

    /// Returns the holds that withhold bytes of a stream's blocks from all streams; only bytes freed up to a completion point count.
    pub(crate) fn withheld_by(&self, lists: &StreamLists, domain: DomainId, upto: PointNumber) -> HoldIds {
        let (home, domain) = (&self.home, &self.home.domains[domain]);
        let own = [lists.large, lists.slabs, lists.small];
        let withheld = [domain.limbo_large, domain.limbo_small];
        let withheld = withheld.iter().flat_map(|&limbo| home.lists[limbo].bins.iter());
        let own = withheld.map(|id| &home.pieces[id]).filter(|piece| own.contains(&piece.returns_to));
        let due = own.filter(|piece| piece.point <= upto);
        due.flat_map(|piece| self.holds.on(piece.start, piece.end())).collect()
    }

    /// Puts a carved range back. Holds and completion points on it may have passed meanwhile.
    pub(crate) fn put_back(&mut self, carved: Carved) {
        let (start, end) = (self.home.pieces[carved.piece].start, self.home.pieces[carved.piece].end());
        self.home.put_back(carved);
        self.let_go_unheld(start, end);
    }

    /// Returns the pieces of a range that are no longer held to their stream.
    fn let_go_unheld(&mut self, start: u64, end: u64) {
        for id in self.home.free_in(start, end) {
            let piece = &self.home.pieces[id];
            let is_held = self.points.is_pending(piece.point)
                && self.holds.on(piece.start, piece.end()).next().is_some();
            let owner = self.home.lists.owner_of(&self.home.pieces, id);
            if matches!(owner, Owner::Held(_) | Owner::Nobody) && !is_held {
                self.let_go(id);
            }
        }
    }

    /// Returns a held or withheld piece to its stream.
    pub(super) fn let_go(&mut self, id: PieceId) {
        let piece = &self.home.pieces[id];
        self.holds.take(piece.start, piece.end());
        if self.home.lists.owner_of(&self.home.pieces, id) == Owner::Nobody {
            self.tallies.completed(piece.slab != PieceId::NONE, piece.requested, piece.size);
        }
        self.home.let_go(id);
    }

    /// Returns held pieces of a domain whose completion point has passed to their stream: the completion point implies every hold.
    pub(super) fn settle_held(&mut self, id: DomainId) {
        let passed = self.points.passed();
        let lists: smallvec::SmallVec<[_; 4]> = self.home.domains[id].held_lists().collect();
        for list in lists {
            while let Some(piece) = self.home.lists[list].next_passed(list, &self.home.pieces, passed) {
                self.let_go(piece);
            }
        }
    }

    /// Returns the free bytes that holds keep from their stream.
    pub(crate) fn held_bytes(&self) -> u64 {
        let held = self.home.domains.iter().flat_map(|(_, domain)| domain.held_lists());
        held.map(|list| self.home.lists[list].bytes).sum()
    }

    /// Returns the held piece of the stream that fits best; among equals, the one held longest.
    pub(crate) fn held_piece(&self, want: &Want) -> Option<Run> {
        let home = &self.home;
        let at_home = |id: &PieceId| home.pieces[*id].start < home.slab_zone;
        let held = home.lists[want.lists.held].bins.iter().filter(at_home);
        let fitting = held.filter(|&id| home.pieces[id].size >= want.size);
        let last_hold = |id: PieceId| self.holds.on(home.pieces[id].start, home.pieces[id].end()).max();
        let chosen = fitting.min_by_key(|&id| (home.pieces[id].size, last_hold(id)))?;
        Some(home.run_of(chosen))
    }

    /// Returns the runs that the stream may take, held pieces included.
    pub(crate) fn held_runs(&self, want: &Want, kept: u64) -> Runs {
        let mut all = self.runs(want, false, kept).all;
        all.extend(self.home.runs_in([want.lists.held].into_iter()));
        let all = run::join(all);
        let home = all.partition_point(|run| run.start < self.home.slab_zone);
        Runs { all, home }
    }
}
