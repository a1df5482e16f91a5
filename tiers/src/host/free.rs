//! Free pinned memory of a pool.
//!
//! Invariant: adjacent ranges of one registration are joined. A range may be handed out again once a completion point of its sequence has
//! passed; joined ranges take the later sequence.

use std::collections::BTreeMap;

use glake_device::owned::{PinnedRange, Sequence};
use glake_units::Bytes;

#[derive(Debug)]
struct Free {
    range: PinnedRange,
    since: Sequence,
}

impl Free {
    fn start(&self) -> u64 {
        self.range.start().0
    }

    fn end(&self) -> u64 {
        self.start() + self.range.size().get()
    }
}

/// Free ranges by address.
#[derive(Debug, Default)]
pub(super) struct FreeRanges(BTreeMap<u64, Free>);

impl FreeRanges {
    /// Adds a range that work marked before `since` may still access.
    pub(super) fn put(&mut self, range: PinnedRange, since: Sequence) {
        let mut free = Free { range, since };
        let before = self.0.range(..free.start()).next_back();
        let before = before.filter(|(_, before)| before.range.is_before(&free.range)).map(|(at, _)| *at);
        if let Some(before) = before.and_then(|at| self.0.remove(&at)) {
            free = self.joined(before, free);
        }
        let next = self.0.get(&free.end()).filter(|next| free.range.is_before(&next.range)).map(Free::start);
        if let Some(next) = next.and_then(|at| self.0.remove(&at)) {
            free = self.joined(free, next);
        }
        self.0.insert(free.start(), free);
    }

    /// Joins two adjacent ranges if they belong to one registration.
    fn joined(&mut self, first: Free, second: Free) -> Free {
        let since = first.since.max(second.since);
        match first.range.join(second.range) {
            Ok(range) => Free { range, since },
            Err((range, second)) => {
                self.0.insert(range.start().0, Free { range, since });
                Free { range: second, since }
            }
        }
    }

    /// Takes the first bytes of the smallest range that is large enough and no longer in use. A linear search: free ranges are few, because
    /// blocks are as large as extents.
    pub(super) fn take(&mut self, size: Bytes, passed: Sequence) -> Option<PinnedRange> {
        let fits = |free: &&Free| free.range.size() >= size && free.since <= passed;
        let best = self.0.values().filter(fits).min_by_key(|free| free.range.size()).map(Free::start)?;
        let Free { range, since } = self.0.remove(&best)?;
        match range.split(size) {
            Ok((range, rest)) => {
                self.0.insert(rest.start().0, Free { range: rest, since });
                Some(range)
            }
            Err(range) => Some(range),
        }
    }

    /// Takes a range that covers a whole registration.
    pub(super) fn take_whole(&mut self) -> Option<PinnedRange> {
        let start = self.0.iter().find(|(_, free)| free.range.is_whole()).map(|(start, _)| *start)?;
        self.0.remove(&start).map(|free| free.range)
    }

    /// Returns the total that [`FreeRanges::take_whole`] could take.
    pub(super) fn whole(&self) -> Bytes {
        sum(self.0.values().filter(|free| free.range.is_whole()))
    }

    pub(super) fn total(&self) -> Bytes {
        sum(self.0.values())
    }

    pub(super) fn largest(&self) -> Bytes {
        self.0.values().map(|free| free.range.size()).max().unwrap_or(Bytes::ZERO)
    }

    /// Returns whether work may still access some of the free memory.
    pub(super) fn is_pending(&self, passed: Sequence) -> bool {
        self.0.values().any(|free| free.since > passed)
    }
}

fn sum<'a>(ranges: impl Iterator<Item = &'a Free>) -> Bytes {
    ranges.fold(Bytes::ZERO, |sum, free| sum.saturating_add(free.range.size()))
}
