//! A driver decorator whose GPU lags behind the host by a fixed time on a virtual clock.
//!
//! An event completes once the lag has passed on the clock since it was recorded and the wrapped driver has completed it too. The clock is
//! the time set by a replay plus the time spent waiting: a wait on the host moves the clock to the end of the wait, and everything after it
//! happens that much later, as in the replayed program.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::decorate::{Call, delegate};
use crate::{DeviceId, Driver, Event, Result, Stream};

/// Driver decorator that makes a GPU lag behind the host. A lag of zero changes nothing.
#[derive(Debug)]
pub struct Lag {
    inner: Arc<dyn Driver>,
    lag: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    now: Duration,
    waited: Duration,
    /// Recorded events that have not been seen to complete.
    records: HashMap<(DeviceId, Event), Record>,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    at: Duration,
    /// Stream of the event; `None` for a whole context.
    stream: Option<Stream>,
}

impl Lag {
    /// Wraps a driver whose GPU lags by `lag`; the clock starts at zero.
    pub fn new(inner: Arc<dyn Driver>, lag: Duration) -> Self {
        Lag { inner, lag, state: Mutex::default() }
    }

    /// Sets the replay's time. The clock never runs backwards: an earlier time changes nothing.
    pub fn set_now(&self, now: Duration) {
        let mut state = self.state.lock();
        state.now = state.now.max(now);
    }

    /// Returns the virtual time that the host has waited so far.
    pub fn waited(&self) -> Duration {
        self.state.lock().waited
    }

    fn around<T>(&self, _: Call, verb: impl FnOnce(&dyn Driver) -> Result<T>) -> Result<T> {
        verb(&*self.inner)
    }

    fn recorded(&self, device: DeviceId, event: Event, stream: Option<Stream>) {
        let mut state = self.state.lock();
        let at = state.clock();
        state.records.insert((device, event), Record { at, stream });
    }

    /// Moves the clock to the completion of all recorded events selected by `of`.
    fn wait_for(&self, of: impl Fn(&(DeviceId, Event), &Record) -> bool) {
        let mut state = self.state.lock();
        let due = state.records.iter().filter(|(key, record)| of(key, record)).map(|(_, record)| record.at);
        if let Some(last) = due.max() {
            let wait = (last + self.lag).saturating_sub(state.clock());
            state.waited += wait;
        }
    }
}

impl State {
    fn clock(&self) -> Duration {
        self.now + self.waited
    }
}

impl Driver for Lag {
    delegate!(devices);
    delegate!(memory);
    delegate!(work);
    delegate!(bytes);
    delegate!(copy_on);
    delegate!(streams);
    delegate!(contexts);
    delegate!(kernels);
    delegate!(reach);

    /// Returns undelayed private contexts: replays enqueue no work there.
    fn own_contexts(&self) -> Result<Arc<dyn Driver>> {
        self.inner.own_contexts()
    }

    fn stream_synchronize(&self, device: DeviceId, stream: Stream) -> Result<()> {
        self.wait_for(|key, record| key.0 == device && record.stream == Some(stream));
        self.inner.stream_synchronize(device, stream)
    }

    unsafe fn event_destroy(&self, device: DeviceId, event: Event) -> Result<()> {
        self.state.lock().records.remove(&(device, event));
        // SAFETY: the caller's promise is passed on as it is.
        unsafe { self.inner.event_destroy(device, event) }
    }

    fn event_record(&self, device: DeviceId, event: Event, stream: Stream) -> Result<()> {
        self.inner.event_record(device, event, stream)?;
        self.recorded(device, event, Some(stream));
        Ok(())
    }

    fn event_record_context(&self, device: DeviceId, event: Event) -> Result<()> {
        self.inner.event_record_context(device, event)?;
        self.recorded(device, event, None);
        Ok(())
    }

    fn event_query(&self, device: DeviceId, event: Event) -> Result<bool> {
        {
            let mut state = self.state.lock();
            let clock = state.clock();
            match state.records.get(&(device, event)) {
                Some(record) if record.at + self.lag > clock => return Ok(false),
                Some(_) => state.records.remove(&(device, event)),
                None => None,
            };
        }
        self.inner.event_query(device, event)
    }

    fn event_synchronize(&self, device: DeviceId, event: Event) -> Result<()> {
        self.wait_for(|key, _| *key == (device, event));
        self.inner.event_synchronize(device, event)
    }

    fn context_synchronize(&self, device: DeviceId) -> Result<()> {
        self.wait_for(|key, _| key.0 == device);
        self.inner.context_synchronize(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EventKind;
    use crate::stub::Stub;

    const GPU: DeviceId = DeviceId(0);
    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn an_event_completes_after_the_lag() {
        let lag = Lag::new(Stub::new(), MS(100));
        let event = lag.event_create(GPU, EventKind::Plain).unwrap();
        assert!(lag.event_query(GPU, event).unwrap(), "never recorded");
        lag.set_now(MS(5));
        lag.event_record_context(GPU, event).unwrap();
        for (now, passed) in [(5, false), (104, false), (105, true), (90, true)] {
            lag.set_now(MS(now));
            assert_eq!(lag.event_query(GPU, event).unwrap(), passed, "{now}");
        }
    }

    #[test]
    fn a_wait_delays_later_events() {
        let lag = Lag::new(Stub::new(), MS(100));
        let events: Vec<Event> = (0..3).map(|_| lag.event_create(GPU, EventKind::Plain).unwrap()).collect();
        lag.event_record(GPU, events[0], Stream(7)).unwrap();
        lag.set_now(MS(10));
        lag.event_record(GPU, events[1], Stream(8)).unwrap();
        lag.event_synchronize(GPU, events[0]).unwrap();
        assert_eq!(lag.waited(), MS(90));
        assert!(lag.event_query(GPU, events[0]).unwrap());
        assert!(!lag.event_query(GPU, events[1]).unwrap());
        lag.set_now(MS(20));
        assert!(lag.event_query(GPU, events[1]).unwrap());
        lag.event_record_context(GPU, events[2]).unwrap();
        lag.set_now(MS(119));
        assert!(!lag.event_query(GPU, events[2]).unwrap());
        lag.context_synchronize(GPU).unwrap();
        assert_eq!(lag.waited(), MS(91));
        assert!(lag.event_query(GPU, events[2]).unwrap());
    }

    #[test]
    fn zero_lag_changes_nothing() {
        let lag = Lag::new(Stub::new(), Duration::ZERO);
        let event = lag.event_create(GPU, EventKind::Plain).unwrap();
        lag.event_record_context(GPU, event).unwrap();
        assert!(lag.event_query(GPU, event).unwrap());
    }
}
