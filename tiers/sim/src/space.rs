//! Addresses of the simulated devices: reservations, mappings and access rights.
//!
//! ```text
//!   reservation  ├──────────────────────────────────────────┤
//!   mappings     │ ext 3 │ ext 7 │   (blank)  │    ext 3     │     ext 3 twice: an alias
//! ```
//!
//! Invariants: reservations do not overlap; a mapping lies in one reservation and mappings do not overlap; unmapped addresses are
//! `PROT_NONE` in the process; the process's mappings are within the budget. Every verb takes logarithmic time per affected mapping.

use std::collections::BTreeMap;

use super::budget;
use super::denial::{Checked, Denial, refuse};
use super::system::{self, GRANULE, Source};
use glake_device::{Access, Address, DeviceId, Handle, Protection, Refusal};
use glake_units::Bytes;

/// Devices that may read and write, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reach {
    read: u64,
    write: u64,
}

impl Reach {
    pub(super) fn give(&mut self, device: DeviceId, protection: Protection) {
        let bit = 1_u64 << (device.0 % 64);
        self.read &= !bit;
        self.write &= !bit;
        match protection {
            Protection::None => {}
            Protection::Read => self.read |= bit,
            Protection::ReadWrite => {
                self.read |= bit;
                self.write |= bit;
            }
        }
    }

    /// Returns the rule that an access by `device` breaks.
    pub(super) fn breach(self, device: DeviceId, write: bool) -> Option<Refusal> {
        let bit = 1_u64 << (device.0 % 64);
        match (self.read & bit != 0, self.write & bit != 0) {
            (_, true) => None,
            (true, false) if !write => None,
            (true, false) => Some(Refusal::ReadOnly),
            (false, false) if self.read == 0 => Some(Refusal::NoAccess),
            (false, false) => Some(Refusal::NoPeerAccess),
        }
    }

    fn includes(self, other: Reach) -> bool {
        self.read & other.read == other.read && self.write & other.write == other.write
    }

    fn on_host(self) -> Protection {
        match (self.read, self.write) {
            (0, 0) => Protection::None,
            (_, 0) => Protection::Read,
            (_, _) => Protection::ReadWrite,
        }
    }
}

/// One extent mapped at one address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mapping {
    pub(super) size: u64,
    pub(super) extent: Handle,
    pub(super) reach: Reach,
    /// Number of enqueued operations that use the mapping.
    pub(super) users: u32,
}

#[derive(Debug)]
struct Reservation {
    size: u64,
    mappings: u32,
}

#[derive(Debug, Default)]
pub(super) struct AddressSpace {
    reservations: BTreeMap<u64, Reservation>,
    mappings: BTreeMap<u64, Mapping>,
    /// Mappings taken from the budget by this space.
    share: u64,
}

impl AddressSpace {
    pub(super) fn reserve(&mut self, size: u64) -> Checked<Address> {
        aligned(0, size)?;
        self.take(1)?;
        let start = system::reserve(size).inspect_err(|_| self.give(1))?;
        self.reservations.insert(start, Reservation { size, mappings: 0 });
        Ok(Address(start))
    }

    pub(super) fn unreserve(&mut self, start: u64, size: u64) -> Checked<()> {
        match self.reservations.get(&start) {
            Some(reservation) if reservation.size != size => refuse(Address(start), Refusal::InvalidValue),
            Some(reservation) if reservation.mappings > 0 => refuse(Address(start), Refusal::StillMapped),
            Some(_) => {
                // SAFETY: the range is a whole reservation of ours with nothing mapped in it, so nothing uses it.
                unsafe { system::unreserve(start, size) }?;
                self.reservations.remove(&start);
                self.give(1);
                Ok(())
            }
            None => refuse(Address(start), Refusal::NotReserved),
        }
    }

    /// Maps memory, without access for any device.
    pub(super) fn map(&mut self, start: u64, size: u64, extent: Handle, source: Source<'_>) -> Checked<()> {
        aligned(start, size)?;
        let end = start.checked_add(size).ok_or(Denial::Refused(Address(start), Refusal::InvalidValue))?;
        let inside = self.reservation(start).filter(|(at, reservation)| end <= at + reservation.size);
        let Some((at, _)) = inside else {
            return refuse(Address(start), Refusal::NotReserved);
        };
        if self.overlapping(start, end) {
            return refuse(Address(start), Refusal::AlreadyMapped);
        }
        let cuts = self.cuts(start, end);
        self.take(cuts)?;
        // SAFETY: the range is in our reservation and blank.
        unsafe { system::map(start, size, source) }.inspect_err(|_| self.give(cuts))?;
        self.mappings.insert(start, Mapping { size, extent, reach: Reach::default(), users: 0 });
        if let Some(reservation) = self.reservations.get_mut(&at) {
            reservation.mappings += 1;
        }
        Ok(())
    }

    /// Unmaps whole mappings; returns their extents.
    pub(super) fn unmap(&mut self, start: u64, size: u64) -> Checked<Vec<Handle>> {
        let starts = self.tiles(start, size)?;
        self.idle(&starts)?;
        // SAFETY: whole mappings in a reservation of ours that no enqueued work uses.
        unsafe { system::blank(start, size) }?;
        let mut extents = Vec::with_capacity(starts.len());
        for at in &starts {
            extents.extend(self.mappings.remove(at).map(|mapping| mapping.extent));
        }
        // Each boundary between the mappings goes; the outer ends may remain as boundaries of neighbours.
        let between = starts.len() as u64 - 1;
        self.give(between + self.cuts(start, start + size));
        let count = u32::try_from(starts.len()).unwrap_or(u32::MAX);
        if let Some((&at, _)) = self.reservations.range(..=start).next_back()
            && let Some(reservation) = self.reservations.get_mut(&at)
        {
            reservation.mappings -= count;
        }
        Ok(extents)
    }

    /// Sets the access rights of whole mappings; returns their number.
    pub(super) fn set_access(&mut self, start: u64, size: u64, access: &[Access]) -> Checked<usize> {
        let starts = self.tiles(start, size)?;
        let count = starts.len();
        let mut changes = Vec::with_capacity(starts.len());
        for at in starts {
            let Some(mapping) = self.mappings.get(&at) else { continue };
            let mut reach = mapping.reach;
            for one in access {
                reach.give(one.device, one.protection);
            }
            if mapping.users > 0 && !reach.includes(mapping.reach) {
                return refuse(Address(at), Refusal::InUse);
            }
            changes.push((at, mapping.size, reach));
        }
        // Runs of equal protection take one call each.
        for run in changes.chunk_by(|a, b| a.2.on_host() == b.2.on_host()) {
            let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
            let (from, to) = (first.0, last.0 + last.1);
            // SAFETY: whole mappings in a reservation of ours; enqueued work keeps the memory it uses, and the simulator
            // moves bytes through its own mapping.
            unsafe { system::protect(from, to - from, first.2.on_host()) }?;
            for (at, _, reach) in run {
                if let Some(mapping) = self.mappings.get_mut(at) {
                    mapping.reach = *reach;
                }
            }
        }
        Ok(count)
    }

    /// Returns start and description of the mapping that contains an address.
    pub(super) fn find(&self, at: u64) -> Option<(u64, &Mapping)> {
        let (start, mapping) = self.mappings.range(..=at).next_back()?;
        (at < start + mapping.size).then_some((*start, mapping))
    }

    pub(super) fn mapping_mut(&mut self, start: u64) -> Option<&mut Mapping> {
        self.mappings.get_mut(&start)
    }

    pub(super) fn is_reserved(&self, at: u64) -> bool {
        self.reservation(at).is_some()
    }

    /// Returns the numbers of reservations and mappings.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.reservations.len(), self.mappings.len())
    }

    fn take(&mut self, count: u64) -> Checked<()> {
        if !budget::take(count) {
            return Err(Denial::OutOfMemory(Bytes::ZERO));
        }
        self.share += count;
        Ok(())
    }

    fn give(&mut self, count: u64) {
        budget::give(count);
        self.share -= count;
    }

    fn reservation(&self, at: u64) -> Option<(u64, &Reservation)> {
        let (start, reservation) = self.reservations.range(..=at).next_back()?;
        (at < start + reservation.size).then_some((*start, reservation))
    }

    fn overlapping(&self, start: u64, end: u64) -> bool {
        self.mappings.range(..end).next_back().is_some_and(|(at, mapping)| at + mapping.size > start)
    }

    /// Returns how many ends of a blank range are not yet a boundary of a kernel mapping.
    fn cuts(&self, start: u64, end: u64) -> u64 {
        let ends = |at: u64| {
            self.mappings.range(..at).next_back().is_some_and(|(from, mapping)| from + mapping.size == at)
                || self.mappings.contains_key(&at)
                || self.reservations.contains_key(&at)
                || self.reservation(at - 1).is_some_and(|(from, reservation)| from + reservation.size == at)
        };
        u64::from(!ends(start)) + u64::from(!ends(end))
    }

    /// Returns the starts of the mappings that make up a range exactly.
    fn tiles(&self, start: u64, size: u64) -> Checked<Vec<u64>> {
        aligned(start, size)?;
        let wrong = Denial::Refused(Address(start), Refusal::NotMapped);
        let Some(end) = start.checked_add(size) else { return Err(wrong) };
        let mut starts = Vec::new();
        let mut at = start;
        for (from, mapping) in self.mappings.range(start..end) {
            if *from != at {
                return Err(wrong);
            }
            starts.push(at);
            at += mapping.size;
        }
        if at == end { Ok(starts) } else { Err(wrong) }
    }

    fn idle(&self, starts: &[u64]) -> Checked<()> {
        match starts.iter().find(|at| self.mappings.get(at).is_some_and(|mapping| mapping.users > 0)) {
            Some(at) => refuse(Address(*at), Refusal::InUse),
            None => Ok(()),
        }
    }
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        for (start, reservation) in &self.reservations {
            // SAFETY: the reservation is ours, and the devices whose addresses these are are gone.
            let _ = unsafe { system::unreserve(*start, reservation.size) };
        }
        budget::give(self.share);
    }
}

fn aligned(start: u64, size: u64) -> Checked<()> {
    if size == 0 || !start.is_multiple_of(GRANULE) || !size.is_multiple_of(GRANULE) {
        return refuse(Address(start), Refusal::InvalidValue);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use proptest::prelude::*;

    use super::*;

    const SLOTS: u64 = 12;

    /// Returns the number of kernel mappings in a range.
    fn kernel_counts(start: u64, end: u64) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let range = |line: &str| {
            let (from, to) = line.split(' ').next()?.split_once('-')?;
            Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
        };
        maps.lines().filter_map(range).filter(|(from, to)| *from < end && *to > start).count() as u64
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// Compares with a list of slots: mappings, refusals, and a count of mappings that is never below the kernel's.
        #[test]
        fn agrees_with_a_list_of_slots(steps in prop::collection::vec((any::<bool>(), 0..SLOTS, 1..4_u64), 1..60)) {
            let file = system::memory_file("test", SLOTS * GRANULE, false).unwrap();
            let mut space = AddressSpace::default();
            let base = space.reserve(SLOTS * GRANULE).unwrap().0;
            let mut slots = vec![None; SLOTS as usize];
            for (step, (map, slot, length)) in steps.into_iter().enumerate() {
                let range = slot as usize..((slot + length).min(SLOTS) as usize);
                let (start, size) = (base + slot * GRANULE, range.len() as u64 * GRANULE);
                if map {
                    let handle = Handle(step as u64 + 1);
                    let done = space.map(start, size, handle, Source::File(file.as_fd(), slot * GRANULE)).is_ok();
                    prop_assert_eq!(done, slots[range.clone()].iter().all(Option::is_none));
                    if done {
                        slots[range].fill(Some(handle));
                        let access = Access { device: DeviceId(0), protection: Protection::ReadWrite };
                        space.set_access(start, size, &[access]).unwrap();
                    }
                } else {
                    let cut = |at: usize| {
                        at > 0 && at < slots.len() && slots[at].is_some() && slots[at - 1] == slots[at]
                    };
                    let whole = slots[range.clone()].iter().all(Option::is_some);
                    let whole = whole && !cut(range.start) && !cut(range.end);
                    prop_assert_eq!(space.unmap(start, size).is_ok(), whole);
                    if whole {
                        slots[range].fill(None);
                    }
                }
                for (slot, handle) in (0..).zip(&slots) {
                    let found = space.find(base + slot * GRANULE).map(|(_, mapping)| mapping.extent);
                    prop_assert_eq!(found, *handle);
                }
                prop_assert!(kernel_counts(base, base + SLOTS * GRANULE) <= space.share);
            }
            for mapping in space.mappings.clone() {
                space.unmap(mapping.0, mapping.1.size).unwrap();
            }
            prop_assert_eq!(space.share, 1);
            space.unreserve(base, SLOTS * GRANULE).unwrap();
            prop_assert_eq!(space.share, 0);
        }
    }
}
