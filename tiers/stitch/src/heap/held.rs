//! Freed bytes that holds keep from their stream: how they become its own.

use super::Heap;
use crate::free_list::Owner;
use crate::home::Carved;
use crate::ids::{DomainId, HoldId, PieceId};
use crate::run::{self, Run};
use crate::want::{Runs, Want};

impl Heap {
    /// Keeps a freed piece that these hold for its stream.
    pub(crate) fn hold_back(&mut self, id: PieceId, holds: &[HoldId]) {
        let (start, end) = (self.home.pieces[id].start, self.home.pieces[id].end());
        self.holds.cover(holds, start, end);
        self.home.hold_back(id);
    }

    /// What a hold names has completed: what nothing else holds is its stream's.
    pub(crate) fn pass_hold(&mut self, hold: HoldId) {
        for (start, end) in self.holds.pass(hold) {
            self.let_go(start, end);
        }
    }

    /// Puts a carved range back as it was; holds on it may have passed meanwhile, and completion points.
    pub(crate) fn put_back(&mut self, carved: Carved) {
        let (start, end) = (self.home.pieces[carved.piece].start, self.home.pieces[carved.piece].end());
        self.home.put_back(carved);
        self.let_go(start, end);
    }

    /// Gives what lies in a range and is held no more to its stream.
    fn let_go(&mut self, start: u64, end: u64) {
        for id in self.home.free_in(start, end) {
            let (start, end) = (self.home.pieces[id].start, self.home.pieces[id].end());
            let is_pending = self.points.is_pending(self.home.pieces[id].point);
            let is_held = matches!(self.home.lists.owner_of(&self.home.pieces, id), Owner::Held(_));
            if is_held && !(is_pending && self.holds.on(start, end).next().is_some()) {
                self.holds.take(start, end);
                self.home.let_go(id);
            }
        }
    }

    /// Gives what is held in a domain, and has passed, to its stream: a completion point is behind every hold.
    pub(super) fn settle_held(&mut self, id: DomainId) {
        let passed = self.points.passed();
        let home = &mut self.home;
        let lists: smallvec::SmallVec<[_; 4]> = home.domains[id].held_lists().collect();
        for list in lists {
            while let Some(piece) = home.lists[list].next_passed(list, &home.pieces, passed) {
                self.holds.take(home.pieces[piece].start, home.pieces[piece].end());
                home.let_go(piece);
            }
        }
    }

    /// Of what is held for the stream, the piece that fits best, and of those the one held longest.
    pub(crate) fn held_piece(&self, want: &Want) -> Option<Run> {
        let home = &self.home;
        let at_home = |id: &PieceId| home.pieces[*id].start < home.slab_zone;
        let held = home.lists[want.lists.held].bins.iter().filter(at_home);
        let fitting = held.filter(|&id| home.pieces[id].size >= want.size);
        let last_hold = |id: PieceId| self.holds.on(home.pieces[id].start, home.pieces[id].end()).max();
        let chosen = fitting.min_by_key(|&id| (home.pieces[id].size, last_hold(id)))?;
        Some(home.run_of(chosen))
    }

    /// What the stream may take with what is held for it.
    pub(crate) fn held_runs(&self, want: &Want, kept: u64) -> Runs {
        let mut all = self.runs(want, false, kept).all;
        all.extend(self.home.runs_in([want.lists.held].into_iter()));
        let all = run::join(all);
        let home = all.partition_point(|run| run.start < self.home.slab_zone);
        Runs { all, home }
    }
}
