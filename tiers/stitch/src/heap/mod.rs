//! Allocation and free at home: the fast path and its counters.
//!
//! A hit takes a free piece that fits: no driver call, no heap allocation, only arithmetic.
//!
//! Invariants: a live byte belongs to one live block; a piece is in a stream's free list only if that stream may take it now, and in the
//! list of `Anyone` only if its completion point has passed.
//!
//! For the slow path: all runs that a stream may take, and blocks of joined pieces.

use glake_units::Bytes;
use smallvec::SmallVec;

use crate::bins::QUANTUM;
use crate::domain::StreamLists;
use crate::error::StitchError;
use crate::free_list::Owner;
use crate::holds::{CompletionPoints, Holds};
use crate::home::{Carved, Home};
use crate::ids::{DomainId, FreeListId, Move, PieceId};
use crate::piece::{Live, Run, State};
use crate::plan::{Grant, Request, Wait};
use crate::settings::{Borrow, Settings};
use crate::stats::Tallies;

pub(crate) use placement::{Pending, Placement};

mod free;
mod placement;

/// Largest request that is served from slabs.
pub const SMALL_LIMIT: Bytes = Bytes::mib(1);

/// Returns the packed size of a request. Size 0 gets an address too; sizes that overflow when rounded stay larger than any device.
pub(crate) fn packed(size: Bytes) -> u64 {
    size.get().clamp(1, u64::MAX - QUANTUM).next_multiple_of(QUANTUM)
}

/// The memory of one device, free and handed out.
#[derive(Debug)]
pub(crate) struct Heap {
    pub(crate) home: Home,
    pub(crate) points: CompletionPoints,
    pub(crate) holds: Holds,
    /// Number of address changes so far: frees of stitched blocks.
    pub(crate) moves: Move,
    pub(crate) tallies: Tallies,
    /// Size of a slab.
    pub(crate) slab: u64,
    /// Whether a stream may take memory that another stream freed.
    borrow: bool,
}

impl Heap {
    /// Creates a heap without reserved memory.
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

    /// Serves a request from one free piece; `None` on a miss.
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
                // An alias may serve the request from the stream's own memory: the slow path checks that before taking passed memory.
                None if aliases && self.home.lists[lists.large].bytes >= size => return None,
                None => self.home.lists[passed].take_best(&mut self.home.pieces, size)?,
            };
            Some(self.hand_out(piece, State::Live, lists.large, request.size.get()))
        }
    }

    /// Takes from the stream's own pieces first, then from passed ones. Own pieces are available to no other stream; passed ones are better
    /// left to the others.
    fn take_from(&mut self, own: FreeListId, passed: FreeListId, size: u64) -> Option<PieceId> {
        let found = self.home.lists[own].take_best(&mut self.home.pieces, size);
        found.or_else(|| self.home.lists[passed].take_best(&mut self.home.pieces, size))
    }

    /// Serves a small request from a slab; opens a slab if a free one exists.
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

    /// Returns whether bytes last used at another address need a completion edge on the stream that takes them, because the stream has
    /// passed none since.
    fn needs_edge(&mut self, id: PieceId, list: FreeListId) -> bool {
        let list = &mut self.home.lists[list];
        let needs = self.home.pieces[id].moved.is_after(list.edge);
        if needs {
            list.edge = self.moves;
        }
        needs
    }

    /// Returns whether streams of a domain may take memory that others freed, once its completion point has passed.
    pub(crate) fn is_lending(&self, id: DomainId) -> bool {
        let domain = &self.home.domains[id];
        domain.options.lend && self.borrow && domain.streams.len() > 1
    }

    /// Returns the reserved bytes that no block uses.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.tallies.reserved() + self.home.extents.live_evicted() - self.tallies.active_bytes()
    }

    /// Returns the out-of-memory error with the current figures.
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

/// A request that missed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Want {
    /// Packed size in bytes.
    pub(crate) size: u64,
    pub(crate) requested: u64,
    pub(crate) lists: StreamLists,
    pub(crate) domain: DomainId,
    /// Smallest request that is stitched.
    pub(crate) stitch_from: u64,
}

/// Runs that one stream may take, in address order: at home, then whole slabs, which only an alias can use.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    pub(crate) all: Vec<Run>,
    pub(crate) home: usize,
}

impl Runs {
    pub(crate) fn home(&self) -> &[Run] {
        &self.all[..self.home]
    }

    /// Returns the shortest run at home that is long enough.
    pub(crate) fn shortest(&self, size: u64) -> Option<Run> {
        self.home().iter().filter(|run| run.size() >= size).min_by_key(|run| run.size()).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::DomainOptions;
    use crate::free_list::Class;
    use crate::ids::StreamKey;

    const MIB: u64 = 1 << 20;

    /// Creates a heap whose stream 1 has `free` MiB in one free piece and which also knows stream 2.
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
    fn a_stream_reuses_its_own_memory_at_once_and_others_after_the_completion_point() {
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
    fn memory_used_by_other_streams_is_unavailable_until_the_completion_point() {
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
