//! Observers of memory events, called on the thread that causes the event.

use std::fmt;
use std::sync::Arc;

use glake_device::{Address, DeviceId, Stream};
use glake_tiers::{LeaseEvent, LeaseObserver, MappingObserver};
use glake_units::Bytes;
use parking_lot::RwLock;

use super::activity::ActivityWriter;
use super::history::{Action, History};
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
        })
    }

    /// Returns the receiver of the agent's events.
    #[inline]
    pub(super) fn agent(&self) -> &dyn AgentEvents {
        &*self.agent
    }

    /// Reports the begin of a refill to the agent; the guard reports its end.
    pub(super) fn refill_begins(&self) -> ReportedRefill {
        ReportedRefill { agent: self.agent.clone(), refill: self.agent.refill_begins() }
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
