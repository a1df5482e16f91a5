//! Pinned memory of the host, pinned once and reused.
//!
//! ```text
//!  take ─► free range ─► HostBlock ─► Span, for copies        prepare: pins ahead
//!    │        ▲              │
//!    │        │ completion point passed └─ dropped, and no span lives
//!    │      returned ◄───────┘
//!    └─► nothing fits: pin more ─► reclaim spare copies ─► wait for returned memory ─► unpin free memory for larger ─► HostError
//!                                                                                 or a Ring (stage)
//! ```
//!
//! A caller that knows its future requests has the memory pinned by a thread of its own, arena by arena, while the first blocks are in use
//! already.
//!
//! Memory is pinned in arenas: on huge pages, spread over NUMA nodes, touched by several threads, registered for every context, not
//! inherited by a forked child. A range lies in one arena, because the driver does not copy across two registrations.
//!
//! Invariants: pinned memory never exceeds the budget. Returned memory is handed out again once a completion
//! point recorded after its return has passed. One thread at a time pins and
//! unpins (its [`Turn`](grow::Turn)); the lock of `core` is held for bookkeeping only.

use std::sync::Arc;
use std::time::Duration;

use free::FreeRanges;
use glake_device::DriverError;
use glake_device::owned::{
    CompletionEvents, CompletionProof, DeviceSet, PinnedRange, RecordedPoint, Sequence,
};
use glake_units::Bytes;
use grow::{Chance, Reclaimers};
use parking_lot::{Condvar, Mutex, MutexGuard};

pub use available::{AvailableMemory, nodes_of};
pub use block::{HostBlock, Ring, RingSlot};
pub use error::HostError;
pub use grow::{Budget, Reclaim};
pub use pin::{Pinning, PinningUnderWay};

mod available;
mod block;
mod error;
mod free;
mod grow;
mod pin;
#[cfg(test)]
mod tests;

type Result<T> = std::result::Result<T, HostError>;

/// Alignment of block sizes and addresses.
const PAGE: Bytes = Bytes::kib(4);
/// Alignment of arena sizes, a huge page.
const HUGE_PAGE: Bytes = Bytes::mib(2);

/// Pool of pinned host memory.
#[derive(Debug)]
pub struct HostPool {
    completion_events: Arc<CompletionEvents>,
    options: HostOptions,
    core: Mutex<Core>,
    /// Signalled when memory has arrived, or the pinning thread has ended.
    arrived: Condvar,
    /// Completion point that was recorded and has not passed.
    clock: Mutex<Option<RecordedPoint>>,
    reclaimers: Reclaimers,
}

#[derive(Debug)]
struct Core {
    free: FreeRanges,
    /// Whether a thread pins or unpins; other threads proceed.
    growing: bool,
    /// Number of times memory was pinned: a waiter that saw a smaller number looks again.
    arrivals: u64,
    /// Returned ranges, some with live spans.
    returned: Vec<Arc<PinnedRange>>,
    /// Sequence before which all work has completed.
    passed: Sequence,
    statistics: HostStatistics,
}

/// Host memory for bytes in transit.
#[derive(Debug)]
pub enum Staging {
    /// Single block for all bytes at once.
    Whole(HostBlock),
    /// Ring of slots for a few bytes at a time.
    Ring(Ring),
}

impl Drop for HostPool {
    fn drop(&mut self) {
        self.options.budget.give_back(self.core.get_mut().statistics.pinned);
    }
}

impl HostPool {
    /// Creates a pool without pinned memory.
    ///
    /// # Errors
    /// The driver's error when queried for its devices.
    pub fn new(completion_events: &Arc<CompletionEvents>, mut options: HostOptions) -> Result<Arc<Self>> {
        let devices: DeviceSet =
            completion_events.driver().devices()?.into_iter().map(|device| device.id).collect();
        options.devices = options.devices.intersection(devices);
        let statistics = HostStatistics { budget: options.budget.most(), ..HostStatistics::default() };
        let core = Core {
            free: FreeRanges::default(),
            growing: false,
            arrivals: 0,
            returned: Vec::new(),
            passed: Sequence::START,
            statistics,
        };
        let (core, arrived, clock) = (Mutex::new(core), Condvar::new(), Mutex::new(None));
        let (completion_events, reclaimers) = (completion_events.clone(), Reclaimers::default());
        let pool = Arc::new(HostPool { completion_events, options, core, arrived, clock, reclaimers });
        pool.options.budget.add(&pool);
        Ok(pool)
    }

    /// Allocates pinned memory; pins more if none is free.
    ///
    /// # Errors
    /// [`HostError::OverBudget`], [`HostError::Exhausted`], [`HostError::PinRefused`], after waiting for returned memory; the driver's
    /// error.
    pub fn take(self: &Arc<Self>, size: Bytes) -> Result<HostBlock> {
        let rounded = size.max(PAGE).align_up(PAGE);
        let rounded = rounded.ok_or_else(|| self.over_budget(size))?;
        let range = match self.hit_or_turn(rounded)? {
            Chance::Free(range) => range,
            Chance::Turn(_turn) => self.grow_or_wait(rounded)?,
        };
        Ok(HostBlock::new(self, range, size))
    }

    /// Pins arenas until `size` is free, so that [`HostPool::take`] need not. Another thread may take each arena as soon as it is pinned.
    ///
    /// # Errors
    /// The same as [`HostPool::take`]; memory pinned before the failure stays.
    pub fn prepare(&self, size: Bytes) -> Result<()> {
        let _turn = self.turn();
        self.absorb();
        let missing_of = |size: Bytes| size.saturating_sub(self.core.lock().free.total()).align_up(HUGE_PAGE);
        let mut missing = missing_of(size);
        while let Some(more) = missing
            && more > self.options.budget.room()
            && (!self.is_capturing() && self.unpin_of_others() || self.reclaim(more))
        {
            missing = missing_of(size);
        }
        let missing = missing.ok_or_else(|| self.over_budget(size))?;
        if missing > self.options.budget.room() {
            return Err(self.over_budget(size));
        }
        let (mut sizes, mut left) = (Vec::new(), missing);
        let arena =
            self.options.arena.align_up(HUGE_PAGE).filter(|arena| !arena.is_zero()).unwrap_or(missing);
        while !left.is_zero() {
            sizes.push(arena.min(left));
            left = left.saturating_sub(arena);
        }
        self.pin(&sizes, || true)
    }

    /// Checks whether `size` is available in addition to memory in use, without reclaiming anything. Pins nothing. `freed` of it is other
    /// memory of the process that is freed as memory is pinned.
    ///
    /// # Errors
    /// [`HostError::OverBudget`], [`HostError::Exhausted`]: it is not.
    pub fn has_room(&self, size: Bytes, freed: Bytes) -> Result<()> {
        self.absorb();
        let missing = size.saturating_sub(self.core.lock().free.total());
        if missing > self.options.budget.room().saturating_add(self.whole_of_others()) {
            return Err(self.over_budget(size));
        }
        pin::has_room(&self.options, missing.saturating_sub(freed))
    }

    /// Creates a ring for more bytes than may be pinned, with `slots` slots or as many as are available, at least two.
    ///
    /// # Errors
    /// The same as [`HostPool::take`], for the second slot.
    pub fn ring(self: &Arc<Self>, slot: Bytes, slots: usize) -> Result<Ring> {
        let mut blocks = Vec::new();
        while blocks.len() < slots.max(2) {
            match self.take(slot) {
                Ok(block) => blocks.push(block),
                Err(error) if error.is_shortage() && blocks.len() >= 2 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(Ring::new(blocks, slot))
    }

    /// Returns a block of `size` bytes, or a ring if there is too little memory.
    ///
    /// # Errors
    /// The same as [`HostPool::ring`].
    pub fn stage(self: &Arc<Self>, size: Bytes, slot: Bytes, slots: usize) -> Result<Staging> {
        match self.take(size) {
            Ok(block) => Ok(Staging::Whole(block)),
            Err(error) if error.is_shortage() && slot < size => self.ring(slot, slots).map(Staging::Ring),
            Err(error) => Err(error),
        }
    }

    /// Unpins entirely free arenas until at most `keep` is pinned. Waits for all work of all devices, and therefore does nothing while a
    /// capture is open. Returns the number of bytes unpinned.
    pub fn trim(&self, keep: Bytes) -> Bytes {
        let _turn = self.turn();
        if self.is_capturing() {
            return Bytes::ZERO;
        }
        self.absorb();
        let before = self.statistics().pinned;
        while self.statistics().pinned > keep && self.unpin() {}
        before.saturating_sub(self.statistics().pinned)
    }

    /// Returns the statistics of the pool.
    pub fn statistics(&self) -> HostStatistics {
        self.absorb();
        let core = self.core.lock();
        let HostStatistics { pinned, retained, .. } = core.statistics;
        let in_use = pinned.saturating_sub(core.free.total()).saturating_sub(retained);
        HostStatistics { in_use, room: self.options.budget.room(), ..core.statistics }
    }

    fn give_back(&self, range: Arc<PinnedRange>) {
        self.core.lock().returned.push(range);
    }

    fn count_retained(&self, size: Bytes, retained: bool) {
        let total = &mut self.core.lock().statistics.retained;
        *total = if retained { total.saturating_add(size) } else { total.saturating_sub(size) };
    }

    /// Takes a free range that is no longer in use.
    fn hit(&self, size: Bytes) -> Result<Option<PinnedRange>> {
        self.absorb();
        let hit = {
            let mut core = self.core.lock();
            let passed = core.passed;
            core.free.take(size, passed)
        };
        if hit.is_some() || !self.poll()? {
            return Ok(hit);
        }
        let mut core = self.core.lock();
        let passed = core.passed;
        Ok(core.free.take(size, passed))
    }

    /// Adds returned ranges without live spans to the free memory, usable after the work enqueued before.
    fn absorb(&self) {
        let mut core = self.core.lock();
        let returned = std::mem::take(&mut core.returned);
        for range in returned {
            match Arc::try_unwrap(range) {
                Ok(range) => core.free.put(range, self.completion_events.mark()),
                Err(range) => core.returned.push(range),
            }
        }
    }

    /// Returns the entirely free arenas of the other pools under the same budget.
    fn whole_of_others(&self) -> Bytes {
        let whole = |pool: Arc<HostPool>| {
            pool.absorb();
            pool.core.lock().free.whole()
        };
        self.options.budget.others(self).into_iter().map(whole).sum()
    }

    fn over_budget(&self, wanted: Bytes) -> HostError {
        let HostStatistics { budget, mut in_use, mut retained, .. } = self.statistics();
        for other in self.options.budget.others(self) {
            let other = other.statistics();
            in_use = in_use.saturating_add(other.in_use);
            retained = retained.saturating_add(other.retained);
        }
        let largest = self.core.lock().free.largest();
        HostError::OverBudget { wanted, budget, in_use, retained, largest }
    }
}

/// Options of a host pool at its creation.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// Common limit of this pool and others with the same budget, retained copies included.
    pub budget: Arc<Budget>,
    /// Minimum size that is pinned at once. Large, because each arena costs driver calls; not larger, because copies begin when the first
    /// is pinned. Zero: the requested size.
    pub arena: Bytes,
    /// Host memory left to other programs. Zero: none, at the risk that the kernel kills a process.
    pub spare: Bytes,
    /// Number of threads that touch memory; 0: one for each core.
    pub threads: usize,
    /// NUMA nodes to spread memory over ([`nodes_of`]); with fewer than two, memory is local to the touching thread.
    pub nodes: Vec<u32>,
    /// Devices whose work uses the memory: returned memory waits for theirs. Leave out devices that no copy uses, because recording creates
    /// a context there.
    pub devices: DeviceSet,
    /// Counter that tells others when memory is being pinned.
    pub pinning: Arc<Pinning>,
}

impl Default for HostOptions {
    /// Returns a budget of all the host's memory but 1 GiB, arenas of 256 MiB, one thread for each core, and all devices.
    fn default() -> Self {
        HostOptions {
            budget: Budget::new(Bytes::MAX),
            arena: Bytes::mib(256),
            spare: Bytes::gib(1),
            threads: 0,
            nodes: Vec::new(),
            devices: DeviceSet::ALL,
            pinning: Arc::default(),
        }
    }
}

/// Pinned host memory, and the cost of pinning it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStatistics {
    /// Common limit of this pool and others with the same budget.
    pub budget: Bytes,
    /// Bytes of the budget left.
    pub room: Bytes,
    /// Pinned bytes: in use, retained or free.
    pub pinned: Bytes,
    /// Allocated bytes, including returned blocks with live spans.
    pub in_use: Bytes,
    /// Allocated bytes marked as copies of data that is also on a GPU.
    pub retained: Bytes,
    /// Number of times memory was pinned.
    pub pins: u64,
    /// Total time of pinning, touching included.
    pub pinning: Duration,
}

impl HostPool {
    /// Checks whether more memory may be handed out than before. Never waits.
    pub(super) fn poll(&self) -> Result<bool> {
        match self.clock.try_lock() {
            Some(clock) => self.pass(clock, |point| point.poll()),
            None => Ok(false),
        }
    }

    /// Waits until all free memory may be handed out; does not wait while a capture is open.
    pub(super) fn wait(&self) -> Result<bool> {
        self.pass(self.clock.lock(), |point| point.wait().map(Some))
    }

    /// Returns whether any completion point has passed.
    fn pass(
        &self,
        mut clock: MutexGuard<'_, Option<RecordedPoint>>,
        mut ask: impl FnMut(&mut RecordedPoint) -> glake_device::Result<Option<CompletionProof>>,
    ) -> Result<bool> {
        let mut moved = false;
        while self.is_pending() {
            let mut point = match clock.take() {
                Some(point) => point,
                None => match self.completion_events.record(self.options.devices) {
                    Ok(point) => point,
                    Err(DriverError::Capturing { .. }) => break,
                    Err(error) => return Err(error.into()),
                },
            };
            let Some(passed) = ask(&mut point)? else {
                *clock = Some(point);
                break;
            };
            let mut core = self.core.lock();
            core.passed = core.passed.max(passed.sequence());
            moved = true;
        }
        Ok(moved)
    }

    /// Returns whether a capture is open, which waiting for a whole context would break.
    pub(super) fn is_capturing(&self) -> bool {
        matches!(self.completion_events.record(DeviceSet::EMPTY), Err(DriverError::Capturing { .. }))
    }

    fn is_pending(&self) -> bool {
        let core = self.core.lock();
        core.free.is_pending(core.passed)
    }
}
