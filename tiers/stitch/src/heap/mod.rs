//! Blocks handed out of home, and taken back: the fast path, and what it counts.
//!
//! A hit finds a free piece that fits: no driver call, no heap allocation, nothing but arithmetic.
//!
//! Invariants: a live byte belongs to one live block; a piece is in a stream's free list only if that stream may take it now, and in
//! `Anyone`'s only if its completion point has passed.

mod free;
mod held;
mod placement;
mod serve;

use glake_units::Bytes;
use smallvec::SmallVec;

use crate::bins::QUANTUM;
use crate::domain::StreamLists;
use crate::error::StitchError;
use crate::holds::Holds;
use crate::home::Home;
use crate::ids::{DomainId, FreeListId, Move, PieceId};
use crate::live::Live;
use crate::piece::State;
use crate::plan::{Grant, Request};
use crate::points::CompletionPoints;
use crate::settings::{Borrow, Settings};
use crate::tally::Tallies;

pub(crate) use placement::{Pending, Placement};

/// Requests up to here are cut from slabs.
pub const SMALL_LIMIT: Bytes = Bytes::mib(1);

/// A size as it is packed; 0 is given an address too, and what cannot be rounded up stays larger than any device.
pub(crate) fn packed(size: Bytes) -> u64 {
    size.get().clamp(1, u64::MAX - QUANTUM).next_multiple_of(QUANTUM)
}

/// The memory of one device, free and handed out.
#[derive(Debug)]
pub(crate) struct Heap {
    pub(crate) home: Home,
    pub(crate) points: CompletionPoints,
    pub(crate) holds: Holds,
    /// Counts what changes its address: frees of stitched blocks.
    pub(crate) moves: Move,
    pub(crate) tallies: Tallies,
    /// The size of a slab.
    pub(crate) slab: u64,
    /// Whether a stream may take what another freed.
    borrow: bool,
}

impl Heap {
    /// A heap with nothing reserved.
    pub(crate) fn new(settings: &Settings) -> Self {
        Heap {
            home: Home::new(settings.whole_memory(), settings.granularity.get()),
            points: CompletionPoints::default(),
            holds: Holds::default(),
            moves: Move::default(),
            tallies: Tallies::default(),
            slab: settings.slab.get(),
            borrow: settings.borrow != Borrow::Off,
        }
    }

    /// Hands out a free piece that fits, or nothing.
    #[inline]
    pub(crate) fn take(&mut self, request: &Request) -> Option<Grant> {
        let domain =
            self.home.domains.get(request.domain).filter(|domain| !domain.is_released() && !domain.sealed)?;
        let lists = domain.lists_of(request.stream)?;
        let size = packed(request.size);
        if size <= SMALL_LIMIT.get() {
            self.take_small(lists, domain.passed_slabs, size, request.size.get())
        } else {
            let (passed, aliases) = (domain.passed_large, !domain.aliases.is_empty());
            let own = self.home.lists[lists.large].take_best(&mut self.home.pieces, size);
            let piece = match own {
                Some(piece) => piece,
                // An alias may hold enough of the stream's own: the slow path looks, before it takes what others could.
                None if aliases && self.home.lists[lists.large].bytes >= size => return None,
                None => self.home.lists[passed].take_best(&mut self.home.pieces, size)?,
            };
            Some(self.hand_out(piece, State::Live, lists.large, request.size.get()))
        }
    }

    /// A stream takes its own pieces first, then passed ones: what it could use itself it leaves to nobody else, and what
    /// anyone could use it leaves to the others.
    fn take_from(&mut self, own: FreeListId, passed: FreeListId, size: u64) -> Option<PieceId> {
        let found = self.home.lists[own].take_best(&mut self.home.pieces, size);
        found.or_else(|| self.home.lists[passed].take_best(&mut self.home.pieces, size))
    }

    /// Hands out a piece of a slab; opens a slab where there is a free one.
    #[inline]
    pub(crate) fn take_small(
        &mut self,
        lists: StreamLists,
        passed_slabs: FreeListId,
        size: u64,
        requested: u64,
    ) -> Option<Grant> {
        let piece = match self.home.lists[lists.small].take_best(&mut self.home.pieces, size) {
            Some(piece) => piece,
            None => {
                let slab = self.take_from(lists.slabs, passed_slabs, self.slab)?;
                self.home.open_slab(slab, lists);
                self.home.lists[lists.small].take_best(&mut self.home.pieces, size)?
            }
        };
        Some(self.hand_out(piece, State::Live, lists.small, requested))
    }

    /// Hands out a piece that is in no free list.
    #[inline]
    pub(crate) fn hand_out(&mut self, id: PieceId, state: State, list: FreeListId, requested: u64) -> Grant {
        let piece = &mut self.home.pieces[id];
        piece.state = state;
        piece.list = list;
        piece.requested = requested;
        piece.recorded = false;
        let moved = piece.moved > Move::default() && self.points.is_pending(piece.point);
        let (start, size, small) = (piece.start, piece.size, piece.slab != PieceId::NONE);
        let edge = moved && self.needs_edge(id, list);
        self.home.live.insert(start, Live::Piece(id));
        self.tallies.handed_out(small, size, requested);
        self.tallies.counters.edges += u64::from(edge);
        Grant { offset: Bytes::new(start), size: Bytes::new(size), edge, waits: SmallVec::new() }
    }

    /// Whether bytes that were last used at another address need a completion edge on the stream that takes them: not
    /// where it has passed one since.
    fn needs_edge(&mut self, id: PieceId, list: FreeListId) -> bool {
        let list = &mut self.home.lists[list];
        let needs = self.home.pieces[id].moved.is_after(list.edge);
        if needs {
            list.edge = self.moves;
        }
        needs
    }

    /// Whether streams of a domain may take what others freed, once that has passed.
    pub(crate) fn is_lending(&self, id: DomainId) -> bool {
        let domain = &self.home.domains[id];
        domain.options.lend && self.borrow && domain.streams.len() > 1
    }

    /// Bytes held that no block uses.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.tallies.reserved() + self.home.extents.live_evicted() - self.tallies.active_bytes()
    }

    /// How memory stands, for a request that is refused.
    pub(crate) fn out_of_memory(&self, wanted: Bytes, limit: Bytes) -> StitchError {
        StitchError::OutOfMemory {
            wanted,
            reserved: Bytes::new(self.tallies.committed()),
            limit,
            free: Bytes::new(self.free_bytes()),
            stitchable: Bytes::new(self.home.stitchable_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::DomainOptions;
    use crate::free_list::Class;
    use crate::ids::StreamKey;

    const MIB: u64 = 1 << 20;

    /// A heap whose stream 1 has so many MiB free, in one piece, and where stream 2 is known.
    fn heap(free: u64) -> Heap {
        let mut heap = Heap::new(&Settings::for_memory(Bytes::mib(64)));
        let home = &mut heap.home;
        let domain = home.domains.add(DomainOptions::default(), &mut home.lists);
        let lists = home.lists_for(domain, StreamKey(1));
        home.lists_for(domain, StreamKey(2));
        home.add_extents(0, &[free * MIB], domain, Class::Large);
        let piece = home.add_piece(0, free * MIB, domain, State::Part);
        home.pieces[piece].list = lists.large;
        home.give(piece);
        heap.tallies.add_extents(false, 1, free * MIB);
        heap
    }

    fn request(size: u64, stream: u64) -> Request {
        Request { size: Bytes::new(size * MIB), stream: StreamKey(stream), domain: DomainId::DEFAULT }
    }

    fn free(heap: &mut Heap, grant: &Grant) {
        let live = heap.home.live.remove(grant.offset.get(), &heap.home.pieces);
        let Some(Live::Piece(id)) = live else { panic!("it is at home") };
        heap.free_piece(id, &[]);
    }

    #[test]
    fn a_stream_has_its_own_at_once_and_others_once_it_has_passed() {
        let mut heap = heap(8);
        let grant = heap.take(&request(8, 1)).unwrap();
        assert_eq!(heap.free_bytes(), 0);
        free(&mut heap, &grant);
        assert!(heap.take(&request(8, 2)).is_none(), "its work may still run");
        let again = heap.take(&request(8, 1)).unwrap();
        assert_eq!(again, grant);
        free(&mut heap, &again);
        let closed = heap.points.close();
        assert_eq!(heap.oldest_pending(), Some(closed));
        heap.pass(closed);
        assert_eq!(heap.take(&request(8, 2)).map(|grant| grant.offset), Some(grant.offset));
    }

    #[test]
    fn what_other_streams_used_is_nobody_s_until_it_has_passed() {
        let mut heap = heap(8);
        let grant = heap.take(&request(4, 1)).unwrap();
        let live = heap.home.live.get(grant.offset.get(), &heap.home.pieces);
        let Some(Live::Piece(id)) = live else { panic!("it is at home") };
        heap.home.pieces[id].recorded = true;
        free(&mut heap, &grant);
        assert!(heap.take(&request(8, 1)).is_none());
        assert_eq!(heap.free_bytes(), 4 * MIB, "it counts as active");
        let closed = heap.points.close();
        heap.pass(closed);
        assert!(heap.take(&request(8, 2)).is_some() || heap.take(&request(8, 1)).is_some());
    }
}
