//! Frees of blocks, and the transfer of freed bytes to other streams.

use glake_units::Bytes;

use super::Heap;
use crate::error::StitchError;
use crate::ids::{DomainId, HoldId, Move, PieceId, PointNumber};
use crate::stitched::Stitched;

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
        let domains: smallvec::SmallVec<[DomainId; 4]> = self.home.domains.iter().map(|(id, _)| id).collect();
        for domain in domains {
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
            while let Some(piece) = self.home.lists[limbo].next_passed(limbo, &self.home.pieces, passed) {
                self.let_go(piece);
            }
        }
        let home = &mut self.home;
        if !lend {
            return;
        }
        for lists in streams {
            for (from, to) in [(lists.large, passed_large), (lists.slabs, passed_slabs)] {
                while let Some(piece) = home.lists[from].next_passed(from, &home.pieces, passed) {
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
