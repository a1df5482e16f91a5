//! Address zones: the reserved and the free ranges of addresses.
//!
//! ```text
//! offset:  start ──── used ──── hole ──── used ──── end ──── (untouched) ──── limit
//! ```
//!
//! Growth takes the lowest hole that is long enough, else the end. Returned ranges are reused, so that a zone of finite length lasts for
//! any number of cycles of trimming and growth.

use std::collections::BTreeMap;

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
mod tests {
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
