//! Requests that no single free piece can serve: all memory that a stream may take, and blocks of joined pieces.

use smallvec::SmallVec;

use super::Heap;
use crate::domain::StreamLists;
use crate::free_list::Owner;
use crate::home::Carved;
use crate::ids::FreeListId;
use crate::piece::State;
use crate::plan::{Grant, Wait};
use crate::run::Run;
use crate::want::{Runs, Want};

impl Heap {
    /// Returns all memory that the stream may take, joined across free lists; with `borrow`, memory pending on other streams too. The first
    /// `kept` bytes of free slabs are left to small requests, which will soon need them.
    pub(crate) fn runs(&self, want: &Want, borrow: bool, kept: u64) -> Runs {
        let domain = &self.home.domains[want.domain];
        let others = domain.streams.iter().filter(|lists| borrow && lists.stream != want.lists.stream);
        let others: SmallVec<[StreamLists; 4]> = others.copied().collect();
        let large =
            [want.lists.large, domain.passed_large].into_iter().chain(others.iter().map(|lists| lists.large));
        let slabs =
            [want.lists.slabs, domain.passed_slabs].into_iter().chain(others.iter().map(|lists| lists.slabs));
        let mut all = self.home.runs_in(large);
        let home = all.len();
        let mut kept = kept;
        all.extend(self.home.runs_in(slabs).into_iter().skip_while(|run| {
            let keep = kept > 0;
            kept = kept.saturating_sub(run.size());
            keep
        }));
        Runs { all, home }
    }

    /// Serves a request from one piece that any stream may take.
    pub(crate) fn take_passed(&mut self, want: &Want) -> Option<Grant> {
        let passed = self.home.domains[want.domain].passed_large;
        let piece = self.home.lists[passed].take_best(&mut self.home.pieces, want.size)?;
        Some(self.hand_out(piece, State::Live, want.lists.large, want.requested))
    }

    /// Serves a request from the front of a free run.
    pub(crate) fn take_run(&mut self, want: &Want, run: &Run) -> Grant {
        let carved = self.home.carve(run, run.start, run.start + want.size);
        self.hand_out_carved(want, carved)
    }

    /// Hands out a carved home range, with waits for the streams that freed parts of it.
    pub(crate) fn hand_out_carved(&mut self, want: &Want, carved: Carved) -> Grant {
        let waits = self.waits(want, std::slice::from_ref(&carved));
        let mut grant = self.hand_out(carved.piece, State::Live, want.lists.large, want.requested);
        grant.waits = waits;
        grant
    }

    /// Returns the waits that the new owner of the pieces needs: for streams that freed them, and for holds on them.
    pub(crate) fn waits(&mut self, want: &Want, carved: &[Carved]) -> SmallVec<[Wait; 1]> {
        let mut waits = SmallVec::new();
        for range in carved {
            let mut start = self.home.pieces[range.piece].start;
            for former in &range.former {
                let end = start + former.size;
                let is_pending = self.points.is_pending(former.point);
                match self.home.lists[former.list].owner {
                    Owner::Stream(stream) if is_pending && stream != want.lists.stream => {
                        add(&mut waits, Wait::Stream(stream));
                    }
                    Owner::Held(_) => {
                        let holds = self.holds.take(start, end).into_iter().filter(|_| is_pending);
                        holds.for_each(|hold| add(&mut waits, Wait::Hold(hold)));
                    }
                    _ => {}
                }
                start = end;
            }
        }
        let holds = waits.iter().filter(|wait| matches!(wait, Wait::Hold(_))).count();
        self.tallies.counters.stream_waits += (waits.len() - holds) as u64;
        self.tallies.counters.hold_waits += holds as u64;
        waits
    }

    /// Returns the piece pending on another stream that fits best; among equals, the one freed longest ago.
    pub(crate) fn lent_piece(&self, want: &Want) -> Option<Run> {
        let home = &self.home;
        let others = home.domains[want.domain].streams.iter().map(|lists| lists.large);
        let others = others.filter(|&list: &FreeListId| list != want.lists.large);
        let pieces = others.flat_map(|list| home.lists[list].bins.iter());
        let fitting = pieces.filter(|&id| home.pieces[id].size >= want.size);
        let chosen = fitting.min_by_key(|&id| (home.pieces[id].size, home.pieces[id].point))?;
        Some(home.run_of(chosen))
    }
}

fn add(waits: &mut SmallVec<[Wait; 1]>, wait: Wait) {
    if !waits.contains(&wait) {
        waits.push(wait);
    }
}
