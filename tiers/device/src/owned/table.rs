//! What is mapped in a reservation: pure bookkeeping, the driver is called by [`super::Reservation`].
//!
//! Invariants: entries do not overlap; an entry changes hands as plan, execute, commit: it is `Changing` while the
//! driver is asked, and whatever fails leaves it as it was. A range in `busy` is made of live entries and keeps
//! them from being unmapped. A device that was first given access after a mark was drawn has touched nothing that is
//! retired with that mark, so no proof of its work is asked for.

use std::collections::BTreeMap;
use std::ops::Range;

use glake_units::Bytes;

use super::{CompletionProof, DeviceSet, Sequence};
use crate::{Access, DeviceId, Protection, Refusal};

/// A place of a reservation where an extent is mapped. It is a name, not an owner: using one that is gone is
/// refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mapping {
    /// From the start of the reservation.
    pub offset: Bytes,
    /// The size of the extent.
    pub size: Bytes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The driver is being asked.
    Changing,
    /// It may be used.
    Live,
    /// Nothing enqueued after the mark uses it.
    Retired(Sequence),
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    end: u64,
    state: State,
    /// Devices that may load and store, and those that were ever given any access.
    writers: DeviceSet,
    readers: DeviceSet,
    /// Before `Changing`, for an unmap that fails.
    before: State,
    /// What was enqueued through spans was enqueued before this mark.
    used: Sequence,
}

/// The mappings of one reservation.
#[derive(Debug, Default)]
pub(super) struct Table {
    entries: BTreeMap<u64, Entry>,
    busy: Vec<Range<u64>>,
    /// A mark from before each device was given its first access to anything here.
    since: BTreeMap<DeviceId, Sequence>,
    /// Devices that only work of ours touches this memory from, which the owner's completion points cover ([`super::CompletionEvents::outside`]).
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

    /// Commits a mapping, or takes the plan back.
    pub(super) fn end_map(&mut self, start: u64, done: bool) {
        if !done {
            self.entries.remove(&start);
        } else if let Some(entry) = self.entries.get_mut(&start) {
            entry.state = State::Live;
        }
    }

    /// Marks a range as in use: it must be inside live entries without a hole.
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

    /// Ends a use by a span: work enqueued on it before `mark` may still run.
    pub(super) fn end_span(&mut self, range: &Range<u64>, mark: Sequence) {
        self.end_use(range);
        let first = self.entries.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        for (_, entry) in self.entries.range_mut(first..range.end.max(first)) {
            entry.used = entry.used.max(mark);
        }
    }

    /// The devices that may load and store everywhere in a range.
    pub(super) fn writers(&self, range: &Range<u64>) -> DeviceSet {
        self.touching(range).fold(DeviceSet::ALL, |set, (_, entry)| set.intersection(entry.writers))
    }

    /// As [`Table::begin_use`], for whole entries whose access is to change. `true` if somebody loses access.
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

    /// Commits or drops a change of access; `mark` was drawn before the driver was asked.
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
                // A reader stays one: its earlier work must be waited for.
                entry.readers = entry.readers.union(device);
                entry.writers = match access.protection {
                    Protection::ReadWrite => entry.writers.union(device),
                    Protection::None | Protection::Read => entry.writers.without(device),
                };
            }
        }
    }

    /// Retires live mappings, all or none. One that is retired already keeps the later mark.
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

    /// Makes retired mappings live again, those of `mappings` that are there.
    pub(super) fn revive(&mut self, mappings: &[Range<u64>]) {
        for range in mappings {
            if let Some(entry) = self.entries.get_mut(&range.start)
                && matches!(entry.state, State::Retired(_))
            {
                entry.state = State::Live;
            }
        }
    }

    /// Plans an unmap of retired mappings that the proof covers, all or none: the ranges for the driver, joined
    /// where they touch. Of a mapping that any device was given access to, the proof covers `always` too.
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

    /// From now on only work of ours touches the memory from a device, if no other has until now.
    pub(super) fn lend(&mut self, device: DeviceId) {
        if !self.since.contains_key(&device) {
            self.lent = self.lent.union(DeviceSet::of(device));
        }
    }

    /// From now on, which `mark` was drawn before, any work of a device may touch the memory.
    pub(super) fn watch(&mut self, device: DeviceId, mark: Sequence) {
        self.lent = self.lent.without(DeviceSet::of(device));
        self.since.entry(device).or_insert(mark);
    }

    /// The devices whose work from before a mark may use a mapping.
    fn users(&self, entry: &Entry, mark: Sequence) -> DeviceSet {
        let early = |device: &DeviceId| self.since.get(device).is_none_or(|since| *since <= mark);
        entry.readers.without(self.lent).iter().filter(early).collect()
    }

    /// The devices whose work may use any of the mappings.
    pub(super) fn devices(&self, mappings: &[Range<u64>]) -> Outcome<DeviceSet> {
        let readers = |range| Ok(self.entry(range)?.readers.without(self.lent));
        mappings.iter().try_fold(DeviceSet::EMPTY, |set, range| Ok(set.union(readers(range)?)))
    }

    /// Whether any device was ever given access to any of the mappings.
    pub(super) fn is_any_opened(&self, mappings: &[Range<u64>]) -> bool {
        mappings.iter().any(|range| self.entry(range).is_ok_and(|entry| !entry.readers.is_empty()))
    }

    /// Whether exactly this mapping is there, retired or not.
    pub(super) fn is_mapped(&self, range: &Range<u64>) -> bool {
        self.entry(range).is_ok()
    }

    /// What is mapped, joined where it touches.
    pub(super) fn runs(&self) -> Vec<Range<u64>> {
        joined(self.all())
    }

    /// Every mapping.
    pub(super) fn all(&self) -> Vec<Range<u64>> {
        self.entries.iter().map(|(start, entry)| *start..entry.end).collect()
    }

    /// How many mappings there are.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    fn entry(&self, range: &Range<u64>) -> Outcome<&Entry> {
        self.entries.get(&range.start).filter(|entry| entry.end == range.end).ok_or(Refusal::NotMapped)
    }

    /// The entries that share a byte with a range.
    fn touching(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, &Entry)> {
        let first = self.entries.range(..=range.start).next_back().filter(|(_, e)| e.end > range.start);
        let first = first.map_or(range.start, |(start, _)| *start);
        self.entries.range(first..range.end.max(first)).map(|(start, entry)| (*start, entry))
    }
}

/// Sorted ranges, joined where one ends at the start of the next.
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
