//! GPUs that relay copies of others' memory, and relays that were lost.
//!
//! Invariants:
//! - A lost relay is never used again: it is in no set of usable relays.
//! - New copies do not use a suspended relay. Its resources are released only when no copy uses them (`suspension`).
//! - A copy's part is counted (`begin`) before it is enqueued and until it is known to have arrived (`confirm`). So either the thread that
//!   loses the relay counts it, or the thread that enqueues it sees the loss: both read after they have written.
//! - A relay that was left to the program stays suspended.
//! - Every part counted by a loss is reported: by the copy's handle, and once by the next call.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::Bytes;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::links::lane::Ring;
use crate::{RelayCost, Result, TransferError};

#[derive(Debug)]
pub(crate) struct Relays {
    wanted: AtomicU64,
    ready: AtomicU64,
    fenced: AtomicU64,
    /// Relays that are suspended or being suspended.
    suspended: AtomicU64,
    /// Relays that the program uses; empty if GPUs are shared.
    left: AtomicU64,
    shared: bool,
    each: Box<[Relay]>,
    /// Whether `lost` has entries. Read for every copy.
    is_lost: AtomicBool,
    lost: Mutex<SmallVec<[(DeviceId, u64); 4]>>,
    lost_copies: AtomicU64,
}

/// State of one GPU.
#[derive(Debug, Default)]
struct Relay {
    /// Parts enqueued and not known to have arrived.
    unconfirmed: AtomicU64,
    rings: Mutex<Vec<Ring>>,
    cost: Mutex<Option<RelayCost>>,
}

impl Relays {
    pub(crate) fn new(devices: usize, wanted: DeviceSet, shared: bool) -> Relays {
        Relays {
            wanted: AtomicU64::new(wanted.bits()),
            ready: AtomicU64::new(0),
            fenced: AtomicU64::new(0),
            suspended: AtomicU64::new(0),
            left: AtomicU64::new(0),
            shared,
            each: (0..devices).map(|_| Relay::default()).collect(),
            is_lost: AtomicBool::new(false),
            lost: Mutex::default(),
            lost_copies: AtomicU64::new(0),
        }
    }

    /// Returns the relays that new copies may use.
    pub(crate) fn usable(&self) -> DeviceSet {
        let bits = self.wanted.load(Ordering::Relaxed) & self.ready.load(Ordering::Acquire);
        let out =
            self.fenced.load(Ordering::Acquire) | self.suspended.load(Ordering::Acquire) | self.left().bits();
        DeviceSet::from_bits(bits & !out)
    }

    /// Returns whether GPUs that the program uses may be relays.
    pub(crate) fn are_shared(&self) -> bool {
        self.shared
    }

    /// Returns the relays that the program uses, if GPUs are not shared.
    pub(crate) fn left(&self) -> DeviceSet {
        DeviceSet::from_bits(self.left.load(Ordering::Acquire))
    }

    /// Excludes a relay for the rest of the process. Returns `true` the first time.
    pub(crate) fn leave_to_program(&self, relay: DeviceId) -> bool {
        let bit = DeviceSet::of(relay).bits();
        !self.shared && self.left.fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// Returns the relays that are suspended or being suspended.
    pub(crate) fn suspended(&self) -> DeviceSet {
        DeviceSet::from_bits(self.suspended.load(Ordering::SeqCst))
    }

    /// Excludes relays from new copies.
    pub(crate) fn suspend(&self, relays: DeviceSet) {
        self.suspended.fetch_or(relays.bits(), Ordering::SeqCst);
    }

    /// Ends all suspensions except of relays that the program uses. Relays that still have lanes are usable immediately.
    pub(crate) fn resume(&self) {
        self.suspended.fetch_and(self.left().bits(), Ordering::SeqCst);
    }

    pub(crate) fn wanted(&self) -> DeviceSet {
        DeviceSet::from_bits(self.wanted.load(Ordering::Relaxed))
    }

    pub(crate) fn want(&self, relays: DeviceSet) {
        self.wanted.store(relays.bits(), Ordering::Relaxed);
    }

    /// Returns the relays with lanes, usable or not.
    pub(crate) fn ready(&self) -> DeviceSet {
        DeviceSet::from_bits(self.ready.load(Ordering::Acquire))
    }

    pub(crate) fn add_ready(&self, relay: DeviceId) {
        self.ready.fetch_or(DeviceSet::of(relay).bits(), Ordering::Release);
    }

    /// Removes a relay whose lanes are about to be destroyed.
    pub(crate) fn remove_ready(&self, relay: DeviceId) {
        self.ready.fetch_and(!DeviceSet::of(relay).bits(), Ordering::SeqCst);
    }

    /// Returns the relays that were lost.
    pub(crate) fn fenced(&self) -> DeviceSet {
        DeviceSet::from_bits(self.fenced.load(Ordering::SeqCst))
    }

    pub(crate) fn is_fenced(&self, relay: DeviceId) -> bool {
        self.fenced().contains(relay)
    }

    /// Takes all rings that no lane set holds.
    pub(crate) fn take_rings(&self, relay: DeviceId) -> Vec<Ring> {
        let Some(of) = self.of(relay) else { return Vec::new() };
        if let Some(cost) = &mut *of.cost.lock() {
            cost.slots = Bytes::ZERO;
        }
        std::mem::take(&mut of.rings.lock())
    }

    /// Takes a ring that no work uses.
    pub(crate) fn take_ring(&self, relay: DeviceId) -> Option<Ring> {
        self.of(relay)?.rings.lock().pop()
    }

    /// Returns a ring whose work has completed.
    pub(crate) fn give_ring(&self, relay: DeviceId, ring: Ring) {
        if let Some(of) = self.of(relay) {
            of.rings.lock().push(ring);
        }
    }

    pub(crate) fn set_cost(&self, cost: RelayCost) {
        if let Some(of) = self.of(cost.relay) {
            *of.cost.lock() = Some(cost);
        }
    }

    /// Clears the cost of a relay whose context was released.
    pub(crate) fn drop_cost(&self, relay: DeviceId) {
        if let Some(of) = self.of(relay) {
            *of.cost.lock() = None;
        }
    }

    pub(crate) fn cost(&self, relay: DeviceId) -> Option<RelayCost> {
        *self.of(relay)?.cost.lock()
    }

    pub(crate) fn costs(&self) -> Vec<RelayCost> {
        self.each.iter().filter_map(|of| *of.cost.lock()).collect()
    }

    /// Counts a part of a copy that is about to be enqueued. Returns `false`, without counting it, if the relay is lost.
    pub(crate) fn begin(&self, relay: DeviceId) -> bool {
        let Some(of) = self.of(relay) else { return false };
        of.unconfirmed.fetch_add(1, Ordering::SeqCst);
        if self.is_fenced(relay) {
            self.confirm(relay, 1);
            return false;
        }
        true
    }

    /// Removes parts that have arrived or were not enqueued after all.
    pub(crate) fn confirm(&self, relay: DeviceId, parts: u64) {
        if let Some(of) = self.of(relay) {
            // A loss that counted them in the meantime has left nothing to take away. The closure always answers.
            let less = |count: u64| Some(count.saturating_sub(parts));
            let _ = of.unconfirmed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        }
    }

    /// Disables a relay permanently. The first call records its pending parts as lost.
    pub(crate) fn fence(&self, relay: DeviceId) {
        let bit = DeviceSet::of(relay).bits();
        if self.fenced.fetch_or(bit, Ordering::SeqCst) & bit != 0 {
            return;
        }
        let copies = self.of(relay).map_or(0, |of| of.unconfirmed.swap(0, Ordering::SeqCst));
        tracing::warn!(
            target: "glake::transfer", %relay, copies,
            "a relay is lost: copies do without it for the rest of the process"
        );
        if copies > 0 {
            self.lost_copies.fetch_add(copies, Ordering::Relaxed);
            self.lost.lock().push((relay, copies));
            self.is_lost.store(true, Ordering::Release);
        }
    }

    /// Reports losses, each once.
    ///
    /// # Errors
    /// [`TransferError::Lost`].
    pub(crate) fn tell(&self) -> Result<()> {
        if !self.is_lost.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut lost = self.lost.lock();
        let first = lost.pop();
        self.is_lost.store(!lost.is_empty(), Ordering::Release);
        match first {
            Some((relay, copies)) => Err(TransferError::Lost { relay, copies }),
            None => Ok(()),
        }
    }

    pub(crate) fn lost_copies(&self) -> u64 {
        self.lost_copies.load(Ordering::Relaxed)
    }

    fn of(&self, relay: DeviceId) -> Option<&Relay> {
        self.each.get(usize::try_from(relay.0).ok()?)
    }
}
