//! Single extents as their owner sees them: where they are mapped, what lies in them, and what of it has to be kept.

use glake_units::Bytes;

use super::Allocator;
use crate::error::StitchError;
use crate::extent::Presence;
use crate::ids::{AliasId, DomainId, ExtentId, PieceId};
use crate::piece::State;

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
    pub presence: Presence,
}

/// Consecutive bytes of home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomeRange {
    /// From the start of the reservation.
    pub offset: Bytes,
    /// How long.
    pub size: Bytes,
}

impl Allocator {
    /// The extents of a domain, in the order of their addresses at home. Walks their pieces.
    ///
    /// # Errors
    /// [`StitchError::UnknownDomain`].
    pub fn extents_of(&self, domain: DomainId) -> Result<Vec<ExtentView>, StitchError> {
        if self.domains.get(domain).is_none() {
            return Err(StitchError::UnknownDomain { domain });
        }
        let own = self.extents.iter().filter(|(_, extent)| extent.domain == domain);
        let mut views: Vec<ExtentView> = own
            .map(|(id, extent)| ExtentView {
                extent: id,
                offset: Bytes::new(extent.start),
                size: Bytes::new(extent.size),
                live: Bytes::new(self.live_in(id)),
                presence: extent.presence,
            })
            .collect();
        views.sort_unstable_by_key(|view| view.offset);
        Ok(views)
    }

    /// Whether an extent's memory is there; `None`: there is no such extent.
    pub fn presence(&self, extent: ExtentId) -> Option<Presence> {
        self.extents.get(extent).map(|extent| extent.presence)
    }

    /// Whether all bytes of a domain count, those of free memory too: a captured graph knows its addresses.
    pub fn keeps_all(&self, domain: DomainId) -> bool {
        self.domains.get(domain).is_some_and(|domain| domain.options.is_private())
    }

    /// Whether all memory of a domain stays though nothing is live in it: a captured graph knows its addresses, and it was not
    /// released.
    pub fn is_held(&self, domain: DomainId) -> bool {
        let known = self.domains.get(domain);
        known.is_some_and(|domain| domain.options.is_private() && !domain.is_released())
    }

    /// How large an extent is, and whose; nothing, of the default domain, where there is none.
    pub fn size_and_domain(&self, extent: ExtentId) -> (Bytes, DomainId) {
        let found = self.extents.get(extent);
        found.map_or((Bytes::ZERO, Self::default_domain()), |found| (Bytes::new(found.size), found.domain))
    }

    /// Where an extent is mapped when it is resident: at home, then in each alias.
    pub fn addresses_of(&self, extent: ExtentId) -> Vec<Bytes> {
        let Some(found) = self.extents.get(extent) else { return Vec::new() };
        let aliases = found.aliases.iter().map(|&alias| self.address_in(alias, extent));
        [found.start].into_iter().chain(aliases).map(Bytes::new).collect()
    }

    fn address_in(&self, alias: AliasId, extent: ExtentId) -> u64 {
        let alias = &self.aliases[alias];
        let before = alias.extents.iter().take_while(|&&other| other != extent);
        alias.start + before.map(|&other| self.extents[other].size).sum::<u64>()
    }

    /// The bytes of an extent that have to be kept: those in live blocks, joined where they touch; all of it where a captured
    /// graph knows the addresses, until its pool is released.
    pub fn kept_ranges(&self, extent: ExtentId) -> Vec<HomeRange> {
        let Some(found) = self.extents.get(extent) else { return Vec::new() };
        let (start, end) = (found.start, found.end());
        let domain = &self.domains[found.domain];
        if domain.options.is_private() && !domain.is_released() {
            return vec![HomeRange { offset: Bytes::new(start), size: Bytes::new(end - start) }];
        }
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        self.each_in(start, end, |piece| {
            if matches!(self.pieces[piece].state, State::Live | State::Part) {
                let (from, to) = (self.pieces[piece].start.max(start), self.pieces[piece].end().min(end));
                match ranges.last_mut().filter(|last| last.1 == from) {
                    Some(last) => last.1 = to,
                    None => ranges.push((from, to)),
                }
            }
        });
        let range = |(from, to)| HomeRange { offset: Bytes::new(from), size: Bytes::new(to - from) };
        ranges.into_iter().map(range).collect()
    }

    /// Bytes of an extent in live blocks.
    pub(super) fn live_in(&self, id: ExtentId) -> u64 {
        let (start, end) = (self.extents[id].start, self.extents[id].end());
        let mut live = 0;
        self.each_in(start, end, |id| {
            let piece = &self.pieces[id];
            if matches!(piece.state, State::Live | State::Part) {
                live += piece.end().min(end) - piece.start.max(start);
            }
        });
        live
    }

    /// Free pieces that touch a range, in slabs too.
    pub(super) fn free_in(&self, start: u64, end: u64) -> Vec<PieceId> {
        let mut free = Vec::new();
        self.each_in(start, end, |id| {
            if self.pieces[id].state == State::Free {
                free.push(id);
            }
        });
        free
    }

    /// Looks at every piece that touches a mapped range of home, in slabs at those inside, in the order of addresses.
    pub(super) fn each_in(&self, start: u64, end: u64, mut look: impl FnMut(PieceId)) {
        for outer in self.outer_in(start, end) {
            if self.pieces[outer].state != State::Slab {
                look(outer);
                continue;
            }
            let mut id = self.pieces[self.pieces[outer].inside].next;
            while self.pieces[id].state != State::Edge {
                if self.pieces[id].end() > start && self.pieces[id].start < end {
                    look(id);
                }
                id = self.pieces[id].next;
            }
        }
    }

    pub(super) fn outer_in(&self, start: u64, end: u64) -> Vec<PieceId> {
        let first = self.segments.last_at(start).and_then(|edge| {
            // A segment has as many pieces as a program has blocks: the walk begins at the last large block before.
            let block = self.live.last_at_home(start, &self.pieces);
            let near = block.filter(|&block| self.pieces[block].start >= self.pieces[edge].start);
            self.piece_from(near.map_or(edge, |block| self.pieces[block].prev), start)
        });
        let next = |id: &PieceId| Some(self.pieces[*id].next);
        let within = |id: &PieceId| {
            let piece = &self.pieces[*id];
            piece.state != State::Edge && piece.start < end
        };
        std::iter::successors(first, next).take_while(within).collect()
    }
}
