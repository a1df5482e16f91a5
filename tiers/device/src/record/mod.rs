//! A driver decorator that counts calls, and prices for them.
//!
//! Invariant: a call is counted once, whether it succeeds or fails. Its time is either wall-clock time or the price from a [`CostTable`],
//! never both. Of the verbs that copies consist of, only some calls are timed, which stand for all. Calls name ranges and prices go by
//! extent, so the mapped ranges and their number of GPUs are followed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::decorate::{Call, delegate};
use crate::{Driver, Result, Verb};

/// Driver decorator that counts calls, failures and time for each verb, and keeps a log of calls on request.
#[derive(Debug)]
pub struct Recorder {
    inner: Arc<dyn Driver>,
    tally: Arc<Tally>,
    priced: Option<Arc<Priced>>,
    log: Option<Arc<Mutex<Vec<Logged>>>>,
}

/// Log entry of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logged {
    /// Description of the call.
    pub call: Call,
    /// Whether the call succeeded.
    pub done: bool,
}

#[derive(Debug)]
struct Priced {
    costs: CostTable,
    spans: Mutex<Spans>,
}

impl Recorder {
    /// Times calls by the wall clock: for a real driver.
    pub fn measured(inner: Arc<dyn Driver>) -> Self {
        Recorder { inner, tally: Arc::default(), priced: None, log: None }
    }

    /// Prices each call from a table: for the simulator, whose own speed is meaningless.
    pub fn priced(inner: Arc<dyn Driver>, costs: CostTable) -> Self {
        let priced = Some(Arc::new(Priced { costs, spans: Mutex::default() }));
        Recorder { inner, tally: Arc::default(), priced, log: None }
    }

    /// Also keeps a log of the calls. It grows until it is taken.
    pub fn with_log(mut self) -> Self {
        self.log = Some(Arc::default());
        self
    }

    /// Returns the counters so far: 1 KiB, without a lock. Calls in progress on other threads may be missing.
    pub fn counters(&self) -> Counters {
        self.tally.snapshot()
    }

    /// Returns the log since it was last taken; empty if none is kept.
    pub fn take_log(&self) -> Vec<Logged> {
        self.log.as_ref().map(|log| std::mem::take(&mut *log.lock())).unwrap_or_default()
    }

    fn around<T>(&self, call: Call, verb: impl FnOnce(&dyn Driver) -> Result<T>) -> Result<T> {
        let (outcome, time) = match &self.priced {
            None => {
                let start = self.tally.is_due(call.verb).then(Instant::now);
                let outcome = verb(&*self.inner);
                (outcome, start.map(|start| start.elapsed()))
            }
            Some(priced) => {
                let outcome = verb(&*self.inner);
                let span = priced.spans.lock().follow(&call, outcome.is_ok());
                (outcome, Some(priced.costs.price(call.verb, span)))
            }
        };
        self.tally.add(call.verb, outcome.is_ok(), time);
        if let Some(log) = &self.log {
            log.lock().push(Logged { call, done: outcome.is_ok() });
        }
        outcome
    }
}

impl Counters {
    /// Returns the number of extents mapped so far.
    pub fn extent_maps(&self) -> u64 {
        self.of(Verb::Map).calls
    }
}

impl Driver for Recorder {
    delegate!(devices);
    delegate!(memory);
    delegate!(work);
    delegate!(bytes);
    delegate!(copy_on);
    delegate!(streams);
    delegate!(completion);
    delegate!(contexts);
    delegate!(kernels);
    delegate!(reach);

    /// Returns private contexts whose calls are counted together with these.
    fn own_contexts(&self) -> Result<Arc<dyn Driver>> {
        let inner = self.inner.own_contexts()?;
        let (tally, priced, log) = (self.tally.clone(), self.priced.clone(), self.log.clone());
        Ok(Arc::new(Recorder { inner, tally, priced, log }))
    }
}

/// Prices of calls, in nanoseconds, measured on an H200 with driver 580.159; each number names its measurement. A price per extent is multiplied by the extents in a call's range; for memory mapped for several GPUs,
/// it grows with each GPU after the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CostTable {
    /// Price of `reserve`: half of "reserve+free 6 us" of one 64 MiB block.
    pub reserve: u64,
    /// Price of `unreserve`: the other half.
    pub unreserve: u64,
    /// Price of `create` per extent: 6.8 / 6.3 / 6.7 us at 2 / 16 / 32 MiB.
    pub create: u64,
    /// Price of `map` per extent: 0.8 / 0.4 / 0.35 us at 2 / 16 / 32 MiB.
    pub map: u64,
    /// Price of `set_access` per extent for one GPU: 26-29 us.
    pub access: u64,
    /// Price of `set_access` per extent for each further GPU: four GPUs take 70-74 us, so 15 us more each.
    pub access_further: u64,
    /// Price of `unmap` per extent that one GPU may access: 10-19 us.
    pub unmap: u64,
    /// Price of `unmap` per extent for each further GPU that may access it: four GPUs take 63-67 us, so 17 us more each.
    pub unmap_further: u64,
    /// Price of `release` per extent: 11-20 us.
    pub release: u64,
    /// Price of `event_record`: 0.15 us. Queries are assumed to cost the same; they were not measured.
    pub event_record: u64,
    /// Price of `event_record_context`: 0.14 us with 8 streams.
    pub event_record_context: u64,
    /// Price of `stream_wait_event`: 0.12 us.
    pub stream_wait_event: u64,
    /// Price of `copy`, `fill` and `copy_batch`: 1.3 us to issue an asynchronous copy.
    pub copy: u64,
    /// Price of `read_now` and `write_now`: 7.0 us for 4 KiB copied and waited for, without the time on the link.
    pub copy_now: u64,
    /// Price of `export`: 1 ms the first time.
    pub export: u64,
    /// Price of `import`: 30 us.
    pub import: u64,
    /// Price of `alloc_plain`: 180 us.
    pub alloc_plain: u64,
    /// Price of `free_plain`: 76 us.
    pub free_plain: u64,
}

impl CostTable {
    /// Prices measured on an H200.
    pub const H200: CostTable = CostTable {
        reserve: 3_000,
        unreserve: 3_000,
        create: 6_500,
        map: 400,
        access: 27_000,
        access_further: 15_000,
        unmap: 14_000,
        unmap_further: 17_000,
        release: 14_000,
        event_record: 150,
        event_record_context: 140,
        stream_wait_event: 120,
        copy: 1_300,
        copy_now: 7_000,
        export: 1_000_000,
        import: 30_000,
        alloc_plain: 180_000,
        free_plain: 76_000,
    };

    /// Returns the price of one call. Verbs that were not measured are free.
    fn price(&self, verb: Verb, span: Span) -> Duration {
        let Span { extents, gpus } = span;
        let nanoseconds = match verb {
            Verb::Reserve => self.reserve,
            Verb::Unreserve => self.unreserve,
            Verb::Create => self.create,
            Verb::Map => self.map,
            Verb::SetAccess => extents * self.access + gpus.saturating_sub(extents) * self.access_further,
            Verb::Unmap => extents * self.unmap + gpus.saturating_sub(extents) * self.unmap_further,
            Verb::Release => self.release,
            Verb::EventRecord | Verb::EventQuery => self.event_record,
            Verb::EventRecordContext => self.event_record_context,
            Verb::StreamWaitEvent => self.stream_wait_event,
            Verb::Copy | Verb::CopyBetween | Verb::CopyBatch | Verb::Fill => self.copy,
            Verb::ReadNow | Verb::WriteNow => self.copy_now,
            Verb::Export => self.export,
            Verb::Import => self.import,
            Verb::AllocPlain => self.alloc_plain,
            Verb::FreePlain => self.free_plain,
            _ => 0,
        };
        Duration::from_nanos(nanoseconds)
    }
}

const VERBS: usize = Verb::ALL.len();
/// Sampling period of copy verbs: only one call in this many is timed. A copy over four links is sixteen calls, and each timing reads the
/// clock twice.
const TIMED: u64 = 16;

/// Cost of one verb so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Number of calls, including failures.
    pub calls: u64,
    /// Number of failed calls.
    pub failures: u64,
    /// Total time of the calls, extrapolated from the timed ones.
    pub time: Duration,
}

/// Costs of all verbs up to a moment.
#[derive(Clone, Copy, Debug)]
pub struct Counters {
    counts: [Count; VERBS],
}

impl Counters {
    /// Returns the costs of one verb.
    pub fn of(&self, verb: Verb) -> Count {
        self.counts[verb as usize]
    }

    /// Returns the calls of all verbs together.
    pub fn calls(&self) -> u64 {
        self.counts.iter().map(|count| count.calls).sum()
    }

    /// Returns the time of all verbs together.
    pub fn time(&self) -> Duration {
        self.counts.iter().map(|count| count.time).sum()
    }

    /// Returns the costs since an earlier reading.
    pub fn since(&self, earlier: &Counters) -> Counters {
        let counts = std::array::from_fn(|i| Count {
            calls: self.counts[i].calls.saturating_sub(earlier.counts[i].calls),
            failures: self.counts[i].failures.saturating_sub(earlier.counts[i].failures),
            time: self.counts[i].time.saturating_sub(earlier.counts[i].time),
        });
        Counters { counts }
    }

    /// Iterates over the verbs that were called, in the order of [`Verb::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Verb, Count)> + '_ {
        Verb::ALL.iter().map(|&verb| (verb, self.of(verb))).filter(|(_, count)| count.calls > 0)
    }
}

/// Live counters behind [`Counters`].
#[derive(Debug)]
struct Tally {
    rows: [Row; VERBS],
}

#[derive(Debug, Default)]
struct Row {
    calls: AtomicU64,
    failures: AtomicU64,
    timed: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Default for Tally {
    fn default() -> Self {
        Tally { rows: std::array::from_fn(|_| Row::default()) }
    }
}

impl Tally {
    /// Returns whether the next call of a verb should be timed.
    fn is_due(&self, verb: Verb) -> bool {
        !is_frequent(verb) || self.rows[verb as usize].calls.load(Relaxed).is_multiple_of(TIMED)
    }

    fn add(&self, verb: Verb, done: bool, time: Option<Duration>) {
        let row = &self.rows[verb as usize];
        row.calls.fetch_add(1, Relaxed);
        if !done {
            row.failures.fetch_add(1, Relaxed);
        }
        if let Some(time) = time {
            row.timed.fetch_add(1, Relaxed);
            row.nanoseconds.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Relaxed);
        }
    }

    fn snapshot(&self) -> Counters {
        Counters { counts: std::array::from_fn(|i| self.rows[i].count()) }
    }
}

impl Row {
    fn count(&self) -> Count {
        let (calls, timed) = (self.calls.load(Relaxed), self.timed.load(Relaxed));
        let nanoseconds = self.nanoseconds.load(Relaxed);
        let all = u128::from(nanoseconds) * u128::from(calls) / u128::from(timed.max(1));
        let time = Duration::from_nanos(u64::try_from(all).unwrap_or(u64::MAX));
        Count { calls, failures: self.failures.load(Relaxed), time }
    }
}

const fn is_frequent(verb: Verb) -> bool {
    matches!(
        verb,
        Verb::Copy
            | Verb::CaptureState
            | Verb::EventRecord
            | Verb::EventQuery
            | Verb::StreamDevice
            | Verb::StreamWaitEvent
    )
}

/// Contents of a call's range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Span {
    /// Number of mapped extents.
    extents: u64,
    /// Sum over the extents of the GPUs that may access each, counting at least one.
    gpus: u64,
}

/// Mappings by start address.
#[derive(Debug, Default)]
struct Spans {
    mapped: BTreeMap<u64, u64>,
}

impl Spans {
    /// Applies one call and returns the contents of its range.
    fn follow(&mut self, call: &Call, done: bool) -> Span {
        let start = call.start.0;
        let range = start..start.saturating_add(call.size.get());
        match call.verb {
            Verb::Map if done => {
                self.mapped.insert(start, 0);
                Span { extents: 1, gpus: 1 }
            }
            Verb::SetAccess => {
                let mut span = Span::default();
                for (_, gpus) in self.mapped.range_mut(range) {
                    // Calls that name fewer GPUs remove no access, so the number never falls.
                    if done {
                        *gpus = (*gpus).max(u64::from(call.gpus));
                    }
                    span.extents += 1;
                    span.gpus += u64::from(call.gpus.max(1));
                }
                span
            }
            Verb::Unmap => {
                let starts: Vec<(u64, u64)> = self.mapped.range(range).map(|(s, g)| (*s, *g)).collect();
                let mut span = Span::default();
                for (start, gpus) in starts {
                    span.extents += 1;
                    span.gpus += gpus.max(1);
                    if done {
                        self.mapped.remove(&start);
                    }
                }
                span
            }
            _ => Span::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use glake_units::Bytes;

    use super::*;
    use crate::stub::{Stub, extent_properties, read_write};
    use crate::{Address, Handle};

    /// Maps `extents` of 2 MiB side by side, gives `gpus` access and unmaps them all in one call each.
    fn live_and_die(driver: &dyn Driver, extents: u64, gpus: u32) {
        let size = Bytes::mib(2);
        let all = Bytes::mib(2 * extents);
        let start = driver.reserve(all).unwrap();
        for i in 0..extents {
            let handle = driver.create(size, extent_properties()).unwrap();
            let at = Address(start.0 + i * size.get());
            // SAFETY: the stub has no memory.
            unsafe {
                driver.map(at, size, handle).unwrap();
                driver.release(handle).unwrap();
            }
        }
        // SAFETY: the stub has no memory.
        unsafe {
            driver.set_access(start, all, &read_write(gpus)).unwrap();
            driver.unmap(start, all).unwrap();
            driver.unreserve(start, all).unwrap();
        }
    }

    #[test]
    fn prices_scale_with_the_extents_of_a_range() {
        let recorder = Recorder::priced(Stub::new(), CostTable::H200);
        live_and_die(&recorder, 3, 1);
        let one = recorder.counters();
        assert_eq!(one.of(Verb::SetAccess), Count { calls: 1, failures: 0, time: Duration::from_micros(81) });
        assert_eq!(one.of(Verb::Unmap).time, Duration::from_micros(3 * 14));
        assert_eq!(one.of(Verb::Create).time, Duration::from_nanos(3 * 6500));
        assert_eq!(one.extent_maps(), 3);
        live_and_die(&recorder, 3, 4);
        let four = recorder.counters().since(&one);
        assert_eq!(four.of(Verb::SetAccess).time, Duration::from_micros(3 * 72));
        assert_eq!(four.of(Verb::Unmap).time, Duration::from_micros(3 * 65));
        assert_eq!(four.of(Verb::Reserve).time + four.of(Verb::Unreserve).time, Duration::from_micros(6));
    }

    #[test]
    fn failed_calls_count_as_failures_and_change_no_span() {
        let stub = Stub::new();
        let faults = Arc::new(crate::Faults::new(stub));
        let recorder = Recorder::priced(faults.clone(), CostTable::H200);
        faults.set(&[crate::Fault {
            verb: Some(Verb::Map),
            when: crate::When::Nth(2),
            error: crate::Injected::NotReady,
        }]);
        let start = recorder.reserve(Bytes::mib(4)).unwrap();
        // SAFETY: the stub has no memory.
        unsafe {
            recorder.map(start, Bytes::mib(2), Handle(1)).unwrap();
            recorder.map(Address(start.0 + (2 << 20)), Bytes::mib(2), Handle(2)).unwrap_err();
            recorder.unmap(start, Bytes::mib(4)).unwrap();
        }
        let counters = recorder.counters();
        assert_eq!(counters.of(Verb::Map).failures, 1);
        assert_eq!(counters.of(Verb::Unmap).time, Duration::from_micros(14));
        assert_eq!(counters.calls(), 4);
    }

    #[test]
    fn timed_calls_stand_for_untimed_ones() {
        let tally = Tally::default();
        let timed = (0..40).filter(|_| {
            let due = tally.is_due(Verb::Copy);
            tally.add(Verb::Copy, true, due.then_some(Duration::from_nanos(300)));
            due
        });
        assert_eq!(timed.count(), 3);
        let copies = tally.snapshot().of(Verb::Copy);
        assert_eq!(copies, Count { calls: 40, failures: 0, time: Duration::from_micros(12) });
        for _ in 0..40 {
            assert!(tally.is_due(Verb::Map), "what is seldom asked is always timed");
            tally.add(Verb::Map, true, Some(Duration::from_nanos(1)));
        }
        assert_eq!(tally.snapshot().of(Verb::Map).time, Duration::from_nanos(40));
    }

    #[test]
    fn the_log_keeps_calls_in_order() {
        let recorder = Recorder::measured(Stub::new()).with_log();
        live_and_die(&recorder, 1, 1);
        let log = recorder.take_log();
        let verbs: Vec<Verb> = log.iter().map(|logged| logged.call.verb).collect();
        use Verb::*;
        assert_eq!(verbs, [Reserve, Create, Map, Release, SetAccess, Unmap, Unreserve]);
        assert_eq!((log[4].call.gpus, log[4].call.size), (1, Bytes::mib(2)));
        assert!(recorder.take_log().is_empty());
        assert_eq!(recorder.counters().calls(), 7);
    }
}
