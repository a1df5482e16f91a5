//! Table of the mappings of a reservation: pure bookkeeping, without driver calls, which are up to [`super::Reservation`].
//!
//! Invariants: entries do not overlap. Every change is planned, executed and committed: an entry is `Changing` during the driver call, and
//! a failure leaves it as it was. A range in `busy` consists of live entries and keeps them from being unmapped. A device that first got
//! access after a mark was drawn has touched nothing that is retired with that mark, so its work needs no proof.

use std::collections::BTreeMap;
use std::ops::Range;

use glake_units::Bytes;

use super::{CompletionProof, DeviceSet, Sequence};
use crate::{Access, DeviceId, Protection, Refusal};

/// A place in a reservation where an extent is mapped. A name, not an owner: using a stale one is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mapping {
    /// Offset from the start of the reservation.
    pub offset: Bytes,
    /// Size of the extent.
    pub size: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A driver call on the mapping is in progress.
    Changing,
    /// The mapping may be used.
    Live,
    /// Retired: nothing enqueued after the mark uses the mapping.
    Retired(Sequence),
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    end: u64,
    state: State,
    /// Devices that may load and store, and devices that ever had any access.
    writers: DeviceSet,
    readers: DeviceSet,
    /// State to restore if an unmap fails.
    before: State,
    /// Work enqueued through spans was enqueued before this mark.
    used: Sequence,
}

/// All mappings of one reservation.
#[derive(Debug, Default)]
pub(super) struct Table {
    entries: BTreeMap<u64, Entry>,
    busy: Vec<Range<u64>>,
    /// Mark drawn before each device first got access to any mapping here.
    since: BTreeMap<DeviceId, Sequence>,
    /// Devices from which only internal work accesses this memory; the owner's completion points cover it
    /// ([`super::CompletionEvents::outside`]).
    lent: DeviceSet,
}

type Outcome<T> = Result<T, Refusal>;

impl Table {
    /// Plans a mapping: the range becomes `Changing`.
    pub(super) fn begin_map(&mut self, range: Range<u64>) -> Outcome<()> {
        let before = self.entries.range(..range.end).next_back();
        if before.is_some_and(|(_, entry)| entry.end > range.start) {
            return Err(Refusal::AlreadyMapped);
        }
        let entry = Entry {
            end: range.end,
            state: State::Changing,
            writers: DeviceSet::EMPTY,
            readers: DeviceSet::EMPTY,
            before: State::Changing,
            used: Sequence::START,
        };
        self.entries.insert(range.start, entry);
        Ok(())
    }

    /// Commits a planned mapping, or removes it.
    pub(super) fn end_map(&mut self, start: u64, done: bool) {
        if !done {
            self.entries.remove(&start);
        } else if let Some(entry) = self.entries.get_mut(&start) {
            entry.state = State::Live;
        }
    }

    /// Marks a range as in use. It must lie in live entries without a gap.
    pub(super) fn begin_use(&mut self, range: Range<u64>) -> Outcome<()> {
        let mut at = range.start;
        for (start, entry) in self.touching(&range) {
            if start > at || entry.state != State::Live {
                return Err(Refusal::NotMapped);
            }
            at = entry.end;
        }
        if at < range.end {
            return Err(Refusal::NotMapped);
        }
        self.busy.push(range);
        Ok(())
    }

    /// Ends one use of a range.
    pub(super) fn end_use(&mut self, range: &Range<u64>) {
        if let Some(i) = self.busy.iter().position(|busy| busy == range) {
            self.busy.swap_remove(i);
        }
    }

    /// Ends the use of a range by a span: work enqueued on it before `mark` may still run.
    pub(super) fn end_span(&mut self, range: &Range<u64>, mark: Sequence) {
        self.end_use(range);
        let first = self.entries.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        for (_, entry) in self.entries.range_mut(first..range.end.max(first)) {
            entry.used = entry.used.max(mark);
        }
    }

    /// Returns the devices that may load and store everywhere in a range.
    pub(super) fn writers(&self, range: &Range<u64>) -> DeviceSet {
        self.touching(range).fold(DeviceSet::ALL, |set, (_, entry)| set.intersection(entry.writers))
    }

    /// Begins a change of access to whole entries, like [`Table::begin_use`]. Returns `true` if a device loses access.
    pub(super) fn begin_access(&mut self, range: Range<u64>, access: &[Access]) -> Outcome<bool> {
        self.begin_use(range.clone())?;
        let mut whole = true;
        let mut takes = false;
        for (start, entry) in self.touching(&range) {
            whole &= start >= range.start && entry.end <= range.end;
            takes |= access.iter().any(|access| match access.protection {
                Protection::None => entry.readers.contains(access.device),
                Protection::Read => entry.writers.contains(access.device),
                Protection::ReadWrite => false,
            });
        }
        if !whole {
            self.end_use(&range);
            return Err(Refusal::InvalidValue);
        }
        Ok(takes)
    }

    /// Commits or drops a change of access; `mark` was drawn before the driver call.
    pub(super) fn end_access(&mut self, range: &Range<u64>, access: &[Access], mark: Sequence, done: bool) {
        self.end_use(range);
        if !done {
            return;
        }
        for access in access.iter().filter(|access| access.protection != Protection::None) {
            self.since.entry(access.device).or_insert(mark);
        }
        for (_, entry) in self.entries.range_mut(range.clone()) {
            for access in access {
                let device = DeviceSet::of(access.device);
                // A reader stays recorded: an unmap must wait for its earlier work.
                entry.readers = entry.readers.union(device);
                entry.writers = match access.protection {
                    Protection::ReadWrite => entry.writers.union(device),
                    Protection::None | Protection::Read => entry.writers.without(device),
                };
            }
        }
    }

    /// Retires live mappings, all or none. A mapping that is already retired keeps the later mark.
    pub(super) fn retire(&mut self, mappings: &[Range<u64>], mark: Sequence) -> Outcome<()> {
        for range in mappings {
            match self.entry(range)?.state {
                State::Changing => return Err(Refusal::InUse),
                State::Live | State::Retired(_) => {}
            }
        }
        for range in mappings {
            if let Some(entry) = self.entries.get_mut(&range.start) {
                entry.state = match entry.state {
                    State::Retired(before) => State::Retired(before.max(mark)),
                    State::Live | State::Changing => State::Retired(mark),
                };
            }
        }
        Ok(())
    }

    /// Makes those of `mappings` live again that exist and are retired.
    pub(super) fn revive(&mut self, mappings: &[Range<u64>]) {
        for range in mappings {
            if let Some(entry) = self.entries.get_mut(&range.start)
                && matches!(entry.state, State::Retired(_))
            {
                entry.state = State::Live;
            }
        }
    }

    /// Plans an unmap of retired mappings that the proof covers, all or none. Returns the ranges for the driver, adjacent ones joined. For
    /// a mapping that any device ever had access to, the proof must cover `always` too.
    pub(super) fn begin_unmap(
        &mut self,
        mappings: &[Range<u64>],
        passed: &CompletionProof,
        always: DeviceSet,
    ) -> Outcome<Vec<Range<u64>>> {
        let mut sorted = mappings.to_vec();
        sorted.sort_unstable_by_key(|range| range.start);
        sorted.dedup();
        for range in &sorted {
            let entry = self.entry(range)?;
            let covered = match entry.state {
                State::Retired(mark) => {
                    let mark = mark.max(entry.used);
                    let always = if entry.readers.is_empty() { DeviceSet::EMPTY } else { always };
                    passed.covers(mark, self.users(entry, mark).union(always))
                }
                State::Live | State::Changing => false,
            };
            let busy = self.busy.iter().any(|busy| busy.start < range.end && range.start < busy.end);
            if !covered || busy {
                return Err(Refusal::InUse);
            }
        }
        for range in &sorted {
            if let Some(entry) = self.entries.get_mut(&range.start) {
                entry.before = entry.state;
                entry.state = State::Changing;
            }
        }
        Ok(joined(sorted))
    }

    /// Commits an unmapped range, or makes its entries retired again.
    pub(super) fn end_unmap(&mut self, run: &Range<u64>, done: bool) {
        if !done {
            for (_, entry) in self.entries.range_mut(run.clone()) {
                entry.state = entry.before;
            }
            return;
        }
        let gone: Vec<u64> = self.entries.range(run.clone()).map(|(start, _)| *start).collect();
        for start in gone {
            self.entries.remove(&start);
        }
    }

    /// Declares that only internal work accesses the memory from a device, unless other work may have done so already.
    pub(super) fn lend(&mut self, device: DeviceId) {
        if !self.since.contains_key(&device) {
            self.lent = self.lent.union(DeviceSet::of(device));
        }
    }

    /// Declares that any work of a device may access the memory from now on; `mark` was drawn before.
    pub(super) fn watch(&mut self, device: DeviceId, mark: Sequence) {
        self.lent = self.lent.without(DeviceSet::of(device));
        self.since.entry(device).or_insert(mark);
    }

    /// Returns the devices whose work from before a mark may use a mapping.
    fn users(&self, entry: &Entry, mark: Sequence) -> DeviceSet {
        let early = |device: &DeviceId| self.since.get(device).is_none_or(|since| *since <= mark);
        entry.readers.without(self.lent).iter().filter(early).collect()
    }

    /// Returns the devices whose work may use any of the mappings.
    pub(super) fn devices(&self, mappings: &[Range<u64>]) -> Outcome<DeviceSet> {
        let readers = |range| Ok(self.entry(range)?.readers.without(self.lent));
        mappings.iter().try_fold(DeviceSet::EMPTY, |set, range| Ok(set.union(readers(range)?)))
    }

    /// Returns whether any device ever had access to any of the mappings.
    pub(super) fn is_any_opened(&self, mappings: &[Range<u64>]) -> bool {
        mappings.iter().any(|range| self.entry(range).is_ok_and(|entry| !entry.readers.is_empty()))
    }

    /// Returns whether exactly this mapping exists, retired or not.
    pub(super) fn is_mapped(&self, range: &Range<u64>) -> bool {
        self.entry(range).is_ok()
    }

    /// Returns the mapped ranges, adjacent ones joined.
    pub(super) fn runs(&self) -> Vec<Range<u64>> {
        joined(self.all())
    }

    /// Returns the range of every mapping.
    pub(super) fn all(&self) -> Vec<Range<u64>> {
        self.entries.iter().map(|(start, entry)| *start..entry.end).collect()
    }

    /// Returns the number of mappings.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    fn entry(&self, range: &Range<u64>) -> Outcome<&Entry> {
        self.entries.get(&range.start).filter(|entry| entry.end == range.end).ok_or(Refusal::NotMapped)
    }

    /// Returns the entries that overlap a range.
    fn touching(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &Entry)> {
        let first = self.entries.range(..=range.start).next_back().filter(|(_, e)| e.end > range.start);
        let first = first.map_or(range.start, |(start, _)| *start);
        self.entries.range(first..range.end.max(first)).map(|(start, entry)| (*start, entry))
    }
}

/// Joins adjacent ranges of a sorted list.
fn joined(sorted: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for range in sorted {
        match runs.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => runs.push(range),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_and_holes_are_refused() {
        let mut table = Table::default();
        for start in [0, 10, 30] {
            table.begin_map(start..start + 10).unwrap();
            table.end_map(start, true);
        }
        for bad in [5..6, 9..21, 25..31, 0..10, 39..50] {
            assert_eq!(table.begin_map(bad.clone()), Err(Refusal::AlreadyMapped), "{bad:?}");
        }
        table.begin_use(3..18).unwrap();
        assert_eq!(table.begin_use(15..35), Err(Refusal::NotMapped));
        assert_eq!(table.begin_use(39..41), Err(Refusal::NotMapped));
        assert_eq!(table.begin_use(20..30), Err(Refusal::NotMapped));
        assert_eq!(table.begin_access(3..18, &[]), Err(Refusal::InvalidValue));
        assert_eq!(table.busy.len(), 1);
    }

    #[test]
    fn ranges_join() {
        assert_eq!(joined(vec![0..2, 2..4, 6..8, 8..9]), [0..4, 6..9]);
    }
}
