//! GPUs that relay copies of other GPUs' memory, relays that were lost, and the results of suspensions (`engine::suspension`).
//!
//! Invariants:
//! - A lost relay is never used again: it is in no set of usable relays.
//! - New copies do not use a suspended relay. Its resources are released only when no copy uses them (`engine::suspension`).
//! - A copy's part is counted (`begin`) before it is enqueued and until it is known to have arrived (`confirm`). Either the thread that
//!   reports the loss counts the part, or the thread that enqueues the part sees the loss: both write before they read.
//! - A relay that was left to the program stays suspended.
//! - Every part counted by a loss is reported: by the copy's handle, and once by the next call.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use glake_device::owned::DeviceSet;
use glake_device::{DeviceId, Living};
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex};
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

    /// Returns the latest unreported loss of a relay as an error and marks it as reported.
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

/// Relay whose context still exists after its suspension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsuspendedRelay {
    /// Relay GPU.
    pub relay: DeviceId,
    /// Memory of its context, as in [`crate::RelayCost`].
    pub context: Bytes,
    /// Reason why the context still exists.
    pub why: WhyUnsuspended,
}

/// Reasons why a relay's context still exists.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhyUnsuspended {
    /// Copies, or work of the program on that GPU, have not completed. The context is released afterwards.
    #[error("work on it is not done yet")]
    UnderWay,
    /// A captured graph launches GLake's kernels there.
    #[error("a captured graph has kernels on it")]
    Graph,
    /// Another object of GLake's is alive there.
    #[error("it holds {0} that are in use")]
    InUse(Living),
    /// The relay was lost and stays as it is.
    #[error("the GPU was lost")]
    Lost,
    /// The driver refused to release it.
    #[error("the driver did not give it back")]
    Refused,
}

/// Results of suspensions.
#[derive(Debug, Default)]
pub(crate) struct Suspensions {
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of requests, and number of completed ones.
    asked: u64,
    over: u64,
    stayed: Vec<UnsuspendedRelay>,
}

impl Suspensions {
    /// Records a request and returns its number.
    pub(crate) fn ask(&self) -> u64 {
        let mut state = self.state.lock();
        state.asked += 1;
        state.asked
    }

    /// Returns the suspended relays whose contexts still exist, with the reason, after all requests have completed or `timeout` has
    /// elapsed.
    pub(crate) fn unsuspended(&self, relays: &Relays, timeout: Duration) -> Vec<UnsuspendedRelay> {
        let until = Instant::now() + timeout;
        let mut state = self.state.lock();
        let asked = state.asked;
        while state.over < asked && !self.over.wait_until(&mut state, until).timed_out() {}
        let suspended = relays.suspended();
        let mut stayed: Vec<UnsuspendedRelay> =
            state.stayed.iter().filter(|stayed| suspended.contains(stayed.relay)).copied().collect();
        if state.over < asked {
            let known: DeviceSet = stayed.iter().map(|stayed| stayed.relay).collect();
            let costs = suspended.without(known).iter().filter_map(|relay| relays.cost(relay));
            let under_way = |cost: RelayCost| UnsuspendedRelay {
                relay: cost.relay,
                context: cost.context,
                why: WhyUnsuspended::UnderWay,
            };
            stayed.extend(costs.map(under_way));
        }
        stayed.sort_by_key(|stayed| stayed.relay);
        stayed
    }

    pub(crate) fn note_unsuspended(&self, stayed: UnsuspendedRelay) {
        let mut state = self.state.lock();
        state.stayed.retain(|other| other.relay != stayed.relay);
        state.stayed.push(stayed);
    }

    pub(crate) fn forget(&self, relay: DeviceId) {
        self.state.lock().stayed.retain(|other| other.relay != relay);
    }

    pub(crate) fn end(&self, asked: u64) {
        let mut state = self.state.lock();
        state.over = state.over.max(asked);
        self.over.notify_all();
    }
}
