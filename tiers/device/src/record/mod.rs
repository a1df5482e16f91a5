//! A driver decorator that counts calls.
//!
//! Invariant: a call is counted once, whether it succeeds or fails. Its time is either wall-clock time or the price from a [`CostTable`],
//! never both. Of the verbs that copies consist of, only some calls are timed, which stand for all.

mod cost;
mod counters;
mod spans;

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

pub use cost::CostTable;
pub use counters::{Count, Counters};

use crate::decorate::{Call, delegate};
use crate::{Driver, Result, Verb};
use counters::Tally;
use spans::Spans;

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
