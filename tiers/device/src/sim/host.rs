//! Host memory that the simulated devices were told of.
//!
//! Invariant: registered ranges do not overlap.

use std::collections::BTreeMap;

use super::denial::{Checked, refuse};
use crate::{Address, Refusal};

/// The unit of registration.
const PAGE: u64 = 4096;

#[derive(Debug)]
struct Registered {
    size: u64,
    /// How much enqueued work uses it.
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
        let before = self.ranges.range(..end).next_back();
        if before.is_some_and(|(from, range)| from + range.size > start) {
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

    /// The start of the registration that holds a whole range.
    pub(super) fn find(&self, start: u64, size: u64) -> Option<u64> {
        let (at, range) = self.ranges.range(..=start).next_back()?;
        (start.checked_add(size)? <= at + range.size).then_some(*at)
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
