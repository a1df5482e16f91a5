//! Owners of extents, and the free lists of their free pieces.

use smallvec::SmallVec;

use crate::free_list::{Class, FreeList, Owner};
use crate::free_lists::FreeLists;
use crate::ids::{AliasId, DomainId, FreeListId, PointNumber, StreamKey};
use crate::piece::Pieces;

/// What a domain allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DomainOptions {
    /// Whether its free pieces may be stitched.
    pub alias: bool,
    /// Whether a stream may take what another freed, once that has passed.
    pub lend: bool,
    /// The full size of its extents; `None`: the device's.
    pub extent: Option<glake_units::Bytes>,
    /// Whether its free extents stay its own until it is released, or trimmed by name.
    pub keep: bool,
}

impl Default for DomainOptions {
    fn default() -> Self {
        DomainOptions { alias: true, lend: true, extent: None, keep: false }
    }
}

impl DomainOptions {
    /// Memory for a part of a program: stitched and lent among its own streams, and kept until it is released.
    pub fn own_pool() -> Self {
        DomainOptions { keep: true, ..DomainOptions::default() }
    }

    /// The private pool of a CUDA graph: addresses are baked into graphs, so that nothing is lent, and free memory stays,
    /// because a replay writes to it.
    pub fn private_pool() -> Self {
        DomainOptions { alias: false, lend: false, extent: None, keep: true }
    }

    /// Memory that leaves its GPU and comes back as a whole: like the default domain, in extents so large that mapping them
    /// takes no time beside copying them.
    pub fn region(extent: glake_units::Bytes) -> Self {
        DomainOptions { extent: Some(extent), ..DomainOptions::default() }
    }

    /// Whether addresses and bytes are a captured graph's, those of free memory too.
    pub fn is_private(&self) -> bool {
        self.keep && !self.alias && !self.lend
    }
}

/// So many streams of a domain are kept, whatever they have.
const MANY: usize = 16;

/// The free lists of one stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamLists {
    pub(crate) stream: StreamKey,
    pub(crate) large: FreeListId,
    pub(crate) slabs: FreeListId,
    pub(crate) small: FreeListId,
    /// Large pieces and slabs that holds keep from it.
    pub(crate) held: FreeListId,
}

/// What a hit looks at comes first, in two cache lines.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Domain {
    pub(crate) id: DomainId,
    /// When its owner gave it up: what was free then goes back to the driver once that has passed, for a graph may still write to it.
    pub(crate) released: Option<PointNumber>,
    /// What is in it is not written to, so nothing new is handed out.
    pub(crate) sealed: bool,
    /// Large pieces and slabs that anyone may take.
    pub(crate) passed_large: FreeListId,
    pub(crate) passed_slabs: FreeListId,
    pub(crate) aliases: Vec<AliasId>,
    pub(crate) streams: SmallVec<[StreamLists; 4]>,
    pub(crate) options: DomainOptions,
    /// Where there are more streams than this, those that have nothing any more are forgotten.
    pub(crate) most_streams: usize,
    /// Pieces that nobody may take yet.
    pub(crate) limbo_large: FreeListId,
    pub(crate) limbo_small: FreeListId,
    /// Free pieces of extents that are not resident.
    pub(crate) evicted_large: FreeListId,
    pub(crate) evicted_small: FreeListId,
    /// Plans for blocks of it that are neither committed nor aborted.
    pub(crate) plans: usize,
    /// Bytes of its extents, resident or not.
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

    /// Whether all of its memory stays though nothing is live in it: a captured graph knows its addresses, and it was not released.
    pub(crate) fn is_held(&self) -> bool {
        self.options.is_private() && !self.is_released()
    }

    /// Whether its free extents go back to the driver when somebody needs memory.
    pub(crate) fn gives_back(&self) -> bool {
        self.is_released() || !self.options.keep
    }

    /// Whether there are so many streams that a new one is a reason to look for those that are gone.
    pub(crate) fn is_crowded(&self, stream: StreamKey) -> bool {
        self.streams.len() >= self.most_streams && self.lists_of(stream).is_none()
    }

    /// Forgets the streams that do not stay.
    pub(crate) fn forget_streams(&mut self, mut stays: impl FnMut(&StreamLists) -> bool) {
        self.streams.retain(|stream| stays(stream));
        // Looked for again when there are twice as many: each costs a look at every piece.
        self.most_streams = MANY.max(2 * self.streams.len());
    }

    /// The free lists of a stream that was seen before.
    pub(crate) fn lists_of(&self, stream: StreamKey) -> Option<StreamLists> {
        self.streams.iter().find(|lists| lists.stream == stream).copied()
    }

    /// The free lists of a stream, made at first sight.
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
        self.streams.push(own);
        if self.streams.len() > 1 && self.options.lend {
            for own in self.streams.iter().flat_map(|own| [own.large, own.slabs]) {
                lists[own].keep_ages(pieces);
            }
        }
        own
    }

    /// Every free list.
    pub(crate) fn lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        let small = self.streams.iter().map(|lists| lists.small);
        let apart = [self.limbo_large, self.limbo_small, self.evicted_large, self.evicted_small];
        self.home_lists().chain(apart).chain(small).chain(self.held_lists())
    }

    /// Every free list of what is held.
    pub(crate) fn held_lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        self.streams.iter().map(|lists| lists.held)
    }

    /// Every free list that holds whole pieces of home.
    pub(crate) fn home_lists(&self) -> impl Iterator<Item = FreeListId> + '_ {
        [self.passed_large, self.passed_slabs]
            .into_iter()
            .chain(self.streams.iter().flat_map(|lists| [lists.large, lists.slabs]))
    }
}
