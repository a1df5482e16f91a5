//! Views of single extents: their addresses, their live blocks, and the bytes that an eviction has to keep.

use glake_units::Bytes;

use crate::aliases::Aliases;
use crate::domain::Domain;
use crate::extent::ExtentState;
use crate::heap::Heap;
use crate::ids::{DomainId, ExtentId};

/// State of one extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExtentView {
    /// Extent that is described.
    pub extent: ExtentId,
    /// Start at home, from the start of the reservation.
    pub offset: Bytes,
    /// Size of the extent in bytes.
    pub size: Bytes,
    /// Bytes of the extent in live blocks.
    pub live: Bytes,
    /// Residency of the extent.
    pub state: ExtentState,
}

/// Consecutive bytes of home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomeRange {
    /// Start, from the start of the reservation.
    pub offset: Bytes,
    /// Size of the range in bytes.
    pub size: Bytes,
}

/// A view of the extents of an allocator.
#[derive(Clone, Copy, Debug)]
pub struct ExtentViews<'a> {
    pub(crate) heap: &'a Heap,
    pub(crate) aliases: &'a Aliases,
}

impl ExtentViews<'_> {
    /// Returns the extents of a domain, or the remaining ones of a released domain, in the order of their home addresses. Walks their
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

    /// Returns the residency of an extent; `None`: no such extent.
    pub fn state(&self, extent: ExtentId) -> Option<ExtentState> {
        self.heap.home.extents.state(extent)
    }

    /// Returns whether all memory of a domain counts and stays, live or not: a captured graph knows its addresses, and the domain was not
    /// released.
    pub fn is_held(&self, domain: DomainId) -> bool {
        self.heap.home.domains.get(domain).is_some_and(Domain::is_held)
    }

    /// Returns an extent's size and domain; for an unknown extent, 0 and the default domain.
    pub fn size_and_domain(&self, extent: ExtentId) -> (Bytes, DomainId) {
        let found = self.heap.home.extents.get(extent);
        found.map_or((Bytes::ZERO, DomainId::DEFAULT), |found| (Bytes::new(found.size), found.domain))
    }

    /// Returns the extents that a range of home touches, in address order, each with the part of the range that it holds.
    pub fn touching(&self, range: HomeRange) -> Vec<(ExtentId, HomeRange)> {
        let (start, end) = (range.offset.get(), range.offset.get() + range.size.get());
        let home = |id: ExtentId| {
            let (offset, size) = self.heap.home.extents.bounds(id);
            (id, HomeRange { offset, size })
        };
        self.heap.home.extents.touching(start, end).map(home).collect()
    }

    /// Returns the addresses of an extent when resident: at home, then in each alias.
    pub fn addresses_of(&self, extent: ExtentId) -> Vec<Bytes> {
        let Some(found) = self.heap.home.extents.get(extent) else { return Vec::new() };
        let aliases = found
            .aliases
            .iter()
            .map(|&alias| self.aliases[alias].address_of(extent, &self.heap.home.extents));
        [found.start].into_iter().chain(aliases).map(Bytes::new).collect()
    }

    /// Returns the bytes of an extent that an eviction has to keep: those in live blocks, joined where they touch. All bytes count if a
    /// captured graph knows the addresses, until its pool is released.
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
