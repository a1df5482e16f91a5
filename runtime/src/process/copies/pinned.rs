//! Cache of host ranges that the driver recently reported as pinned.
//!
//! Invariant: users of the cache make driver copies or parts of them, which are correct even if the memory is no longer pinned.

use glake_device::Address;
use glake_units::Bytes;
use parking_lot::Mutex;

/// Maximum number of cached ranges.
const KEPT: usize = 8;
/// Number of copies after which the driver is queried again. A query takes 1 us; pageable memory wrongly taken for pinned is copied at the
/// driver's rate.
const TRUSTED: u32 = 64;

/// Cached ranges; the last one was reported most recently.
#[derive(Debug, Default)]
pub(super) struct PinnedRanges(Mutex<Vec<Seen>>);

#[derive(Debug)]
struct Seen {
    start: Address,
    size: Bytes,
    /// Number of copies that may still use the entry.
    trusted: u32,
}

impl PinnedRanges {
    /// Adds a range that the driver reported as pinned.
    pub(super) fn saw(&self, (start, size): (Address, Bytes)) {
        let mut ranges = self.0.lock();
        ranges.retain(|seen| seen.start != start);
        if ranges.len() == KEPT {
            ranges.remove(0);
        }
        ranges.push(Seen { start, size, trusted: TRUSTED });
    }

    /// Returns whether memory lies in a cached range; `false` if another thread holds the cache.
    pub(super) fn holds(&self, start: Address, size: Bytes) -> bool {
        let Some(mut ranges) = self.0.try_lock() else { return false };
        let holds = |seen: &Seen| {
            let offset = start.0.checked_sub(seen.start.0);
            let end = offset.and_then(|offset| offset.checked_add(size.get()));
            end.is_some_and(|end| end <= seen.size.get())
        };
        let Some(place) = ranges.iter().rposition(holds) else { return false };
        match ranges[place].trusted.checked_sub(1) {
            Some(left) => {
                ranges[place].trusted = left;
                true
            }
            None => {
                ranges.remove(place);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_trusted_for_a_while_and_the_oldest_are_forgotten() {
        let ranges = PinnedRanges::default();
        let at = |number: u64| Address(number << 20);
        assert!(!ranges.holds(at(1), Bytes::new(1)));
        ranges.saw((at(1), Bytes::mib(1)));
        for _ in 0..TRUSTED {
            assert!(ranges.holds(Address(at(1).0 + 5), Bytes::new((1 << 20) - 5)));
        }
        assert!(!ranges.holds(at(1), Bytes::mib(1)), "asked again");
        ranges.saw((at(1), Bytes::mib(1)));
        assert!(!ranges.holds(at(1), Bytes::new((1 << 20) + 1)) && !ranges.holds(Address(0), Bytes::mib(1)));
        assert!(!ranges.holds(at(1), Bytes::MAX) && !ranges.holds(at(2), Bytes::new(1)));
        for number in 2..=8 {
            ranges.saw((at(number), Bytes::mib(1)));
        }
        assert!(ranges.holds(at(1), Bytes::mib(1)));
        ranges.saw((at(9), Bytes::mib(1)));
        assert!(!ranges.holds(at(1), Bytes::mib(1)) && ranges.holds(at(9), Bytes::mib(1)));
        // Replaces an older range with the same start.
        ranges.saw((at(9), Bytes::kib(4)));
        assert!(!ranges.holds(at(9), Bytes::kib(8)) && ranges.holds(at(9), Bytes::kib(4)));
    }
}
