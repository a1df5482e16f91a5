//! Host memory registered with the simulated devices.
//!
//! Invariant: registered ranges do not overlap.

use std::collections::BTreeMap;

use super::denial::{Checked, refuse};
use glake_device::{Address, Refusal};

/// Page size, the granularity of registrations.
const PAGE: u64 = 4096;

#[derive(Debug)]
struct Registered {
    size: u64,
    /// Number of enqueued operations that use it.
    users: u32,
}

#[derive(Debug, Default)]
pub(super) struct HostTable {
    ranges: BTreeMap<u64, Registered>,
}

impl HostTable {
    pub(super) fn register(&mut self, start: u64, size: u64) -> Checked<()> {
        let at = Address(start);
        let end = start.checked_add(size).filter(|_| size > 0 && start > 0);
        let Some(end) = end.filter(|_| start.is_multiple_of(PAGE) && size.is_multiple_of(PAGE)) else {
            return refuse(at, Refusal::InvalidValue);
        };
        if self.overlaps(start, end) {
            return refuse(at, Refusal::AlreadyMapped);
        }
        self.ranges.insert(start, Registered { size, users: 0 });
        Ok(())
    }

    pub(super) fn unregister(&mut self, start: u64) -> Checked<()> {
        match self.ranges.get(&start) {
            None => refuse(Address(start), Refusal::NotRegistered),
            Some(range) if range.users > 0 => refuse(Address(start), Refusal::InUse),
            Some(_) => {
                self.ranges.remove(&start);
                Ok(())
            }
        }
    }

    /// Returns start and end of the registration that contains a byte.
    pub(super) fn find(&self, at: u64) -> Option<(u64, u64)> {
        let (start, range) = self.ranges.range(..=at).next_back()?;
        (at < start + range.size).then_some((*start, start + range.size))
    }

    /// Returns whether any byte of a range is registered.
    pub(super) fn overlaps(&self, start: u64, end: u64) -> bool {
        self.ranges.range(..end).next_back().is_some_and(|(from, range)| from + range.size > start)
    }

    pub(super) fn hold(&mut self, start: u64) {
        if let Some(range) = self.ranges.get_mut(&start) {
            range.users += 1;
        }
    }

    pub(super) fn let_go(&mut self, start: u64) {
        if let Some(range) = self.ranges.get_mut(&start) {
            range.users = range.users.saturating_sub(1);
        }
    }
}
