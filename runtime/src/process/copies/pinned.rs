//! Host memory that was pinned when the driver was last asked what it is.
//!
//! Invariant: whoever goes by it makes the driver's own copy, or parts of one, which are right whatever the memory has become meanwhile.

use glake_device::Address;
use glake_units::Bytes;
use parking_lot::Mutex;

/// How many ranges are kept.
const KEPT: usize = 8;
/// After so many copies the driver is asked again: to ask takes 1 us, and pageable memory that is taken for pinned is copied at the
/// driver's rate.
const TRUSTED: u32 = 64;

/// The ranges; the last is the one that was seen last.
#[derive(Debug, Default)]
pub(super) struct PinnedRanges(Mutex<Vec<Seen>>);

#[derive(Debug)]
struct Seen {
    start: Address,
    size: Bytes,
    /// How many copies may still go by it.
    trusted: u32,
}

impl PinnedRanges {
    /// A range of host memory was found pinned.
    pub(super) fn saw(&self, (start, size): (Address, Bytes)) {
        let mut ranges = self.0.lock();
        ranges.retain(|seen| seen.start != start);
        if ranges.len() == KEPT {
            ranges.remove(0);
        }
        ranges.push(Seen { start, size, trusted: TRUSTED });
    }

    /// Whether memory lies in one of them. Not where another thread looks just now.
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
        // Of what begins there it is known how large it is now.
        ranges.saw((at(9), Bytes::kib(4)));
        assert!(!ranges.holds(at(9), Bytes::kib(8)) && ranges.holds(at(9), Bytes::kib(4)));
    }
}
