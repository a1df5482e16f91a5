//! The bytes at home: which piece lies where, whose extents they are in, and in which free list what is free waits.
//!
//! Home knows no time and counts nothing: an epoch is an argument, and who hands bytes out keeps the statistics.
//!
//! Invariants:
//! - the pieces cover every extent exactly once, and free neighbours of one free list are one piece;
//! - a free piece is in the free list that it names; one in an extent that is not resident is in a list of evicted pieces, and lies
//!   inside that one extent;
//! - a slab is a segment of its own, inside a piece of home.

mod carve;
mod evict;
mod place;
mod slabs;
mod walk;

use rustc_hash::FxHashSet;

use crate::domain::StreamLists;
use crate::domains::Domains;
use crate::extent::Extents;
use crate::free_list::Class;
use crate::free_lists::FreeLists;
use crate::ids::{DomainId, Epoch, FreeListId, PieceId, StreamKey};
use crate::live::LiveBlocks;
use crate::piece::{Pieces, State};
use crate::segments::Segments;
use crate::zone::Zone;

pub(crate) use carve::{Carved, Former};

/// The home of one device.
#[derive(Debug)]
pub(crate) struct Home {
    pub(crate) pieces: Pieces,
    pub(crate) lists: FreeLists,
    pub(crate) domains: Domains,
    pub(crate) extents: Extents,
    pub(crate) segments: Segments,
    pub(crate) live: LiveBlocks,
    /// Where extents of large blocks go.
    pub(crate) large: Zone,
    /// Where extents of slabs go.
    pub(crate) slabs: Zone,
    /// Where the zone of slabs begins.
    pub(crate) slab_zone: u64,
}

impl Home {
    /// A home with nothing in it, for a device with so much memory.
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

    pub(crate) fn zone(&mut self, class: Class) -> &mut Zone {
        if class == Class::Slabs { &mut self.slabs } else { &mut self.large }
    }

    /// The free lists of a stream, made at first sight.
    pub(crate) fn lists_for(&mut self, id: DomainId, stream: StreamKey) -> StreamLists {
        if let Some(known) = self.domains[id].lists_of(stream) {
            return known;
        }
        self.domains[id].add_stream(id, stream, &mut self.lists, &self.pieces)
    }

    /// Forgets the streams of a domain of which nothing is left: no free piece, no live block that would come back to them, and
    /// none of the free lists that are `held` by something else.
    pub(crate) fn forget_streams(&mut self, id: DomainId, held: impl Iterator<Item = FreeListId>) {
        let mut used: FxHashSet<FreeListId> = self.pieces.lists().collect();
        used.extend(held);
        let lists = &mut self.lists;
        self.domains[id].forget_streams(|stream| {
            let own = [stream.large, stream.slabs, stream.small];
            let stays = own.iter().any(|list| used.contains(list));
            if !stays {
                own.into_iter().for_each(|list| lists.forget(list));
            }
            stays
        });
    }

    /// Forgets a released domain that holds nothing any more.
    pub(crate) fn drop_if_done(&mut self, id: DomainId) {
        let domain = &self.domains[id];
        if !domain.is_released() || domain.extents > 0 || domain.plans > 0 {
            return;
        }
        if let Some(domain) = self.domains.remove(id) {
            domain.lists().for_each(|list| self.lists.forget(list));
        }
    }

    /// Puts a piece that is in no free list into the one it names, merged with its neighbours there.
    pub(crate) fn give(&mut self, id: PieceId) {
        let piece = &mut self.pieces[id];
        piece.state = State::Free;
        let (list, prev, next) = (piece.list, piece.prev, piece.next);
        // Both are read before the first branch on either: two cache misses at a time instead of one after the other.
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

    /// Keeps a freed piece from everybody until its epoch has passed; `blocks` are complete with it.
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

    /// Gives every piece of a free list an epoch.
    pub(crate) fn renew(&mut self, list: FreeListId, epoch: Epoch) {
        let ids: Vec<PieceId> = self.lists[list].bins.iter().collect();
        for id in ids {
            self.lists[list].remove(&mut self.pieces, id);
            self.pieces[id].epoch = epoch;
            self.lists[list].insert(&mut self.pieces, id);
        }
    }
}
