//! Observers of memory events, called on the thread that causes the event, and the history of recent events.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use glake_device::{Address, DeviceId, Stream};
use glake_tiers::{LeaseEvent, LeaseObserver, MappingObserver};
use glake_units::Bytes;
use parking_lot::{Mutex, RwLock};

use super::activity::ActivityWriter;
use super::counters::CountersWriter;
use super::{PoolId, Shortage};

/// Observer of requests that are about to fail, called without locks.
pub type OnShortage = Arc<dyn Fn(&Shortage) + Send + Sync>;

/// Observer of memory that was mapped for blocks (`true`) or is about to be unmapped (`false`), including aliases. No other miss of the
/// device proceeds while it runs, so it must not allocate.
pub type OnMapping = Arc<dyn Fn(DeviceId, bool, Address, Bytes) + Send + Sync>;

/// Observer of wanted and returned lease bytes of a device. Called on any thread, with no lock held except that of moving regions: it may
/// change leases, but must neither move regions nor wait for long.
pub type OnLease = Arc<dyn Fn(LeaseEvent, DeviceId, Bytes) + Send + Sync>;

/// Events of a process that its agent must know. Without an agent each costs one atomic load.
pub(super) trait AgentEvents: fmt::Debug + Send + Sync {
    /// Returns whether an agent controls the leases (one atomic load).
    fn is_on(&self) -> bool;

    /// Reports the event of a lease.
    fn told(&self, event: LeaseEvent, device: DeviceId, bytes: Bytes);

    /// Reports that a waiting caller needs more memory than the last want said.
    fn want_again(&self);

    /// Reports that the holdings have changed.
    fn changed(&self);

    /// Ends a start, so that other workers may load.
    fn start_is_over(&self);

    /// Records that a use has begun or the program has declared itself loaded: between uses its memory may be evicted from now on.
    fn has_loaded(&self);

    /// Reports that the pool of a device is about to start; may join the agent and wait for it.
    fn pool_starts(&self, device: DeviceId, observers: &Observers);

    /// Reports the begin of a refill. Returns a number for [`AgentEvents::refill_ended`], or `None` without an agent.
    fn refill_begins(&self) -> Option<u64>;

    /// Reports the end of the refill with this number.
    fn refill_ended(&self, refill: u64, outcome: Result<(), String>);
}

/// Guard that reports the end of a refill to the agent.
#[derive(Debug)]
pub(super) struct ReportedRefill {
    agent: Arc<dyn AgentEvents>,
    counters: Arc<CountersWriter>,
    refill: Option<u64>,
}

impl ReportedRefill {
    /// Reports the result of the refill.
    pub(super) fn end<T, E: fmt::Display>(mut self, outcome: &Result<T, E>) {
        if let Some(refill) = self.refill.take() {
            self.agent.refill_ended(refill, outcome.as_ref().map(|_| ()).map_err(ToString::to_string));
        }
    }
}

impl Drop for ReportedRefill {
    fn drop(&mut self) {
        if let Some(refill) = self.refill.take() {
            self.agent.refill_ended(refill, Err("it was given up".to_owned()));
        }
        self.counters.note();
    }
}

/// Observers of a process, one of each kind, and the history of events.
pub struct Observers {
    pub(super) history: History,
    shortage: RwLock<Option<OnShortage>>,
    mapping: RwLock<Option<OnMapping>>,
    lease: RwLock<Option<OnLease>>,
    agent: Arc<dyn AgentEvents>,
    pub(super) activity: Arc<ActivityWriter>,
    pub(super) counters: Arc<CountersWriter>,
}

impl Observers {
    pub(super) fn new(
        devices: usize,
        agent: Arc<dyn AgentEvents>,
        activity: Arc<ActivityWriter>,
    ) -> Arc<Self> {
        Arc::new(Observers {
            history: History::new(devices),
            shortage: RwLock::default(),
            mapping: RwLock::default(),
            lease: RwLock::default(),
            agent,
            activity,
            counters: Arc::default(),
        })
    }

    /// Returns the receiver of the agent's events.
    #[inline]
    pub(super) fn agent(&self) -> &dyn AgentEvents {
        &*self.agent
    }

    /// Reports the begin of a refill to the agent; the guard reports its end.
    pub(super) fn refill_begins(&self) -> ReportedRefill {
        let (agent, counters) = (self.agent.clone(), self.counters.clone());
        ReportedRefill { refill: agent.refill_begins(), agent, counters }
    }

    /// Enables or disables the history, with the last `most` events.
    pub fn keep_history(&self, on: bool, most: u64, clear: bool) {
        self.history.keep(on, most, clear);
    }

    /// Returns whether history is enabled.
    pub fn keeps_history(&self) -> bool {
        self.history.is_on()
    }

    /// Sets the observer of requests that are about to fail for lack of memory, replacing the previous one.
    pub fn on_shortage(&self, observer: Option<OnShortage>) {
        let before = std::mem::replace(&mut *self.shortage.write(), observer);
        // Its destructor is the program's code.
        drop(before);
    }

    /// Sets the observer of mapped and unmapped ranges, replacing the previous one.
    pub fn on_mapping(&self, observer: Option<OnMapping>) {
        let before = std::mem::replace(&mut *self.mapping.write(), observer);
        drop(before);
    }

    /// Sets the observer of leases, replacing the previous one.
    pub fn on_lease(&self, observer: Option<OnLease>) {
        let before = std::mem::replace(&mut *self.lease.write(), observer);
        drop(before);
    }

    pub(super) fn tell_shortage(&self, shortage: &Shortage) {
        let observer = self.shortage.read().clone();
        if let Some(observer) = observer {
            observer(shortage);
        }
    }

    fn tell_mapping(&self, device: DeviceId, mapped: bool, address: Address, size: Bytes) {
        if self.history.is_on() {
            let action = if mapped { Action::SegmentMap } else { Action::SegmentUnmap };
            self.history.note(action, device, (address.0, size.get()), Stream(0), PoolId::default());
        }
        let observer = self.mapping.read().clone();
        if let Some(observer) = observer {
            observer(device, mapped, address, size);
        }
    }
}

impl MappingObserver for Observers {
    fn mapped(&self, device: DeviceId, address: Address, size: Bytes) {
        self.tell_mapping(device, true, address, size);
    }

    fn unmapping(&self, device: DeviceId, address: Address, size: Bytes) {
        self.tell_mapping(device, false, address, size);
    }
}

impl LeaseObserver for Observers {
    fn is_listening(&self) -> bool {
        self.agent.is_on() || self.lease.read().is_some()
    }

    fn made(&self, device: DeviceId, bytes: Bytes) {
        self.activity.made(device, bytes);
        self.counters.note();
    }

    fn told(&self, event: LeaseEvent, device: DeviceId, bytes: Bytes) {
        self.agent.told(event, device, bytes);
        let observer = self.lease.read().clone();
        if let Some(observer) = observer {
            observer(event, device, bytes);
        }
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Observers");
        shown.field("history", &self.history).field("shortage", &self.shortage.read().is_some());
        shown.field("mapping", &self.mapping.read().is_some());
        shown.field("lease", &self.lease.read().is_some()).finish()
    }
}

/// Kind of an event, with torch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A block was allocated.
    Alloc,
    /// A block was freed by the program.
    FreeRequested,
    /// A freed block may be reused by its stream.
    FreeCompleted,
    /// Physical memory was mapped.
    SegmentMap,
    /// Physical memory is about to be unmapped.
    SegmentUnmap,
    /// A request failed; the address field holds the device's free memory.
    OutOfMemory,
    /// A snapshot was taken.
    Snapshot,
}

/// One recorded event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) action: Action,
    pub(super) address: u64,
    pub(super) size: u64,
    pub(super) stream: Stream,
    pub(super) pool: PoolId,
    pub(super) time_us: u64,
}

/// Events of all devices, a ring buffer each.
#[derive(Debug)]
pub(super) struct History {
    on: AtomicBool,
    rings: Vec<Mutex<Ring>>,
}

#[derive(Debug, Default)]
struct Ring {
    most: usize,
    entries: VecDeque<Entry>,
}

impl Action {
    /// Returns torch's name of the event.
    pub(super) fn name(self) -> &'static str {
        match self {
            Action::Alloc => "alloc",
            Action::FreeRequested => "free_requested",
            Action::FreeCompleted => "free_completed",
            Action::SegmentMap => "segment_map",
            Action::SegmentUnmap => "segment_unmap",
            Action::OutOfMemory => "oom",
            Action::Snapshot => "snapshot",
        }
    }
}

impl History {
    pub(super) fn new(devices: usize) -> Self {
        let rings = std::iter::repeat_with(Mutex::default).take(devices);
        History { on: AtomicBool::new(false), rings: rings.collect() }
    }

    /// Enables or disables history, with the last `most` events of each device; earlier events stay unless `clear` is set.
    pub(super) fn keep(&self, on: bool, most: u64, clear: bool) {
        for ring in &self.rings {
            let mut ring = ring.lock();
            if clear {
                ring.entries = VecDeque::new();
            }
            if on {
                ring.most = usize::try_from(most).unwrap_or(usize::MAX).max(1);
                let excess = ring.entries.len().saturating_sub(ring.most);
                ring.entries.drain(..excess);
            }
        }
        self.on.store(on, Ordering::Release);
    }

    /// Returns whether history is enabled.
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Records an event if history is enabled.
    #[cold]
    pub(super) fn note(
        &self,
        action: Action,
        device: DeviceId,
        (address, size): (u64, u64),
        stream: Stream,
        pool: PoolId,
    ) {
        let Some(ring) = self.rings.get(device.0 as usize) else { return };
        let mut ring = ring.lock();
        if !self.on.load(Ordering::Acquire) {
            return;
        }
        while ring.entries.len() >= ring.most {
            ring.entries.pop_front();
        }
        // Timestamp under the lock, so that the ring is in the order of time.
        let time_us = now_us();
        ring.entries.push_back(Entry { action, address, size, stream, pool, time_us });
    }

    /// Returns the events of a device, oldest first.
    pub(super) fn of(&self, device: DeviceId) -> Vec<Entry> {
        let ring = self.rings.get(device.0 as usize).map(Mutex::lock);
        ring.map_or_else(Vec::new, |ring| ring.entries.iter().copied().collect())
    }
}

/// Returns the microseconds since 1970, as torch records them.
fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod history_tests {
    use super::*;

    fn note(history: &History, address: u64) {
        history.note(Action::Alloc, DeviceId(0), (address, 1), Stream(0), PoolId(0, 0));
    }

    #[test]
    fn keeps_the_last_ones_while_it_is_on() {
        let history = History::new(2);
        note(&history, 1);
        assert!(!history.is_on() && history.of(DeviceId(0)).is_empty());
        history.keep(true, 3, false);
        (2..7).for_each(|address| note(&history, address));
        let kept = || history.of(DeviceId(0)).iter().map(|entry| entry.address).collect::<Vec<_>>();
        assert_eq!(kept(), [4, 5, 6]);
        history.note(Action::Snapshot, DeviceId(1), (0, 0), Stream(0), PoolId(0, 0));
        assert_eq!((kept().len(), history.of(DeviceId(1)).len(), history.of(DeviceId(2)).len()), (3, 1, 0));
        history.keep(false, 0, false);
        note(&history, 7);
        assert_eq!(kept(), [4, 5, 6]);
        history.keep(true, 2, false);
        assert_eq!(kept(), [5, 6]);
        history.keep(true, 2, true);
        assert!(kept().is_empty());
    }
}
