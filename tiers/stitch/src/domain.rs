//! Domains: owners of extents, with the free lists of their pieces.
//!
//! An id is given once: a lookup with the id of a removed domain fails even if its slot was reused.

use std::ops::{Index, IndexMut};

use slab::Slab;
use smallvec::SmallVec;

use crate::error::StitchError;
use crate::free_list::{Class, FreeList, FreeLists, Owner};
use crate::ids::{AliasId, DomainId, FreeListId, PointNumber, StreamKey};
use crate::piece::Pieces;

/// Options of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DomainOptions {
    /// Whether the domain's free pieces may be stitched.
    pub alias: bool,
    /// Whether a stream may reuse memory that another stream freed, once its completion point has passed.
    pub lend: bool,
    /// Full size of the domain's extents; `None`: the device's extent size.
    pub extent: Option<glake_units::Bytes>,
    /// Whether the domain keeps its free extents until it is released or trimmed by name.
    pub keep: bool,
    /// Whether each extent is an allocation of its own, whose real addresses are not those of home: no piece spans two extents. Requires
    /// `alias` to be off.
    pub plain: bool,
}

impl Default for DomainOptions {
    fn default() -> Self {
        DomainOptions { alias: true, lend: true, extent: None, keep: false, plain: false }
    }
}

impl DomainOptions {
    /// Returns the options of a memory pool of part of a program: stitched and lent among its own streams, kept until released.
    pub fn own_pool() -> Self {
        DomainOptions { keep: true, ..DomainOptions::default() }
    }

    /// Returns the options of a CUDA graph's private pool. Addresses are baked into graphs, so nothing is lent; free memory stays because a
    /// replay writes to it.
    pub fn private_pool() -> Self {
        DomainOptions { alias: false, lend: false, keep: true, ..DomainOptions::default() }
    }

    /// Returns the options of a region, whose memory is evicted and refilled as a whole: like the default domain, with extents so large
    /// that mapping takes negligible time beside copying.
    pub fn region(extent: glake_units::Bytes) -> Self {
        DomainOptions { extent: Some(extent), ..DomainOptions::default() }
    }

    /// Returns these options for plain memory of the same owner: each extent an allocation of its own, never stitched.
    #[must_use]
    pub fn plain(self) -> Self {
        DomainOptions { alias: false, plain: true, ..self }
    }

    /// Returns whether addresses and bytes, also of free memory, belong to a captured graph.
    pub fn is_private(&self) -> bool {
        self.keep && !self.alias && !self.lend
    }
}

/// Number of streams below which a domain keeps streams without memory.
const MANY: usize = 16;

/// Free lists of one stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamLists {
    pub(crate) stream: StreamKey,
    pub(crate) large: FreeListId,
    pub(crate) slabs: FreeListId,
    pub(crate) small: FreeListId,
    /// Large pieces and slabs that holds keep from the stream.
    pub(crate) held: FreeListId,
}

/// State of a domain. The fields that a hit reads come first, in two cache lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Domain {
    pub(crate) id: DomainId,
    /// Completion point of the domain's release. Memory free then returns to the driver once it has passed: a graph may still write to it.
    pub(crate) released: Option<PointNumber>,
    /// Whether the domain is sealed: its bytes must not change, so it serves no requests.
    pub(crate) sealed: bool,
    /// Large pieces and slabs that any stream may take.
    pub(crate) passed_large: FreeListId,
    pub(crate) passed_slabs: FreeListId,
    pub(crate) aliases: Vec<AliasId>,
    pub(crate) streams: SmallVec<[StreamLists; 4]>,
    pub(crate) options: DomainOptions,
    /// Number of streams above which streams without memory are forgotten.
    pub(crate) most_streams: usize,
    /// Large pieces that no stream may take yet.
    pub(crate) limbo_large: FreeListId,
    pub(crate) limbo_small: FreeListId,
    /// Free large pieces of extents that are not resident.
    pub(crate) evicted_large: FreeListId,
    pub(crate) evicted_small: FreeListId,
    /// Number of pending plans for blocks of the domain.
    pub(crate) plans: usize,
    /// Bytes of the domain's extents, resident or not.
    pub(crate) held: u64,
}

impl Domain {
    pub(crate) fn new(id: DomainId, options: DomainOptions, lists: &mut FreeLists) -> Self {
        let mut list = |class, owner| lists.add(FreeList::new(id, class, owner));
        Domain {
            id,
            options,
            streams: SmallVec::new(),
            most_streams: MANY,
            passed_large: list(Class::Large, Owner::Anyone),
            passed_slabs: list(Class::Slabs, Owner::Anyone),
            limbo_large: list(Class::Large, Owner::Nobody),
            limbo_small: list(Class::Small, Owner::Nobody),
            evicted_large: list(Class::Large, Owner::Evicted),
            evicted_small: list(Class::Small, Owner::Evicted),
            aliases: Vec::new(),
            released: None,
            plans: 0,
            sealed: false,
            held: 0,
        }
    }

    pub(crate) fn is_released(&self) -> bool {
        self.released.is_some()
    }

    /// Returns whether all memory of the domain stays although none of it may be live: a captured graph knows its addresses, and the domain
    /// was not released.
    pub(crate) fn is_held(&self) -> bool {
        self.options.is_private() && !self.is_released()
    }

    /// Returns whether the domain's free extents return to the driver under memory pressure.
    pub(crate) fn gives_back(&self) -> bool {
        self.is_released() || !self.options.keep
    }

    /// Returns whether a new stream should trigger a search for unused ones because there are many.
    pub(crate) fn is_crowded(&self, stream: StreamKey) -> bool {
        self.streams.len() >= self.most_streams && self.lists_of(stream).is_none()
    }

    /// Forgets the streams for which `stays` returns false.
    pub(crate) fn forget_streams(&mut self, mut stays: impl FnMut(&StreamLists) -> bool) {
        self.streams.retain(|stream| stays(stream));
        // The next search happens at twice the number of streams, because a search visits every piece.
        self.most_streams = MANY.max(2 * self.streams.len());
    }

    /// Returns the free lists of a known stream.
    pub(crate) fn lists_of(&self, stream: StreamKey) -> Option<StreamLists> {
        self.streams.iter().find(|lists| lists.stream == stream).copied()
    }

    /// Returns the free lists of a stream; creates them on first use.
    pub(crate) fn add_stream(
        &mut self,
        id: DomainId,
        stream: StreamKey,
        lists: &mut FreeLists,
        pieces: &Pieces,
    ) -> StreamLists {
        let held = lists.add(FreeList::new(id, Class::Large, Owner::Held(stream)));
        let mut list = |class| lists.add(FreeList::of_stream(id, class, stream, held));
        let own = StreamLists {
            stream,
            large: list(Class::Large),
            slabs: list(Class::Slabs),
            small: list(Class::Small),
            held,
        };
        for list in [own.large, own.slabs, own.small] {
            lists[list].bins.open();
        }
        self.streams.push(own);
        // Whether free bytes wait for a stream depends on whether there are several.
        self.lists().for_each(|list| lists.mark(list));
        if self.streams.len() > 1 && self.options.lend {
            for own in self.streams.iter().flat_map(|own| [own.large, own.slabs]) {
                lists[own].keep_ages(pieces);
            }
        }
        own
    }

    /// Iterates over all free lists of the domain.
    pub(crate) fn lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        let small = self.streams.iter().map(|lists| lists.small);
        let apart = [self.limbo_large, self.limbo_small, self.evicted_large, self.evicted_small];
        self.home_lists().chain(apart).chain(small).chain(self.held_lists())
    }

    /// Iterates over the free lists of held pieces.
    pub(crate) fn held_lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        self.streams.iter().map(|lists| lists.held)
    }

    /// Iterates over the free lists of whole pieces of home.
    pub(crate) fn home_lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        [self.passed_large, self.passed_slabs]
            .into_iter()
            .chain(self.streams.iter().flat_map(|lists| [lists.large, lists.slabs]))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Domains {
    table: Slab<Domain>,
    /// Number of domains created so far.
    made: u32,
}

impl Domains {
    /// Adds a domain with free lists of its own.
    pub(crate) fn add(&mut self, options: DomainOptions, lists: &mut FreeLists) -> DomainId {
        let entry = self.table.vacant_entry();
        let id = DomainId::new(self.made, entry.key());
        self.made += 1;
        entry.insert(Domain::new(id, options, lists));
        id
    }

    pub(crate) fn get(&self, id: DomainId) -> Option<&Domain> {
        self.table.get(id.place()).filter(|domain| domain.id == id)
    }

    /// Returns a domain that exists and was not released.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`].
    pub(crate) fn active(&self, id: DomainId) -> Result<&Domain, StitchError> {
        match self.get(id) {
            Some(domain) if !domain.is_released() => Ok(domain),
            _ => Err(StitchError::UnknownDomain { domain: id }),
        }
    }

    pub(crate) fn get_mut(&mut self, id: DomainId) -> Option<&mut Domain> {
        self.table.get_mut(id.place()).filter(|domain| domain.id == id)
    }

    /// Removes a domain from the table.
    pub(crate) fn remove(&mut self, id: DomainId) -> Option<Domain> {
        self.get(id)?;
        self.table.try_remove(id.place())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (DomainId, &Domain)> {
        self.table.iter().map(|(_, domain)| (domain.id, domain))
    }
}

/// Looks up a domain that must exist: pieces in memory only name live domains.
impl Index<DomainId> for Domains {
    type Output = Domain;

    fn index(&self, id: DomainId) -> &Domain {
        let domain = &self.table[id.place()];
        debug_assert_eq!(domain.id, id);
        domain
    }
}

impl IndexMut<DomainId> for Domains {
    fn index_mut(&mut self, id: DomainId) -> &mut Domain {
        let domain = &mut self.table[id.place()];
        debug_assert_eq!(domain.id, id);
        domain
    }
}

#[cfg(test)]
mod domains_tests {
    use super::*;

    #[test]
    fn an_id_is_given_once() {
        let (mut domains, mut lists) = (Domains::default(), FreeLists::default());
        let mut gone = Vec::new();
        for _ in 0..100 {
            let id = domains.add(DomainOptions::default(), &mut lists);
            assert!(domains.get(id).is_some() && !gone.contains(&id));
            assert!(domains.remove(id).is_some() && domains.remove(id).is_none());
            gone.push(id);
        }
        let last = domains.add(DomainOptions::default(), &mut lists);
        assert!(gone.iter().all(|id| domains.get(*id).is_none() && id.number() != last.number()));
        assert_eq!(domains.iter().map(|(id, _)| id).collect::<Vec<_>>(), [last]);
    }
}
