//! Which GPUs serve copies of others, and what became of those that were lost.
//!
//! Invariants:
//! - A relay that was lost is never used again: no set of usable relays holds it.
//! - A suspended relay is taken by no copy that begins; what it has goes only when no copy uses it (`suspension`).
//! - A copy's part is counted (`begin`) before it is enqueued and until it was seen to arrive (`confirm`). So whoever loses the
//!   relay counts it, or whoever enqueues sees the loss: both look after they have written.
//! - A relay that was left to the program is suspended for ever.
//! - Every part that a loss counts is told of: by the copy's handle, and once by the next call.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::Bytes;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::RelayCost;
use crate::kinds::foreign::slots::Ring;
use crate::{Result, TransferError};

#[derive(Debug)]
pub(crate) struct Relays {
    wanted: AtomicU64,
    ready: AtomicU64,
    fenced: AtomicU64,
    /// Those that rest, or are to.
    suspended: AtomicU64,
    /// Those that the program uses; none where GPUs are shared.
    left: AtomicU64,
    shared: bool,
    each: Box<[Relay]>,
    /// Whether `lost` holds something: what a copy looks at.
    is_lost: AtomicBool,
    lost: Mutex<SmallVec<[(DeviceId, u64); 4]>>,
    lost_copies: AtomicU64,
}

/// One GPU.
#[derive(Debug, Default)]
struct Relay {
    /// Parts of copies that were enqueued and not seen to arrive.
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

    /// Those that a copy may take now.
    pub(crate) fn usable(&self) -> DeviceSet {
        let bits = self.wanted.load(Ordering::Relaxed) & self.ready.load(Ordering::Acquire);
        let out =
            self.fenced.load(Ordering::Acquire) | self.suspended.load(Ordering::Acquire) | self.left().bits();
        DeviceSet::from_bits(bits & !out)
    }

    /// Whether GPUs that the program uses serve too.
    pub(crate) fn are_shared(&self) -> bool {
        self.shared
    }

    /// Those that the program uses, where GPUs are not shared.
    pub(crate) fn left(&self) -> DeviceSet {
        DeviceSet::from_bits(self.left.load(Ordering::Acquire))
    }

    /// No copy takes a relay from its beginning on, for the rest of the process; true the first time.
    pub(crate) fn leave_to_program(&self, relay: DeviceId) -> bool {
        let bit = DeviceSet::of(relay).bits();
        !self.shared && self.left.fetch_or(bit, Ordering::AcqRel) & bit == 0
    }

    /// Those that rest, or are to.
    pub(crate) fn suspended(&self) -> DeviceSet {
        DeviceSet::from_bits(self.suspended.load(Ordering::SeqCst))
    }

    /// No copy takes these from its beginning on.
    pub(crate) fn suspend(&self, relays: DeviceSet) {
        self.suspended.fetch_or(relays.bits(), Ordering::SeqCst);
    }

    /// All may be taken again, but for those that the program uses; those that have lanes at once.
    pub(crate) fn resume(&self) {
        self.suspended.fetch_and(self.left().bits(), Ordering::SeqCst);
    }

    pub(crate) fn wanted(&self) -> DeviceSet {
        DeviceSet::from_bits(self.wanted.load(Ordering::Relaxed))
    }

    pub(crate) fn want(&self, relays: DeviceSet) {
        self.wanted.store(relays.bits(), Ordering::Relaxed);
    }

    /// Those that have lanes, usable or not.
    pub(crate) fn ready(&self) -> DeviceSet {
        DeviceSet::from_bits(self.ready.load(Ordering::Acquire))
    }

    pub(crate) fn add_ready(&self, relay: DeviceId) {
        self.ready.fetch_or(DeviceSet::of(relay).bits(), Ordering::Release);
    }

    /// Its lanes are about to go.
    pub(crate) fn remove_ready(&self, relay: DeviceId) {
        self.ready.fetch_and(!DeviceSet::of(relay).bits(), Ordering::SeqCst);
    }

    /// Those that were lost.
    pub(crate) fn fenced(&self) -> DeviceSet {
        DeviceSet::from_bits(self.fenced.load(Ordering::SeqCst))
    }

    pub(crate) fn is_fenced(&self, relay: DeviceId) -> bool {
        self.fenced().contains(relay)
    }

    /// All rings that no lane set has.
    pub(crate) fn take_rings(&self, relay: DeviceId) -> Vec<Ring> {
        let Some(of) = self.of(relay) else { return Vec::new() };
        if let Some(cost) = &mut *of.cost.lock() {
            cost.slots = Bytes::ZERO;
        }
        std::mem::take(&mut of.rings.lock())
    }

    /// A ring of slots that no work uses.
    pub(crate) fn take_ring(&self, relay: DeviceId) -> Option<Ring> {
        self.of(relay)?.rings.lock().pop()
    }

    /// A ring whose work is done.
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

    /// Its context went back.
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

    /// Counts a part of a copy that is about to be enqueued; false, and nothing counted, where the relay is lost.
    pub(crate) fn begin(&self, relay: DeviceId) -> bool {
        let Some(of) = self.of(relay) else { return false };
        of.unconfirmed.fetch_add(1, Ordering::SeqCst);
        if self.is_fenced(relay) {
            self.confirm(relay, 1);
            return false;
        }
        true
    }

    /// So many parts have arrived, or were not enqueued after all.
    pub(crate) fn confirm(&self, relay: DeviceId, parts: u64) {
        if let Some(of) = self.of(relay) {
            // A loss that counted them in the meantime has left nothing to take away. The closure always answers.
            let less = |count: u64| Some(count.saturating_sub(parts));
            let _ = of.unconfirmed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        }
    }

    /// Takes a relay out of use for ever; the first call tells of what was under way.
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

    /// Tells of a loss, each once.
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
