//! Who wants to be told. Called on the thread at hand.

use std::fmt;
use std::sync::Arc;

use glake_device::{Address, DeviceId, Stream};
use glake_tiers::{LeaseEvent, LeaseObserver, MappingObserver};
use glake_units::Bytes;
use parking_lot::RwLock;

use super::agent::Port;
use super::history::{Action, History};
use super::{PoolId, Shortage};

/// Told of a request that is about to be refused, with no lock held.
pub type OnShortage = Arc<dyn Fn(&Shortage) + Send + Sync>;

/// Told of memory that was mapped for blocks (true) or is about to be unmapped, at home and in aliases. While it runs, no
/// other miss of the device goes on: it must not ask for memory.
pub type OnMapping = Arc<dyn Fn(DeviceId, bool, Address, Bytes) + Send + Sync>;

/// Told of what is wanted of a lease, and given back: the device and how many bytes. On any thread, with no lock held but that of regions
/// that move: it may change leases, and must neither move regions nor wait for long.
pub type OnLease = Arc<dyn Fn(LeaseEvent, DeviceId, Bytes) + Send + Sync>;

/// The observers of a process, one of each kind, and the history, which is one too.
pub struct Observers {
    pub(super) history: History,
    shortage: RwLock<Option<OnShortage>>,
    mapping: RwLock<Option<OnMapping>>,
    lease: RwLock<Option<OnLease>>,
    agent: Arc<Port>,
}

impl Observers {
    pub(super) fn new(devices: usize, agent: Arc<Port>) -> Arc<Self> {
        Arc::new(Observers {
            history: History::new(devices),
            shortage: RwLock::default(),
            mapping: RwLock::default(),
            lease: RwLock::default(),
            agent,
        })
    }

    /// Where what an agent hears is noted.
    #[inline]
    pub(super) fn agent(&self) -> &Arc<Port> {
        &self.agent
    }

    /// Starts or stops to keep events, the last `most` of them.
    pub fn keep_history(&self, on: bool, most: u64, clear: bool) {
        self.history.keep(on, most, clear);
    }

    /// Whether events are kept.
    pub fn keeps_history(&self) -> bool {
        self.history.is_on()
    }

    /// Who is told of every request that is about to be refused for want of memory; replaces who was told before.
    pub fn on_shortage(&self, observer: Option<OnShortage>) {
        let before = std::mem::replace(&mut *self.shortage.write(), observer);
        // Its end is the program's code.
        drop(before);
    }

    /// Who is told of every range that is mapped and unmapped; replaces who was told before.
    pub fn on_mapping(&self, observer: Option<OnMapping>) {
        let before = std::mem::replace(&mut *self.mapping.write(), observer);
        drop(before);
    }

    /// Who is told of leases; replaces who was told before.
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
        self.agent.activity.made(device, bytes);
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
