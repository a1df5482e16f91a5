//! An address range and the mappings in it.
//!
//! Invariant: the driver's mappings in the range are those of the table: no other safe call that maps memory learns of these addresses.

use std::ops::Range;
use std::sync::Arc;

use glake_units::Bytes;
use parking_lot::Mutex;

use super::table::Table;
use super::{CompletionEvents, CompletionProof, DeviceSet, Extent, Mapping, OwnedStream, Sequence, Span};
use crate::{Access, Address, DeviceId, Driver, DriverError, PointerKind, Refusal, Result, Verb};

/// A reserved address range. Dropping it waits for the contexts that may use it, unmaps everything and releases the addresses; if that
/// fails (a lost context), they leak.
#[derive(Debug)]
pub struct Reservation {
    completion_events: Arc<CompletionEvents>,
    device: DeviceId,
    start: Address,
    size: Bytes,
    table: Mutex<Table>,
}

impl Reservation {
    /// Reserves `size` bytes of addresses (a multiple of the granularity). Copies with the host run in the context of `device`.
    pub fn new(completion_events: &Arc<CompletionEvents>, device: DeviceId, size: Bytes) -> Result<Self> {
        let start = completion_events.driver().reserve(size)?;
        Ok(Reservation {
            completion_events: completion_events.clone(),
            device,
            start,
            size,
            table: Mutex::default(),
        })
    }

    /// Returns the start address.
    pub fn start(&self) -> Address {
        self.start
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// Returns the device in whose context copies with the host run.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Returns the number of mappings, including retired ones.
    pub fn mappings(&self) -> usize {
        self.table.lock().len()
    }

    /// Returns the mapped runs in order: offset and size of each group of adjacent mappings.
    pub fn mapped(&self) -> Vec<(Bytes, Bytes)> {
        let runs = self.table.lock().runs().into_iter();
        runs.map(|run| (Bytes::new(run.start), Bytes::new(run.end - run.start))).collect()
    }

    /// Returns whether a mapping exists. Unless it is retired it may be used, within its access rights.
    pub fn is_mapped(&self, mapping: Mapping) -> bool {
        let range = self.range(Verb::Map, mapping.offset, mapping.size);
        range.is_ok_and(|range| self.table.lock().is_mapped(&range))
    }

    /// Returns the devices that may load and store everywhere in a mapping; empty if it does not exist.
    pub fn writers(&self, mapping: Mapping) -> DeviceSet {
        let range = self.range(Verb::SetAccess, mapping.offset, mapping.size);
        range.map_or(DeviceSet::EMPTY, |range| {
            let table = self.table.lock();
            if table.is_mapped(&range) { table.writers(&range) } else { DeviceSet::EMPTY }
        })
    }

    /// Returns mapped memory for asynchronous work, for the devices that may load and store all of it. Its mappings are not unmapped while
    /// the span lives, nor before work enqueued by then is done.
    ///
    /// # Errors
    /// [`Refusal::NotMapped`] unless all of it is mapped.
    pub fn span(self: &Arc<Self>, offset: Bytes, size: Bytes) -> Result<Span> {
        let range = self.range(Verb::Copy, offset, size)?;
        let reach = {
            let mut table = self.table.lock();
            table.begin_use(range.clone()).map_err(|r| self.refused(Verb::Copy, offset, r))?;
            table.writers(&range)
        };
        let lease = Arc::new(Lease { reservation: self.clone(), range });
        let kind = PointerKind::Device { device: self.device, mapped: true };
        // SAFETY: the lease keeps the mappings; afterwards they are unmapped only with a proof that covers the mark
        // drawn when the lease is dropped.
        Ok(unsafe { Span::owned(&lease, (self.address(offset), size), kind, reach) })
    }

    /// Maps a whole extent. Access is granted only by [`Reservation::set_access`].
    pub fn map(&self, offset: Bytes, extent: &Extent) -> Result<Mapping> {
        let mapping = Mapping { offset, size: extent.size() };
        let range = self.range(Verb::Map, offset, extent.size())?;
        if !extent.is_of(self.driver()) {
            return Err(self.refused(Verb::Map, offset, Refusal::UnknownHandle));
        }
        self.table.lock().begin_map(range.clone()).map_err(|r| self.refused(Verb::Map, offset, r))?;
        // SAFETY: the extent is alive, and the table has just given this range to this call alone.
        let done = unsafe { self.driver().map(self.address(offset), extent.size(), extent.handle()) };
        self.table.lock().end_map(range.start, done.is_ok());
        done.map(|()| mapping)
    }

    /// Grants access to whole adjacent mappings in one call.
    ///
    /// # Errors
    /// [`Refusal::InUse`] if it would remove access: use [`Reservation::protect`].
    pub fn set_access(&self, offset: Bytes, size: Bytes, access: &[Access]) -> Result<()> {
        self.change_access(offset, size, access, false)
    }

    /// Declares that only internal work accesses this memory from `device`, and that the enqueuer joins it into the owner's context or
    /// registers it ([`CompletionEvents::outside`]): proofs need not cover that device. Call it before the device is given access.
    pub fn lend(&self, device: DeviceId) {
        self.table.lock().lend(device);
    }

    /// Declares that any work of a device may access this memory from now on, so that proofs must cover it. Call it before that is
    /// possible.
    pub fn watch(&self, device: DeviceId) {
        let mark = self.completion_events.mark();
        self.table.lock().watch(device, mark);
    }

    /// Changes access like [`Reservation::set_access`], and may also remove it: it first waits for the contexts that lose access. Work
    /// enqueued afterwards faults.
    pub fn protect(&self, offset: Bytes, size: Bytes, access: &[Access]) -> Result<()> {
        self.change_access(offset, size, access, true)
    }

    /// Retires mappings: nothing enqueued after `mark` was drawn uses them, now or later. [`CompletionEvents::mark`] draws a mark. All of
    /// them or none.
    pub fn retire(&self, mappings: &[Mapping], mark: Sequence) -> Result<()> {
        let ranges = self.ranges(mappings)?;
        self.table.lock().retire(&ranges, mark).map_err(|r| self.refused_at(Verb::Unmap, mappings, r))
    }

    /// Reverts [`Reservation::retire`] for an unmap that was given up: the mappings may be used again.
    pub fn revive(&self, mappings: &[Mapping]) -> Result<()> {
        let ranges = self.ranges(mappings)?;
        self.table.lock().revive(&ranges);
        Ok(())
    }

    /// Unmaps retired mappings; adjacent ones share one driver call.
    ///
    /// # Errors
    /// [`Refusal::InUse`], without unmapping anything, if a mapping is not retired, is being read or written, or if the proof does not
    /// cover its mark on every device that had access by then. After an error of the driver the remaining mappings stay retired: retry.
    pub fn unmap(&self, mappings: &[Mapping], passed: &CompletionProof) -> Result<()> {
        let ranges = self.ranges(mappings)?;
        let plan = if self.completion_events.gave(passed) {
            self.table.lock().begin_unmap(&ranges, passed, DeviceSet::of(self.device))
        } else {
            Err(Refusal::InUse)
        };
        let runs = plan.map_err(|r| self.refused_at(Verb::Unmap, mappings, r))?;
        let mut outcome = Ok(());
        for run in &runs {
            if outcome.is_ok() {
                let start = Address(self.start.0 + run.start);
                // SAFETY: the mappings are retired and all work from before their marks is done on every device
                // that may access them; the table excludes host copies and other calls.
                outcome = unsafe { self.driver().unmap(start, Bytes::new(run.end - run.start)) };
                self.table.lock().end_unmap(run, outcome.is_ok());
            } else {
                self.table.lock().end_unmap(run, false);
            }
        }
        outcome
    }

    /// Retires mappings as of now, waits for the contexts that may use them, and unmaps them. Mappings that no device ever had access to
    /// are unmapped without a wait.
    pub fn unmap_now(&self, mappings: &[Mapping]) -> Result<()> {
        let ranges = self.ranges(mappings)?;
        let (users, is_opened) = {
            let table = self.table.lock();
            (table.devices(&ranges), table.is_any_opened(&ranges))
        };
        let users = users.map_err(|r| self.refused_at(Verb::Unmap, mappings, r))?;
        self.retire(mappings, self.completion_events.mark())?;
        let own = if is_opened { DeviceSet::of(self.device) } else { DeviceSet::EMPTY };
        let passed = self.completion_events.synchronize(users.union(own))?;
        self.unmap(mappings, &passed)
    }

    /// Copies mapped bytes to the host and returns when they have arrived. The caller orders it after the work that wrote them.
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<()> {
        let size = Bytes::new(into.len() as u64);
        self.using(Verb::ReadNow, offset, size, || {
            self.driver().read_now(self.device, self.address(offset), into)
        })
    }

    /// Copies host bytes to mapped memory and returns when they have arrived.
    pub fn write(&self, offset: Bytes, bytes: &[u8]) -> Result<()> {
        self.using(Verb::WriteNow, offset, Bytes::new(bytes.len() as u64), || {
            // SAFETY: the range is mapped and in use by this call until it returns.
            unsafe { self.driver().write_now(self.device, self.address(offset), bytes) }
        })
    }

    /// Fills mapped memory with one byte and returns when that is done.
    pub fn fill(&self, offset: Bytes, size: Bytes, byte: u8) -> Result<()> {
        let stream = OwnedStream::new(self.driver(), self.device)?;
        self.using(Verb::Fill, offset, size, || {
            // SAFETY: the range is mapped and in use by this call until it returns; by then the work is done or
            // the context is lost.
            unsafe { self.driver().fill(self.device, self.address(offset), size, byte, stream.id())? };
            stream.synchronize().or_else(|_| self.driver().context_synchronize(self.device))
        })
    }

    fn driver(&self) -> &Arc<dyn Driver> {
        self.completion_events.driver()
    }

    fn address(&self, offset: Bytes) -> Address {
        Address(self.start.0.saturating_add(offset.get()))
    }

    fn using(&self, verb: Verb, offset: Bytes, size: Bytes, call: impl FnOnce() -> Result<()>) -> Result<()> {
        let range = self.range(verb, offset, size)?;
        if range.is_empty() {
            return Ok(());
        }
        self.table.lock().begin_use(range.clone()).map_err(|r| self.refused(verb, offset, r))?;
        let outcome = call();
        self.table.lock().end_use(&range);
        outcome
    }

    fn change_access(&self, offset: Bytes, size: Bytes, access: &[Access], may_take: bool) -> Result<()> {
        let range = self.range(Verb::SetAccess, offset, size)?;
        if access.iter().any(|access| access.device.0 >= 64) {
            return Err(self.refused(Verb::SetAccess, offset, Refusal::InvalidValue));
        }
        let mark = self.completion_events.mark();
        let takes = self.table.lock().begin_access(range.clone(), access);
        let takes = takes.map_err(|r| self.refused(Verb::SetAccess, offset, r))?;
        let outcome = match takes {
            true if !may_take => Err(self.refused(Verb::SetAccess, offset, Refusal::InUse)),
            true => self.completion_events.synchronize(access.iter().map(|a| a.device).collect()).map(|_| ()),
            false => Ok(()),
        };
        let outcome = outcome.and_then(|()| {
            // SAFETY: the table says that these mappings are live and stay so during this call, and every
            // device that loses access has been waited for.
            unsafe { self.driver().set_access(self.address(offset), size, access) }
        });
        self.table.lock().end_access(&range, access, mark, outcome.is_ok());
        outcome
    }

    fn range(&self, verb: Verb, offset: Bytes, size: Bytes) -> Result<Range<u64>> {
        match offset.checked_add(size) {
            Some(end) if end <= self.size => Ok(offset.get()..end.get()),
            _ => Err(self.refused(verb, offset, Refusal::NotReserved)),
        }
    }

    fn ranges(&self, mappings: &[Mapping]) -> Result<Vec<Range<u64>>> {
        mappings.iter().map(|mapping| self.range(Verb::Unmap, mapping.offset, mapping.size)).collect()
    }

    fn refused(&self, verb: Verb, offset: Bytes, reason: Refusal) -> DriverError {
        DriverError::Refused { verb, address: self.address(offset), reason }
    }

    fn refused_at(&self, verb: Verb, mappings: &[Mapping], reason: Refusal) -> DriverError {
        self.refused(verb, mappings.first().map_or(Bytes::ZERO, |mapping| mapping.offset), reason)
    }
}

/// Keeps the mapped memory of spans in use.
#[derive(Debug)]
struct Lease {
    reservation: Arc<Reservation>,
    range: Range<u64>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mark = self.reservation.completion_events.mark();
        self.reservation.table.lock().end_span(&self.range, mark);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let left: Vec<Mapping> = (self.table.get_mut().all().into_iter())
            .map(|range| Mapping {
                offset: Bytes::new(range.start),
                size: Bytes::new(range.end - range.start),
            })
            .collect();
        if !left.is_empty() && self.unmap_now(&left).is_err() {
            return;
        }
        // SAFETY: nothing is mapped in the range, and former users have been waited for. If this fails, the addresses leak.
        let _ = unsafe { self.driver().unreserve(self.start, self.size) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stub::{Stub, extent_properties, read_write};
    use crate::{Fault, Faults, Injected, Protection, Recorder, When};

    const TWO: Bytes = Bytes::mib(2);
    const GPU: DeviceId = DeviceId(0);

    struct Fixture {
        stub: Arc<Stub>,
        faults: Arc<Faults>,
        recorder: Arc<Recorder>,
        completion_events: Arc<CompletionEvents>,
        home: Reservation,
    }

    fn fixture() -> Fixture {
        let stub = Stub::new();
        let faults = Arc::new(Faults::new(stub.clone()));
        let recorder = Arc::new(Recorder::measured(faults.clone()));
        let completion_events = CompletionEvents::new(recorder.clone());
        let home = Reservation::new(&completion_events, GPU, Bytes::gib(1)).unwrap();
        Fixture { stub, faults, recorder, completion_events, home }
    }

    impl Fixture {
        fn map(&self, slots: &[u64]) -> Vec<Mapping> {
            let place = |&slot: &u64| {
                let extent = Extent::new(self.completion_events.driver(), TWO, extent_properties()).unwrap();
                self.home.map(Bytes::mib(2 * slot), &extent).unwrap()
            };
            slots.iter().map(place).collect()
        }

        fn calls(&self, verb: Verb) -> u64 {
            self.recorder.counters().of(verb).calls
        }
    }

    fn refusal(outcome: Result<()>) -> Refusal {
        match outcome {
            Err(DriverError::Refused { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_unmap_needs_a_proof_as_new_as_the_retirement() {
        let fixture = fixture();
        let mapped = fixture.map(&[0, 1, 2, 5]);
        fixture.home.set_access(Bytes::ZERO, Bytes::mib(6), &read_write(2)).unwrap();
        let both: DeviceSet = [GPU, DeviceId(1)].into_iter().collect();
        let early = fixture.completion_events.synchronize(both).unwrap();
        assert_eq!(refusal(fixture.home.unmap(&mapped, &early)), Refusal::InUse, "not retired");
        fixture.home.retire(&mapped, fixture.completion_events.mark()).unwrap();
        assert_eq!(refusal(fixture.home.unmap(&mapped, &early)), Refusal::InUse, "too old");
        let alone = fixture.completion_events.synchronize(DeviceSet::of(GPU)).unwrap();
        assert_eq!(refusal(fixture.home.unmap(&mapped, &alone)), Refusal::InUse, "a peer is not covered");
        let strange = CompletionEvents::new(fixture.stub.clone()).synchronize(both).unwrap();
        assert_eq!(refusal(fixture.home.unmap(&mapped, &strange)), Refusal::InUse, "another clock");
        let passed = fixture.completion_events.record(both).unwrap().wait().unwrap();
        fixture.home.unmap(&mapped, &passed).unwrap();
        assert_eq!(fixture.calls(Verb::Unmap), 2, "three in a row and one apart");
        assert_eq!(fixture.home.mappings(), 0);
        assert_eq!(refusal(fixture.home.unmap(&mapped, &passed)), Refusal::NotMapped);
    }

    #[test]
    fn watching_prevails_over_lending() {
        for lent_first in [false, true] {
            let fixture = fixture();
            let peer = DeviceId(1);
            // Declared before any mapping exists.
            let lend = |now: bool| {
                if now {
                    fixture.home.lend(peer)
                }
            };
            lend(lent_first);
            fixture.home.watch(peer);
            lend(!lent_first);
            let mapped = fixture.map(&[0]);
            fixture.home.set_access(Bytes::ZERO, TWO, &read_write(2)).unwrap();
            fixture.home.retire(&mapped, fixture.completion_events.mark()).unwrap();
            let alone = fixture.completion_events.synchronize(DeviceSet::of(GPU)).unwrap();
            assert_eq!(refusal(fixture.home.unmap(&mapped, &alone)), Refusal::InUse, "the peer may use it");
            let both = fixture.completion_events.synchronize([GPU, peer].into_iter().collect()).unwrap();
            fixture.home.unmap(&mapped, &both).unwrap();
        }
    }

    #[test]
    fn an_older_proof_suffices_for_mappings_idle_before_it() {
        let fixture = fixture();
        let mapped = fixture.map(&[0]);
        let idle_since = fixture.completion_events.mark();
        let passed = fixture.completion_events.synchronize(DeviceSet::of(GPU)).unwrap();
        fixture.home.retire(&mapped, idle_since).unwrap();
        fixture.home.unmap(&mapped, &passed).unwrap();
    }

    #[test]
    fn a_span_keeps_its_mappings_until_its_work_is_done() {
        let fixture = fixture();
        let stub = fixture.stub.clone();
        let mapped = fixture.map(&[0, 1]);
        fixture.home.set_access(Bytes::ZERO, TWO, &read_write(2)).unwrap();
        fixture.home.set_access(TWO, TWO, &read_write(1)).unwrap();
        let home = Arc::new(fixture.home);
        assert!(home.is_mapped(mapped[0]) && !home.is_mapped(Mapping { offset: TWO, size: Bytes::mib(4) }));
        assert_eq!(refusal(home.span(TWO, Bytes::mib(4)).map(|_| ())), Refusal::NotMapped);
        let span = home.span(Bytes::mib(1), TWO).unwrap();
        assert_eq!((span.start().0 - home.start().0, span.device()), (1 << 20, Some(GPU)));
        assert_eq!(span.reach(), DeviceSet::of(GPU), "who may touch all of it");
        let both: DeviceSet = [GPU, DeviceId(1)].into_iter().collect();
        let idle_since = fixture.completion_events.mark();
        let early = fixture.completion_events.synchronize(both).unwrap();
        home.retire(&mapped, idle_since).unwrap();
        assert_eq!(refusal(home.unmap(&mapped, &early)), Refusal::InUse, "a span lives");
        let part = span.part(Bytes::ZERO, Bytes::kib(4)).unwrap();
        drop(span);
        let during = fixture.completion_events.synchronize(both).unwrap();
        assert_eq!(refusal(home.unmap(&mapped, &during)), Refusal::InUse, "a part of it lives");
        drop(part);
        assert_eq!(refusal(home.unmap(&mapped, &during)), Refusal::InUse, "what was enqueued may run");
        let after = fixture.completion_events.synchronize(both).unwrap();
        home.unmap(&mapped, &after).unwrap();
        drop(home);
        assert_eq!(stub.reserved(), 0);
    }

    #[test]
    fn proofs_need_only_devices_that_had_access() {
        let fixture = fixture();
        let mapped = fixture.map(&[0, 1]);
        let second = [Access { device: DeviceId(1), protection: Protection::ReadWrite }];
        fixture.home.set_access(Bytes::ZERO, Bytes::mib(4), &read_write(1)).unwrap();
        assert_eq!(fixture.home.mapped(), [(Bytes::ZERO, Bytes::mib(4))]);
        let alone = fixture.completion_events.record(DeviceSet::of(GPU)).unwrap().wait().unwrap();
        fixture.home.set_access(Bytes::ZERO, Bytes::mib(4), &second).unwrap();
        fixture.home.retire(&mapped[..1], alone.sequence()).unwrap();
        fixture.home.unmap(&mapped[..1], &alone).unwrap();
        fixture.home.retire(&mapped[1..], fixture.completion_events.mark()).unwrap();
        let alone = fixture.completion_events.record(DeviceSet::of(GPU)).unwrap().wait().unwrap();
        assert_eq!(refusal(fixture.home.unmap(&mapped[1..], &alone)), Refusal::InUse);
    }

    #[test]
    fn bounds_and_life_are_checked() {
        let fixture = fixture();
        let mapped = fixture.map(&[0, 1]);
        let mut bytes = vec![0; 3 << 20];
        fixture.home.read(Bytes::mib(1), &mut bytes).unwrap();
        fixture.home.fill(Bytes::mib(1), Bytes::mib(3), 7).unwrap();
        assert_eq!(refusal(fixture.home.write(Bytes::mib(2), &bytes)), Refusal::NotMapped);
        assert_eq!(refusal(fixture.home.read(Bytes::gib(1), &mut bytes)), Refusal::NotReserved);
        assert_eq!(refusal(fixture.home.read(Bytes::MAX, &mut bytes)), Refusal::NotReserved);
        let again = Extent::new(fixture.completion_events.driver(), TWO, extent_properties()).unwrap();
        assert_eq!(refusal(fixture.home.map(Bytes::mib(1), &again).map(|_| ())), Refusal::AlreadyMapped);
        fixture.home.retire(&mapped[..1], fixture.completion_events.mark()).unwrap();
        assert_eq!(refusal(fixture.home.read(Bytes::ZERO, &mut bytes[..1])), Refusal::NotMapped);
    }

    #[test]
    fn taking_access_away_is_explicit() {
        let fixture = fixture();
        fixture.map(&[0]);
        let read = [Access { device: GPU, protection: Protection::Read }];
        fixture.home.set_access(Bytes::ZERO, TWO, &read_write(1)).unwrap();
        assert_eq!(refusal(fixture.home.set_access(Bytes::ZERO, TWO, &read)), Refusal::InUse);
        assert_eq!(fixture.calls(Verb::ContextSynchronize), 0);
        fixture.home.protect(Bytes::ZERO, TWO, &read).unwrap();
        assert_eq!(fixture.calls(Verb::ContextSynchronize), 1);
        fixture.home.set_access(Bytes::ZERO, TWO, &read_write(1)).unwrap();
    }

    #[test]
    fn failures_leave_everything_as_it_was() {
        let fixture = fixture();
        let fail = |verb, nth| Fault { verb: Some(verb), when: When::Nth(nth), error: Injected::NotReady };
        let extent = Extent::new(fixture.completion_events.driver(), TWO, extent_properties()).unwrap();
        fixture.faults.set(&[fail(Verb::Map, 1), fail(Verb::Unmap, 2)]);
        assert!(matches!(fixture.home.map(Bytes::ZERO, &extent), Err(DriverError::NotReady { .. })));
        assert_eq!(fixture.home.mappings(), 0);
        let mapped = fixture.map(&[0, 2, 4]);
        fixture.home.retire(&mapped, fixture.completion_events.mark()).unwrap();
        let passed = fixture.completion_events.synchronize(DeviceSet::of(GPU)).unwrap();
        fixture.home.unmap(&mapped, &passed).unwrap_err();
        assert_eq!(fixture.home.mappings(), 2);
        fixture.home.unmap(&mapped[1..], &passed).unwrap();
        assert_eq!(fixture.home.mappings(), 0);
    }

    #[test]
    fn mappings_without_access_are_unmapped_without_a_wait() {
        let fixture = fixture();
        let mapped = fixture.map(&[0, 1]);
        fixture.home.set_access(Bytes::ZERO, TWO, &read_write(1)).unwrap();
        let none = fixture.completion_events.synchronize(DeviceSet::EMPTY).unwrap();
        fixture.home.retire(&mapped, fixture.completion_events.mark()).unwrap();
        assert_eq!(refusal(fixture.home.unmap(&mapped[1..], &none)), Refusal::InUse, "too old");
        fixture.home.unmap_now(&mapped[1..]).unwrap();
        assert_eq!((fixture.calls(Verb::ContextSynchronize), fixture.home.mappings()), (0, 1));
        fixture.home.unmap_now(&mapped).unwrap_err();
        fixture.home.unmap_now(&mapped[..1]).unwrap();
        assert_eq!((fixture.calls(Verb::ContextSynchronize), fixture.home.mappings()), (1, 0));
    }

    #[test]
    fn dropping_cleans_up_and_a_lost_context_leaks() {
        let clean = fixture();
        clean.map(&[0, 1, 7]);
        let stub = clean.stub.clone();
        drop(clean);
        assert_eq!(stub.reserved(), 0);
        assert!(stub.mapped.lock().is_empty());
        assert_eq!(stub.live_handles.load(std::sync::atomic::Ordering::Relaxed), 0);

        let lost = fixture();
        lost.map(&[0]);
        lost.home.set_access(Bytes::ZERO, TWO, &read_write(1)).unwrap();
        let (stub, recorder) = (lost.stub.clone(), lost.recorder.clone());
        lost.faults.set(&[Fault { verb: None, when: When::From(1), error: Injected::Sticky(700) }]);
        drop(lost);
        assert_eq!((stub.reserved(), stub.mapped.lock().len()), (1, 1));
        assert_eq!(recorder.counters().of(Verb::Unmap).calls, 0);
    }
}
