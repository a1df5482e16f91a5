//! Pinning and unpinning of memory, by one thread at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::owned::{PinnedRange, Sequence};
use glake_units::Bytes;

use super::{HUGE, HostPool, Result, pin};

/// Timeout of the wait for work on returned memory before more is pinned. Many times the duration of pinning an arena, because pinned
/// memory stays, and one wait covers all returned memory.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Polling interval of that wait.
const STEP: Duration = Duration::from_micros(50);

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
        let needed = size.align_up(HUGE).ok_or_else(|| self.over_budget(size))?;
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
        while self.core.lock().free.largest() >= size && begun.elapsed() < TIMEOUT {
            if let Some(range) = self.hit(size)? {
                return Ok(Some(range));
            }
            std::thread::sleep(STEP);
        }
        Ok(None)
    }

    /// Pins an arena and takes its first `size` bytes.
    pub(super) fn grow(&self, size: Bytes) -> Result<PinnedRange> {
        let room = self.options.budget.room();
        let needed = size.align_up(HUGE).filter(|needed| *needed <= room);
        let needed = needed.ok_or_else(|| self.over_budget(size))?;
        let arena = self.options.arena.align_up(HUGE).filter(|arena| *arena <= room).unwrap_or(needed);
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
