//! Single extents as their owner sees them: where they are mapped, what lies in them, and what of it has to be kept.

use glake_units::Bytes;

use crate::aliases::Aliases;
use crate::domain::Domain;
use crate::extent::ExtentState;
use crate::heap::Heap;
use crate::ids::{DomainId, ExtentId};

/// An extent as its owner sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentView {
    /// Which.
    pub extent: ExtentId,
    /// Where it lies at home, from the start of the reservation.
    pub offset: Bytes,
    /// How large it is.
    pub size: Bytes,
    /// Bytes of it that are in live blocks.
    pub live: Bytes,
    /// Whether its memory is there.
    pub state: ExtentState,
}

/// Consecutive bytes of home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomeRange {
    /// From the start of the reservation.
    pub offset: Bytes,
    /// How long.
    pub size: Bytes,
}

/// A look at the extents of an allocator.
#[derive(Clone, Copy, Debug)]
pub struct ExtentViews<'a> {
    pub(crate) heap: &'a Heap,
    pub(crate) aliases: &'a Aliases,
}

impl ExtentViews<'_> {
    /// The extents of a domain, in the order of their addresses at home; of a released one, those that are left. Walks their
    /// pieces.
    pub fn of(&self, domain: DomainId) -> Vec<ExtentView> {
        let own = self.heap.home.extents.iter().filter(|(_, extent)| extent.domain == domain);
        let mut views: Vec<ExtentView> = own
            .map(|(id, extent)| ExtentView {
                extent: id,
                offset: Bytes::new(extent.start),
                size: Bytes::new(extent.size),
                live: Bytes::new(self.heap.home.live_in(id)),
                state: extent.state,
            })
            .collect();
        views.sort_unstable_by_key(|view| view.offset);
        views
    }

    /// Whether an extent's memory is there; `None`: there is no such extent.
    pub fn state(&self, extent: ExtentId) -> Option<ExtentState> {
        self.heap.home.extents.state(extent)
    }

    /// Whether all memory of a domain counts and stays, though nothing is live in it: a captured graph knows its addresses, and it
    /// was not released.
    pub fn is_held(&self, domain: DomainId) -> bool {
        self.heap.home.domains.get(domain).is_some_and(Domain::is_held)
    }

    /// How large an extent is, and whose; nothing, of the default domain, where there is none.
    pub fn size_and_domain(&self, extent: ExtentId) -> (Bytes, DomainId) {
        let found = self.heap.home.extents.get(extent);
        found.map_or((Bytes::ZERO, DomainId::DEFAULT), |found| (Bytes::new(found.size), found.domain))
    }

    /// The extents that a range of home touches, in the order of their addresses, each as the range that it is.
    pub fn touching(&self, range: HomeRange) -> Vec<(ExtentId, HomeRange)> {
        let (start, end) = (range.offset.get(), range.offset.get() + range.size.get());
        let home = |id: ExtentId| {
            let (offset, size) = self.heap.home.extents.bounds(id);
            (id, HomeRange { offset, size })
        };
        self.heap.home.extents.touching(start, end).map(home).collect()
    }

    /// Where an extent is mapped when it is resident: at home, then in each alias.
    pub fn addresses_of(&self, extent: ExtentId) -> Vec<Bytes> {
        let Some(found) = self.heap.home.extents.get(extent) else { return Vec::new() };
        let aliases = found
            .aliases
            .iter()
            .map(|&alias| self.aliases[alias].address_of(extent, &self.heap.home.extents));
        [found.start].into_iter().chain(aliases).map(Bytes::new).collect()
    }

    /// The bytes of an extent that have to be kept: those in live blocks, joined where they touch; all of it where a captured
    /// graph knows the addresses, until its pool is released.
    pub fn kept_ranges(&self, extent: ExtentId) -> Vec<HomeRange> {
        let Some(found) = self.heap.home.extents.get(extent) else { return Vec::new() };
        let (start, end) = (found.start, found.end());
        let domain = &self.heap.home.domains[found.domain];
        if domain.is_held() {
            return vec![HomeRange { offset: Bytes::new(start), size: Bytes::new(end - start) }];
        }
        let range = |(from, to)| HomeRange { offset: Bytes::new(from), size: Bytes::new(to - from) };
        self.heap.home.live_ranges(start, end).into_iter().map(range).collect()
    }
}
