//! More memory pinned, and free memory unpinned, by one thread at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::owned::{PinnedRange, Sequence};
use glake_units::Bytes;

use super::{HUGE, HostPool, Result, pin};

/// How long work on memory that was given back is waited for before more is pinned: many times what pinning an arena takes, because
/// pinned memory stays, and one wait is for all that was given back.
const TIMEOUT: Duration = Duration::from_millis(100);
/// How soon it is looked again whether work is done.
const STEP: Duration = Duration::from_micros(50);

/// The right to pin and unpin, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a HostPool);

/// What there is for who asks for memory.
#[derive(Debug)]
pub(super) enum Chance<'a> {
    /// It.
    Free(PinnedRange),
    /// Nothing that fits, and nobody who pins.
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
    /// Memory that is free, or becomes so while another thread pins; else the turn to pin more.
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

    /// The turn to pin and unpin; waits for it.
    pub(super) fn turn(&self) -> Turn<'_> {
        let mut core = self.core.lock();
        while core.growing {
            self.arrived.wait(&mut core);
        }
        core.growing = true;
        Turn(self)
    }

    /// The turn to pin and unpin, if it is nobody's.
    pub(super) fn try_turn(&self) -> Option<Turn<'_>> {
        let taken = std::mem::replace(&mut self.core.lock().growing, true);
        if taken { None } else { Some(Turn(self)) }
    }

    /// In one's turn, when nothing that is free fits: waits a little, pins, or waits, or unpins.
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
        // Free memory in pieces that are too small makes room for one that is not. Unpinning waits for contexts.
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

    /// What was given back and fits once its work is done, if that is soon.
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
        // Another thread may have taken of it meanwhile, as it may of all that is free.
        let hit = self.hit(size)?;
        hit.map_or_else(|| self.grow(size), Ok)
    }

    /// In one's turn: pins arenas of these sizes while they are wanted.
    pub(super) fn pin(&self, sizes: &[Bytes], wanted: impl Fn() -> bool + Sync) -> Result<()> {
        let _under_way = self.options.pinning.begin();
        let total: Bytes = sizes.iter().copied().sum();
        // Another pool may have taken the room since it was looked for.
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

    /// Unpins one arena that is free as a whole of another pool under the budget. Waits for nobody who pins.
    pub(super) fn unpin_of_others(&self) -> bool {
        let unpin = |pool: Arc<HostPool>| {
            pool.absorb();
            pool.try_turn().is_some_and(|_turn| pool.unpin())
        };
        self.options.budget.others(self).into_iter().any(unpin)
    }
}
