//! Pinning and unpinning of memory, by one thread at a time: for a request, or ahead of its use by a thread of its own. If host memory is
//! short, holders of memory that can be given up without loss are asked first ([`Reclaim`]). Several pools can share one [`Budget`].
//!
//! ```text
//!  expect   ├ arena 1 ┼ arena 2 ┼ arena 3 ┤
//!  take               │ 1 │ 1 │ 2 │ 2 │ 3 │ 3 │       each as soon as it is there
//! ```

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use glake_device::owned::{PinnedRange, Sequence};
use glake_units::Bytes;
use parking_lot::Mutex;

use super::{HUGE_PAGE, HostBlock, HostPool, PAGE, Result, pin};

/// Timeout of the wait for work on returned memory before more is pinned. Many times the duration of pinning an arena, because pinned
/// memory stays, and one wait covers all returned memory.
const RETURN_TIMEOUT: Duration = Duration::from_millis(100);
/// Polling interval of that wait.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// Exclusive right to pin and unpin, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a HostPool);

/// Result of looking for free memory.
#[derive(Debug)]
pub(super) enum Chance<'a> {
    /// Free range that fits.
    Free(PinnedRange),
    /// Turn to pin, because no free range fits and no other thread pins.
    Turn(Turn<'a>),
}

impl Turn<'_> {
    pub(super) fn pool(&self) -> &HostPool {
        self.0
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.core.lock().growing = false;
        self.0.arrived.notify_all();
    }
}

impl HostPool {
    /// Returns memory that is free, or becomes free while another thread pins; else the turn to pin more.
    pub(super) fn hit_or_turn(&self, size: Bytes) -> Result<Chance<'_>> {
        loop {
            let arrivals = self.core.lock().arrivals;
            if let Some(range) = self.hit(size)? {
                return Ok(Chance::Free(range));
            }
            let mut core = self.core.lock();
            if core.arrivals != arrivals {
                continue;
            }
            if !core.growing {
                core.growing = true;
                return Ok(Chance::Turn(Turn(self)));
            }
            self.arrived.wait(&mut core);
        }
    }

    /// Waits for the turn to pin and unpin.
    pub(super) fn turn(&self) -> Turn<'_> {
        let mut core = self.core.lock();
        while core.growing {
            self.arrived.wait(&mut core);
        }
        core.growing = true;
        Turn(self)
    }

    /// Returns the turn to pin and unpin, unless another thread has it.
    pub(super) fn try_turn(&self) -> Option<Turn<'_>> {
        let taken = std::mem::replace(&mut self.core.lock().growing, true);
        if taken { None } else { Some(Turn(self)) }
    }

    /// Finds memory when no free range fits: waits briefly, pins, waits for returned memory, or unpins. The caller must hold the turn.
    pub(super) fn grow_or_wait(&self, size: Bytes) -> Result<PinnedRange> {
        if let Some(range) = self.hit_soon(size)? {
            return Ok(range);
        }
        let refused = match self.grow(size) {
            Err(error) if error.is_shortage() => error,
            answer => return answer,
        };
        while self.reclaim(size) {
            if let Some(range) = self.hit_soon(size)? {
                return Ok(range);
            }
        }
        self.wait()?;
        if let Some(range) = self.hit(size)? {
            return Ok(range);
        }
        // Unpinning too small free pieces makes room for a larger one. Unpinning waits for all contexts.
        if self.is_capturing() {
            return Err(refused);
        }
        let needed = size.align_up(HUGE_PAGE).ok_or_else(|| self.over_budget(size))?;
        let whole = self.core.lock().free.whole().saturating_add(self.whole_of_others());
        let room = self.options.budget.room();
        if whole.is_zero() || room.saturating_add(whole) < needed {
            return Err(refused);
        }
        loop {
            match self.grow(size) {
                Err(error) if error.is_shortage() && (self.unpin() || self.unpin_of_others()) => {}
                answer => return answer,
            }
        }
    }

    /// Returns returned memory that fits once its work is done, if that is soon.
    pub(super) fn hit_soon(&self, size: Bytes) -> Result<Option<PinnedRange>> {
        let begun = Instant::now();
        while self.core.lock().free.largest() >= size && begun.elapsed() < RETURN_TIMEOUT {
            if let Some(range) = self.hit(size)? {
                return Ok(Some(range));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(None)
    }

    /// Pins an arena and takes its first `size` bytes.
    pub(super) fn grow(&self, size: Bytes) -> Result<PinnedRange> {
        let room = self.options.budget.room();
        let needed = size.align_up(HUGE_PAGE).filter(|needed| *needed <= room);
        let needed = needed.ok_or_else(|| self.over_budget(size))?;
        // At most as much as is pinned already: little use costs little memory, and much use few registrations.
        let arena = self.options.arena.min(self.core.lock().statistics.pinned).align_up(HUGE_PAGE);
        let arena = arena.filter(|arena| *arena <= room).unwrap_or(needed);
        self.pin(&[arena.max(needed)], || true)?;
        // Another thread may have taken part of it meanwhile, as with any free memory.
        let hit = self.hit(size)?;
        hit.map_or_else(|| self.grow(size), Ok)
    }

    /// Pins arenas of these sizes while `wanted` returns true. The caller must hold the turn.
    pub(super) fn pin(&self, sizes: &[Bytes], wanted: impl Fn() -> bool + Sync) -> Result<()> {
        let _under_way = self.options.pinning.begin();
        let total: Bytes = sizes.iter().copied().sum();
        // Another pool may have used the room in the budget meanwhile.
        let taken = self.options.budget.take(total).ok_or_else(|| self.over_budget(total))?;
        pin::pin(&self.completion_events, &self.options, sizes, wanted, |range, time| {
            taken.arrived(range.size());
            let mut core = self.core.lock();
            let statistics = &mut core.statistics;
            statistics.pinned = statistics.pinned.saturating_add(range.size());
            statistics.pins += 1;
            statistics.pinning += time;
            core.free.put(range, Sequence::START);
            core.arrivals += 1;
            drop(core);
            self.arrived.notify_all();
        })
    }

    /// Unpins one arena that is free as a whole.
    pub(super) fn unpin(&self) -> bool {
        let Some(range) = self.core.lock().free.take_whole() else { return false };
        let size = range.size();
        drop(range);
        let pinned = &mut self.core.lock().statistics.pinned;
        *pinned = pinned.saturating_sub(size);
        self.options.budget.give_back(size);
        true
    }

    /// Unpins one entirely free arena of another pool under the budget. Skips pools that are pinning.
    pub(super) fn unpin_of_others(&self) -> bool {
        let unpin = |pool: Arc<HostPool>| {
            pool.absorb();
            pool.try_turn().is_some_and(|_turn| pool.unpin())
        };
        self.options.budget.others(self).into_iter().any(unpin)
    }
}

/// Arenas about to be pinned: until then other threads do not pin, and callers that take memory wait for the next arena.
#[derive(Debug)]
pub(crate) struct ExpectedPinning<'a> {
    turn: Turn<'a>,
    arenas: Vec<Bytes>,
}

impl HostPool {
    /// Pins the memory missing for blocks of these sizes, arena by arena, within the budget and while `wanted` returns true. Reclaims no
    /// memory for it. Returns false if another thread pins.
    pub fn prepare_while(&self, blocks: &[Bytes], wanted: impl Fn() -> bool + Sync) -> bool {
        let Some(turn) = self.try_turn() else { return false };
        if let Some(expected) = self.expect_in(turn, blocks) {
            expected.pin(wanted);
        }
        true
    }

    /// Reserves the arenas missing for blocks of these sizes, within the budget. `None` if none is missing, or another thread pins.
    pub(crate) fn expect(&self, blocks: &[Bytes]) -> Option<ExpectedPinning<'_>> {
        self.expect_in(self.try_turn()?, blocks)
    }

    fn expect_in<'a>(&self, turn: Turn<'a>, blocks: &[Bytes]) -> Option<ExpectedPinning<'a>> {
        self.absorb();
        let (free, room) = (self.core.lock().free.total(), self.options.budget.room());
        let arenas = arenas(blocks, free, self.options.arena, room);
        (!arenas.is_empty()).then_some(ExpectedPinning { turn, arenas })
    }
}

impl ExpectedPinning<'_> {
    /// Pins the arenas while `wanted` returns true. Ends at the first failure, which callers that take memory will see.
    pub(crate) fn pin(self, wanted: impl Fn() -> bool + Sync) {
        if let Err(error) = self.turn.pool().pin(&self.arenas, wanted) {
            tracing::debug!(target: "glake::host", %error, "no memory is pinned ahead");
        }
    }
}

/// Returns the sizes of arenas for blocks taken in this order, in addition to the free memory. A block lies in one arena. The last arena is
/// no larger than its blocks.
fn arenas(blocks: &[Bytes], free: Bytes, arena: Bytes, room: Bytes) -> Vec<Bytes> {
    let (mut free, mut room, mut left) = (free, room, Bytes::ZERO);
    let mut found = Vec::new();
    let mut wanted = blocks.iter().fold(Bytes::ZERO, |sum, block| {
        sum.saturating_add((*block).max(PAGE).align_up(PAGE).unwrap_or(*block))
    });
    for block in blocks {
        let Some(block) = (*block).max(PAGE).align_up(PAGE) else { break };
        if let Some(rest) = free.checked_sub(block) {
            free = rest;
        } else if let Some(rest) = left.checked_sub(block) {
            left = rest;
        } else {
            let size = arena.min(wanted).max(block).align_up(HUGE_PAGE).filter(|size| *size <= room);
            let Some(size) = size.or(block.align_up(HUGE_PAGE)).filter(|size| *size <= room) else { break };
            found.push(size);
            room = room.saturating_sub(size);
            left = size.saturating_sub(block);
        }
        wanted = wanted.saturating_sub(block);
    }
    found
}

/// Holder of pool memory that it can give up at any time.
pub trait Reclaim: Send + Sync + fmt::Debug {
    /// Gives up at least `wanted` bytes, or all; returns the number given up. Must not take memory from any pool.
    fn reclaim(&self, wanted: Bytes) -> Bytes;
}

/// Holders of reclaimable memory, asked in this order. Held weakly.
#[derive(Debug, Default)]
pub(super) struct Reclaimers(Mutex<Vec<Weak<dyn Reclaim>>>);

impl HostPool {
    /// Registers a holder of reclaimable memory.
    pub fn add_reclaimer(&self, holder: &Arc<impl Reclaim + 'static>) {
        let holder: Arc<dyn Reclaim> = holder.clone();
        let mut known = self.reclaimers.0.lock();
        known.retain(|known| known.strong_count() > 0);
        known.push(Arc::downgrade(&holder));
    }

    /// Takes memory that is free, free soon, or within the budget, without reclaiming any. `None` if there is none, or another thread pins.
    /// Does not delay other threads.
    ///
    /// # Errors
    /// The driver's error.
    pub(crate) fn take_spare(self: &Arc<Self>, size: Bytes) -> Result<Option<HostBlock>> {
        let Some(rounded) = size.max(PAGE).align_up(PAGE) else { return Ok(None) };
        let found = match self.hit(rounded)? {
            None => self.hit_soon(rounded)?,
            found => found,
        };
        let range = match found {
            Some(range) => range,
            None => {
                let Some(_turn) = self.try_turn() else { return Ok(None) };
                match self.grow(rounded) {
                    Ok(range) => range,
                    Err(error) if error.is_shortage() => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
        };
        Ok(Some(HostBlock::new(self, range, size)))
    }

    /// Asks the holders for memory. Returns whether any was given up; it is available once the work on it has completed.
    pub(super) fn reclaim(&self, wanted: Bytes) -> bool {
        let holders = self.reclaimers.0.lock().clone();
        let mut given = Bytes::ZERO;
        for holder in holders.iter().filter_map(Weak::upgrade) {
            if given < wanted {
                given = given.saturating_add(holder.reclaim(wanted.saturating_sub(given)));
            }
        }
        self.absorb();
        !given.is_zero()
    }
}

/// Budget shared by all pools created with it.
#[derive(Debug)]
pub struct Budget {
    most: Bytes,
    pinned: AtomicU64,
    pools: Mutex<Vec<Weak<HostPool>>>,
}

/// Part of a budget reserved for memory about to be pinned; the unused rest is returned on drop.
#[derive(Debug)]
pub(super) struct BudgetReservation<'a> {
    budget: &'a Budget,
    left: Mutex<Bytes>,
}

impl Budget {
    /// Creates a budget in bytes. Zero: no memory may be pinned; [`Bytes::MAX`]: all of the host's memory.
    pub fn new(most: Bytes) -> Arc<Budget> {
        Arc::new(Budget { most, pinned: AtomicU64::new(0), pools: Mutex::default() })
    }

    /// Returns the total of the budget.
    pub fn most(&self) -> Bytes {
        self.most
    }

    /// Returns the bytes that may still be pinned.
    pub fn room(&self) -> Bytes {
        self.most.saturating_sub(Bytes::new(self.pinned.load(Ordering::Acquire)))
    }

    /// Reserves bytes of the budget; `None` if too few are left.
    pub(super) fn take(&self, size: Bytes) -> Option<BudgetReservation<'_>> {
        let taken = |pinned: u64| pinned.checked_add(size.get()).filter(|pinned| *pinned <= self.most.get());
        self.pinned.try_update(Ordering::AcqRel, Ordering::Acquire, taken).ok()?;
        Some(BudgetReservation { budget: self, left: Mutex::new(size) })
    }

    /// Returns bytes that were unpinned to the budget.
    pub(super) fn give_back(&self, size: Bytes) {
        self.pinned.fetch_sub(size.get(), Ordering::AcqRel);
    }

    pub(super) fn add(&self, pool: &Arc<HostPool>) {
        let mut pools = self.pools.lock();
        pools.retain(|pool| pool.strong_count() > 0);
        pools.push(Arc::downgrade(pool));
    }

    /// Returns all pools of the budget except one.
    pub(super) fn others(&self, but: &HostPool) -> Vec<Arc<HostPool>> {
        let pools = self.pools.lock();
        pools.iter().filter_map(Weak::upgrade).filter(|pool| !std::ptr::eq(&raw const **pool, but)).collect()
    }
}

impl BudgetReservation<'_> {
    /// Notes that reserved bytes have been pinned.
    pub(super) fn arrived(&self, size: Bytes) {
        let left = &mut *self.left.lock();
        *left = left.saturating_sub(size);
    }
}

impl Drop for BudgetReservation<'_> {
    fn drop(&mut self) {
        self.budget.give_back(*self.left.get_mut());
    }
}

#[cfg(test)]
mod expect_tests {
    use super::*;

    fn of(blocks: &[u64], free: u64, room: u64) -> Vec<u64> {
        let blocks: Vec<Bytes> = blocks.iter().copied().map(Bytes::mib).collect();
        let found = arenas(&blocks, Bytes::mib(free), Bytes::mib(256), Bytes::mib(room));
        found.into_iter().map(|size| size.get() >> 20).collect()
    }

    #[test]
    fn blocks_lie_in_one_arena_each() {
        assert_eq!(of(&[], 0, 4096), []);
        assert_eq!(of(&[128; 4], 0, 4096), [256, 256]);
        assert_eq!(of(&[100; 4], 0, 4096), [256, 200]);
        assert_eq!(of(&[200; 3], 0, 4096), [256, 256, 200]);
        assert_eq!(of(&[300, 20], 0, 4096), [300, 20]);
        assert_eq!(of(&[8], 0, 4096), [8]);
    }

    #[test]
    fn what_is_free_and_the_budget_count() {
        assert_eq!(of(&[128; 4], 256, 4096), [256]);
        assert_eq!(of(&[128; 4], 512, 4096), []);
        assert_eq!(of(&[128; 4], 0, 300), [256]);
        assert_eq!(of(&[128; 4], 0, 130), [128]);
        assert_eq!(of(&[128; 4], 0, 100), []);
    }
}
