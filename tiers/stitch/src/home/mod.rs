//! The bytes at home: the position of every piece, the extents behind them, and the free lists.
//!
//! Home knows no time and counts nothing: a completion point is an argument, and the caller that hands bytes out keeps the statistics.
//!
//! Invariants:
//! - the pieces cover every extent exactly once, and free neighbours of one free list are one piece;
//! - a free piece is in the free list that it names; one in an extent that is not resident is in a list of evicted pieces, and lies
//!   inside that one extent;
//! - a slab is a segment of its own, inside a piece of home.
//!
//! A segment is a run of extents of one domain: it begins, joins and ends as extents are added and removed.

use std::collections::BTreeMap;

use rustc_hash::FxHashSet;

use crate::domain::{Domains, StreamLists};
use crate::extent::{Extent, ExtentState, Extents, Zone};
use crate::free_list::{Class, FreeLists};
use crate::ids::{DomainId, ExtentId, FreeListId, PieceId, PointNumber, StreamKey};
use crate::piece::{LiveBlocks, Pieces, State};

pub(crate) use carve::Carved;

mod carve;
mod walk;

/// The home of one device.
#[derive(Debug)]
pub(crate) struct Home {
    pub(crate) pieces: Pieces,
    pub(crate) lists: FreeLists,
    pub(crate) domains: Domains,
    pub(crate) extents: Extents,
    pub(crate) segments: Segments,
    pub(crate) live: LiveBlocks,
    /// Address zone for extents of large blocks.
    pub(crate) large: Zone,
    /// Address zone for extents of slabs.
    pub(crate) slabs: Zone,
    /// Start of the zone of slabs.
    pub(crate) slab_zone: u64,
}

impl Home {
    /// Creates an empty home for a device with `memory` bytes.
    pub(crate) fn new(memory: u64, granularity: u64) -> Self {
        Home {
            pieces: Pieces::default(),
            lists: FreeLists::default(),
            domains: Domains::default(),
            extents: Extents::new(granularity),
            segments: Segments::default(),
            live: LiveBlocks::new(2 * memory),
            large: Zone::new(0, 2 * memory),
            slabs: Zone::new(2 * memory, memory),
            slab_zone: 2 * memory,
        }
    }

    /// Makes room in all tables for what hits and frees write until the next call, so that these never allocate.
    pub(crate) fn make_room(&mut self) {
        self.pieces.make_room();
        self.live.make_room();
        self.lists.make_room();
    }

    pub(crate) fn zone(&mut self, class: Class) -> &mut Zone {
        if class == Class::Slabs { &mut self.slabs } else { &mut self.large }
    }

    /// Reserves addresses for new extents of a domain. Those of plain memory are followed by a gap, so that no piece spans two allocations.
    pub(crate) fn reserve(&mut self, domain: DomainId, class: Class, length: u64) -> Option<u64> {
        let length = length + self.gap_behind(domain);
        self.zone(class).take(length)
    }

    /// Returns addresses of extents of a domain to their zone.
    pub(crate) fn unreserve(&mut self, domain: DomainId, class: Class, start: u64, length: u64) {
        let length = length + self.gap_behind(domain);
        self.zone(class).give_back(start, length);
    }

    /// Returns the length of the unused addresses behind each extent of a domain.
    fn gap_behind(&self, domain: DomainId) -> u64 {
        if self.domains[domain].options.plain { self.extents.granularity() } else { 0 }
    }

    /// Returns the free lists of a stream; creates them on first use.
    pub(crate) fn lists_for(&mut self, id: DomainId, stream: StreamKey) -> StreamLists {
        if let Some(known) = self.domains[id].lists_of(stream) {
            return known;
        }
        self.domains[id].add_stream(id, stream, &mut self.lists, &self.pieces)
    }

    /// Forgets the streams of a domain without free pieces and live blocks, unless `held` contains one of their free lists.
    pub(crate) fn forget_streams(&mut self, id: DomainId, held: impl Iterator<Item = FreeListId>) {
        let mut used: FxHashSet<FreeListId> = self.pieces.lists().collect();
        used.extend(held);
        let lists = &mut self.lists;
        self.domains[id].forget_streams(|stream| {
            let own = [stream.large, stream.slabs, stream.small, stream.held];
            let stays = own.iter().any(|list| used.contains(list));
            if !stays {
                own.into_iter().for_each(|list| lists.forget(list));
            }
            stays
        });
        self.domains[id].lists().for_each(|list| self.lists.mark(list));
    }

    /// Removes a released domain once it is empty.
    pub(crate) fn drop_if_done(&mut self, id: DomainId) {
        let domain = &self.domains[id];
        if !domain.is_released() || domain.held > 0 || domain.plans > 0 {
            return;
        }
        if let Some(domain) = self.domains.remove(id) {
            domain.lists().for_each(|list| self.lists.forget(list));
        }
    }

    /// Puts a piece into the free list that it names, merged with its neighbours there.
    pub(crate) fn give(&mut self, id: PieceId) {
        let piece = &mut self.pieces[id];
        piece.state = State::Free;
        let (list, prev, next) = (piece.list, piece.prev, piece.next);
        // Read both before branching on either: the two cache misses overlap.
        let (behind, in_front) = (self.pieces.is_in(next, list), self.pieces.is_in(prev, list));
        if behind {
            self.lists[list].remove(&mut self.pieces, next);
            self.pieces.inherit(id, next);
            self.pieces.absorb_next(id);
        }
        let id = if in_front {
            self.lists[list].remove(&mut self.pieces, prev);
            self.pieces.inherit(prev, id);
            self.pieces.absorb_next(prev);
            prev
        } else {
            id
        };
        if self.pieces[id].slab == PieceId::NONE || !self.close_slab(id) {
            self.lists[list].insert(&mut self.pieces, id);
        }
    }

    /// Withholds a freed piece from all streams until its completion point has passed; `blocks` blocks complete with it.
    pub(crate) fn withhold(&mut self, id: PieceId, blocks: u64) {
        let list = &self.lists[self.pieces[id].list];
        let domain = &self.domains[list.domain];
        let limbo = if list.class == Class::Small { domain.limbo_small } else { domain.limbo_large };
        let piece = &mut self.pieces[id];
        piece.state = State::Free;
        piece.requested = blocks;
        piece.returns_to = std::mem::replace(&mut piece.list, limbo);
        self.lists[limbo].insert(&mut self.pieces, id);
    }

    /// Keeps a freed piece for its stream, which has to wait for the holds on it.
    pub(crate) fn hold_back(&mut self, id: PieceId) {
        let held = self.lists[self.pieces[id].list].held;
        let piece = &mut self.pieces[id];
        piece.state = State::Free;
        piece.returns_to = std::mem::replace(&mut piece.list, held);
        self.lists[held].insert(&mut self.pieces, id);
    }

    /// Returns a piece without holds to its stream.
    pub(crate) fn let_go(&mut self, id: PieceId) {
        self.lists.remove(&mut self.pieces, id);
        let piece = &mut self.pieces[id];
        piece.list = std::mem::replace(&mut piece.returns_to, FreeListId::NONE);
        self.give(id);
    }

    /// Sets the completion point of every piece of a free list.
    pub(crate) fn renew(&mut self, list: FreeListId, point: PointNumber) {
        let ids: Vec<PieceId> = self.lists[list].bins.iter().collect();
        for id in ids {
            self.lists[list].remove(&mut self.pieces, id);
            self.pieces[id].point = point;
            self.lists[list].insert(&mut self.pieces, id);
        }
    }
}

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

/// Edges of all segments, by offset.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    pub(crate) begins: BTreeMap<u64, PieceId>,
    pub(crate) ends: BTreeMap<u64, PieceId>,
}

impl Segments {
    /// Iterates over the first edge of every segment, in address order.
    pub(crate) fn begins(&self) -> impl Iterator<Item = PieceId> + '_ {
        self.begins.values().copied()
    }

    /// Returns the first edge of the last segment that begins at or before an offset.
    pub(crate) fn last_at(&self, offset: u64) -> Option<PieceId> {
        self.begins.range(..=offset).next_back().map(|(_, &edge)| edge)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::DomainOptions;
    use crate::error::StitchError;
    use crate::extent::ExtentState;
    use crate::ids::ExtentId;
    use crate::piece::Run;

    const MIB: u64 = 1 << 20;
    const STREAM: StreamKey = StreamKey(1);

    /// Creates a home with two extents of 8 MiB in one free piece of one stream.
    fn home() -> (Home, StreamLists, PieceId, Vec<ExtentId>) {
        let mut home = Home::new(64 * MIB, 2 * MIB);
        let domain = home.domains.add(DomainOptions::default(), &mut home.lists);
        let lists = home.lists_for(domain, STREAM);
        let extents = home.add_extents(0, &[8 * MIB; 2], domain, Class::Large);
        home.domains[domain].held = 16 * MIB;
        let piece = home.add_piece(0, 16 * MIB, domain, State::Part);
        home.pieces[piece].list = lists.large;
        home.give(piece);
        (home, lists, piece, extents)
    }

    fn free(home: &Home, list: FreeListId) -> Vec<Run> {
        let mut runs: Vec<Run> = home.lists[list].bins.iter().map(|id| home.run_of(id)).collect();
        runs.sort_unstable_by_key(|run| run.start);
        runs
    }

    #[test]
    fn a_carved_range_put_back_is_one_piece_again() {
        let (mut home, lists, _, _) = home();
        let [whole] = free(&home, lists.large)[..] else { panic!("one piece") };
        let carved = home.carve(&whole, 4 * MIB, 12 * MIB);
        let left: Vec<_> = free(&home, lists.large).iter().map(|run| (run.start, run.end)).collect();
        assert_eq!(left, [(0, 4 * MIB), (12 * MIB, 16 * MIB)]);
        home.put_back(carved);
        let left: Vec<_> = free(&home, lists.large).iter().map(|run| (run.start, run.end)).collect();
        assert_eq!(left, [(0, 16 * MIB)]);
    }

    #[test]
    fn free_bytes_of_an_evicted_extent_are_unavailable_until_its_refill() {
        let (mut home, lists, _, extents) = home();
        home.set_apart(extents[1]).unwrap();
        assert!(home.extents.is_apart(12 * MIB, 13 * MIB) && !home.extents.is_apart(0, 8 * MIB));
        assert_eq!(free(&home, lists.large).iter().map(Run::size).sum::<u64>(), 8 * MIB);
        home.join_again(extents[1]);
        assert!(home.extents.are_all_resident());
        assert_eq!(free(&home, lists.large).iter().map(Run::size).collect::<Vec<_>>(), [16 * MIB]);
    }

    #[test]
    fn an_extent_with_withheld_bytes_stays() {
        let (mut home, lists, _, extents) = home();
        let [whole] = free(&home, lists.large)[..] else { panic!("one piece") };
        let carved = home.carve(&whole, 8 * MIB, 10 * MIB);
        home.withhold(carved.piece, 1);
        assert_eq!(home.set_apart(extents[1]), Err(StitchError::Withheld { extent: extents[1] }));
        assert!(home.extents.are_all_resident());
        home.set_apart(extents[0]).unwrap();
    }

    #[test]
    fn freeing_the_last_block_of_an_evicted_extent_empties_it() {
        let (mut home, lists, _, extents) = home();
        let [whole] = free(&home, lists.large)[..] else { panic!("one piece") };
        let live = home.carve(&whole, 6 * MIB, 10 * MIB).piece;
        home.set_apart(extents[1]).unwrap();
        home.extents.set_state(extents[1], ExtentState::Evicted);
        assert_eq!(home.extents.live_evicted(), 2 * MIB);
        assert!(!home.is_forgettable(extents[1]));
        home.give_apart(live, None);
        assert_eq!(home.extents.take_emptied(), [extents[1]]);
        assert_eq!(free(&home, lists.large).iter().map(Run::size).sum::<u64>(), 8 * MIB);
        assert!(home.is_forgettable(extents[1]));
        home.forget_extent(extents[1]);
        assert!(home.extents.are_all_resident() && home.extents.get(extents[1]).is_none());
    }

    #[test]
    fn a_slab_closes_when_all_of_it_is_free_and_another_is_open() {
        let (mut home, lists, _, _) = home();
        let domain = DomainId::DEFAULT;
        let start = home.slab_zone;
        home.add_extents(start, &[4 * MIB], domain, Class::Slabs);
        let piece = home.add_piece(start, 4 * MIB, domain, State::Part);
        let second = home.pieces.split(piece, 2 * MIB);
        for slab in [piece, second] {
            home.open_slab(slab, lists);
        }
        let blocks = [(); 2].map(|()| home.lists[lists.small].take_best(&mut home.pieces, 2 * MIB).unwrap());
        home.give(blocks[0]);
        assert!(free(&home, lists.slabs).is_empty(), "the last free one stays open");
        home.give(blocks[1]);
        assert_eq!(free(&home, lists.slabs).len(), 1);
        home.dissolve_idle_slabs(None);
        assert_eq!(free(&home, lists.slabs).iter().map(Run::size).collect::<Vec<_>>(), [4 * MIB]);
    }
}
