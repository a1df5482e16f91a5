//! Physical memory as the core sees it: the position of each extent at home, and the aliases that map it a second time. With the address
//! zones that extents and aliases take their addresses from.
//!
//! ```text
//! offset:  start ──── used ──── hole ──── used ──── end ──── (untouched) ──── limit
//! ```
//!
//! Growth of a zone takes the lowest hole that is long enough, else the end. Returned ranges are reused, so that a zone of finite length lasts for
//! any number of cycles of trimming and growth.

use std::collections::BTreeMap;

use glake_units::Bytes;
use slab::Slab;
use smallvec::SmallVec;

use crate::error::StitchError;
use crate::free_list::Class;
use crate::ids::{AliasId, DomainId, ExtentId};

/// Residency of an extent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExtentState {
    /// The extent is mapped at all its addresses; its free bytes can be handed out.
    #[default]
    Resident,
    /// The extent is being evicted or refilled, or the move was interrupted: memory is reserved for it, and its free bytes are not handed
    /// out.
    Moving,
    /// The extent has no memory. Its addresses stay reserved, its blocks live.
    Evicted,
}

impl ExtentState {
    pub(crate) fn name(self) -> &'static str {
        match self {
            ExtentState::Resident => "resident",
            ExtentState::Moving => "moving",
            ExtentState::Evicted => "evicted",
        }
    }
}

/// Physical memory with one address at home: the unit of mapping and release.
#[derive(Clone, Debug)]
pub(crate) struct Extent {
    pub(crate) start: u64,
    pub(crate) size: u64,
    pub(crate) domain: DomainId,
    /// Size class of the blocks: large blocks or slabs.
    pub(crate) class: Class,
    /// Aliases that map the extent.
    pub(crate) aliases: SmallVec<[AliasId; 4]>,
    pub(crate) state: ExtentState,
    /// Bytes in live blocks, maintained while the extent is not resident.
    pub(crate) live: u64,
}

impl Extent {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.size
    }
}

/// Extents of a device, found by id or by any home address in them.
#[derive(Debug)]
pub(crate) struct Extents {
    granularity: u64,
    extents: Slab<Extent>,
    /// Index of the extent plus one for each granule of home; 0: unmapped.
    granules: Vec<u32>,
    /// Number of extents that are not resident; while it is 0, a free skips the checks for evicted memory.
    not_resident: usize,
    /// Bytes in live blocks of evicted extents.
    live_evicted: u64,
    /// Extents that are not resident and whose last live block was freed.
    emptied: Vec<ExtentId>,
}

impl std::ops::Index<ExtentId> for Extents {
    type Output = Extent;

    fn index(&self, id: ExtentId) -> &Extent {
        &self.extents[id.index()]
    }
}

impl std::ops::IndexMut<ExtentId> for Extents {
    fn index_mut(&mut self, id: ExtentId) -> &mut Extent {
        &mut self.extents[id.index()]
    }
}

impl Extents {
    pub(crate) fn new(granularity: u64) -> Self {
        Extents {
            granularity,
            extents: Slab::new(),
            granules: Vec::new(),
            not_resident: 0,
            live_evicted: 0,
            emptied: Vec::new(),
        }
    }

    /// Returns the unit of extents' sizes and addresses.
    pub(crate) fn granularity(&self) -> u64 {
        self.granularity
    }

    /// Converts an offset to a granule index; home is at most 2^40 bytes, a granule at least 2^16.
    #[allow(clippy::cast_possible_truncation)]
    fn granule_of(&self, offset: u64) -> usize {
        (offset / self.granularity) as usize
    }

    fn granules_of(&self, extent: &Extent) -> std::ops::Range<usize> {
        self.granule_of(extent.start)..self.granule_of(extent.end())
    }

    pub(crate) fn insert(&mut self, extent: Extent) -> ExtentId {
        let range = self.granules_of(&extent);
        let id = ExtentId::at(self.extents.insert(extent));
        if self.granules.len() < range.end {
            self.granules.resize(range.end, 0);
        }
        self.granules[range].fill(id.0 + 1);
        id
    }

    pub(crate) fn remove(&mut self, id: ExtentId) -> Extent {
        let extent = self.extents.remove(id.index());
        // Ids are reused: a later extent may get this one.
        self.emptied.retain(|emptied| *emptied != id);
        let range = self.granules_of(&extent);
        self.granules[range].fill(0);
        self.not_resident -= usize::from(extent.state != ExtentState::Resident);
        self.live_evicted -= if extent.state == ExtentState::Evicted { extent.live } else { 0 };
        extent
    }

    /// Sets the residency of an extent; the only place that changes it.
    pub(crate) fn set_state(&mut self, id: ExtentId, state: ExtentState) {
        let before = std::mem::replace(&mut self[id].state, state);
        let apart = |state: ExtentState| usize::from(state != ExtentState::Resident);
        self.not_resident = self.not_resident + apart(state) - apart(before);
        let live = |state: ExtentState| if state == ExtentState::Evicted { self[id].live } else { 0 };
        self.live_evicted = self.live_evicted + live(state) - live(before);
    }

    /// Returns the residency of an extent; `None`: no such extent.
    pub(crate) fn state(&self, id: ExtentId) -> Option<ExtentState> {
        self.get(id).map(|extent| extent.state)
    }

    /// Checks that an extent is in the state `wanted`.
    ///
    /// # Errors
    /// [`StitchError::WrongExtentState`].
    pub(crate) fn expect_residency(&self, extent: ExtentId, wanted: ExtentState) -> Result<(), StitchError> {
        let state = self.state(extent);
        if state == Some(wanted) { Ok(()) } else { Err(StitchError::WrongExtentState { extent, state }) }
    }

    /// Returns the start of an extent at home and its size.
    pub(crate) fn bounds(&self, id: ExtentId) -> (Bytes, Bytes) {
        (Bytes::new(self[id].start), Bytes::new(self[id].size))
    }

    /// Returns whether every extent is resident.
    #[inline]
    pub(crate) fn are_all_resident(&self) -> bool {
        self.not_resident == 0
    }

    /// Checks that all extents of a domain are resident.
    ///
    /// # Errors
    /// [`StitchError::Evicted`].
    pub(crate) fn all_resident(&self, domain: DomainId) -> Result<(), StitchError> {
        let is_apart = |extent: &Extent| extent.domain == domain && extent.state != ExtentState::Resident;
        if self.not_resident > 0 && self.iter().any(|(_, extent)| is_apart(extent)) {
            return Err(StitchError::Evicted { domain });
        }
        Ok(())
    }

    /// Returns whether a range of home touches an extent that is not resident.
    #[inline]
    pub(crate) fn is_apart(&self, start: u64, end: u64) -> bool {
        self.not_resident > 0 && self.touches_apart(start, end)
    }

    #[cold]
    fn touches_apart(&self, start: u64, end: u64) -> bool {
        self.touching(start, end).any(|extent| self[extent].state != ExtentState::Resident)
    }

    /// Records a free of live bytes in an extent that is not resident. If the extent is empty then, [`Extents::take_emptied`] reports it
    /// unless `keeps_all` is set.
    pub(crate) fn freed_apart(&mut self, id: ExtentId, bytes: u64, keeps_all: bool) {
        let extent = &mut self[id];
        extent.live -= bytes;
        let (is_evicted, is_empty) = (extent.state == ExtentState::Evicted, extent.live == 0);
        self.live_evicted -= if is_evicted { bytes } else { 0 };
        if is_empty && !keeps_all {
            self.emptied.push(id);
        }
    }

    /// Records that a domain keeps only its live blocks from now on: [`Extents::take_emptied`] reports its non-resident extents without
    /// any.
    pub(crate) fn given_up(&mut self, domain: DomainId) {
        if self.not_resident == 0 {
            return;
        }
        let is_empty = |extent: &Extent| {
            extent.domain == domain && extent.state != ExtentState::Resident && extent.live == 0
        };
        let empty: Vec<ExtentId> =
            self.iter().filter(|(_, extent)| is_empty(extent)).map(|(id, _)| id).collect();
        self.emptied.extend(empty);
    }

    /// Takes the non-resident extents that lost the last of their kept bytes since the last call.
    #[inline]
    pub(crate) fn take_emptied(&mut self) -> Vec<ExtentId> {
        if self.emptied.is_empty() { Vec::new() } else { std::mem::take(&mut self.emptied) }
    }

    /// Returns the bytes in live blocks of evicted extents.
    pub(crate) fn live_evicted(&self) -> u64 {
        self.live_evicted
    }

    /// Returns the extent at a mapped home address.
    pub(crate) fn at(&self, offset: u64) -> ExtentId {
        ExtentId(self.granules[self.granule_of(offset)] - 1)
    }

    /// Iterates over the extents that a mapped home range touches, in order.
    pub(crate) fn touching(&self, start: u64, end: u64) -> impl Iterator<Item = ExtentId> + '_ {
        let mut at = start;
        std::iter::from_fn(move || {
            (at < end).then(|| {
                let id = self.at(at);
                at = self[id].end();
                id
            })
        })
    }

    /// Returns the first extent boundary at or after `start` and the last one at or before `end` of a mapped range. The second is the
    /// smaller one if the range lies inside one extent.
    pub(crate) fn boundaries(&self, start: u64, end: u64) -> (u64, u64) {
        let first = &self[self.at(start)];
        let last = &self[self.at(end - 1)];
        let first = if first.start == start { start } else { first.end() };
        let last = if last.end() == end { end } else { last.start };
        (first, last)
    }

    /// Returns the bytes of a mapped range that form whole extents.
    pub(crate) fn whole_in(&self, start: u64, end: u64) -> u64 {
        let (first, last) = self.boundaries(start, end);
        last.saturating_sub(first)
    }

    pub(crate) fn get(&self, id: ExtentId) -> Option<&Extent> {
        self.extents.get(id.index())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ExtentId, &Extent)> {
        self.extents.iter().map(|(index, extent)| (ExtentId::at(index), extent))
    }
}

/// A range of offsets inside the device's one reservation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Zone {
    end: u64,
    limit: u64,
    /// Holes, start to length; never adjacent to each other nor to `end`.
    holes: BTreeMap<u64, u64>,
}

impl Zone {
    pub(crate) fn new(start: u64, length: u64) -> Self {
        Zone { end: start, limit: start + length, holes: BTreeMap::new() }
    }

    /// Takes `length` at the lowest place where it fits in one run.
    pub(crate) fn take(&mut self, length: u64) -> Option<u64> {
        let hole = self.holes.iter().find(|(_, size)| **size >= length).map(|(start, _)| *start);
        let start = hole.unwrap_or(self.end);
        self.take_at(start, length).then_some(start)
    }

    /// Returns the length of the free run at `start`.
    pub(crate) fn room_at(&self, start: u64) -> u64 {
        if start == self.end {
            return self.limit - self.end;
        }
        self.holes.get(&start).copied().unwrap_or(0)
    }

    /// Takes `length` at `start` if a hole or the end begins there and is long enough.
    pub(crate) fn take_at(&mut self, start: u64, length: u64) -> bool {
        if self.room_at(start) < length {
            return false;
        }
        if start == self.end {
            self.end += length;
            return true;
        }
        let hole = self.holes.remove(&start).unwrap_or(length);
        if hole > length {
            self.holes.insert(start + length, hole - length);
        }
        true
    }

    /// Returns a taken range.
    pub(crate) fn give_back(&mut self, start: u64, length: u64) {
        let (mut start, mut length) = (start, length);
        if let Some((&before, &size)) = self.holes.range(..start).next_back()
            && before + size == start
        {
            self.holes.remove(&before);
            start = before;
            length += size;
        }
        if let Some(size) = self.holes.remove(&(start + length)) {
            length += size;
        }
        if start + length == self.end {
            self.end = start;
        } else {
            self.holes.insert(start, length);
        }
    }
}

#[cfg(test)]
mod zone_tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn fills_the_lowest_hole_then_the_end() {
        let mut zone = Zone::new(100, 100);
        assert_eq!([zone.take(10), zone.take(10), zone.take(10)], [Some(100), Some(110), Some(120)]);
        zone.give_back(110, 10);
        zone.give_back(100, 10);
        assert_eq!(zone.take(15), Some(100));
        assert_eq!(zone.take(15), Some(130));
        assert_eq!(zone.take(60), None);
    }

    proptest! {
        /// Taken ranges never overlap, and returning everything leaves the zone as new.
        #[test]
        fn takes_are_disjoint(program in prop::collection::vec((any::<bool>(), 1u64..40), 1..200)) {
            let mut zone = Zone::new(7, 300);
            let mut taken: Vec<(u64, u64)> = Vec::new();
            for (take, length) in program {
                if take {
                    if let Some(start) = zone.take(length) {
                        prop_assert!(start >= 7 && start + length <= 307);
                        prop_assert!(taken.iter().all(|&(at, size)| at + size <= start || start + length <= at));
                        taken.push((start, length));
                    }
                } else if !taken.is_empty() {
                    let (start, length) = taken.swap_remove(usize::try_from(length).unwrap_or(0) % taken.len());
                    zone.give_back(start, length);
                }
            }
            for (start, length) in taken {
                zone.give_back(start, length);
            }
            prop_assert_eq!(zone, Zone::new(7, 300));
        }
    }
}
