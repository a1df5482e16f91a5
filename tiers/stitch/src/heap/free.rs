//! Frees of blocks, and the transfer of freed bytes to other streams. Holds keep freed bytes from their stream, or from all streams, until
//! they pass.

use glake_units::Bytes;

use super::Heap;
use crate::alias::Stitched;
use crate::domain::StreamLists;
use crate::error::StitchError;
use crate::free_list::Owner;
use crate::heap::{Runs, Want};
use crate::holds::HoldIds;
use crate::home::Carved;
use crate::ids::{DomainId, HoldId, Move, PieceId, PointNumber};
use crate::piece::{self, Run};

impl Heap {
    /// Frees a block that is one piece of home and is held by `holds`. Returns the block's size.
    pub(crate) fn free_piece(&mut self, id: PieceId, holds: &[HoldId]) -> Bytes {
        let piece = &mut self.home.pieces[id];
        let (size, requested, recorded) = (piece.size, piece.requested, piece.recorded);
        let small = piece.slab != PieceId::NONE;
        piece.point = self.points.open();
        piece.moved = Move::default();
        let (start, end) = (piece.start, piece.end());
        let apart = self.home.extents.is_apart(start, end);
        let held = !holds.is_empty();
        // Streams never wait for held memory in slabs or in extents that are not resident.
        let withheld = recorded || held && (small || apart);
        self.tallies.freed(small, size, requested, withheld && !apart);
        if apart {
            let waiting = self.home.give_apart(id, withheld.then_some(1));
            self.withhold_apart(small, &waiting, holds);
        } else if withheld {
            self.holds.cover(holds, start, end);
            self.home.withhold(id, 1);
        } else if held {
            self.hold_back(id, holds);
        } else {
            self.home.give(id);
        }
        Bytes::new(size)
    }

    /// Frees the parts of a stitched block that is held by `holds`. Returns the block's size.
    pub(crate) fn free_parts(&mut self, block: Stitched, holds: &[HoldId]) -> Bytes {
        let home = &mut self.home;
        let apart = block.parts.iter().any(|&part| {
            let piece = &home.pieces[part];
            home.extents.is_apart(piece.start, piece.end())
        });
        let held = !holds.is_empty();
        let withheld = block.recorded || held && apart;
        self.tallies.freed(false, block.size, block.requested, withheld && !apart);
        self.moves = self.moves.next();
        let (mut blocks, mut waiting) = (1, Vec::new());
        for part in block.parts {
            let piece = &mut home.pieces[part];
            piece.point = self.points.open();
            piece.moved = self.moves;
            piece.list = if piece.start < home.slab_zone { block.list } else { block.slabs };
            let (start, end) = (piece.start, piece.end());
            if apart {
                waiting.extend(home.give_apart(part, withheld.then_some(blocks)));
                blocks = u64::from(waiting.is_empty());
            } else if withheld {
                self.holds.cover(holds, start, end);
                home.withhold(part, std::mem::take(&mut blocks));
            } else if held {
                self.holds.cover(holds, start, end);
                home.hold_back(part);
            } else {
                home.give(part);
            }
        }
        self.withhold_apart(false, &waiting, holds);
        Bytes::new(block.size)
    }

    /// Counts the withheld ranges of a block of which some extents are not resident.
    fn withhold_apart(&mut self, small: bool, ranges: &[(u64, u64)], holds: &[HoldId]) {
        ranges.iter().for_each(|&(start, end)| self.holds.cover(holds, start, end));
        let bytes = ranges.iter().map(|(start, end)| end - start).sum();
        self.tallies.withheld(small, u64::from(!ranges.is_empty()), bytes);
    }

    /// Marks a completion point as passed and makes the memory that waited for it available to more streams.
    pub(crate) fn pass(&mut self, point: PointNumber) {
        self.points.pass(point);
        for domain in self.home.lists.aged() {
            self.settle(domain);
        }
        self.home.make_room();
    }

    /// Moves passed pieces to the list for any stream: those that no stream could take always, others if there is a second stream.
    pub(crate) fn settle(&mut self, id: DomainId) {
        let domain = &self.home.domains[id];
        let (limbos, passed_large, passed_slabs) =
            ([domain.limbo_large, domain.limbo_small], domain.passed_large, domain.passed_slabs);
        let streams = domain.streams.clone();
        self.settle_held(id);
        let (lend, passed) = (self.is_lending(id), self.points.passed());
        for limbo in limbos {
            while let Some(piece) = self.home.lists.next_passed(limbo, &self.home.pieces, passed) {
                self.let_go(piece);
            }
        }
        let home = &mut self.home;
        if !lend {
            return;
        }
        for lists in streams {
            for (from, to) in [(lists.large, passed_large), (lists.slabs, passed_slabs)] {
                while let Some(piece) = home.lists.next_passed(from, &home.pieces, passed) {
                    home.lists[from].remove(&mut home.pieces, piece);
                    let passed = &mut home.pieces[piece];
                    passed.list = to;
                    passed.point = PointNumber(0);
                    passed.moved = Move::default();
                    home.give(piece);
                }
            }
        }
    }

    /// Gives a domain up. All its free memory now belongs to the open completion point, wherever it lies: a replay of its graph may still
    /// write to it.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`].
    pub(crate) fn release_domain(&mut self, id: DomainId) -> Result<(), StitchError> {
        self.home.domains.active(id)?;
        let open = self.points.open();
        self.home.domains[id].released = Some(open);
        let lists: Vec<_> = self.home.domains[id].lists().collect();
        for list in lists {
            self.home.renew(list, open);
        }
        self.home.extents.given_up(id);
        self.points.uncover();
        Ok(())
    }

    /// Closes entirely free, passed slabs that other streams keep open. Returns whether there was one.
    pub(crate) fn take_idle_slabs(&mut self, id: DomainId) -> bool {
        if !self.is_lending(id) {
            return false;
        }
        let home = &self.home;
        let small = home.domains[id].streams.iter().map(|lists| &home.lists[lists.small]);
        let open = small.filter(|list| list.bytes >= self.slab).flat_map(|list| list.bins.iter());
        let passed = |id: PieceId| !self.points.is_pending(home.pieces[id].point);
        let idle: Vec<PieceId> = open.filter(|&id| passed(id) && home.is_idle_slab(id)).collect();
        self.home.dissolve_slabs(&idle);
        self.settle(id);
        !idle.is_empty()
    }

    /// Returns the oldest completion point that withholds usable bytes.
    pub(crate) fn oldest_pending(&self) -> Option<PointNumber> {
        let (home, passed) = (&self.home, self.points.passed());
        home.lists.iter().filter_map(|(_, list)| list.oldest_pending(&home.pieces, passed)).min()
    }
}

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
            while let Some(piece) = self.home.lists.next_passed(list, &self.home.pieces, passed) {
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
        let all = piece::join_runs(all);
        let home = all.partition_point(|run| run.start < self.home.slab_zone);
        Runs { all, home }
    }
}
